"""One row moves a clipped sum by no more than ε counts: the published table, and a quick one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.studies.lib.results import PUBLISHED, Results
from recipes.studies.row_rounding import ARITHMETICS, TASKS


def check(cells: Any, count: int) -> None:
    assert len(cells) == count
    for settings, found in cells.items():
        assert 0 < found["moved"] <= found["counted"], settings
        is_fine = settings["arithmetic"] in ("float32", "float64")
        assert found["row by row"] == (not is_fine), settings


def test_no_published_row_moves_its_sum_further_than_is_counted() -> None:
    cells = Results(PUBLISHED / "row_rounding")
    check(cells, len(TASKS) * len(ARITHMETICS))
    (head,) = (
        found for settings, found in cells.items()
        if settings == {"task": next(iter(TASKS)), "arithmetic": "float32", "seed": 0}
    )  # fmt: skip
    assert head["sizes"] == 1099
    # the worst of all fills more than half of what is counted: that is no empty allowance
    used = [(f["moved"] - 1) / (f["counted"] - 1) for f in cells.values()]
    assert 0.3 < max(used) <= 1


def test_a_quick_run(quick: Any, tmp_path: Path) -> None:
    study = quick("row_rounding", output=tmp_path / "rows")
    check(Results(study.output), 2 * len(ARITHMETICS))
    assert len(study.rows()) == 2
