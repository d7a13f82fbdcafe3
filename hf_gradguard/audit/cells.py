"""Finished pieces of an audit on disk, each under a hash of all that determines it.

The hash covers settings, data and the code, so that an interrupted audit continues where it
stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.private import make_private_folder, write_private
from ..metrics.scores import bootstrap_intervals, open_ends
from ..metrics.text import TEXT_SCORES
from .report.verdicts import PERCENTILE, Estimate

Cell = dict[str, Any]
"""The result of one step of an audit, or a `reason` why there is none, or a `crash`."""


@dataclass
class Audit:
    """The results of an audit; `asdict` of it is `audit.json`.

    Args:
        settings: Model, data, threat model, seeds, versions: all that it takes to repeat it.
        defenses: `{label: settings}`.
        attacks: `{label: settings}`.
        messages: The originals, one entry per message that was attacked. Private data.
        chance: Scores of guesses without a gradient: for each of these messages `{score: one number
            per sample}`.
        shared: One entry per message, repeat and defense: `relative_error` ‖shared - g‖/‖g‖ and
            `cosine` of what was shared; `pairs`, of batches that differ in one word: `[correct,
            relative_change, direction_ratio]` of each, or `no_pairs`, why there are none;
            `estimates`, one number per sample for each estimator (`None` is infinite), and
            `no_estimates`, the reasons of the others; `labels`, those that were recovered from it,
            or `no_labels`, why none were. Or `reason`, if the defense refused; or `crash`, if it
            failed.
        cells: One entry per message, repeat, defense and attack: `scores`, the reconstruction, and
            `membership` of an attack that ranks candidates; or `reason`, if the attack is not
            applicable; or `crash`, if it failed.

    Example:
        >>> from hf_gradguard.audit import audit
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [cell["defense"] for cell in result.cells]
        ['none', 'pruning', 'pruning', 'none', 'pruning', 'pruning']
    """

    settings: dict[str, Any]
    defenses: dict[str, dict[str, Any]]
    attacks: dict[str, dict[str, Any]]
    messages: list[dict[str, Any]]
    chance: list[dict[str, list[float]]]
    shared: list[Cell]
    cells: list[Cell]


class Cells:
    """A folder with one JSON file for each cell, named by a hash of all that determines it.

    Other settings make other cells.

    Args:
        folder: The folder. It is made if needed, for its owner alone: cells hold private data.

    Raises:
        OSError: If nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            make_private_folder(self.folder.parent)
            make_private_folder(self.folder)
            # Permissions alone do not tell: a file system may be read-only or full.
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise OSError(
                f"Cannot write to {self.folder} ({error.strerror or error}), so nothing was "
                "attacked. Choose another output."
            ) from error

    def __contains__(self, key: str) -> bool:
        return (self.folder / f"{key}.json").exists()

    def once(self, key: str, make: Callable[[], Cell]) -> Cell:
        """Return the cell of this key, and make it if there is none yet.

        A crash is not stored: it is tried again when the audit is continued.
        """
        path = self.folder / f"{key}.json"
        if key not in self:
            cell = make()
            if "crash" in cell:
                return cell
            write_json(path, cell)
        # As it will be read the next time.
        stored: Cell = json.loads(path.read_text(encoding="utf-8"))
        return stored


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all, for its owner alone: it may hold private texts."""
    write_private(path, text.encode())


def digest(*values: Any) -> str:
    """Return a hash of values.

    Tensors are hashed by their entries, modules by weights and modes, and dataclasses by their
    fields, the modules that they loaded, and the code of their class.
    """
    state = hashlib.sha256()
    _feed(state, values)
    return state.hexdigest()[:24]


def _feed(state: Any, value: Any) -> None:
    state.update(f"<{type(value).__name__}".encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # bfloat16 has no NumPy type, so entries are hashed as bytes.
        entries = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        state.update(entries.numpy().tobytes())
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, nn.Module):
        trained = [name for name, parameter in value.named_parameters() if parameter.requires_grad]
        modes = [module.training for module in value.modules()]
        config: Any = getattr(value, "config", None) or {}
        if not isinstance(config, dict):
            config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        # Classifiers fill in `problem_type` at their first loss, by the labels.
        ignored = ("_name_or_path", "transformers_version", "problem_type")
        config = {key: entry for key, entry in config.items() if key not in ignored}
        described = str(value), repr(sorted(config.items(), key=str))
        _feed(state, [*described, value.state_dict(), trained, modes])
    elif is_dataclass(value) and not isinstance(value, type):
        # What a defense has computed or remembers is no setting; a network that it loaded is.
        settings = {field.name for field in fields(value) if field.init}
        networks = {name for name, field in vars(value).items() if isinstance(field, nn.Module)}
        attributes = {
            name: vars(value)[name] for name in vars(value) if name in settings | networks
        }
        _feed(state, [code_digest(type(value)), attributes])
    elif isinstance(value, Mapping):
        # The order of a mapping says nothing.
        for key in sorted(value, key=str):
            _feed(state, (str(key), value[key]))
    elif isinstance(value, list | tuple):
        for element in value:
            _feed(state, element)
    else:
        # Numbers, strings and `None`. An object without a stable `repr` makes new cells each time.
        state.update(repr(value).encode())
    state.update(b">")


def code_digest(*classes: type) -> str:
    """Return a hash of the code that classes depend on.

    It covers the packages of each class and of its bases, other than the standard library: the
    version of one that is installed, and the source of one that is not (or is, to be edited).

    Sources are read once, and again when the class's module was reloaded: what counts is the code
    that runs, not what was edited since. A class whose source cannot be read (typed into a prompt,
    or compiled) has a hash that never comes again.

    Example:
        >>> from hf_gradguard.attacks import ATTACKS
        >>> code_digest(ATTACKS["tag"]) == code_digest(ATTACKS["lamp"])
        False
    """
    state = hashlib.sha256()
    for base in (base for cls in classes for base in cls.__mro__):
        top = base.__module__.partition(".")[0]
        if top in sys.stdlib_module_names and top != "__main__":
            continue
        package_version = _package_version(top)
        state.update(f"{base.__module__}:{base.__qualname__} {package_version}".encode())
        if not (package_version and _is_installed(top)):
            state.update(_sources_of(base.__module__))
    return state.hexdigest()[:24]


def _package_version(top: str) -> str:
    """Return the versions of the distributions that bring a package."""
    return " ".join(version(name) for name in sorted(set(_distributions().get(top, []))))


def _is_installed(top: str) -> bool:
    path = _source_file(top)
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return path is not None and any(path.is_relative_to(folder) for folder in folders)


def _source_file(module: str) -> Path | None:
    """Return the source of a module that is loaded, if there is one."""
    path = getattr(sys.modules.get(module), "__file__", None)
    # More may have been typed in there than is in the file.
    return None if path is None or module == "__main__" else Path(path)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


_sources: dict[str, tuple[object, bytes]] = {}


def _sources_of(module: str) -> bytes:
    """Return a hash of all sources of a module's package, as they were when it was loaded."""
    path, top = _source_file(module), _source_file(module.partition(".")[0])
    if path is None or top is None:
        # Never equal to any hash before: such cells are computed anew.
        return secrets.token_bytes(32)
    spec = getattr(sys.modules.get(module), "__spec__", None)  # reloading makes a new one
    if module not in _sources or _sources[module][0] is not spec:
        is_package = top.name == "__init__.py"
        files = sorted(top.parent.rglob("*.py")) if is_package else [path]
        state = hashlib.sha256(b"".join(file.read_bytes() for file in files))
        _sources[module] = spec, state.digest()
    return _sources[module][1]


