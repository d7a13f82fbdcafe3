"""Which of several outcomes is recommended, by hand-worked cases."""

from __future__ import annotations

import dataclasses

import pytest

from hf_gradguard.recommend import Outcome, choose
from hf_gradguard.recommend.choice import Estimate


def outcome(name: str, lost: float, leak: float, width: float = 0.01) -> Outcome:
    accuracy = Estimate(0.9 - lost, 0.88 - lost, 0.92 - lost)
    read = Estimate(leak, max(leak - width, 0.0), leak + width)
    around = Estimate(lost, lost - 0.01, lost + 0.01)
    return Outcome(name, 1e-3, accuracy, around, read, "span", "end")


PLAIN = outcome("none", 0.0, 1.0)


def test_the_least_leak_within_the_budget() -> None:
    tried = [PLAIN, outcome("a", 0.05, 0.0), outcome("b", 0.02, 0.2), outcome("c", 0.01, 0.4)]
    assert choose(tried, 0.02, 0.05).chosen is tried[2]
    assert choose(tried, 0.05, 0.05).chosen is tried[1]


def test_of_leaks_that_cannot_be_told_apart_the_most_accurate() -> None:
    tried = [PLAIN, outcome("a", 0.02, 0.10), outcome("b", -0.01, 0.11), outcome("c", -0.1, 0.5)]
    assert choose(tried, 0.02, 0.05).chosen is tried[2]


def test_of_what_cannot_be_told_apart_at_all_the_one_that_hides_more() -> None:
    """Leaks of 0.08 and 0.05 overlap, and so do losses of 0.001 and 0.015, but not of 0.03."""
    tried = [
        PLAIN,
        outcome("a", 0.001, 0.08, 0.05),
        outcome("b", 0.015, 0.05, 0.05),
    ]
    assert choose(tried, 0.02, chance=0.1).chosen == tried[2]
    sure = dataclasses.replace(tried[1], lost=Estimate(0.0, 0.0, 0.0))  # every answer is the same
    assert choose([PLAIN, sure], 0.02, chance=0.1).chosen == sure
    told_apart = [*tried[:2], outcome("b", 0.03, 0.05, 0.05)]
    assert choose(told_apart, 0.04, chance=0.1).chosen == tried[1]


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
    assert leaks.words.endswith("it hides much, and not all.")
    assert (
        "reads 30 % [29, 31] (a guess: 5 %; span reads 100 % [99, 101] undefended)" in leaks.words
    )


@pytest.mark.parametrize("tried", [[PLAIN], [outcome("a", 0.0, 0.1), PLAIN]])
def test_the_undefended_comes_first(tried: list[Outcome]) -> None:
    with pytest.raises(ValueError, match="the undefended outcome first"):
        choose(tried, 0.02, 0.05)


def listed(one: Outcome, named: float, width: float = 0.05) -> Outcome:
    return dataclasses.replace(one, named=Estimate(named, named - width, named + width), listed=54)


def test_searches_that_read_nothing_undefended_say_nothing() -> None:
    blind = outcome("none", 0.0, 0.17, width=0.04)  # a guess has 0.2
    choice = choose([blind, outcome("a", 0.0, 0.0)], 0.02, chance=0.2)
    assert choice.chosen is None
    assert "No search that was tried reads this model even undefended (span reads 17 %" in (
        choice.words
    )
    # Nor does a list from which as many are named.
    tried = [listed(blind, 1.0), listed(outcome("a", 0.0, 0.0), 0.95)]
    assert choose(tried, 0.02, chance=0.2).chosen is None


def test_then_a_list_decides_where_it_can_tell() -> None:
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
