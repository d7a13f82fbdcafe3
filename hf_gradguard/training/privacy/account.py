"""The account of what left a rank, on disk before it leaves.

A run that is killed forgets what it shared after its last checkpoint. So each message is written to
the output folder, and flushed to the disk, before it is exchanged; a run that resumes counts it.

Of (ε, δ) a record holds public figures alone: noise multiplier, sampling rate, number of messages.
Of the Fisher information it holds dFIL by row, which is private. So the file is its owner's alone,
and is never pushed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

NAME = "gradguard_account_rank{}.jsonl"
_EMPTIED = (
    "{} beside the checkpoint holds fewer messages of this run than the checkpoint counted: it was "
    "removed, emptied or swapped, so what left after the checkpoint cannot be counted. Copy it "
    "back from the output folder that the run wrote to; or begin a new run."
)
_BEYOND = "{} message(s) left after the checkpoint, before the run ended: the account counts them."
_OTHER_RUNS = (
    "{} holds {} message(s) of {} earlier run(s), which this run's account leaves out. What they "
    "told of the same data adds up: to count it, resume."
)
_OTHER_RUN = (
    "This Trainer has shared messages of a run of its own, which the account of the checkpoint's "
    "run would leave out. Make a new Trainer to resume the other run."
)
_CHANGED = (
    "{}, line {}: its checksum is another, so what left this rank cannot be counted. Copy the file "
    "back from where it was saved; or begin a new run in another output_dir."
)


class AccountFile:
    """One rank's records of messages, each line under a checksum that covers all lines before it.

    Args:
        folder: The run's output folder.
        rank: Whose messages.

    Attributes:
        run: Names the run that a record counts for. A run that is resumed keeps its name.

    Example:
        >>> account = AccountFile(tmp_path, rank=0)
        >>> account.write({"noise_multiplier": 1.0, "sampling_rate": 0.1, "messages": 1})
        >>> after_kill = AccountFile(tmp_path, rank=0)
        >>> after_kill.run = account.run
        >>> [record["messages"] for record in after_kill.records([tmp_path], counted={})]
        [1]
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.run, self._attempt = secrets.token_hex(8), secrets.token_hex(4)
        self._path, self._name = Path(folder) / NAME.format(rank), NAME.format(rank)
        self._counted: dict[str, int] = {}  # by attempt; of this run, in this file
        self._digest, self._end = "", (-1, -1)  # of the file as this object left it

    @property
    def counted(self) -> dict[str, int]:
        """How many records of each attempt at this run the accounts hold: for a checkpoint."""
        return dict(self._counted)

    @property
    def has_written(self) -> bool:
        """Whether this process shared anything under the run's name."""
        return bool(self._counted.get(self._attempt))

    def write_to(self, folder: str | os.PathLike[str]) -> None:
        """What follows is written to that output folder."""
        if Path(folder) != self._path.parent:
            self._path, self._attempt = Path(folder) / self._name, secrets.token_hex(4)
            self._counted = {}

    def write(self, record: Mapping[str, Any]) -> None:
        """A message is about to leave. Returns once the disk has it.

        Raises:
            OSError: If it cannot be written. Then the message must stay.
            ValueError: If the file was changed since.
        """
        number = self._counted.get(self._attempt, 0)
        about = {"run": self.run, "attempt": self._attempt, "number": number}
        self._append(json.dumps(about | dict(record)))
        self._counted[self._attempt] = number + 1

    def records(
        self, folders: Iterable[str | os.PathLike[str]], counted: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """What this run shared beyond what a checkpoint counted, oldest first. All of it counts as
        counted from then on.

        Args:
            folders: Output folders that the run may have written to.
            counted: As a checkpoint has it.

        Raises:
            ValueError: If a file was changed, or lacks records that the checkpoint counted.
        """
        beyond, present = [], dict.fromkeys(counted, 0)
        for path in dict.fromkeys((Path(folder) / self._name).resolve() for folder in folders):
            for record in _read_records(path)[0]:
                if record["run"] != self.run:
                    continue
                attempt, number = record["attempt"], record["number"] + 1
                present[attempt] = max(present.get(attempt, 0), number)
                if number > counted.get(attempt, 0):
                    beyond.append(record)
                if path == self._path.resolve():
                    self._counted[attempt] = present[attempt]
        if any(present[attempt] < number for attempt, number in counted.items()):
            raise ValueError(_EMPTIED.format(self._name))
        if beyond:
            logger.warning(_BEYOND.format(len(beyond)))
        return beyond

    def go_on_with(self, run: str) -> None:
        """Take another run's name: what follows counts as its own.

        Raises:
            ValueError: If this process has shared messages under another name.
        """
        if self.has_written and run != self.run:
            raise ValueError(_OTHER_RUN)
        if run != self.run:
            self.run, self._counted = run, {}

    def last_run(self) -> str | None:
        """The run that wrote to the output folder last; `None` if there is none."""
        records, _, _ = _read_records(self._path)
        return records[-1]["run"] if records else None

    def _append(self, content: str) -> None:
        is_new = not self._path.is_file()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            state = os.fstat(descriptor)
            if (state.st_ino, state.st_size) != self._end:  # the first line, or another Trainer's
                records, self._digest, size = _read_records(self._path)
                if not self._counted and (runs := {r["run"] for r in records} - {self.run}):
                    logger.warning(_OTHER_RUNS.format(self._path, len(records), len(runs)))
                os.ftruncate(descriptor, size)  # a line that a kill cut off: it never left
            line, self._digest = _sealed(content, self._digest)
            os.write(descriptor, line)
            os.fsync(descriptor)
            state = os.fstat(descriptor)
            self._end = state.st_ino, state.st_size
        finally:
            os.close(descriptor)
        if is_new:
            _sync_folder(self._path.parent)


def _sealed(content: str, digest: str) -> tuple[bytes, str]:
    """A line, and the checksum that it ends with."""
    digest = hashlib.sha256(f"{digest}{content}".encode()).hexdigest()[:32]
    return f"{content}\t{digest}\n".encode(), digest


def _read_records(path: Path) -> tuple[list[dict[str, Any]], str, int]:
    """The records of a file, the checksum of the last one, and where it ends."""
    records: list[dict[str, Any]] = []
    digest, end = "", 0
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # cut off by a kill before the message left
        text, _, _ = line.decode(errors="replace").rstrip("\n").rpartition("\t")
        sealed, digest = _sealed(text, digest)
        if sealed != line:
            raise ValueError(_CHANGED.format(path, number))
        records.append(json.loads(text))
        end += len(line)
    return records, digest, end


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk only when its folder is. Windows opens no folder."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
