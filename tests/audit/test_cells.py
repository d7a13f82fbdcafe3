"""Cells know the code that made them; what crashes is said, and tried again."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_audit import TEXTS, Spy, spy, text_model  # noqa: F401

from hf_gradguard import DEFENSES, GradientMap
from hf_gradguard.attacks import Observation, Reconstruction
from hf_gradguard.audit import audit, markdown_table, summarize
from hf_gradguard.audit.cells import Cells, code_digest
from hf_gradguard.audit.report.page import html_report
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream

pytestmark = pytest.mark.usefixtures("few_probes")

# ruff: noqa: F811

HELPER = "GUESS = 5\n"
ATTACK = """
from dataclasses import dataclass

from hf_gradguard.attacks import Attack, Reconstruction

from .helper import GUESS


@dataclass
class Guess(Attack):
    name = "guess"

    def reconstruct(self, seen, generator):
        return Reconstruction(token_ids=[[GUESS]])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody else's, with an attack that imports a helper."""
    folder = tmp_path / "toy_attacks"
    folder.mkdir()
    for name, source in [("__init__", ""), ("helper", HELPER), ("attack", ATTACK)]:
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_attacks"]:
        del sys.modules[name]


def reloaded() -> type:
    for name in ("helper", "attack"):
        importlib.reload(importlib.import_module(f"toy_attacks.{name}"))
    found: type = sys.modules["toy_attacks.attack"].Guess
    return found


def test_a_mended_attack_makes_new_cells(package: Path, tmp_path: Path) -> None:
    """Its own and no others, also where the change is in what it imports."""
    model, tokenizer = text_model()

    def run(found: type) -> tuple[Any, set[str]]:
        result = audit(
            model, tokenizer, TEXTS[:1], "none", ["tag:steps=1", found()], output=tmp_path / "out"
        )
        return result.cells[1]["ids"], {path.name for path in (tmp_path / "out/cells").iterdir()}

    first, before = run(reloaded())
    assert first == [[5]]
    assert run(reloaded()) == (first, before)
    (package / "helper.py").write_text("GUESS = 12345 % 7\n")
    second, after = run(reloaded())
    assert second == [[4]]
    assert len(after - before) == 1


def test_what_was_edited_but_not_reloaded_does_not_count(package: Path) -> None:
    found = reloaded()
    before = code_digest(found)
    (package / "helper.py").write_text("GUESS = 12345 % 7\n")
    assert code_digest(found) == before
    assert code_digest(reloaded()) != before


