"""A run that is killed (SIGKILL) at any moment goes on with `resume_from_checkpoint=True`, and ends
with the weights of a run left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import HERE, environment


def killed_run(
    folder: Path, ranks: int, inside: int, outside: int, seed: int, steps: int
) -> dict[str, Any]:
    numbers = map(str, (ranks, inside, outside, seed, steps))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "kill_worker.py"), str(folder), *numbers],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=1100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the forked ranks are of its group
    assert process.returncode == 0, output[-6000:]
    report = json.loads((folder / "report.json").read_text())
    assert report["refused"] == 0, output[-6000:]
    assert not any(report["last"]), output[-6000:]
    assert report["tensors"] > 20
    assert report["differing"] == []  # not one bit
    # what was complete stays so until something newer is
    assert report["complete"] == sorted(report["complete"])
    return report


@pytest.mark.long
def test_killed_on_one_rank(tmp_path: Path) -> None:
    report = killed_run(tmp_path, ranks=1, inside=2, outside=1, seed=0, steps=10)
    assert len(report["complete"]) == 3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_killed_at_twenty_random_points_on_two_ranks(tmp_path: Path) -> None:
    report = killed_run(tmp_path, ranks=2, inside=12, outside=8, seed=1, steps=24)
    assert len(report["complete"]) == 20
    assert report["half written"] >= 3  # kills that would have ended the run
    assert report["complete"][-1] < 24
