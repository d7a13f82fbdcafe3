"""Which of several outcomes is recommended, by hand-worked cases."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from hf_gradguard.audit.report.verdicts import MAIN_SCORES, Estimate
from hf_gradguard.recommend import Choice, Outcome, Proof, choose
from hf_gradguard.recommend.choice import finalists
from hf_gradguard.recommend.evidence import Recognition, highest_leak
from hf_gradguard.recommend.intervals import (
    accuracy_over_seeds,
    lost_over_seeds,
    mean_over_seeds,
)
from hf_gradguard.recommend.rendering import html_report, markdown_table
from hf_gradguard.recommend.trial_settings import TrialSettings


def outcome(name: str, lost: float, leak: float, width: float = 0.01) -> Outcome:
    accuracy = Estimate(0.9 - lost, 0.88 - lost, 0.92 - lost)
    read = Estimate(leak, max(leak - width, 0.0), leak + width)
    around = Estimate(lost, lost - 0.01, lost + 0.01)
    right = varied(f"right {name}", 0.9 - lost, 0.06, 100)
    return Outcome(
        name, 1e-3, accuracy, around, read, "span", "end",
        accuracy_by_sample=right, leak_by_message=varied(name, leak, 2 * width, MESSAGES),
    )  # fmt: skip


def varied(name: str, mean: float, spread: float, count: int) -> dict[int, float]:
    """Of exactly this mean and spread, each name by itself: a difference of two has an error of
    some 1.4 times the spread over the root of the count.
    """
    found = np.random.default_rng(list(name.encode())).standard_normal(count)
    return dict(enumerate(mean + spread * (found - found.mean()) / found.std(ddof=1)))


MESSAGES = 16
PLAIN = outcome("none", 0.0, 1.0)


def test_the_least_leak_within_the_budget() -> None:
    tried = [PLAIN, outcome("a", 0.05, 0.0), outcome("b", 0.02, 0.15), outcome("c", 0.01, 0.22)]
    assert choose(tried, 0.02, 0.05).chosen is tried[2]
    assert choose(tried, 0.05, 0.05).chosen is tried[1]


def test_a_leaky_defense_is_never_chosen() -> None:
    """Though nothing else keeps the budget, and it costs nothing."""
    tried = [PLAIN, outcome("a", 0.2, 0.0), outcome("b", 0.0, 0.33)]
    choice = choose(tried, 0.02, chance=0.05)
    assert choice.chosen is None
    assert choice.words.startswith("Nothing is recommended: no defense tried keeps")
    assert "\n\nUnprotected: a server recovers 100 % [79, 100] of the words (" in choice.words
    assert "Within the budget b leaks least" in choice.words
    assert "a costs least among those" in choice.words
    assert "than that limit: 20.0 points [19.0, 21.0]" in choice.words


def test_few_messages_show_nothing() -> None:
    """Of 8 without a word 31 % may still be read: 1 - 0.05^(1/8)."""
    silent = outcome("a", 0.0, 0.0, width=0.0)
    few = dataclasses.replace(silent, leak_by_message=dict.fromkeys(range(8), 0.0))
    score = MAIN_SCORES["text"]
    assert highest_leak(few, score) == pytest.approx(0.3123, abs=1e-3)
    assert choose([PLAIN, few], 0.02, chance=0.05).chosen is None
    enough = dataclasses.replace(silent, leak_by_message=dict.fromkeys(range(16), 0.0))
    assert choose([PLAIN, enough], 0.02, chance=0.05).chosen is enough


def test_of_equals_the_first_in_order() -> None:
    """Leaks that differ by 0.02, and accuracies by half a point, are equal."""
    pair = [outcome("a", 0.005, 0.02), outcome("b", 0.0, 0.0)]
    assert choose([PLAIN, *pair], 0.02, chance=0.0).chosen is pair[0]
    assert choose([PLAIN, *reversed(pair)], 0.02, chance=0.0).chosen is pair[1]


def test_below_a_guess_nothing_is_more_private() -> None:
    pair = [outcome("a", 0.0, 0.1), outcome("b", 0.0, 0.0)]
    assert choose([PLAIN, *pair], 0.02, chance=0.1).chosen is pair[0]
    assert choose([PLAIN, *pair], 0.02, chance=0.0).chosen is pair[1]


def test_less_accurate_by_samples_and_in_every_training() -> None:
    worse, better = outcome("a", 0.05, 0.0), outcome("b", 0.0, 0.0)
    assert choose([PLAIN, worse, better], 0.1, chance=0.05).chosen is better
    three = [
        dataclasses.replace(one, trainings=accuracies)
        for one, accuracies in ((worse, (0.85, 0.91, 0.79)), (better, (0.9, 0.9, 0.9)))
    ]
    assert choose([PLAIN, *three], 0.1, chance=0.05).chosen is three[0]


def test_paired_messages_differ_where_intervals_overlap() -> None:
    """Messages differ by 0.3, and behind a each gives away 0.1 to 0.12 more than behind b."""
    easy = [0.0, 0.25, 0.05, 0.2, 0.1, 0.15] * 3
    worse = [mean + (0.1, 0.12, 0.11)[n % 3] for n, mean in enumerate(easy)]
    b = dataclasses.replace(outcome("b", 0.02, 0.125), leak_by_message=dict(enumerate(easy)))
    a = dataclasses.replace(outcome("a", 0.0, 0.23), leak_by_message=dict(enumerate(worse)))
    assert choose([PLAIN, a, b], 0.02, chance=0.05).chosen is b


def test_finalists_are_three_and_none_is_ruled_out_yet() -> None:
    tried = [
        PLAIN, outcome("costly", 0.2, 0.0), outcome("leaky", 0.0, 0.5),
        *(outcome(name, 0.02, 0.0) for name in "abcd"),
    ]  # fmt: skip
    score = MAIN_SCORES["text"]
    assert [one.defense for one in finalists(tried, 0.02, 0.05, score)] == ["a", "b", "c"]
    assert finalists(tried[:3], 0.02, 0.05, score) == []


def test_nothing_is_recommended_that_costs_more() -> None:
    tried = [PLAIN, outcome("a", 0.06, 0.0), outcome("b", 0.05, 0.0)]
    choice = choose(tried, 0.02, 0.05)
    assert choice.chosen is None
    paragraphs = choice.words.split("\n\n")
    assert paragraphs[0].startswith(
        "Nothing is recommended: no defense tried keeps accuracy within"
    )
    assert paragraphs[1].startswith("Unprotected: a server recovers 100 % [79, 100] of the words")
    assert paragraphs[2] == (
        "b costs least among those that leak less than that limit: 5.0 points [4.0, 6.0]."
    )
    assert paragraphs[3].startswith("To choose it, allow more (--budget 0.04; the same command")
    assert choose(tried, 0.04, 0.05).chosen is tried[2]


def test_too_few_messages_are_said_where_nothing_else_is_wrong() -> None:
    few = dataclasses.replace(outcome("a", 0.0, 0.0), leak_by_message={0: 0.0, 1: 0.0})
    paragraphs = choose([PLAIN, few], 0.02, chance=0.05).words.split("\n\n")
    assert paragraphs[2].startswith("Within the budget a leaks least: at the end a server recovers")
    assert paragraphs[2].endswith("That is below 30 %, but so few messages do not show it.")
    assert "--budget " not in paragraphs[3]
    assert "give more time (--budget_minutes; the same command continues)" in paragraphs[3]


def test_a_measured_defense_in_three_sentences() -> None:
    """The first one says all that is found behind it, here and elsewhere."""
    tried, untrained = [PLAIN, listed(outcome("a", 0.01, 0.0), 0.5)], [0.0, 1.0] * 50
    elsewhere = {"a": "a search found 28% of the words (docs/findings/text.md)"}
    words = choose(tried, 0.02, 0.05, untrained=untrained, elsewhere=elsewhere).words
    answer, unprotected, accuracy = words.split("\n\n")
    assert answer == (
        "Train the whole model with a, without a proof: it loses 1.0 points [0.0, 2.0], and a "
        "server recovers 0 % [0, 17] of the words (16 messages; a guess has 5 %) and recognizes "
        "50 % [45, 55] of a message's texts among 54 candidates; elsewhere, a search found 28% of "
        "the words (docs/findings/text.md)."
    )
    assert unprotected == (
        "Unprotected: a server recovers 100 % [79, 100] of the words (16 messages)."
    )
    assert accuracy.startswith("Accuracy: 90.0 to 89.0 %; 50.0 % before training (100 samples, ")
    assert accuracy.endswith("1 training, so that other seeds may differ by more).")


def test_a_whole_model_may_have_a_proof() -> None:
    """By `dp_sgd` of samples: the table has its ε, and the answer too."""
    proved = dataclasses.replace(outcome("dp_sgd", 0.01, 0.0), guarantee=(7.96, 1e-5))
    choice = choose([PLAIN, proved], 0.02, 0.05)
    assert choice.words.startswith(
        "Train the whole model with dp_sgd, by proof (ε = 8 at δ = 1e-05): it loses 1.0 points"
    )
    table = markdown_table(choice, MAIN_SCORES["text"], "")
    assert "| `dp_sgd` | ε = 8 at δ = 1e-05 | 89.0 %" in table
    assert "| `none` | no proof |" in table


def test_a_training_that_taught_nothing_has_no_price() -> None:
    tried, right = [PLAIN, outcome("a", 0.01, 0.0)], PLAIN.accuracy_by_sample
    untrained = list(right.values())
    choice = choose(tried, 0.02, chance=0.05, untrained=untrained)
    assert choice.chosen is None
    assert "taught nothing that 100 samples show" in choice.words
    wrong = [0.0] * 50 + untrained[50:]
    assert choose(tried, 0.02, chance=0.05, untrained=wrong).chosen is tried[1]
    # Whatever may be lost, no price matters.
    assert choose(tried, 0.99, chance=0.05, untrained=untrained).chosen is tried[1]


def test_equal_samples_have_an_interval() -> None:
    """Clopper and Pearson's: of 20 of 20 the lower end is 0.025^(1/20)."""
    accuracy = accuracy_over_seeds([[1.0] * 20])
    assert accuracy.low == pytest.approx(0.025 ** (1 / 20))
    assert accuracy.high == 1.0
    lost = mean_over_seeds([[0.0] * 20], are_fractions=True)
    assert lost.high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert lost.low == -lost.high
    assert accuracy_over_seeds([[0.0] * 20]).high == pytest.approx(lost.high)