def test_the_version_of_another_package_counts(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for number in ("1.0", "1.1"):
        monkeypatch.setattr(
            "hf_gradguard.audit.cells._distributions", lambda: {"toy_attacks": ["toy-attacks"]}
        )
        monkeypatch.setattr("hf_gradguard.audit.cells.version", lambda name, n=number: n)
        digests.append(code_digest(reloaded()))
    assert digests[0] != digests[1]


def test_what_is_installed_is_known_by_its_version(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all that Transformers' Trainer imports takes seconds."""
    monkeypatch.setattr(
        "hf_gradguard.audit.cells._distributions", lambda: {"toy_attacks": ["toy-attacks"]}
    )
    monkeypatch.setattr("hf_gradguard.audit.cells.version", lambda name: "1.0")
    edited = code_digest(reloaded())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(package.parent))
    before = code_digest(reloaded())
    (package / "helper.py").write_text("GUESS = 12345 % 7\n")
    assert code_digest(reloaded()) == before != edited


def test_a_class_without_source_is_never_the_same_again() -> None:
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec("class Typed: pass", names)
    assert code_digest(names["Typed"]) != code_digest(names["Typed"])


# --- crashes


def test_a_crash_is_a_cell_that_says_so_and_is_tried_again(tmp_path: Path, spy: type[Spy]) -> None:
    def answer(seen: Observation) -> Reconstruction:
        if seen.input_shape[1] == 5:
            raise RuntimeError("no <memory>")
        return Reconstruction(token_ids=[[5]])

    model, tokenizer = text_model()
    spy.answer = staticmethod(answer)
    result = audit(model, tokenizer, TEXTS[:3], "none", "spy", output=tmp_path)
    assert [cell.get("crash") for cell in result.cells] == ["RuntimeError: no <memory>", None, None]
    assert [len(cell.get("scores", [])) > 0 for cell in result.cells] == [False, True, True]
    summary = summarize(result)
    assert summary.rows[0].messages == 2
    table, page = markdown_table(summary), html_report(summary)
    assert "(2 of 3)" in table
    assert "- spy: RuntimeError: no <memory>" in table
    assert "not applicable" not in table
    assert "<h2>Crashed</h2>" in page
    assert "spy: RuntimeError: no &lt;memory&gt;" in page

    calls = len(spy.seen)
    spy.answer = staticmethod(lambda seen: Reconstruction(token_ids=[[5]]))
    again = audit(model, tokenizer, TEXTS[:3], "none", "spy", output=tmp_path)
    assert len(spy.seen) == calls + 1
    assert all("scores" in cell for cell in again.cells)
    assert summarize(again).crashes == []


def test_a_defense_that_crashes_stops_nothing_else(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Broken(Defense):
        name: ClassVar[str] = "broken"

        def protect(self, gmap: GradientMap, generator: Stream) -> Any:
            raise KeyError("weight")

    monkeypatch.setitem(DEFENSES, "broken", Broken)
    result = audit(
        *text_model(), TEXTS[:1], ["broken", "pruning:ratio=0.9"], "spy", output=tmp_path
    )
    assert [cell.get("crash") for cell in result.cells] == [None, "KeyError: 'weight'", None]
    summary = summarize(result)
    assert [row.silence for row in summary.rows if not row.scores] == ["crashed"]
    assert "| crashed |" in markdown_table(summary)


# --- what a stopped audit leaves


def test_a_stopped_audit_leaves_a_report(tmp_path: Path, spy: type[Spy]) -> None:
    def answer(seen: Observation) -> Reconstruction:
        if len(spy.seen) == 4:
            raise KeyboardInterrupt
        return Reconstruction(token_ids=[[5]])

    model, tokenizer = text_model()
    spy.answer = staticmethod(answer)
    with pytest.raises(KeyboardInterrupt):
        audit(model, tokenizer, TEXTS, ["pruning"], "spy", output=tmp_path)
    said = "This audit is not finished: it is of 1 of 4 messages."
    page = (tmp_path / "report.html").read_text()
    assert said in page
    assert "Sample 1" in page
    assert "Sample 2" not in page
    assert said in (tmp_path / "table.md").read_text()
    record = json.loads((tmp_path / "audit.json").read_text())
    assert len(record["messages"]) == len(record["chance"]) == 1
    audit(model, tokenizer, TEXTS, ["pruning"], "spy", output=tmp_path)
    assert "not finished" not in (tmp_path / "report.html").read_text()
    assert "not finished" not in (tmp_path / "table.md").read_text()


def test_a_budget_ends_an_audit_between_two_messages(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 20 seconds by a clock that stands still between attacks."""
    now = [0.0]
    monkeypatch.setattr("hf_gradguard.attacks.base.time.perf_counter", lambda: now[0])

    def answer(seen: Observation) -> Reconstruction:
        now[0] += 20.0
        return Reconstruction(token_ids=[[wrong]])

    spy.answer = staticmethod(answer)
    model, tokenizer = text_model()
    there = {index for text, _ in TEXTS for index in tokenizer(text).input_ids}
    wrong = max(set(range(len(tokenizer))) - there)

    def attacked(folder: str, **settings: Any) -> Any:
        return audit(model, tokenizer, TEXTS, "none", "spy", output=tmp_path / folder, **settings)

    whole, ended = attacked("whole"), attacked("ended", budget_minutes=1.1)
    assert [len(one.messages) for one in (whole, ended)] == [4, 3]  # a fourth would end after 66 s
    said = "This audit is not finished: it is of 3 of 4 messages."
    assert said in (tmp_path / "ended" / "report.html").read_text()
    row, all_of_it = (summarize(one).rows[0] for one in (ended, whole))
    assert row.messages == 3
    width, narrower = (one.scores["token_f1"].high for one in (row, all_of_it))
    assert width == pytest.approx(1 - 0.025 ** (1 / 3))
    assert narrower == pytest.approx(1 - 0.025 ** (1 / 4))
    again = attacked("ended", budget_minutes=1.1)  # the fourth alone
    assert len(spy.seen) == 4 + 3 + 1
    assert again.cells == whole.cells
    assert "not finished" not in (tmp_path / "ended" / "report.html").read_text()
    assert len(attacked("short", budget_minutes=1e-3).messages) == 2  # one has no interval
    assert len(attacked("whole", budget_minutes=1e-3).messages) == 4  # they were there


def test_files_are_written_after_every_message(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as that takes no more than a tenth of the time: here time stands still between."""
    written = []

    def answer(seen: Observation) -> Reconstruction:
        path = tmp_path / "audit.json"
        written.append(len(json.loads(path.read_text())["messages"]) if path.exists() else 0)
        return Reconstruction(token_ids=[[5]])

    spy.answer = staticmethod(answer)
    monkeypatch.setattr("hf_gradguard.audit.message_loop.time.monotonic", lambda: 0.0)
    model, tokenizer = text_model()
    audit(model, tokenizer, TEXTS, "none", "spy", output=tmp_path)
    assert written == [0, 1, 2, 3]


def test_an_audits_files_are_their_owners_alone(tmp_path: Path) -> None:
    """They hold private texts, and what attacks made of them."""
    before = os.umask(0o000)
    try:
        cells = Cells(tmp_path / "runs" / "audit" / "cells")
        cells.once("key", lambda: {"scores": {}})
    finally:
        os.umask(before)
    folders = [tmp_path / "runs" / "audit", tmp_path / "runs" / "audit" / "cells"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    (file,) = folders[1].iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
