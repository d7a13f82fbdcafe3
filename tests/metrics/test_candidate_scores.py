"""Scores of rankings, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hf_gradguard.metrics import score_candidates


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
