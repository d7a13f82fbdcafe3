"""Scores of rankings, by hand."""

from __future__ import annotations

import numpy as np
import pytest

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
