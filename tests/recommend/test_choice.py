"""Which of several outcomes is recommended, by hand-worked cases."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from hf_gradguard.audit.report.verdicts import MAIN_SCORES, Estimate
from hf_gradguard.recommend import Outcome, choose
from hf_gradguard.recommend.choice import html_report
from hf_gradguard.recommend.settings import TrialSettings


def outcome(name: str, lost: float, leak: float, width: float = 0.01) -> Outcome:
    accuracy = Estimate(0.9 - lost, 0.88 - lost, 0.92 - lost)
    read = Estimate(leak, max(leak - width, 0.0), leak + width)
    around = Estimate(lost, lost - 0.01, lost + 0.01)
    right = varied(f"right {name}", 0.9 - lost, 0.06, 100)
    return Outcome(
        name, 1e-3, accuracy, around, read, "span", "end",
        accuracy_by_sample=right, leak_by_message=varied(name, leak, 2 * width, 8),
    )  # fmt: skip


def varied(name: str, mean: float, spread: float, count: int) -> dict[int, float]:
    """Of exactly this mean and spread, each name by itself: a difference of two has an error of
    some 1.4 times the spread over the root of the count.
    """
    found = np.random.default_rng(list(name.encode())).standard_normal(count)
    return dict(enumerate(mean + spread * (found - found.mean()) / found.std(ddof=1)))


PLAIN = outcome("none", 0.0, 1.0)


def test_the_least_leak_within_the_budget() -> None:
    tried = [PLAIN, outcome("a", 0.05, 0.0), outcome("b", 0.02, 0.2), outcome("c", 0.01, 0.4)]
    assert choose(tried, 0.02, 0.05).chosen is tried[2]
    assert choose(tried, 0.05, 0.05).chosen is tried[1]


def test_of_equal_leaks_the_most_accurate() -> None:
    tried = [PLAIN, outcome("a", 0.02, 0.10), outcome("b", -0.01, 0.11), outcome("c", -0.1, 0.5)]
    assert choose(tried, 0.02, 0.05).chosen is tried[2]


def test_of_equal_leaks_and_accuracies_the_lower_leak() -> None:
    """Leaks of 0.08 and 0.05 differ by less than their error, and so do losses of 0.001 and 0.015,
    but not of 0.03.
    """
    tried = [
        PLAIN,
        outcome("a", 0.001, 0.08, 0.05),
        outcome("b", 0.015, 0.05, 0.05),
    ]
    assert choose(tried, 0.02, chance=0.1).chosen == tried[2]
    sure = dataclasses.replace(
        tried[1], accuracy_by_sample=dict.fromkeys(range(100), 0.9)
    )  # all the same
    assert choose([PLAIN, sure], 0.02, chance=0.1).chosen == sure
    told_apart = [*tried[:2], outcome("b", 0.03, 0.05, 0.05)]
    assert choose(told_apart, 0.04, chance=0.1).chosen == tried[1]


def test_paired_messages_differ_where_intervals_overlap() -> None:
    """Messages differ by 0.5, and behind a each gives away 0.1 to 0.12 more than behind b."""
    easy, more = [0.1, 0.6, 0.2, 0.5, 0.3, 0.55], [0.1, 0.12, 0.11, 0.1, 0.12, 0.11]
    b = dataclasses.replace(outcome("b", 0.02, 0.375, 0.2), leak_by_message=dict(enumerate(easy)))
    worse = [mean + some for mean, some in zip(easy, more, strict=True)]
    a = dataclasses.replace(outcome("a", -0.05, 0.485, 0.2), leak_by_message=dict(enumerate(worse)))
    assert choose([PLAIN, a, b], 0.02, chance=0.1).chosen is b
    # One message alone tells nobody apart.
    single = [
        dataclasses.replace(one, leak_by_message={0: one.leak_by_message[0]}) for one in (a, b)
    ]
    assert choose([PLAIN, *single], 0.02, chance=0.1).chosen == single[0]


def test_nothing_is_recommended_that_costs_more() -> None:
    tried = [PLAIN, outcome("a", 0.05, 0.0), outcome("b", 0.04, 0.0)]
    choice = choose(tried, 0.02, 0.05)
    assert choice.chosen is None
    assert "None of the defenses tried kept accuracy within 2 points" in choice.words
    assert "nearest is b at a learning rate of 0.001: it loses 4 % [3, 5]" in choice.words


def test_words_say_whether_it_is_more_than_a_guess() -> None:
    hides = choose([PLAIN, outcome("a", 0.0, 0.05)], 0.02, chance=0.05)
    leaks = choose([PLAIN, outcome("a", 0.0, 0.30)], 0.02, chance=0.05)
    assert "not all" not in hides.words
    assert leaks.words.endswith("much is private, and not all.")
    assert (
        "recovers 30 % [29, 31] (a guess: 5 %; span recovers 100 % [99, 101] undefended)"
        in leaks.words
    )


@pytest.mark.parametrize("tried", [[PLAIN], [outcome("a", 0.0, 0.1), PLAIN]])
def test_the_undefended_comes_first(tried: list[Outcome]) -> None:
    with pytest.raises(ValueError, match="the undefended outcome first"):
        choose(tried, 0.02, 0.05)


def listed(one: Outcome, named: float, width: float = 0.05) -> Outcome:
    return dataclasses.replace(
        one, membership=Estimate(named, named - width, named + width), candidates=54
    )


def test_much_membership_inference_names_a_defense_against_it() -> None:
    for named, said in ((0.5, True), (0.08, False)):  # of the latter 0.03 to 0.13
        tried = [listed(PLAIN, 1.0), listed(outcome("a", 0.0, 0.1), named)]
        words = choose(tried, 0.02, chance=0.2).words
        assert "Membership inference among 54 candidates identifies" in words
        assert ("share its linear head alone" in words) == said


def test_attacks_that_recover_nothing_undefended_say_nothing() -> None:
    blind = outcome("none", 0.0, 0.17, width=0.04)  # a guess has 0.2
    choice = choose([blind, outcome("a", 0.0, 0.0)], 0.02, chance=0.2)
    assert choice.chosen is None
    assert "reconstructs data of this model even undefended (span recovers 17 %" in choice.words
    # Nor does membership inference that identifies as many.
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
    page = html_report(choose(tried, 0.02, 12.0), 12.0, TrialSettings(), MAIN_SCORES["image"])
    assert "≥ 40 dB" in page
    assert "1 (100.0 dB)" in page
    numbers = re.findall(r'class="number" x="([0-9.]+)" y="([0-9.]+)"', page)
    (x, *_), heights = zip(*numbers[1:], strict=True)
    assert all(number[0] == x for number in numbers[1:])
    gaps = np.diff(sorted(map(float, heights)))
    assert len(gaps) == 2
    assert (gaps > 13).all()  # pixels of a number
