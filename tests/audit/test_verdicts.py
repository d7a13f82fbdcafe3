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
    assert undefended.text == (
        "candidates ranks members above 100 % of the other candidates [54, 100]; chance is 50 %. A "
        "server recognizes 100 % [54, 100] of the texts among 6 candidates (17 % by chance)."
    )
    assert verdict.standing == "chance"
    assert [undefended.recognized, verdict.recognized] == [True, False]
    assert "recovers" not in undefended.text + verdict.text + headline(summary)
    assert "Not distinguishable from a random draw of candidates" in verdict.text
    assert summary.membership[1].chance == pytest.approx(1 / 6)
    assert "| recognized | by chance |" in markdown_table(summary)
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
    assert "It recognizes 0 % [0, 52] of the texts among 6 candidates (17 %" in headline(summary)
    assert verdict.standing == "open"
    assert "Against span, not distinguishable from no defense." in verdict.text


def test_who_ranks_above_others_is_not_recognized_yet() -> None:
    """Always the second of ten: that is no chance, and not the first."""
    result = made({"none/candidates": [1.0] * 8, "d/candidates": [0.0] * 8})
    for cell in result.cells:
        member = int(cell["defense"] == "d")
        cell["membership"] = {"scores": [-float(k) for k in range(10)], "members": [member]}
    _, verdict = summarize(result).verdicts
    assert verdict.recognized is False
    assert verdict.text.endswith(
        "A server recognizes 0 % [0, 37] of the texts among 10 candidates (10 % by chance), and "
        "ranks them above others."
    )


@pytest.mark.parametrize(("recovered", "standing"), [(LOW, "chance"), (MIDDLE, "reduced")])
def test_what_is_recognized_is_not_what_is_recovered(recovered: list[float], standing: str) -> None:
    """Its best candidates are whole texts. They grade no defense that hides the words, which would
    carry the badge of none; they stand beside it.
    """
    result = made(
        {"none/span": HIGH, "none/candidates": [1.0] * 5}
        | {"d/span": recovered, "d/candidates": [1.0] * 5}
    )  # fmt: skip
    for cell in result.cells:
        cell["knows_defense"] = True
        if cell["attack"] == "candidates":
            cell["membership"] = {"scores": [1.0] + [0.0] * 5, "members": [0]}
    undefended, verdict = summarize(result).verdicts
    assert [undefended.standing, verdict.standing] == ["open", standing]
    assert verdict.recognized is True
    assert verdict.text.startswith("span recovers")
    assert "candidates recovers" not in markdown_table(summarize(result))
    assert "A server recognizes 100 % [48, 100] of the texts among 6 candidates" in verdict.text