def test_losses_are_over_the_trainings_of_both_kinds() -> None:
    """By hand: two means of one kind that differ by d have half an interval of 12.71 d / 2."""
    plain, others = [[1.0] * 100], [[0.9] * 100, [0.88] * 100, [0.86] * 100]
    one = lost_over_seeds(plain, others)
    of_samples = 1 - 0.025 ** (1 / 100)
    of_others = 4.302653 * 0.02 / 3**0.5
    assert one.mean == pytest.approx(0.12)
    assert one.high - one.mean == pytest.approx(np.hypot(of_samples, of_others), rel=1e-5)
    two = lost_over_seeds([[1.0] * 100, [0.99] * 100], others)
    assert two.mean == pytest.approx(0.115)
    half = np.sqrt(of_samples**2 + of_others**2 + (12.7062 * 0.005) ** 2)
    assert two.high - two.mean == pytest.approx(half, rel=1e-5)
    assert lost_over_seeds(plain, others[:1]).high == pytest.approx(0.1 + of_samples)


def test_numbers_of_trainings_are_said_of_both_kinds() -> None:
    head = dataclasses.replace(headed("E", 0.02), trainings=(0.88, 0.87, 0.89))
    for trainings, said in (
        ((0.9,), "3 trainings of the head, and 1 undefended, so that other seeds may differ"),
        ((0.9, 0.9), "3 trainings of the head, and 2 undefended)."),
        ((0.9, 0.9, 0.9), "3 trainings)."),
    ):
        plain = dataclasses.replace(PLAIN, trainings=trainings)
        assert f"(100 samples, {said}" in choose([plain, head], 0.02, 0.05).words


