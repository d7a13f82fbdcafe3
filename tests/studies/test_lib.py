"""The studies' library: cells are found by their settings alone, and only missing ones are
computed.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from recipes import study
from recipes.studies.lib.results import Results, nested
from recipes.study import Study


@pytest.fixture
def toy(tmp_path):
    """A study that squares numbers; `toy.rows` are its rows, `toy.computed` what it computed."""

    class Toy(Study):
        """Squares."""

        ARGUMENTS = {"--data": "a file", "--factor": {"type": int, "default": 1}}
        rows, computed, shown, fails_at = {"two": 2, "three": 3}, [], [], None

        def cells(self):
            return {(row, "square"): {"of": n} for row, n in self.rows.items()}

        def measure(self, cell):
            if cell["of"] == self.fails_at:
                raise KeyboardInterrupt
            self.computed.append(cell["of"])
            return self.args.factor * cell["of"] ** 2

        def report(self, metrics):
            self.shown.append(metrics)

        @classmethod
        def start(cls, *flags):
            cls.parse(["--output", str(tmp_path / "toy"), *flags]).run()

    return Toy


def test_a_new_row_computes_only_its_own_cell(toy, tmp_path):
    toy.start("--data", "x")
    before = (tmp_path / "toy.json").read_text()
    toy.rows = {"one": 1, "also two": 2, **toy.rows}
    toy.start("--data", "x", "--factor", "7")
    assert toy.computed == [2, 3, 1]
    squares = {"one": 7, "also two": 4, "two": 4, "three": 9}
    assert toy.shown[-1] == {row: {"square": square} for row, square in squares.items()}
    assert before.rstrip("]\n") in (tmp_path / "toy.json").read_text()  # lines are only added


def test_what_is_there_needs_no_data(toy, tmp_path):
    with pytest.raises(SystemExit, match="2 cells are to be computed: give --data"):
        toy.start()
    with pytest.raises(SystemExit, match="lacks 2 of 2 cells"):
        toy.start("--tables")
    toy.start("--data", "x")
    toy.start("--tables")
    toy.start()
    assert toy.shown == [{"two": {"square": 4}, "three": {"square": 9}}] * 3


def test_quick_cells_are_never_taken_for_others(toy, tmp_path):
    toy.start("--data", "x", "--quick")
    toy.start("--data", "x")
    assert toy.computed == [2, 3, 2, 3]
    assert len(Results(tmp_path / "toy")) == 4


def test_what_is_published_is_asked_for_whatever_the_rate(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "PUBLISHED", tmp_path / "published")
    Results(tmp_path / "published" / "toy").add({"of": 2, "learning_rate": 0.1}, {})
    cells = {(str(n),): {"of": n, "learning_rate": rate} for n, rate in ((2, 0.5), (3, 0.1))}

    def asked(**args: object) -> list[str]:
        args = {"quick": False, "all": False, "output": tmp_path / "toy"} | args
        return [place[0] for place in toy(SimpleNamespace(**args)).published(cells)]

    assert asked() == ["2"]
    assert asked(all=True) == ["2", "3"]
    Results(tmp_path / "toy").add(cells["3",], {})
    assert asked() == ["2", "3"]
    cells["published",] = {"of": 2, "learning_rate": 0.1}  # then no other rate is asked for
    assert asked() == ["3", "published"]


def test_an_interrupted_run_goes_on(toy, tmp_path):
    toy.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        toy.start("--data", "x")
    toy.fails_at = None
    toy.start("--data", "x")
    assert toy.computed == [2, 3]


def test_cells_are_found_by_their_settings_alone(tmp_path):
    output = tmp_path / "some.0"
    Results(output).add({"a": 1, "b": {"c": (0.5, None), "d": "ε"}}, {"of each": [1.0]})
    assert json.loads((tmp_path / "some.0.json").read_text()) == [
        {"settings": {"a": 1, "b": {"c": [0.5, None], "d": "ε"}}, "figures": {"of each": [1.0]}}
    ]
    results, swapped = Results(output), {"b": {"d": "ε", "c": [0.5, None]}, "a": 1}
    assert results[swapped] == {"of each": [1.0]}
    assert {"a": 1} not in results
    places = {("row", "column"): swapped, ("row", "other"): {"a": 1}}
    assert nested(places, results) == {"row": {"column": {"of each": [1.0]}}}
