"""Correlated noise of six clients on three ranks: what it leaves in weights, and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from correlated_worker import BATCH, CLIENTS, CLIP, RATE, RUNS, SIGMA, STEPS
from launcher import launch

from hf_gradguard.defenses.correlated import make_factor, prefix_error, sensitivity

pytestmark = pytest.mark.distributed
RANKS = 3  # secure aggregation takes no fewer


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("correlated")
    return launch("correlated_worker.py", folder, ranks=RANKS)


@pytest.mark.parametrize("run", RUNS)
def test_weights_are_the_undefended_ones_and_the_factors_noise(
    reports: list[dict[str, Any]], run: str
) -> None:
    """A pass moves weights by all rows' mean gradient, as often as it has steps, and by a prefix
    sum's noise: of each client's message, or, of a sum, of all but one rank's clients together.
    """
    assert all(report[run]["moved"] == reports[0][run]["moved"] for report in reports)
    moved, gradient = (
        torch.tensor(reports[0][run][name], dtype=torch.float64) for name in ("moved", "undefended")
    )
    noise = -moved / RATE - STEPS * gradient
    factor = make_factor("blt", STEPS)
    clients, rows = RANKS * CLIENTS, BATCH / CLIENTS
    each = SIGMA * CLIP * sensitivity(factor.column(STEPS)) / rows
    share = clients / (clients - CLIENTS) if run == "sum" else clients
    expected = each * float(prefix_error(factor, STEPS)[-1]) * math.sqrt(share) / clients
    entries = len(noise)
    assert float(noise.square().mean().sqrt()) == pytest.approx(
        expected, rel=5 / math.sqrt(2 * entries)
    )
    # none of it is along the gradient, which is much larger
    along = float(noise @ gradient / gradient.norm()) / expected
    assert abs(along) < 5
    assert STEPS * float(gradient.norm()) / expected > 50


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_goes_on_to_the_bit(reports: list[dict[str, Any]], run: str) -> None:
    for report in reports:
        assert report[run]["steps"] == [STEPS, STEPS]
        assert report[run]["differing"] == []
