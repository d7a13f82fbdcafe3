"""Leakage figures stay on their rank, and a message that is not shared holds nobody up."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from launcher import launch
from meter_worker import STEPS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("meter_worker.py", tmp_path_factory.mktemp("meter"))


def test_every_rank_logs_its_own_figures(ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["figures"] for rank in ranks)
    assert len(one) == len(two) == STEPS
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() == theirs.keys()
        assert len(ours) == 5
        assert all(0 < ours[name] < math.inf and ours[name] != theirs[name] for name in ours)


def test_no_figure_is_exchanged(ranks: list[dict[str, Any]]) -> None:
    """As many tensors of the same sizes as without the meter, and no number in them is a figure."""
    for rank in ranks:
        unmeasured, measured = (Counter(map(tuple, sent)) for sent in rank["exchanged"])
        assert unmeasured == measured
        assert len(rank["apart"]) == STEPS
        # In float32 a figure would be found to 6e-8. The nearest of some 7,500 random numbers is
        # thousands of times farther.
        assert min(rank["apart"]) > 1e-7
    torch.testing.assert_close(
        torch.tensor(ranks[0]["logged"]), torch.tensor(ranks[0]["plain"]), rtol=1e-4, atol=1e-5
    )


def test_a_message_kept_back_counts_as_zeros_and_no_weight_changes(
    ranks: list[dict[str, Any]],
) -> None:
    """The step is n₀ s₀/(n₀ + n₁): rank 1's tokens still count, its gradient is zero. Nobody
    waits.
    """
    assert [rank["counts"] for rank in ranks] == [[0.0] * STEPS, [1.0] * STEPS]
    assert ranks[0]["skipped"] == ranks[1]["skipped"] != ranks[0]["plain"]
    for rank in ranks:
        assert rank["steps"][:3] == [STEPS] * 3
        assert rank["error"] < 1e-5  # float32 sums


def test_one_rank_stops_all_after_the_same_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["steps"][3] == 1
        assert rank["last_error"] < 1e-5  # and its message is in that step as zeros
    assert ranks[0]["stopped"] == ranks[1]["stopped"]
