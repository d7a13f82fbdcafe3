"""On two ranks: the overflow of one skips the step on both, and nothing else leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import launch
from scaling_worker import STEP, STEPS


@pytest.mark.distributed
def test_an_overflow_of_one_rank_skips_the_step_on_both(tmp_path: Path) -> None:
    ranks = launch("scaling_worker.py", tmp_path)
    for rank in ranks:
        sums = rank["sums"]
        assert sums == ranks[0]["sums"]  # the same weights, step by step
        for step in range(STEPS):
            assert (sums[step + 1] == sums[step]) == (step == STEP)
        for step, sent in enumerate(rank["sent"]):
            assert sum(sent) >= rank["entries"] or step == STEP
        assert rank["sent"][STEP] == [1, 1]  # how many labels there are, and the overflow
        assert rank["scale"] == 2.0**11
        assert rank["messages"] == STEPS - 1
