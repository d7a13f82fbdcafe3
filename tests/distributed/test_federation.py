"""On two ranks, each hosts its own clients, and a step is the drawn clients' mean weighted by their
sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from federation_worker import samples
from helpers import small_convolution
from launcher import launch

from hf_gradguard import GradientMap
from hf_gradguard.training.clients.batches import ClientSampler, SampledRow

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("federation_worker.py", tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def rounds(ranks: list[dict[str, Any]]) -> list[list[SampledRow]]:
    """What is drawn: two rounds a step, 60 rows and 16 places a round, so three rounds an epoch."""
    sampler = ClientSampler([np.array(part) for part in ranks[0]["parts"]], 2, 4, ranks=2, seed=1)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        picks = list(sampler)
        found += [picks[start : start + 16] for start in range(0, 48, 16)]
    return found


def test_ranks_agree_on_the_partition(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["parts"] == ranks[1]["parts"]
    assert sorted(row for part in ranks[0]["parts"] for row in part) == list(range(60))
    assert len({len(part) for part in ranks[0]["parts"]}) > 2  # weights that differ


def test_clients_stay_on_their_rank_and_send_their_own_rows(ranks: list[dict[str, Any]]) -> None:
    sums = [float(row["pixel_values"].sum()) for row in samples()]
    for rank, report in enumerate(ranks):
        assert len(report["messages"]) == 2 * (
            3 + 2
        )  # an epoch of three rounds ends a step with one round
        for number, rows in report["messages"]:
            own = [sums[row] for row in report["parts"][2 * number + rank]]
            assert len(rows) == min(4, len(own))
            assert all(min(abs(value - other) for other in own) < 1e-3 for value in rows)
    drawn = [{number for number, _ in report["messages"]} for report in ranks]
    assert drawn == [{0, 1, 2}, {0, 1, 2}]


def test_steps_are_the_weighted_means(
    ranks: list[dict[str, Any]], rounds: list[list[SampledRow]]
) -> None:
    model, data, parts = small_convolution(dtype=torch.float32)[0], samples(), ranks[0]["parts"]
    # Rounds to a step: an epoch has three, so two, then the one that is left; and two of the next
    # epoch.
    for step, own in enumerate((rounds[0:2], rounds[2:3], rounds[3:5])):
        expected = torch.zeros(len(ranks[0]["steps"][step]))
        for picks in own:
            clients = sorted({pick.client for pick in picks})
            assert len(clients) == 4
            whole = sum(len(parts[client]) for client in clients)
            for client in clients:
                rows = [
                    data[pick.row]
                    for pick in picks
                    if pick.client == client and pick.row is not None
                ]
                batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
                gradient = torch.cat(
                    [g.flatten() for g in GradientMap(model, batch).gradient().values()]
                )
                expected += gradient * len(parts[client]) / whole / len(own)
        for report in ranks:
            torch.testing.assert_close(
                torch.tensor(report["steps"][step]), expected, rtol=1e-4, atol=1e-6
            )
