"""Docstrings that survive alone, in a tooltip: a first sentence with a verb and an object, and
sections that agree with the signature and can be read entry by entry.

`ruff` checks the form (rules D and the Google convention in pyproject.toml). What it does not
check is here: which words a public docstring may begin with, and that `Args`, `Attributes` and
`Raises` name what there is.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_gradguard

PACKAGE = Path(hf_gradguard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
VERBS = """
Add Agree Allow Answer Append Apply Ask Attack Average Begin Bound Bring Build Call Change Check
Choose Clear Clip Collate Collect Combine Compare Compute Continue Convert Copy Correct Count
Create Cut Decide Delete Descend Describe Differentiate Divide Do Draw Drop Encode End Estimate
Evaluate Exchange Expect Explain Fill Find Follow Forget Free Freeze Gather Give Group Hide Hold
Ignore Infer Initialize Insert Judge Keep Learn Leave Let Limit List Listen Load Log Look Make
Map Mark Match Measure Merge Mix Move Multiply Name Note Notice Number Observe Open Pack Pad
Parse Pass Place Plan Prepare Print Project Protect Prune Push Put Quantize Raise Read
Reconstruct Record Recover Reduce Refuse Register Release Remember Remove Repeat Replace Report
Require Reserve Reset Resize Restore Resume Return Reverse Rewrite Round Run Save Say Scale
Score Search Seed Select Send Serve Set Share Show Shuffle Skip Solve Split Stack Start Stop
Store Subtract Sum Swap Switch Take Tell Train Transform Truncate Try Turn Undo Update Use Wait
Warn Widen Wrap Write Yield
"""
"""Verbs that a function's docstring begins with. A verb that is missing may be added; a noun, a
preposition or a participle may not.
"""

TELEGRAMS = """
Alike All Also And Any Around As At Because Before Behind Beside Besides Between Both But By
Each Either Every Everything For From Further How If In Inside Into It Its Like Likewise Not
Nothing Of On Or Other Others Out Over Same So Some Such That Their Then There These They Those
Told Under Until What Whatever When Where Whether Which While Who Whose Why With Within Without
"""
"""Words that begin telegrams: "Of losses and counts", "What it found", "As before". A property
may begin with Whether, for it says what is true and not what is done.
"""


class Documented(NamedTuple):
    """A public definition with a docstring."""

    place: str
    node: ast.Module | ast.ClassDef | ast.FunctionDef
    text: str

    @property
    def first_sentence(self) -> str:
        return " ".join(self.text.split("\n\n")[0].split())

    @property
    def first_word(self) -> str:
        return self.first_sentence.split()[0].strip(",;:")

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, ast.FunctionDef) and not self.is_property

    @property
    def is_property(self) -> bool:
        decorators = getattr(self.node, "decorator_list", [])
        return any(ast.unparse(decorator).endswith("property") for decorator in decorators)


def _definitions(node: ast.Module | ast.ClassDef, place: str) -> Iterator[Documented]:
    if (text := ast.get_docstring(node)) is not None:
        yield Documented(place, node, text)
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _definitions(child, f"{place}::{child.name}")
        elif (
            isinstance(child, ast.FunctionDef)
            and (not child.name.startswith("_") or child.name.endswith("__"))
            and (text := ast.get_docstring(child)) is not None
        ):
            yield Documented(f"{place}::{child.name}", child, text)


def _public(file: Path) -> list[Documented]:
    return list(_definitions(ast.parse(file.read_text(encoding="utf-8")), file.name))


def _ids(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=_ids)
def test_begins_with_a_sentence(file: Path) -> None:
    """A function with a verb in the imperative, everything else not with a telegram's word."""
    wrong = [
        f"{item.place}: {item.first_sentence[:60]}"
        for item in _public(file)
        if not item.first_word[0].isupper()
        or (item.is_function and item.first_word not in VERBS.split())
        or (
            item.first_word in TELEGRAMS.split()
            and not (item.is_property and item.first_word == "Whether")
        )
    ]
    assert not wrong, "\n".join(wrong)


SECTION = r"^%s:\n((?:(?: {4}.*)?\n)*)"
ENTRY = r"^ {4}(\*{0,2}\w+):"


def _entries(text: str, section: str) -> list[str]:
    """The names that a section documents."""
    found = re.search(SECTION % section, text + "\n", re.MULTILINE)
    return re.findall(ENTRY, found[1], re.MULTILINE) if found else []


CLASSES = {
    node.name: node
    for file in sorted(PACKAGE.rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
}


def _lineage(node: ast.ClassDef) -> list[ast.ClassDef]:
    """A class and those of its bases that are this package's."""
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return [node, *(cls for base in bases if base in CLASSES for cls in _lineage(CLASSES[base]))]


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in names if name not in ("self", "cls", "**_")]


