"""Which attacks a verdict goes by, and what few messages and lists prove."""

from __future__ import annotations

import pytest
from test_audit import HIGH, LOW, MIDDLE, made

from hf_gradguard.audit import markdown_table, summarize
from hf_gradguard.audit.report.page import headline
from hf_gradguard.audit.report.verdicts import Estimate

pytestmark = pytest.mark.usefixtures("few_probes")


def test_one_message_of_several_samples_is_an_anecdote() -> None:
    result = made({"none/tag": [0.9]})
    result.cells[0]["scores"]["token_f1"] = HIGH
    result.chance[0]["token_f1"] = LOW
    (row,) = summarize(result).rows
    assert row.scores["token_f1"] == Estimate(pytest.approx(0.92))
    assert "this is an anecdote" in summarize(result).verdicts[0].text


def test_an_attack_on_one_message_hides_no_other() -> None:
    everywhere = {"none/span": HIGH, "d/span": MIDDLE, "e/span": LOW}
    result = made(everywhere | {f"{name}/rows": [0.96] for name in "ed"} | {"none/rows": [0.97]})
    undefended, leaking, hiding = summarize(result).verdicts
    assert [undefended.standing, leaking.standing] == ["open", "reduced"]
    assert "(rows 97 % on 1 of 5 messages)" in undefended.text
    assert "where undefended span recovers 92 %;" in leaking.text
    assert hiding.standing == "unknown"  # and it reads that one
    assert "rows recovers the one message that it works on" in hiding.text


def test_membership_leaks_by_the_order_of_candidates_alone() -> None:
    """Entries that are drawn blindly are right at times, and are then whole texts."""
    result = made({"none/candidates": [1.0] * 6, "d/candidates": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]})
    for cell in result.cells:
        number, told = cell["message"], cell["defense"] == "none"
        first = number if told else (number + (1, 2, 3, 4, 5, 0)[number]) % 6
        cell["membership"] = {
            "scores": [-float(abs(k - first)) for k in range(6)],
            "members": [number],
        }
    summary = summarize(result)
    assert [row.beats_chance for row in summary.rows] == [("percentile",), ()]
    undefended, verdict = summary.verdicts
    assert undefended.text.endswith("chance is 20 %.")
    assert verdict.standing == "chance"
    assert "Not distinguishable from a random draw of candidates" in verdict.text
    assert summary.membership[1].chance == pytest.approx(1 / 6)
    assert "| identified | by chance |" in markdown_table(summary)
    assert "| 0.17 |" in markdown_table(summary)


def test_reconstruction_is_compared_with_reconstruction() -> None:
    """That membership inference fails is no help against reconstruction."""
    result = made(
        {"none/span": MIDDLE, "none/candidates": [1.0] * 5}
        | {"d/span": MIDDLE, "d/candidates": LOW}
    )  # fmt: skip
    for cell in result.cells:
        if cell["attack"] == "candidates":
            even = [0.0] * 6 if cell["defense"] == "d" else [1.0] + [0.0] * 5
            cell["membership"] = {"scores": even, "members": [0]}
    summary = summarize(result)
    verdict = summary.verdicts[1]
    assert "among 6 candidates identifies 0 % of the texts (17 % by chance)" in headline(summary)
    assert verdict.standing == "open"
    assert "Against span, not distinguishable from no defense." in verdict.text
