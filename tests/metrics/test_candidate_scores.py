"""Scores of rankings, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit

from hf_gradguard.metrics import membership_log_odds, score_candidates


def test_by_hand() -> None:
    """Two messages of two members among five."""
    scores = [[9.0, 8.0, 7.0, 1.0, 0.0], [0.0, 5.0, 5.0, 9.0, 1.0]]
    found = score_candidates(scores, [[0, 2], [1, 3]])
    assert found.per_sample["top1"] == [1, 0, 0, 1]  # the third is tied for the second place
    assert found.per_sample["rank"] == [1, 2, 1.5, 1]
    assert found.mean["rank"] == pytest.approx(1.375)
    assert found.false_positives == 6
    assert found.curve[0] == (0.0, 0.0)
    assert found.curve[-1] == (1.0, 1.0)


def test_thresholds_are_of_all_messages_together() -> None:
    """200 others score 1 to 200, so two of them may be above the threshold."""
    others = np.arange(1.0, 201.0)
    row = np.concatenate([[198.5, 197.5, 500.0], others])
    found = score_candidates([row], [[0, 1, 2]])
    assert found.per_sample["tpr_1%"] == [1, 0, 1]
    assert found.per_sample["tpr_0.1%"] == [0, 0, 1]
    # A message that knows nothing does not have its first candidate called sure.
    flat = np.zeros(100)
    both = score_candidates([flat, np.array([50.0, *np.zeros(99)])], [[0], [0]])
    assert both.per_sample["tpr_1%"] == [0, 1]


def test_of_one_member_log_odds_are_those_of_likelihoods() -> None:
    """By a loop, also where one candidate is all of the sum but its rounding."""
    for row in ([0.3, -1.0, 2.0, 2.0, 0.3], [0.0, 1.0, -4.0], [900.0, 0.0, -900.0]):
        expected = [
            score - np.logaddexp.reduce([*row[:at], *row[at + 1 :]]) for at, score in enumerate(row)
        ]
        np.testing.assert_allclose(membership_log_odds(row, 1), expected, rtol=1e-12)


def test_of_several_members_probabilities_add_up_to_them() -> None:
    np.testing.assert_allclose(membership_log_odds(np.zeros(5), 2), np.log(2 / 3))
    # p and 1 - p: 1 and -1 add up to one of two, and 20 more of each.
    np.testing.assert_allclose(
        membership_log_odds(np.repeat([7.0, 5.0], 20), 20), np.repeat([1.0, -1.0], 20)
    )
    draw = np.random.default_rng(0)
    for spread in (0.1, 10.0, 1e5):
        scores = spread * draw.normal(size=300)
        odds = membership_log_odds(scores, 16)
        assert (1 / (1 + np.exp(-odds.clip(-700)))).sum() == pytest.approx(16, abs=1e-6)
        np.testing.assert_allclose(odds - scores, (odds - scores)[0], rtol=1e-9, atol=1e-9)


def test_of_several_members_log_odds_have_one_value_where_all_is_sure() -> None:
    """By hand: p of the third is 1 - p of the second, and a little of the first's."""
    both = np.log1p(np.exp(-10))
    odds = membership_log_odds([1000.0, 990.0, 0.0, -1000.0], 2)
    np.testing.assert_allclose(odds, np.array([505, 495, -495, -1495]) + both / 2, rtol=1e-13)
    # Ties stay. Three times p of the third.
    odds = membership_log_odds([0.0, -300.0, 0.0, 990.0, 0.0, 1000.0], 2)
    shift = (both - 990 - np.log(3)) / 2
    np.testing.assert_allclose(odds, np.array([0, -300, 0, 990, 0, 1000]) + shift, rtol=1e-13)
    assert odds[0] == odds[2] == odds[4]
    # All tied at the edge: two of three are in, of whom nobody knows which.
    odds = membership_log_odds([500.0, 0.0, 500.0, 500.0], 2)
    np.testing.assert_allclose(odds[[0, 2, 3]], np.log(2), atol=1e-9)
    order = np.random.default_rng(2).permutation(60)
    scores = np.repeat(np.linspace(-4e3, 4e3, 20), 3)
    np.testing.assert_array_equal(
        membership_log_odds(scores, 7)[order], membership_log_odds(scores[order], 7)
    )


