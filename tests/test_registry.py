"""Names of defenses, attacks and estimators, also of other packages, without importing them."""

from __future__ import annotations

import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest

from hf_gradguard import DEFENSES
from hf_gradguard.attacks import ATTACKS
from hf_gradguard.cli import describe
from hf_gradguard.defenses.pruning import Pruning
from hf_gradguard.registry import Registry, UnknownNameError

PARTS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
raise RuntimeError("imported")

class Base:
    plain: int = 3

@dataclass
class Middle(Base):
    first: float
    second: str = "a"
    kind: ClassVar[str] = "no setting"

@dataclass
class Toy(Middle):
    \"\"\"Does a thing
    or two.

    Not this.
    \"\"\"

    third: tuple[int, ...] = (1, 2)
    _own: int = 0
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import fails, so that whoever imports it is caught."""
    folder = tmp_path / "a_toy_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .inner import Toy\n")
    (folder / "inner" / "__init__.py").write_text("from .parts import Toy\n")
    (folder / "inner" / "parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize(
    "where", ["a_toy_package.inner.parts", "a_toy_package.inner", "a_toy_package"]
)
def test_a_class_is_described_without_importing_it(package: Path, where: str) -> None:
    """Also where the name is only passed on; bases count as a dataclass counts them."""
    found = Registry("defense", {"toy": f"{where}:Toy"}).describe("toy")
    assert found.summary == "Does a thing or two."
    assert found.settings == {"first": None, "second": "'a'", "third": "(1, 2)"}


@pytest.mark.parametrize("value", ["math:sin", "no_such_package:Toy", "a_toy_package:Absent"])
def test_what_has_no_source_is_listed_all_the_same(package: Path, value: str) -> None:
    found = Registry("defense", {"toy": value}).describe("toy")
    assert value in found.summary
    assert found.settings == {}


def test_descriptions_are_what_the_classes_say() -> None:
    for registry in (DEFENSES, ATTACKS):
        for name, found in registry.items():
            described = registry.describe(name)
            assert list(described.settings) == [f.name for f in fields(found) if f.init]
            assert described.summary.endswith(".")


def test_unknown_names_list_the_right_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"no defense 'prunning'\. Did you mean 'pruning'\?"):
        DEFENSES["prunning"]
    with pytest.raises(ValueError, match=r"The names are: none, gaussian_noise"):
        DEFENSES["zzz"]
    assert DEFENSES.get("zzz") is None
    assert "zzz" not in DEFENSES


def test_a_built_in_name_cannot_be_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a package; and one that cannot be imported says which package it is of."""
    metadata = tmp_path / "bad_guard-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-guard\nVersion: 1.0\n")
    points = "[hf_gradguard.defenses]\npruning = json:loads\nbroken = bad_guard:Absent\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    anew = Registry[type]("defense", DEFENSES._builtin)
    assert anew["pruning"] is Pruning
    assert (list(anew)[-1], anew.package("broken")) == ("broken", "bad-guard")
    said = r"The defense 'broken' of bad-guard \(bad_guard:Absent\) cannot be imported"
    with pytest.raises(ImportError, match=said):
        anew["broken"]


def test_names_can_be_added_in_a_process() -> None:
    own = Registry[type]("defense", {})
    own["mine"] = dict
    assert (list(own), own["mine"], len(own)) == (["mine"], dict, 1)
    del own["mine"]
    assert not len(own)


def test_a_class_of_a_script_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is run has no source that could be found by its name."""
    script = types.ModuleType("script")  # as `python -c` has it, of no file
    monkeypatch.setitem(sys.modules, "script", script)
    exec("class Mine:\n    pass", vars(script))
    DEFENSES["mine"] = script.Mine
    shown = describe(DEFENSES)
    assert "mine" in shown
    assert "whose source cannot be read" in shown
