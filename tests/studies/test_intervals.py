"""Intervals of the studies: their coverage, and hand-worked cases."""

import numpy as np
import pytest

from recipes.studies.frontier_tables import lost, score_text, values_text
from recipes.studies.lib.intervals import DISPERSION, over_seeds, paired, share, student


def test_of_shares_none_is_not_nothing() -> None:
    """Of n that all failed, success is rarer than 1 - 0.025^(1/n)."""
    none, every = share(0, 48), share(12, 12)
    assert none[:2] == (0, 0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 48))
    assert every[::2] == (1, 1)
    assert every.low == pytest.approx(0.025 ** (1 / 12))
    assert values_text([[0.0] * 24, [0.0] * 24], "tpr_1%") == "0.00 [0.00, 0.07]"
    assert values_text([[0.0] * 8], "token_f1") == "0.00 (all 8)"


def test_samples_and_trainings_add_up() -> None:
    alike = [[0.0, 1.0] * 8] * 3  # trainings differ in nothing
    assert over_seeds(alike, "shares") == pytest.approx(share(24, 48))
    apart = [[1.0] * 9 + [0.0] * 39, [1.0] * 23 + [0.0] * 25, [1.0] * 26 + [0.0] * 22]
    trainings, samples = student([9 / 48, 23 / 48, 26 / 48]), share(58, 144)
    both = over_seeds(apart, "shares")
    assert both.high == pytest.approx(
        both.mean + np.hypot(trainings.bar[1], samples.bar[1]), rel=1e-9
    )
    assert both.low == 0
    assert over_seeds([[0.3, 0.5]], "part") == student([0.3, 0.5], (0, 1))
    apart = over_seeds([[20.0], [22.0]], "decibels")
    assert apart.bar == pytest.approx((12.706205 * 2**0.5, 12.706205 * 2**0.5))
    assert student([0.7]).text(2) == "0.70"


def test_members_of_one_training_have_its_luck_in_common() -> None:
    one, independent = over_seeds([[1.0] * 17 + [0.0] * 31], "shares"), share(17, 48)
    assert one.bar == pytest.approx([DISPERSION * bar for bar in independent.bar])


@pytest.mark.parametrize("between", [0.0, 0.01, 0.03])
def test_paired_intervals_cover(between: float) -> None:
    """At least 95 % of them hold the true difference, whatever trainings differ by."""
    draws, truth, inside = np.random.default_rng(0), 0.02, 0
    repeats, seeds, samples = 2000, 3, 400
    for _ in range(repeats):
        luck = draws.normal(0, between, (seeds, 1))
        each = draws.normal(0, 0.3, (1, samples)) + draws.normal(0, 0.2, (seeds, samples))
        low, high = paired(truth + luck + each)[1:]
        assert low is not None
        assert high is not None
        inside += low <= truth <= high
    assert inside / repeats > 0.95 - 4 * (0.95 * 0.05 / repeats) ** 0.5


def test_one_seed_is_said() -> None:
    def run(right: list[int]) -> dict:
        return {"right": np.packbits(right).tobytes().hex(), "of": len(right)}

    plain, mine = run([1, 1, 1, 1, 1, 0, 0, 0]), run([1, 1, 1, 0, 1, 0, 0, 0])
    assert lost({"0": mine}, {"0": plain}).startswith("0.125 [-0.171, 0.421] (1 seed)")
    two = lost({"0": mine, "1": plain}, {"0": plain, "1": plain})
    assert two.startswith("0.062 [")
    assert "seed" not in two
    assert lost({"5": mine}, {"0": plain}) == ""


def test_members_are_told_by_the_threshold_that_tells_more():
    """Of a message whose scores are all low, one threshold for all tells nobody."""
    low = {"tpr_1%": [0.0, 0.0, 0.0], "rank": [1.0, 3.0, 3.5]}
    assert score_text({"0": low}) == over_seeds([[1.0, 1.0, 0.0]], "shares").text(2)
    high = {"tpr_1%": [1.0, 1.0, 1.0], "rank": [1.0, 2.0, 9.0]}
    assert score_text({"0": high}) == over_seeds([[1.0, 1.0, 1.0]], "shares").text(2)
    both = score_text({"0": low, "1": high})  # the same threshold for all seeds: 4 of 6 told, not 5
    assert both == over_seeds([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], "shares").text(2)