def test_where_nothing_is_sure_probabilities_add_up_as_ever() -> None:
    draw = np.random.default_rng(3)
    for members in (2, 5, 39):
        scores = 3 * draw.normal(size=40).round(1)
        plain = brentq(lambda s, b=members, v=scores: expit(v + s).sum() - b, -99, 99)
        odds = membership_log_odds(scores, members)
        np.testing.assert_allclose(odds, scores + plain, atol=1e-8)


def test_infinite_scores_are_sure() -> None:
    inf = np.inf
    for scores, members, expected in (
        ([0.0, -inf, 0.0, -inf, 0.0], 2, [np.log(2), -inf, np.log(2), -inf, np.log(2)]),
        ([0.0, inf, 0.0, 0.0], 2, [-np.log(2), inf, -np.log(2), -np.log(2)]),
        ([1.0, -inf, 0.0], 2, [inf, -inf, inf]),  # who else
        ([1.0, -inf, 0.0, -inf, -inf, -inf], 3, [inf, -np.log(3), inf, *[-np.log(3)] * 3]),
        ([inf, 0.0, inf, inf], 2, [np.log(2), -inf, np.log(2), np.log(2)]),
        ([1.0, 0.0, -inf], 1, [1.0, -1.0, -inf]),
        ([-inf, -inf, -inf], 1, [-np.log(2)] * 3),
        ([inf, 5.0, -inf], 1, [inf, -inf, -inf]),
        ([3.0, -inf, -inf], 1, [inf, -inf, -inf]),
    ):
        with np.errstate(all="raise"):
            odds = membership_log_odds(scores, members)
        np.testing.assert_allclose(odds, expected, atol=1e-9)
    # Whom nothing excludes are told apart still, though all of them are sure.
    found = score_candidates([[3.0, -inf, 1.0, -inf]], [[0, 3]], bootstrap=0)
    assert found.per_sample["rank"] == [1.0, 2.5]


def test_a_message_with_one_outlier_does_not_hide_the_members_of_all() -> None:
    """Two messages of three members; one of the second stands out by far. From the sum of its
    likelihoods the other two would be farther than anybody is in the first.
    """
    others = [0.0] * 100
    first, second = [9.0, 8.0, 10.0, *others], [9.0, 8.0, 500.0, *others]
    found = score_candidates([first, second], [[0, 1, 2], [0, 1, 2]])
    assert found.per_sample["tpr_1%"] == [1] * 6
    assert found.area == 1


def test_equal_scores_name_nobody() -> None:
    found = score_candidates([np.zeros(11)] * 3, [[0], [1], [2]])
    assert found.per_sample["rank"] == [6.0] * 3
    assert found.mean["top1"] == found.mean["tpr_1%"] == 0
    assert found.area == pytest.approx(0.5)


def test_noise_is_at_chance_and_order_does_not_matter() -> None:
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(200, 50))
    found = score_candidates(rows, [[i % 50] for i in range(200)])
    assert abs(found.mean["rank"] - 25.5) < 4 * 14.4 / 200**0.5
    assert abs(found.area - 0.5) < 4 * 0.29 / 200**0.5
    order = draw.permutation(50)
    again = score_candidates(rows[:, order], [[order.tolist().index(i % 50)] for i in range(200)])
    assert again.per_sample == found.per_sample


def test_what_is_refused() -> None:
    for scores, members, message in [
        ([], [], "no message"),
        ([[1.0, 2.0]], [[]], "nothing to tell apart"),
        ([[1.0, 2.0]], [[0, 1]], "nothing to tell apart"),
        ([[1.0, float("nan")]], [[0]], "no number"),
    ]:
        with pytest.raises(ValueError, match=message):
            score_candidates(scores, members)
