"""Names of defenses, attacks and estimators, also of other packages, and what is listed of them."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import pytest

from hf_gradguard import DEFENSES
from hf_gradguard.attacks import ATTACKS
from hf_gradguard.cli import describe
from hf_gradguard.defenses.pruning import Pruning
from hf_gradguard.registry import Registry, UnknownNameError


class Base:
    plain: int = 3


@dataclass
class Middle(Base):
    first: float
    second: str = "a"
    kind: ClassVar[str] = "no setting"


@dataclass
class Toy(Middle):
    """Does a thing
    or two.

    Not this.
    """

    third: tuple[int, ...] = (1, 2)
    fourth: list[int] | None = None
    own: int = field(default=0, init=False)


def test_a_class_is_described_by_its_docstring_and_its_settings() -> None:
    registry = Registry("defense", {})
    registry["toy"] = Toy
    found = registry.describe("toy")
    assert found.summary == "Does a thing or two."
    assert found.settings == {"first": None, "second": "'a'", "third": "(1, 2)", "fourth": None}


def test_what_has_no_settings_is_listed_all_the_same() -> None:
    found = Registry("defense", {"toy": "math:sin"}).describe("toy")
    assert "sine" in found.summary
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
    assert re.match(said, anew.describe("broken").summary)


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
    assert shown.endswith("mine\n  \n  settings: none")
