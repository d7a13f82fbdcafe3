"""What the source of a class says of it, read without importing anything."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Description:
    """What the source of a class says of it.

    Args:
        summary: The first paragraph of its docstring.
        settings: Its dataclass fields with their defaults as they are written; `None` without one.
    """

    summary: str
    settings: dict[str, str | None]


def describe(value: str) -> Description:
    """Of a class, by `"module:Class"`.

    Example:
        >>> describe("hf_gradguard.defenses.none:NoDefense").settings
        {}
    """
    module, _, name = value.partition(":")
    try:
        where = _defined_in(module, name)
    except (ImportError, OSError, SyntaxError, ValueError):  # the last of a notebook, say
        where = None
    if where is None:
        return Description(f"{value}, whose source cannot be read.", {})
    node = _class(where, name)
    summary = inspect.cleandoc(ast.get_docstring(node) or "" if node else "").split("\n\n")[0]
    return Description(summary.replace("\n", " "), _settings(where, name))


def _class(module: str, name: str) -> ast.ClassDef | None:
    found = (n for n in _parse(module).body if isinstance(n, ast.ClassDef) and n.name == name)
    return next(found, None)


def _defined_in(module: str, name: str) -> str | None:
    """The module of the same package that defines a class; `None` if it is none of this package."""
    if _class(module, name) is not None:
        return module
    where = _imported_from(module, name)
    return None if where is None else _defined_in(where, name)


def _settings(module: str, name: str) -> dict[str, str | None]:
    """Annotated class variables of a class and its bases, in a dataclass's order."""
    where = _defined_in(module, name)
    node = None if where is None else _class(where, name)
    if where is None or node is None:
        return {}
    found: dict[str, str | None] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            found |= _settings(where, base.id)
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return found
    for line in node.body:
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and "ClassVar" not in ast.unparse(line.annotation)
            and not line.target.id.startswith("_")
        ):
            found[line.target.id] = None if line.value is None else ast.unparse(line.value)
    return found


def _imported_from(module: str, name: str) -> str | None:
    """The module that a name comes from, if it is of the same package."""
    # Seen from a package's own file, one dot is the package itself.
    parts = module.split(".") + ["__init__"] * (_file(module).name == "__init__.py")
    for node in _parse(module).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            if node.level:
                return ".".join([*parts[: -node.level], node.module or ""]).rstrip(".")
            if node.module and node.module.split(".")[0] == module.split(".")[0]:
                return node.module
    return None


def _parse(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    """The source of a module, found without importing the packages that it is in."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise ImportError(f"There is no module {module}.")
    path = Path(spec.origin)
    for folder in map(Path, spec.submodule_search_locations or ()):
        inner = folder.joinpath(*rest)
        path = inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")
    return path
