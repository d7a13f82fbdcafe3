"""The accountant answers as dp-accounting does, and soon: the published table, and a quick one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.studies.accountant import MESSAGES, MULTIPLIERS, RATES
from recipes.studies.lib.results import PUBLISHED, Results


def check(cells: Any) -> int:
    """Return how many answers stand beside dp-accounting's."""
    compared = 0
    for settings, found in cells.items():
        assert 0 <= found["epsilon"] < float("inf"), settings
        if "dp_accounting" in found:
            compared += 1
            assert found["epsilon"] <= 1.01 * found["dp_accounting"] + 1e-9, settings
        if "direct" in found:  # a closed form, or quadrature
            assert found["epsilon"] >= found["direct"] * (1 - 1e-4), settings
            assert found["epsilon"] <= 1.01 * found["direct"] + 1e-9, settings
    return compared


def test_published_answers_are_right_and_soon() -> None:
    cells = Results(PUBLISHED / "accountant")
    assert len(cells) == len(MULTIPLIERS) * len(RATES) * len(MESSAGES)
    assert check(cells) >= 0.75 * len(cells)
    assert max(found["seconds"] for found in cells.values()) <= 5


def test_a_quick_run(quick: Any, tmp_path: Path) -> None:
    study = quick("accountant", output=tmp_path / "answers")
    assert check(Results(study.output)) == 6
