"""A hash of the source behind a class, so that results know which code made them."""

from __future__ import annotations

import ast
import hashlib
import secrets
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
# These only list names: a defense more must not undo the results of all others.
_LISTS = {PACKAGE, f"{PACKAGE}.registry"}


def code_digest(*classes: type) -> str:
    """A hash of the source that classes depend on.

    It covers the module of each class and of its bases, and all modules that those import from
    their own package or from this one, however deep. Imports for type checkers only do not count.
    A class of another package also has the version of its distribution in it.

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
            state.update(f"{base.__module__}:{base.__qualname__} {_version(top)}".encode())
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


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _path(module: str) -> Path | None:
    """Where the source of a module lies; `None` if there is none."""
    top, *rest = module.split(".")
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or Path(file).suffix != ".py":
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
    return _imported(_read(module), package, tops)


@cache
def _imported(source: bytes, module: str, tops: frozenset[str]) -> tuple[str, ...]:
    """Modules that a source in a package imports."""
    package = module.split(".")
    found: list[str] = []
    for node in _running(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            # A name may be a module of its own, or something in the one that it comes from.
            inner = [f"{base}.{alias.name}" for alias in node.names]
            found += [name if _in(name, tops) else base for name in inner]
    return tuple(name for name in found if _in(name, tops))


def _in(name: str, tops: frozenset[str]) -> bool:
    return name.partition(".")[0] in tops and _path(name) is not None


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield node
    inside = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        inside = iter(node.orelse)
    for child in inside:
        yield from _running(child)