def test_no_share_is_beyond_one() -> None:
    """Of two trainings the interval by Student's t is wider than what can be lost."""
    lost = mean_over_seeds([[0.0] * 20, [0.4] * 20], are_fractions=True)
    assert (lost.low, lost.high) == (-1.0, 1.0)
    assert mean_over_seeds([[0.0] * 20, [0.4] * 20]).high > 2


@pytest.mark.parametrize("tried", [[PLAIN], [outcome("a", 0.0, 0.1), PLAIN]])
def test_the_undefended_comes_first(tried: list[Outcome]) -> None:
    with pytest.raises(ValueError, match="the undefended outcome first"):
        choose(tried, 0.02, 0.05)


def listed(one: Outcome, named: float, width: float = 0.05) -> Outcome:
    return dataclasses.replace(
        one, membership=Estimate(named, named - width, named + width), candidates=54
    )


def headed(name: str, lost: float, sigma: float = 1.5) -> Outcome:
    proof = Proof(sigma, epsilon=2.7, delta=1e-5, encoder=name, rows=1600)
    none = {"leak": None, "attack": "", "stage": "", "leak_by_message": {}}
    return dataclasses.replace(outcome(f"head on {name}", lost, 0.0), proof=proof, **none)


def test_a_head_by_proof_comes_first() -> None:
    """Though a measured defense loses less, and no attack found a word behind it."""
    tried = [PLAIN, headed("E", 0.02), listed(outcome("a", 0.0, 0.0), 0.5)]
    choice = choose(tried, 0.02, 0.05, untrained=[0.0, 1.0] * 50)
    assert choice.chosen is tried[1]
    answer, meaning, accuracy, beside, unprotected = choice.words.split("\n\n")
    assert answer == (
        "Train only a linear head on E, by proof (ε = 2.7 at δ = 1e-05): it loses 2.0 points "
        "[1.0, 3.0] of accuracy against the whole model undefended."
    )
    # Worked by hand: Φ(Φ⁻¹(0.01) + 1/1.5) and Φ(1/1.5).
    assert "at most 4.8 % of the rows at 1 % false alarms" in meaning
    assert "which of two texts a row holds in at most 75 % of cases" in meaning
    assert accuracy.startswith("Accuracy: 90.0 to 88.0 %; 50.0 % before training")
    assert beside.startswith(
        "For the whole model, without a proof: a loses 0.0 points [-1.0, 1.0], and"
    )
    assert "recognizes 50 % [45, 55] of a message's texts" in beside
    assert unprotected.startswith("Unprotected: a server recovers 100 %")