def _fields(node: ast.ClassDef) -> tuple[list[str], list[str]]:
    """What a class is made of: all names, and those that are its own and cannot be left out."""
    for cls in _lineage(node):
        for child in cls.body:
            if isinstance(child, ast.FunctionDef) and child.name in ("__init__", "__new__"):
                names = _parameters(child)
                if child.name == "__new__" and "**__" in names:
                    continue  # it only chooses the class
                return names, names if cls is node else []
    fields = [
        (cls is node, child.target.id, child)
        for cls in _lineage(node)
        for child in cls.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    ]
    names = [name for _, name, _ in fields]
    own = [
        name
        for is_own, name, child in fields
        if is_own
        and not name.startswith("_")
        and not any(name == other for is_other_own, other, _ in fields if not is_other_own)
        and "ClassVar" not in ast.unparse(child.annotation)
        and "init=False" not in ast.unparse(child)
    ]
    return names, own


@pytest.mark.parametrize("file", FILES, ids=_ids)
def test_arguments_are_those_of_the_signature(file: Path) -> None:
    """`Args` names every parameter, or there is no such section; and it names nothing else."""
    wrong = []
    for item in _public(file):
        documented = _entries(item.text, "Args")
        if isinstance(item.node, ast.FunctionDef):
            names = needed = _parameters(item.node)
        elif isinstance(item.node, ast.ClassDef):
            names, needed = _fields(item.node)
        else:
            continue
        unknown = [name for name in documented if name not in names]
        missing = [name for name in needed if name not in documented] if documented else []
        if unknown or missing:
            wrong.append(f"{item.place}: unknown {unknown}, missing {missing}")
    assert not wrong, "\n".join(wrong)


DANGLING = ["As", "By", "Gives", "It", "Its", "Likewise", "Of", "Says", "Their", "Those", "Whose"]
"""Words that begin an entry which cannot be read without the others: "Of the messages", "Its".
"""


@pytest.mark.parametrize("file", FILES, ids=_ids)
def test_entries_can_be_read_alone(file: Path) -> None:
    """An argument is named by a noun, and an error by its condition."""
    wrong = []
    for item in _public(file):
        for section in ("Args", "Attributes"):
            wrong += [
                f"{item.place}: {name}: {word}"
                for name, word in _first_words(item.text, section)
                if word in DANGLING
            ]
        wrong += [
            f"{item.place}: {name}: {word}"
            for name, word in _first_words(item.text, "Raises")
            if word not in ("If", "Always")
        ]
    assert not wrong, "\n".join(wrong)


def _first_words(text: str, section: str) -> list[tuple[str, str]]:
    """The entries of a section, each with its first word."""
    found = re.search(SECTION % section, text + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}([\w*, ]+): +(\S+)", found[1], re.MULTILINE) if found else []
    return [(name, word.strip(",;:.")) for name, word in entries]


@pytest.mark.parametrize("file", FILES, ids=_ids)
def test_attributes_are_those_of_the_class(file: Path) -> None:
    wrong = []
    for item in _public(file):
        if isinstance(item.node, ast.ClassDef) and (names := _entries(item.text, "Attributes")):
            there = set()
            for child in (child for cls in _lineage(item.node) for child in ast.walk(cls)):
                if isinstance(child, ast.FunctionDef):
                    there.add(child.name)
                elif isinstance(child, ast.Attribute | ast.Name):
                    there.add(ast.unparse(child).removeprefix("self."))
            wrong += [f"{item.place}: {name}" for name in names if name not in there]
    assert not wrong, "\n".join(wrong)


def _raised(node: ast.FunctionDef) -> set[str]:
    """The exceptions that a function itself raises, by name, in no function inside it."""
    names, waiting = set[str](), list[ast.AST](node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            names.add(ast.unparse(part.exc.func).split(".")[-1])
        waiting += ast.iter_child_nodes(part)
    return names & EXCEPTIONS


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name, None)
    if isinstance(value, type):
        return issubclass(value, BaseException)
    return name in CLASSES and any(
        _is_exception(ast.unparse(base).split(".")[-1]) for base in CLASSES[name].bases
    )


EXCEPTIONS = {name for name in [*dir(builtins), *CLASSES] if _is_exception(name)}


@pytest.mark.parametrize("file", FILES, ids=_ids)
def test_errors_are_those_that_are_raised(file: Path) -> None:
    """`Raises` names exceptions, and all of those that a public function itself raises."""
    wrong = []
    for item in _public(file):
        documented = _entries(item.text, "Raises")
        wrong += [f"{item.place}: no {name}" for name in documented if name not in EXCEPTIONS]
        if isinstance(item.node, ast.FunctionDef):
            missing = _raised(item.node) - {*documented, "NotImplementedError", "AssertionError"}
            wrong += [f"{item.place}: {name} is raised" for name in missing]
    assert not wrong, "\n".join(wrong)
