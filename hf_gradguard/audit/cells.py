"""Finished pieces of an audit on disk, each under a hash of all that determines it: settings, data
and the code that made it. So an interrupted audit continues where it stopped.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.private import make_private_folder, write_private

PACKAGE = __name__.partition(".")[0]
# These only list names: a defense more must not undo the results of all others.
_LISTS = {PACKAGE, f"{PACKAGE}.registry"}

Cell = dict[str, Any]
"""What was found, or a `reason` why nothing can be, or a `crash`."""


class Cells:
    """One JSON file for each cell, named by a hash of all that determines it. Other settings make
    other cells.

    Args:
        folder: Where they lie. Made if it is not there, for its owner alone: cells hold private
            data.

    Attributes:
        made: How many were not there and had to be made.

    Raises:
        OSError: If nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self.made = Path(folder), 0
        try:
            make_private_folder(self.folder.parent)
            make_private_folder(self.folder)
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
        """The cell of that key, made if it is not there yet.

        What crashed is not kept: it is tried again when the audit goes on.
        """
        path = self.folder / f"{key}.json"
        if key not in self:
            self.made += 1
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


def digest(*parts: Any) -> str:
    """A hash of values: tensors by their entries, modules by weights and modes, dataclasses by
    their fields, the modules that they loaded, and the source of their class.
    """
    state = hashlib.sha256()
    _feed(state, parts)
    return state.hexdigest()[:24]


def _feed(state: Any, value: Any) -> None:
    state.update(f"<{type(value).__name__}".encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, nn.Module):
        trained = [name for name, parameter in value.named_parameters() if parameter.requires_grad]
        modes = [module.training for module in value.modules()]
        config: Any = getattr(value, "config", None) or {}
        if not isinstance(config, dict):
            config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        # Classifiers fill in `problem_type` at their first loss, by the labels.
        config = {
            k: v
            for k, v in config.items()
            if k not in ("_name_or_path", "transformers_version", "problem_type")
        }
        _feed(
            state,
            [str(value), repr(sorted(config.items(), key=str)), value.state_dict(), trained, modes],
        )
    elif is_dataclass(value) and not isinstance(value, type):
        settings = {field.name for field in fields(value) if field.init}
        own = {
            name: item
            for name, item in vars(value).items()
            if name in settings or isinstance(item, nn.Module)
        }
        _feed(state, [code_digest(type(value)), own])
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(state, (str(key), value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode())
    state.update(b">")


def code_digest(*classes: type) -> str:
    """A hash of the source that classes depend on.

    It covers the module of each class and of its bases, and all modules that those import from
    their own package or from this one, however deep. Imports for type checkers only do not count.
    A class of another package also has the version of its distribution in it, and where that is
    installed (not editable) that says it all: nothing is read.

    A module is read once, and again when it was reloaded: what counts is the code that runs, not
    what was edited since. A class whose source cannot be read (typed into a prompt, or compiled)
    has a hash that never comes again.

    Example:
        >>> from hf_gradguard.attacks import ATTACKS
        >>> code_digest(ATTACKS["tag"]) == code_digest(ATTACKS["lamp"])
        False
    """
    state = hashlib.sha256()
    for one in classes:
        for base in one.__mro__:
            top = base.__module__.partition(".")[0]
            if top in sys.stdlib_module_names and top != "__main__":
                continue
            said = _version(top)
            state.update(f"{base.__module__}:{base.__qualname__} {said}".encode())
            if said and _is_installed(top):
                continue
            for name in sorted(modules_of(base.__module__)):
                state.update(name.encode() + _read(name))
    return state.hexdigest()[:24]


def modules_of(module: str) -> set[str]:
    """A module and all that it imports from its own package or from this one."""
    found, left = set[str](), [module]
    while left:
        name = left.pop()
        if name not in found and name not in _LISTS:
            found.add(name)
            left += _imports(name, frozenset({module.partition(".")[0], PACKAGE}))
    return found


def _version(top: str) -> str:
    """Of the distributions that bring a package, but for this one, whose source says more."""
    if top == PACKAGE:
        return ""
    return " ".join(version(name) for name in sorted(set(_distributions().get(top, []))))


def _is_installed(top: str) -> bool:
    path = _path(top)
    places = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return path is not None and any(path.is_relative_to(place) for place in places)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _path(module: str) -> Path | None:
    """Where the source of a module lies; `None` if there is none."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    return None if file is None else _beside(file, module)


@cache
def _beside(file: str, module: str) -> Path | None:
    """Where it lies in a package of that file."""
    _, *rest = module.split(".")
    if Path(file).suffix != ".py":
        return None
    if not rest:
        return Path(file)
    if Path(file).name != "__init__.py":
        return None
    inner = Path(file).parent.joinpath(*rest)
    for path in (inner / "__init__.py", inner.with_suffix(".py")):
        if path.exists():
            return path
    return None


_sources: dict[str, tuple[object, bytes]] = {}


def _read(module: str) -> bytes:
    path = _path(module)
    if path is None:
        return secrets.token_bytes(32)
    spec = getattr(sys.modules.get(module), "__spec__", None)  # reloading makes a new one
    if module not in _sources or _sources[module][0] is not spec:
        _sources[module] = spec, path.read_bytes()
    return _sources[module][1]


def _imports(module: str, tops: frozenset[str]) -> tuple[str, ...]:
    """Modules of these packages that a module imports, also within its functions."""
    path = _path(module)
    if path is None:
        return ()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    # A name may be a module of its own, or something in the one that it comes from.
    found = [name if _in(name, tops) else base for name, base in _imported(_read(module), package)]
    return tuple(name for name in found if _in(name, tops))


@cache
def _imported(source: bytes, module: str) -> tuple[tuple[str, str], ...]:
    """What a source in a package imports, each with the module that it comes from."""
    package = module.split(".")
    found: list[tuple[str, str]] = []
    for node in _running(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            found += [(f"{base}.{alias.name}", base) for alias in node.names]
    return tuple(found)


def _in(name: str, tops: frozenset[str]) -> bool:
    return name.partition(".")[0] in tops and _path(name) is not None


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        yield (node := left.pop())
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        else:
            left += ast.iter_child_nodes(node)


@dataclass
class Audit:
    """What an audit found. `asdict` of it is `audit.json`.

    Args:
        settings: Model, data, threat model, seeds, versions: all that it takes to repeat it.
        defenses: `{label: settings}`.
        attacks: `{label: settings}`.
        messages: The originals, one entry per message that was attacked. Private data.
        chance: Scores of guesses without a gradient: for each of these messages
            `{score: one number per sample}`.
        shared: One entry per message, repeat and defense: `relative_error` ‖shared - g‖/‖g‖ and
            `cosine` of what was shared, `figures`, one number per sample for each estimator
            (`None` is infinite), `no_figures`, the reasons of the others, and `labels`, those that
            were read off it, or `no_labels`, why none were; or `reason`, if the defense refused; or
            `crash`, if it failed.
        cells: One entry per message, repeat, defense and attack: `scores` and the reconstruction;
            or `reason`, if the attack is not applicable; or `crash`, if it failed.

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
    shared: list[dict[str, Any]]
    cells: list[dict[str, Any]]
