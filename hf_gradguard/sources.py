"""What the source of a class says of it, read without importing anything."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
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
        definition = _definition(module, name)
    except (ImportError, OSError, SyntaxError):
        definition = None
    if definition is None:
        return Description(f"{value}, whose source cannot be read.", {})
    home, node = definition
    summary = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
    return Description(summary.replace("\n", " "), _settings(home, node))


def source_file(module: str) -> Path | None:
    """The source of a module, found without importing the packages that it is in; `None` if there
    is none.

    Example:
        >>> source_file("hf_gradguard.sources").name
        'sources.py'
    """
    top, _, inner = module.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # `__main__`, and modules made by hand
        return None
    if spec is None or not str(spec.origin).endswith(".py"):
        return None
    return _inner_file(str(spec.origin), inner) if inner else Path(str(spec.origin))


@cache
def _inner_file(origin: str, inner: str) -> Path | None:
    if Path(origin).name != "__init__.py":
        return None
    path = Path(origin).parent.joinpath(*inner.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.exists()), None)


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The module that defines a class, and its source; `None` if it is not of the same package."""
    path = source_file(module)
    if path is None:
        raise ImportError(f"There is no module {module}.")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            # From a package's own file, one dot is the package itself.
            names = module.split(".") + ["__init__"] * (path.name == "__init__.py")
            if node.level:
                parent = ".".join([*names[: -node.level], node.module or ""]).rstrip(".")
                return _definition(parent, name)
            if node.module and node.module.split(".")[0] == names[0]:
                return _definition(node.module, name)
    return None


def _settings(module: str, node: ast.ClassDef) -> dict[str, str | None]:
    """Annotated class variables of a class and its bases, in a dataclass's order."""
    settings: dict[str, str | None] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and (definition := _definition(module, base.id)):
            settings |= _settings(*definition)
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return settings
    for line in node.body:
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and "ClassVar" not in ast.unparse(line.annotation)
            and not line.target.id.startswith("_")
        ):
            settings[line.target.id] = None if line.value is None else ast.unparse(line.value)
    return settings