# --- means of what cells hold, with their intervals

FRACTIONS = {*TEXT_SCORES, PERCENTILE}
"""The scores from 0 to 1."""

COUNTED = {"labels", "top1", "tpr_1%", "tpr_0.1%"}
"""The scores that are 0 or 1 for each sample."""

Values = dict[int, dict[str, list[float]]]
"""For each message and each score one number per sample."""


def values_of(cells: Sequence[Cell]) -> Values:
    """Return per message and score the mean over repeats of each sample.

    Repeats are no new samples.
    """
    repeats: dict[int, list[dict[str, list[float]]]] = {}
    for cell in cells:
        if "scores" in cell:
            repeats.setdefault(cell["message"], []).append(cell["scores"])
    means = {}
    for message, rows in sorted(repeats.items()):
        means[message] = {n: np.mean([row[n] for row in rows], axis=0).tolist() for n in rows[0]}
    return means


def estimates(values: Values) -> dict[str, Estimate]:
    """Return the mean of each score with its interval, all from one bootstrap."""
    messages = list(values.values())
    if not messages or not messages[0]:
        return {}
    # Messages are resampled whole: samples of one message are not independent.
    per_sample = {name: [x for message in messages for x in message[name]] for name in messages[0]}
    sizes = [len(next(iter(message.values()))) for message in messages]
    ends: dict[str, tuple[float, float]] = {}
    if len(messages) > 1:
        ends = bootstrap_intervals(per_sample, sizes, bootstrap=2000, confidence=0.95, seed=0)
    return {
        name: Estimate(float(np.mean(x)), *ends.get(name, ())) for name, x in per_sample.items()
    }


def with_open_ends(scores: Mapping[str, Estimate], messages: int) -> dict[str, Estimate]:
    """Return estimates whose intervals have room for events that no message showed.

    The interval is widened for counts, and for fractions that are equal in all messages, which have
    no spread.
    """
    opened = dict(scores)
    for name, estimate in scores.items():
        mean, low, high = estimate.mean, estimate.low, estimate.high
        if low is None or high is None:
            continue
        if name in COUNTED or (name in FRACTIONS and low == high):
            opened[name] = Estimate(mean, *open_ends(mean, low, high, messages))
    return opened


def differences(minuend: Values, subtrahend: Values, scores: set[str]) -> dict[str, Estimate]:
    """Return means and intervals of the difference, over the messages that both have."""
    return estimates(
        {
            message: {
                score: (np.array(numbers) - np.array(subtrahend[message][score])).tolist()
                for score, numbers in minuend[message].items()
                if score in scores and score in subtrahend[message]
            }
            for message in minuend
            if message in subtrahend
        }
    )
