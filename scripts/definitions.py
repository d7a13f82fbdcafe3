"""Compare the public surface of two commits: what came, what went, what moved, what changed.

    python scripts/definitions.py v0.3.0                 # with the working tree
    python scripts/definitions.py v0.3.0 HEAD --changelog CHANGELOG.md

The surface is every function, class, method and constant of the package whose name and modules have
no underscore in front: with its arguments, and for classes their fields, which are settings and
flags. Sources are read and never imported, so any commit will do. Each name is the same, changed,
moved (a definition of that name stands elsewhere), renamed (of that body, or nearly), gone, or new.
`--changelog` leaves out what a file's text names, `--documented` what no page of the first commit
shows as code.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import subprocess
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PACKAGE = "hf_gradguard"
ALIKE = 0.7  # of two bodies, so that one is taken for the other renamed
LEAST_BODY = 120  # characters, below which bodies are alike by chance


class Definition(NamedTuple):
    """A public definition: its signature or value, and its body."""

    signature: str
    body: str


def sources(commit: str | None) -> dict[str, str]:
    """Return the package's sources at a commit, or in the working tree, by path."""
    if commit is None:
        return {str(path): path.read_text("utf-8") for path in Path(PACKAGE).rglob("*.py")}
    data = subprocess.run(
        ["git", "archive", commit, PACKAGE], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [member for member in archive if member.name.endswith(".py")]
        return {file.name: archive.extractfile(file).read().decode() for file in files}  # type: ignore[union-attr]


def surface(commit: str | None) -> dict[str, Definition]:
    """Return the public definitions at a commit, by their full names."""
    everything: dict[str, Definition] = {}
    for path, text in sources(commit).items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if "._" not in module:
            everything |= definitions(ast.parse(text).body, module)
    return everything


def definitions(body: list[ast.stmt], prefix: str) -> dict[str, Definition]:
    """Return the public definitions in a module's or a class's body."""
    members: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name):
            signature = f"({ast.unparse(node.args)})"
            members[f"{prefix}.{node.name}"] = Definition(signature, plain(node.body))
        elif isinstance(node, ast.ClassDef) and is_public(node.name):
            bases = ", ".join(map(ast.unparse, node.bases))
            members[f"{prefix}.{node.name}"] = Definition(f"({bases})", plain(node.body))
            members |= definitions(node.body, f"{prefix}.{node.name}")
        elif isinstance(node, ast.AnnAssign) and is_public(ast.unparse(node.target)):
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            signature = f": {ast.unparse(node.annotation)}{default}"
            members[f"{prefix}.{ast.unparse(node.target)}"] = Definition(signature, "")
        elif isinstance(node, ast.Assign) and is_public(name := ast.unparse(node.targets[0])):
            members[f"{prefix}.{name}"] = Definition("", "")
    return members


def is_public(name: str) -> bool:
    """Return whether a name has no underscore in front, and no dot in it."""
    return not name.startswith("_") and "." not in name and name != "logger"


def plain(body: list[ast.stmt]) -> str:
    """Return a body's source without its docstring."""
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(map(ast.unparse, body[is_docstring:]))


def compare(old: dict[str, Definition], new: dict[str, Definition]) -> list[tuple[str, str, str]]:
    """Return what became of each definition: its fate, its name, and where it is or how it changed.

    Members of a class that is gone or new go with it.
    """
    gone, come = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    by_name = defaultdict(list)
    for name in come:
        by_name[short(name, old, new)].append(name)
    rows, taken = [], set[str]()
    for name in gone:
        if owner(name) in old and owner(name) not in new:
            continue
        place = next(iter(by_name[short(name, old, new)]), "") or renamed(old[name], come, new)
        fate = "gone" if not place else "moved" if last(place) == last(name) else "renamed"
        taken |= {other for other in come if other == place or other.startswith(f"{place}.")}
        rows.append((fate, name, place))
    for name in sorted(old.keys() & new.keys()):
        if old[name].signature != new[name].signature:
            rows.append(("changed", name, f"{old[name].signature} -> {new[name].signature}"))
    fresh = [name for name in come if name not in taken and owner(name) not in come]
    return rows + [("new", name, new[name].signature) for name in fresh]


def renamed(definition: Definition, come: list[str], new: dict[str, Definition]) -> str:
    """Return the new definition whose body is most like an old one's; an empty text if none is."""
    if len(definition.body) < LEAST_BODY:
        return ""
    matcher, best = difflib.SequenceMatcher(autojunk=False), (ALIKE, "")
    matcher.set_seq2(definition.body)
    for name in come:
        matcher.set_seq1(new[name].body)
        if matcher.real_quick_ratio() > best[0] and matcher.quick_ratio() > best[0]:
            best = max(best, (matcher.ratio(), name))
    return best[1]


def short(name: str, old: dict[str, Definition], new: dict[str, Definition]) -> str:
    """Return a name without its module, with its class's."""
    is_member = owner(name) in old or owner(name) in new
    return ".".join(name.split(".")[-2 if is_member else -1 :])


def shown_as_code(commit: str) -> set[str]:
    """Return the words of code in the pages at a commit."""
    command = ["git", "grep", "-h", "", commit, "--", "README.md", "docs/*.md", "examples"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(
        re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`|^.*(?:import|[(=]).*", text, re.M)))
    )


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def last(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("before")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--documented", action="store_true", help="only names that pages show")
    parser.add_argument("--changelog", type=Path, help="leave out names that this file has")
    arguments = parser.parse_args()
    rows = compare(surface(arguments.before), surface(arguments.after))
    if arguments.changelog:
        told = set(re.findall(r"\w+", arguments.changelog.read_text("utf-8")))
        rows = [row for row in rows if last(row[1]) not in told]
    if arguments.documented:
        pages = shown_as_code(arguments.before)
        rows = [row for row in rows if row[0] != "new" and last(row[1]) in pages]
    for fate, name, detail in sorted(rows):
        print(f"{fate:8}{name.removeprefix(PACKAGE + '.')}  {detail.removeprefix(PACKAGE + '.')}")


if __name__ == "__main__":
    main()
