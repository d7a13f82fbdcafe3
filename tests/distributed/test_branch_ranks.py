"""Ranks decide alike whether a run may branch off, whatever each has counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import launch

pytestmark = pytest.mark.distributed


def test_ranks_count_alike_before_they_compare_with_the_target(tmp_path: Path) -> None:
    """A kill may leave one with a record more. One that raised alone would leave the other waiting
    for it.
    """
    outcomes = [report["outcome"] for report in launch("branch_worker.py", tmp_path, ranks=2)]
    assert all("would be exceeded" in outcome for outcome in outcomes)
