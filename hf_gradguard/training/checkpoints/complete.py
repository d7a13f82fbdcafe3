"""Completeness of checkpoints: a run that is killed while it saves leaves an incomplete one.

Once every rank has written its files, the first writes a list of the files that resuming will read,
with sizes and checksums. The Trainer's own state comes last, before it deletes older checkpoints. A
checkpoint of the stock Trainer has no such list. It is taken as complete if that last file is
readable.

No checkpoint is uploaded, because checkpoints hold private state.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from transformers import trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ...data.private import write_private

logger = logging.get_logger(__name__)

LIST, OURS = "gradguard_complete.json", "gradguard_"
_OF_RANKS = "gradguard_private_rank"  # loading reports a missing one, and what that means


def begin_checkpoint(folder: Path) -> None:
    """Mark a checkpoint as incomplete before anything is written to it.

    Example:
        >>> begin_checkpoint(tmp_path / "checkpoint-1")
    """
    for name in (LIST, TRAINER_STATE_NAME):
        (folder / name).unlink(missing_ok=True)


def list_checkpoint(folder: Path) -> None:
    """Write the list of a checkpoint's files that resuming will read, with sizes and checksums.

    Call it when all ranks have written their files.

    Example:
        >>> folder = tmp_path / "checkpoint-1"
        >>> folder.mkdir()
        >>> list_checkpoint(folder)
        >>> missing_from(folder)  # the Trainer writes that file last
        'trainer_state.json is missing'
    """
    files = {
        str(path.relative_to(folder)): [path.stat().st_size, _checksum(path)]
        for path in _files(folder)
    }
    write_private(folder / LIST, json.dumps(files, indent=1).encode())


def missing_from(folder: Path, checks_content: bool = False) -> str:
    """Return a sentence on what a checkpoint lacks; an empty text if it is complete.

    Args:
        folder: The folder of the checkpoint.
        checks_content: Whether files are compared with their checksums, too, which takes about a
            second for each gigabyte. A kill cannot make these differ, since the list is written
            after the files.

    Example:
        >>> missing_from(tmp_path / "checkpoint-1")
        'there is no such folder'
    """
    if not folder.is_dir():
        return "there is no such folder"
    try:
        listed = json.loads((folder / LIST).read_text()) if (folder / LIST).is_file() else {}
    except ValueError:
        return f"{LIST} is cut off"
    for name, entry in listed.items():
        # Older versions listed the size alone.
        size, checksum = entry if isinstance(entry, list) else (entry, None)
        path, is_private = folder / name, name.startswith(_OF_RANKS)
        if not path.is_file():
            if is_private:
                continue
            return f"{name} is missing"
        if path.stat().st_size != size and not is_private:
            return f"{name} has {path.stat().st_size} bytes, but was saved with {size}"
        if checks_content and checksum is not None and _checksum(path) != checksum:
            return f"{name} is cut off or was changed since it was saved"
    if not (folder / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except ValueError:
        return f"{TRAINER_STATE_NAME} is cut off"
    if not any(path.suffix in (".safetensors", ".bin") for path in _weights(folder)):
        return "it holds no weights"
    return ""


def check_checkpoint(folder: Path) -> None:
    """Check that a checkpoint is complete and unchanged before a run resumes from it.

    Raises:
        ValueError: If it is not. The message says what it lacks, and names the newest complete
            checkpoint beside it.

    Example:
        >>> check_checkpoint(tmp_path / "checkpoint-1")
        Traceback (most recent call last):
        ValueError: ... is no complete checkpoint: there is no such folder. ...
    """
    if reason := missing_from(folder, checks_content=True):
        other_steps = [s for s, path in _checkpoints(folder.parent)
                       if path.name != folder.name and not missing_from(path)]  # fmt: skip
        listed = (
            f"The newest complete one beside it is {_PREFIX}{max(other_steps)}."
            if other_steps
            else "There is no complete one beside it."
        )
        raise ValueError(
            f"{folder} is no complete checkpoint: {reason}. The run was killed while it saved it, "
            f"or files were removed, cut off or changed since. {listed} "
            "resume_from_checkpoint=True finds it."
        )


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in an output folder.

    Example:
        >>> complete_steps(tmp_path)
        []
    """
    return [step for step, path in _checkpoints(folder) if not missing_from(path)]


def newest_complete(folder: Path, accelerator: Accelerator) -> str | None:
    """Return the newest checkpoint that is complete on every rank. All ranks must call it.

    A warning names newer checkpoints that are not complete. If there is no complete one, the result
    is `None`, with a warning: a run that was killed before its first checkpoint begins anew.

    Args:
        folder: The output folder, which holds checkpoints.
        accelerator: The accelerator of the ranks that compare theirs.

    Example:
        >>> newest_complete(tmp_path, Accelerator(cpu=True))
    """
    complete_here = complete_steps(folder)
    step = max(complete_here, default=-1)
    while True:
        # A protected Trainer's accelerator adds counts up in `gather`, and each rank's is needed.
        newest = gather(torch.tensor([step], device=accelerator.device))
        if newest.min() == newest.max():
            break
        step = max((s for s in complete_here if s <= int(newest.min())), default=-1)
    for newer, path in _checkpoints(folder):
        if newer > step:
            logger.warning(f"Skipped {path}: {missing_from(path) or 'another rank lacks it'}.")
    if step < 0:
        logger.warning(
            f"There is no complete checkpoint in {folder} to resume from: training begins anew."
        )
        return None
    return str(folder / f"{_PREFIX}{step}")


@contextmanager
def without_private_files() -> Iterator[None]:
    """Keep checkpoints and private files out of any folder that the Trainer uploads meanwhile.

    The Trainer leaves out checkpoints at the folder's top by itself, but not those of a search for
    hyperparameters, which are in folders `run-*`.

    Example:
        >>> from transformers import trainer
        >>> with without_private_files():
        ...     type(trainer.hf_api()).__name__  # `Trainer.push_to_hub` calls it
        '_Uploads'
    """
    api = trainer.hf_api
    trainer.hf_api = lambda: _Uploads(api())
    try:
        yield
    finally:
        trainer.hf_api = api


class _Uploads:
    """An API of the Hub that uploads no private files."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, ignore_patterns: list[str] | None = None, **kwargs: Any) -> Any:
        patterns = [*(ignore_patterns or ()), *_PRIVATE_PATTERNS]
        return self._api.upload_folder(ignore_patterns=patterns, **kwargs)


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (match := re.fullmatch(rf"{_PREFIX}(\d+)", path.name)) and path.is_dir():
            yield int(match[1]), path


def _files(folder: Path) -> Iterator[Path]:
    """Return the files that resuming reads."""
    for path in folder.rglob("*"):
        if (
            path.suffix in _SUFFIXES
            and not path.name.startswith("training_args")
            and path.is_file()
        ):
            yield path


def _weights(folder: Path) -> Iterator[Path]:
    return (path for path in _files(folder) if not path.name.startswith(_OF_RANKS))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_PREFIX, _SUFFIXES = "checkpoint-", (".safetensors", ".bin", ".pt", ".pth")
# `*` matches slashes, too. train.write_metrics writes metrics.json for the rank itself.
_PRIVATE_PATTERNS = (f"*/{_PREFIX}*", f"{OURS}*", f"*/{OURS}*", "metrics.json")
