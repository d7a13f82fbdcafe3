"""A gradient that is not finite, or a defense that breaks its contract, on one rank stops all of
them before anything of that step is exchanged.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from cases import make_model
from launcher import run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("defense", "says"),
    [
        (
            "gaussian_noise",
            r"FloatingPointError: The gradient of (\S+) is not finite, so nothing was shared",
        ),
        (
            "in_place",
            r"RuntimeError: in_place wrote to the true gradient of '(\S+)' in place, so nothing "
            "was shared",
        ),
    ],
)
def test_what_is_broken_on_one_rank_stops_all_ranks(
    tmp_path: Path, defense: str, says: str
) -> None:
    done = run("broken_worker.py", tmp_path, defense, limit=60)

    assert done.returncode != 0
    assert not list(tmp_path.glob("report*.json"))  # neither rank reached the end
    found = re.search(says, done.stdout)
    assert found, done.stdout[-3000:]
    model = make_model("vit")
    assert found[1] in dict(model.named_parameters())

    healthy, broken = ((tmp_path / f"journal{rank}").read_text().splitlines() for rank in range(2))
    entries = sum(p.numel() for p in model.parameters())
    reduction = f"starts allreduce {entries}"
    assert broken.count(reduction) == 1  # the first step's; in the second nothing left the rank
    # Nor did the other rank receive anything, but figures and which parameters are tables.
    received = [start for start, end in pairwise(healthy) if end == "ends allreduce"]
    assert received.count(reduction) == 1
    tables = f"starts allreduce {len(list(model.parameters()))}"
    assert set(received) <= {reduction, tables, "starts allreduce 1"}