def test_a_head_that_costs_too_much_is_named_with_what_to_allow() -> None:
    tried = [PLAIN, headed("E", 0.05), headed("F", 0.08), outcome("a", 0.0, 0.0)]
    choice = choose(tried, 0.02, 0.05)
    assert choice.chosen is tried[3]
    last = choice.words.split("\n\n")[-1]
    assert last == (
        "A linear head on E, by proof (ε = 2.7), trained on 1,600 rows, loses 5.0 points "
        "[4.0, 6.0]. It learns most from more rows (--rows, --steps). To choose it, allow more "
        "(--budget 0.04; the same command then answers at once)."
    )
    assert choose(tried, 0.04, 0.05).chosen is tried[1]
    nothing = choose(tried[:3], 0.02, 0.05)
    assert nothing.chosen is None
    assert nothing.words.startswith("Nothing is recommended: no head by proof keeps the budget, ")
    assert last in nothing.words


def test_of_heads_the_first_that_is_not_shown_to_be_worse() -> None:
    heads = [headed("E", 0.02), headed("F", 0.015), headed("G", -0.03)]
    assert choose([PLAIN, *heads[:2]], 0.05, 0.05).chosen is heads[0]
    assert choose([PLAIN, *heads], 0.05, 0.05).chosen is heads[2]


def test_a_head_needs_no_undefended_training_that_taught() -> None:
    """Its accuracy is its own; what it loses is against a model that learned nothing."""
    right = {number: float(number % 2) for number in range(100)}
    untaught = dataclasses.replace(PLAIN, accuracy_by_sample=right)
    tried, before = [untaught, headed("E", -0.3), outcome("a", 0.0, 0.0)], list(right.values())
    choice = choose(tried, 0.02, 0.05, untrained=before)
    assert choice.chosen is tried[1]
    assert "For the whole model nothing is recommended: undefended training taught" in choice.words
    unlearned = dataclasses.replace(headed("E", 0.0), accuracy_by_sample=right)
    assert choose([PLAIN, unlearned], 0.02, 0.05, untrained=before).chosen is None


