"""README's loop without the Trainer, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("loop_worker.py", tmp_path_factory.mktemp("loop"))


def test_unprotected_it_trains_as_backward_does(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["moved"] > 1e-3
        # Adam divides what is rounded by its size: a ten-thousandth of a step
        assert report["plain"] <= 1e-6


def test_ranks_end_with_the_same_weights(reports: list[dict[str, Any]]) -> None:
    one, other = reports
    assert one["checksum"] == other["checksum"]
    assert one["noisy"] > 1e-3


def test_it_sends_messages_alone(reports: list[dict[str, Any]]) -> None:
    """One a step, and at the first which tables there are."""
    for report in reports:
        messages = [size for size in report["sizes"] if size > 99]
        assert len(messages) == 3
        assert len(set(messages)) == 1


def test_evaluation_sends_no_batch_statistics(reports: list[dict[str, Any]]) -> None:
    """DDP's forward pass would send rank 0's, which hold its private activations."""
    assert [report["evaluated"] for report in reports] == [[], []]


def test_no_loader_sends_batches_for_others(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for way in ("loop", "trainer"):
            assert "dispatch_batches" in report["dispatched"][way], way
        assert not report["dispatched"]["sent"]


def test_no_loss_exchanges(reports: list[dict[str, Any]]) -> None:
    """Models of detection send how many objects a batch has."""
    for report in reports:
        for way in ("loop", "trainer"):
            assert "Counting calls c10d.allreduce_" in report["exchanging"][way], way
        assert "calls accelerator.gather:" in report["exchanging"]["gather"]
        assert not report["exchanging"]["sent"]


def test_every_way_to_exchange_is_refused_in_this_thread_alone(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        assert all(report["ways"].values()), report["ways"]


def test_fabric_averages_over_ranks(reports: list[dict[str, Any]]) -> None:
    if reports[0]["fabric"] is None:
        pytest.skip("lightning-fabric is not installed")
    for report in reports:
        error, size = report["fabric"]
        assert error <= 1e-6 < 1e-3 < size
