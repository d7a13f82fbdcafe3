"""A summary is computed once, and all that is written shows the same one."""

# ruff: noqa: F811

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_audit import HIGH, LOW, MIDDLE, TEXTS, Spy, made, spy, text_model  # noqa: F401

from hf_gradguard.audit import audit, markdown_table, summarize, write_report
from hf_gradguard.audit import cells as cells_module
from hf_gradguard.audit.report.verdicts import MAIN_SCORES
from hf_gradguard.metrics.scores import bootstrap_intervals


@pytest.fixture
def bootstraps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        return bootstrap_intervals(*arguments, **settings)

    monkeypatch.setattr(cells_module, "bootstrap_intervals", counted)
    return calls


@pytest.mark.long
def test_a_report_bootstraps_no_more_than_its_rows_need(
    bootstraps: list[int], tmp_path: Path, spy: type[Spy]
) -> None:
    """For each of four rows its scores and their distance from chance, for three that from the
    undefended gradient, and chance: 4 + 4 + 3 + 1. For each of four defenses the labels: 4.
    """
    defenses = [f"pruning:ratio={ratio}" for ratio in (0.1, 0.5, 0.9)]
    result = audit(*text_model(), TEXTS, defenses, "spy", output=tmp_path)
    bootstraps.clear()
    write_report(summarize(result), tmp_path)
    assert len(bootstraps) == 16


def test_renderers_recompute_nothing(bootstraps: list[int]) -> None:
    summary = summarize(made({"none/tag": HIGH, "d/tag": MIDDLE, "e/tag": LOW}))
    bootstraps.clear()
    assert "92 % of the words [86, 99]" in markdown_table(summary)
    assert bootstraps == []


def test_intervals_do_not_depend_on_what_is_bootstrapped_with_them() -> None:
    """One bootstrap for several scores draws the same messages as one for each."""
    scores = {"a": [0.1, 0.5, 0.2, 0.9, 0.4], "b": [3.0, 1.0, 2.0, 5.0, 4.0]}
    how: Any = {"bootstrap": 2000, "confidence": 0.95, "seed": 0}
    together = bootstrap_intervals(scores, [2, 3], **how) | bootstrap_intervals(
        scores, [1] * 5, **how
    )
    for name, values in scores.items():
        alone = bootstrap_intervals({name: values}, [1] * 5, **how)
        assert alone[name] == together[name]


def test_axes_end_at_a_tick_above_all_values() -> None:
    assert MAIN_SCORES["text"].ticks([0.3, 1 + 2e-16])[-1] == (1.0, "100 %")
    assert MAIN_SCORES["image"].ticks([12.0])[-1] == (30.0, "30 dB")
    assert MAIN_SCORES["image"].ticks([12.0, 31.0])[-1] == (40.0, "40 dB")


def test_an_exact_copy_does_not_press_all_others_together() -> None:
    assert MAIN_SCORES["image"].ticks([12.0, 100.0])[-1] == (40.0, "≥ 40 dB")
    assert MAIN_SCORES["image"].ticks([40.0])[-1] == (40.0, "40 dB")
