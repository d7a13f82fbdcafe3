"""On two ranks, running statistics are each rank's own, averaged or frozen, as asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import small_convolution
from launcher import launch
from safetensors.torch import load_file
from statistics_worker import CHOICES, STEPS, samples
from torch import Tensor

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("statistics")
    reports = launch("statistics_worker.py", folder)
    for choice in CHOICES:
        saved = load_file(folder / choice / "model.safetensors")
        reports[0][choice]["saved"] = [
            saved["norm.running_mean"].tolist(),
            saved["norm.running_var"].tolist(),
        ]
    return reports


def by_hand(batches: list[list[int]], rounds: int = 1) -> Tensor:
    """Running mean and variance, starting at 0 and 1: at every step 0.9 of the old and 0.1 of the
    batch's.
    """
    model, _ = small_convolution(dtype=torch.float32, batch_norm=True)
    data, mean, variance = samples(), torch.zeros(2), torch.ones(2)
    for rows in batches * rounds:
        hidden = model.convolution(
            torch.stack([data[row]["pixel_values"] for row in rows])
        ).detach()
        mean = 0.9 * mean + 0.1 * hidden.mean((0, 2, 3))
        variance = 0.9 * variance + 0.1 * hidden.var((0, 2, 3), unbiased=True)
    return torch.stack([mean, variance])


# In order, batches of four rows go to the two ranks in turn.
BATCHES = [
    [[4 * number + i for i in range(4)] for number in range(rank, 2 * STEPS, 2)]
    for rank in range(2)
]


def test_local_statistics_are_of_a_ranks_own_data_and_rank_0s_are_saved(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, report in enumerate(ranks):
        torch.testing.assert_close(
            torch.tensor(report["local"]["statistics"]), by_hand(BATCHES[rank])
        )
    assert ranks[0]["local"]["saved"] == ranks[0]["local"]["statistics"]
    assert ranks[0]["local"]["statistics"] != ranks[1]["local"]["statistics"]


def test_training_again_goes_on_from_a_ranks_own(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(ranks):
        torch.testing.assert_close(
            torch.tensor(report["local"]["again"]), by_hand(BATCHES[rank], rounds=2)
        )


def test_shared_statistics_are_the_ranks_mean(ranks: list[dict[str, Any]]) -> None:
    expected = (by_hand(BATCHES[0]) + by_hand(BATCHES[1])) / 2  # the recursion is linear
    for report in ranks:
        torch.testing.assert_close(torch.tensor(report["shared"]["statistics"]), expected)
    assert ranks[0]["shared"]["saved"] == ranks[0]["shared"]["statistics"]


def test_frozen_statistics_stay(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        assert report["frozen"]["statistics"] == report["frozen"]["again"] == [[0, 0], [1, 1]]
    assert ranks[0]["frozen"]["saved"] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("choice", CHOICES)
def test_statistics_leave_a_rank_only_when_shared(ranks: list[dict[str, Any]], choice: str) -> None:
    """Beside rank 0's weights at the start, one bucket of gradients a step, and numbers."""
    model, _ = small_convolution(batch_norm=True)
    sizes = [p.numel() for p in model.parameters()]
    for rank, report in enumerate(ranks):
        start = [("broadcast", size) for size in sizes] if rank == 0 else []
        step = [("allreduce", sum(sizes)), *([("allreduce", 4)] if choice == "shared" else [])]
        assert [
            (kind, size) for kind, size in report[choice]["sent"] if size > 1
        ] == start + STEPS * step


def test_another_trainer_sends_no_more(ranks: list[dict[str, Any]]) -> None:
    """The model that it is given is no initial one: its buffers hold what a rank's data left."""
    for report in ranks:
        for choice in CHOICES:
            again, another = (
                [one for one in report[choice][name] if one[0] == "broadcast"]
                for name in ("sent", "by another")
            )
            assert again == another, choice
