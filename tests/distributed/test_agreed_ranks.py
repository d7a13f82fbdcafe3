"""Ranks that would wait for each other, or train apart, do not begin; ranks that would not, do."""

from __future__ import annotations

from typing import Any

import pytest
from agreed_worker import APART
from launcher import launch

from hf_gradguard.training.exchange.start import BATCHES, OPTIMIZER, ROWS, STEPS

pytestmark = pytest.mark.distributed
REFUSED = {
    "lengths": STEPS,
    "lengths, logged by epochs": BATCHES,
    "lengths, random states sent": BATCHES,
    "batch size": STEPS,
    "logging_steps": "logging_steps",
    "learning_rate": "learning_rate",
    "evaluation": ROWS,
    "optimizer": OPTIMIZER,
}
WAYS_OUT = {STEPS: "the same max_steps", ROWS: "the same length"}
WAYS_OUT[BATCHES] = "by steps, not by epochs"
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return launch("agreed_worker.py", tmp_path_factory.mktemp("agreed"), limit=60)


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_differ_do_not_begin(ranks: Reports, name: str) -> None:
    for rank in ranks:
        assert rank[name]["said"].startswith(f"Ranks differ in {REFUSED[name]}, so nothing")
        assert WAYS_OUT.get(REFUSED[name], "the same settings") in rank[name]["said"]
        assert rank[name]["steps"] == 0


@pytest.mark.parametrize("name", [name for name in APART if name not in REFUSED])
def test_what_may_differ_trains_the_same_weights(ranks: Reports, name: str) -> None:
    """The ways out that errors name among them."""
    assert [rank[name]["steps"] for rank in ranks] == [7, 7]
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"]