def test_a_head_has_a_row_in_the_table_and_on_the_page() -> None:
    score = MAIN_SCORES["text"]
    choice = choose([PLAIN, headed("E", 0.02), outcome("a", 0.0, 0.0)], 0.02, 0.05)
    table = markdown_table(choice, score, "gradguard train --config train.yaml")
    assert (
        "| head on E | ε = 2.7 at δ = 1e-05 | 88.0 % [86.0, 90.0] | 2.0 [1.0, 3.0] | tells two "
        "texts apart in ≤ 75 % by proof | ≤ 4.8 % by proof, at 1 % false alarms | all messages | "
        "0.001 |"
    ) in table
    assert "| `a` | no proof | 90.0 %" in table
    page = html_report(choice, 0.05, TrialSettings(), score, "gradguard train --config train.yaml")
    assert page.count("<circle") == 2
    assert page.count('<rect class="dot chosen"') == 1
    assert "Train with it: <code>gradguard train --config train.yaml</code>" in page
    # On a narrow page no line breaks within a flag or an interval.
    words = "Allow more (--budget 0.04) & lose 5.0 points [4.0, 6.0]."
    narrow = Choice(choice.outcomes, None, words)
    page = html_report(narrow, 0.05, TrialSettings(), score, "")
    kept = [
        '(<span class="whole">--budget</span> 0.04) &amp; lose',
        '<span class="whole">[4.0, 6.0]</span>',
    ]
    assert all(text in page for text in kept)
    nothing = Choice(choice.outcomes, None, "Nothing is recommended.")
    assert "<p>There is no file.</p>" in html_report(
        nothing, 0.05, TrialSettings(), score, "There is no file."
    )


def test_what_a_test_found_of_a_head_stands_beside_the_proof() -> None:
    """As a figure of these trainings, and never as what is promised."""
    found = Recognition(Estimate(0.031, 0.023, 0.04), Estimate(0.62, 0.6, 0.64))
    head = dataclasses.replace(headed("E", 0.02), recognition=found)
    choice = choose([PLAIN, head], 0.02, 0.05)
    answer, meaning, measured, *_ = choice.words.split("\n\n")
    assert "3.1 %" not in answer + meaning
    assert measured == (
        "Measured, and no promise: the best test, by somebody who knows all other rows, found "
        "3.1 % [2.3, 4.0] of the rows, and told 62 % [60, 64] of them apart."
    )
    table = markdown_table(choice, MAIN_SCORES["text"], "")
    assert "in ≤ 75 % by proof; measured: 62 % [60, 64] | ≤ 4.8 % by proof, at 1 %" in table
    assert "at 1 % false alarms; measured: 3.1 % [2.3, 4.0] | all messages |" in table


def test_attacks_that_recover_nothing_undefended_say_nothing() -> None:
    blind = outcome("none", 0.0, 0.17, width=0.04)  # a guess has 0.2
    choice = choose([blind, outcome("a", 0.0, 0.0)], 0.02, chance=0.2)
    assert choice.chosen is None
    assert "reconstructs data of this model even undefended (a server recovers 17 %" in choice.words
    assert choice.words.startswith("Nothing is recommended: no attack that was tried reconstructs")
    # Nor does membership inference that recognizes as many.
    tried = [listed(blind, 1.0), listed(outcome("a", 0.0, 0.0), 0.95)]
    assert choose(tried, 0.02, chance=0.2).chosen is None


def test_then_membership_inference_decides_where_it_can_tell() -> None:
    blind = listed(outcome("none", 0.0, 0.17, width=0.04), 1.0)
    tried = [
        blind,
        listed(outcome("a", 0.0, 0.0), 0.6),
        listed(outcome("b", 0.01, 0.0), 0.2),
        listed(outcome("c", 0.05, 0.0), 0.0),  # costs too much
    ]
    choice = choose(tried, 0.02, chance=0.2)
    assert choice.chosen is tried[2]
    assert "least under b: 20 % [15, 25]" in choice.words


def test_an_exact_copy_stands_at_the_edge_and_numbers_do_not_overlap() -> None:
    tried = [outcome("none", 0.0, 100.0), *(outcome(name, 0.01, 14.0) for name in "abc")]
    page = html_report(choose(tried, 0.02, 12.0), 12.0, TrialSettings(), MAIN_SCORES["image"], "")
    assert "≥ 40 dB" in page
    assert "1 (100.0 dB)" in page
    numbers = re.findall(r'class="number" x="([0-9.]+)" y="([0-9.]+)"', page)
    (x, *_), heights = zip(*numbers[1:], strict=True)
    assert all(number[0] == x for number in numbers[1:])
    gaps = np.diff(sorted(map(float, heights)))
    assert len(gaps) == 2
    assert (gaps > 13).all()  # pixels of a number
