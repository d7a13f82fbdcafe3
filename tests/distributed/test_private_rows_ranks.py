"""On three ranks: each draws rows of its own, and noise has the size that ε is of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import launch
from private_rows_worker import BATCH, CLIP, ROWS, RUNS, SIGMA

from hf_gradguard.leakage import dp_sgd_epsilon

pytestmark = pytest.mark.distributed
RANKS = 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("private_rows")
    return launch("private_rows_worker.py", folder, ranks=RANKS)


@pytest.mark.parametrize("run", RUNS)
def test_ranks_draw_their_own_rows(reports: list[dict[str, Any]], run: str) -> None:
    for rank, report in enumerate(reports):
        assert report[run]["own"] == list(range(rank, ROWS, RANKS))
        assert {row for row in report[run]["drawn"] if row >= 0} <= set(report[run]["own"])
        assert report[run]["moved"] == reports[0][run]["moved"]


@pytest.mark.parametrize("run", RUNS)
def test_noise_of_a_step_is_of_messages_or_of_their_sum(
    reports: list[dict[str, Any]], run: str
) -> None:
    """Two steps of rate 1, each the mean of three messages over B rows. Times 3B it is the sum of
    clipped gradients, with noise of σC for each, or of σC for what is not a rank's own.
    """
    moved = torch.tensor(reports[0][run]["moved"]) * RANKS * BATCH / (SIGMA * CLIP)
    expected = 2 * (RANKS / (RANKS - 1) if run == "sum" else RANKS)
    assert float(moved.var()) == pytest.approx(
        expected, abs=5 * expected * math.sqrt(2 / len(moved))
    )
    epsilon = dp_sgd_epsilon(SIGMA, BATCH / (ROWS / RANKS), 2, 1e-3)
    assert all(report[run]["epsilon"] == pytest.approx(epsilon) for report in reports)
