"""A private head is trained by several ranks in the words of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import launch

pytestmark = pytest.mark.distributed


def test_ranks_have_the_same_features_and_the_same_head(tmp_path: Path) -> None:
    """Directions that a rank found with other signs would make other features."""
    first, second = launch("head_worker.py", tmp_path)
    assert first["features"] == second["features"]
    assert first["norm"] == pytest.approx(1)
    assert first["moved"]
    assert first["weights"] == second["weights"]
    assert (first["steps"], first["epsilon"]) == (3, pytest.approx(2.754, abs=2e-3))
