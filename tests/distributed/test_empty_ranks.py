"""On three ranks: a sum of messages has the noise that was stated, whoever has nothing to say."""

from __future__ import annotations

from typing import Any

import pytest
from empty_worker import SCALE, STEPS
from launcher import launch

pytestmark = pytest.mark.distributed
RANKS = 3
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return launch("empty_worker.py", tmp_path_factory.mktemp("empty"), ranks=RANKS)


@pytest.mark.parametrize(
    ("run", "weight", "messages"),
    [
        ("all count", 1.0, 1),
        ("one is empty", 3 / 2, 1),
        ("two are empty", 3.0, 1),
        ("accumulated", 3 / 4, 2),
    ],
)
def test_each_that_counts_is_hidden_by_the_scale(
    ranks: Reports, run: str, weight: float, messages: int
) -> None:
    """Of equal messages, each of which has so much weight on its rank: over that, the sum has noise
    of the scale, at each micro-batch.
    """
    for rank in ranks:
        assert len(rank[run]["means"]) == STEPS
        for mean in rank[run]["means"]:
            hidden = mean * RANKS / weight
            assert hidden == pytest.approx(SCALE * messages**0.5, rel=0.05)


def test_nothing_at_all_is_no_noise(ranks: Reports) -> None:
    """All ranks know already, by the number of labels, that there is nothing to hide."""
    assert all(mean == 0 for rank in ranks for mean in rank["none counts"]["means"])


def test_a_short_batch(ranks: Reports) -> None:
    """One row for four clients, where other ranks have four: nine of twelve count, by 1/3 each."""
    for rank in ranks:
        for mean, weight in zip(rank["short batch"]["means"], (1 / 4, 1 / 3), strict=True):
            assert mean * RANKS / weight == pytest.approx(SCALE, rel=0.05)


def test_an_empty_rank_sends_noise_and_no_zeros(ranks: Reports) -> None:
    """Rank 1, of equal weight; the others' labels are all that count, so each weighs 3/2."""
    for rank, weight in zip(ranks, (1.5, 1.0, 1.5), strict=True):
        for own in rank["message"]["own"]:
            assert own == pytest.approx(weight * SCALE, rel=0.05)
