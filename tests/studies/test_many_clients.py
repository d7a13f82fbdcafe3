"""Clients of the study of many: what they send, and the engine beside its simulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from recipes.studies import many_clients as study
from recipes.studies.many_clients import (
    ALONE,
    CORRELATED,
    NONE,
    SERVER,
    SHARES,
    Averaging,
    averaged_head,
    clipped_updates,
    equal_parts,
)

ROOT = Path(__file__).resolve().parents[2]
LABELS = torch.arange(400) % 2


def test_every_row_is_one_clients() -> None:
    parts = equal_parts(LABELS, 40, 10, seed=0)
    assert sorted(parts.flatten().tolist()) == list(range(400))
    assert not torch.equal(parts, equal_parts(LABELS, 40, 10, seed=1))


def test_skewed_clients_have_few_classes_and_as_many_rows() -> None:
    parts = equal_parts(LABELS, 40, 10, seed=0, alpha=0.1)
    assert sorted(parts.flatten().tolist()) == list(range(400))
    of_one = LABELS[parts].double().mean(1)
    equal = LABELS[equal_parts(LABELS, 40, 10, seed=0)].double().mean(1)
    assert (of_one - 0.5).abs().mean() > 2 * (equal - 0.5).abs().mean()


def test_no_update_is_larger_than_the_clip() -> None:
    samples, labels = torch.randn(6, 5, 8), torch.randint(2, (6, 5))
    start = torch.zeros(8, 2)
    whole = clipped_updates(samples, labels, start, Averaging(NONE, 1.0))
    clipped = clipped_updates(samples, labels, start, Averaging(SERVER, 1.0, clip=0.5))
    norms = whole.flatten(1).norm(dim=1)
    assert (norms > 0.5).any()
    expected = whole * (0.5 / norms).clamp(max=1)[:, None, None]
    torch.testing.assert_close(clipped, expected)


def noise_power(protection: str) -> float:
    """Of weights after a training on features of zero, from which nothing is learned."""
    features, parts = torch.zeros(400, 500), torch.arange(400).view(200, 2)
    of = Averaging(protection, 1.0, asked=50)
    weights = averaged_head(features, LABELS, parts, of, seed=0)
    return float(weights.square().mean())


def test_noise_of_shares_exceeds_that_of_the_server_by_those_that_answer() -> None:
    """Planned for 40 answers, of 45 on average; and a client alone has all of it."""
    server, shares, alone = map(noise_power, (SERVER, SHARES, ALONE))
    # Of 1,000 draws in a power, and four rounds' answers.
    assert shares / server == pytest.approx(45 / 40, rel=0.25)
    assert alone / server == pytest.approx(45, rel=0.25)
    assert noise_power(NONE) == 0
    assert noise_power(CORRELATED) < server


def test_tables_are_written_of_published_cells(tmp_path: Path) -> None:
    study._report_noise(tmp_path / "noise")
    rows = (tmp_path / "noise.md").read_text().splitlines()
    assert rows[2].startswith("| 50 | 50 | 0 | 1.50 | 2.75 |")


# In the engine


def run_engine(folder: Path, *federations: dict) -> tuple[list[torch.Tensor], list[dict]]:
    """Weights and what was measured, of trainings in a process of its own."""
    settings, result = folder / "settings.json", folder / "result.safetensors"
    settings.write_text(json.dumps([{"folder": str(folder), **one} for one in federations]))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "recipes.studies.lib.simulated_clients", settings, result],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with safe_open(result, "pt") as opened:
        figures = json.loads(opened.metadata()["figures"])
        return [opened.get_tensor(f"{n}.0").T for n in range(len(federations))], figures


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engine_trains_as_its_simulation_does(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    from recipes.studies.lib.simulated_clients import write_rows

    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(24, 8, generator=generator))
    labels = torch.arange(24) % 2
    parts = torch.arange(24).view(6, 4)
    write_rows(tmp_path, features, labels, parts.tolist())
    everybody = {"clients": 6, "asked": 6, "rounds": 1, "dropout": 0.0, "by_node": True}
    private = {"clip": 0.5, "noise_multiplier": 1.0}
    found, figures = run_engine(
        tmp_path,
        {**everybody, "protection": "none"},
        {**everybody, "protection": "none", "secure": True, "clip": 8.0},
        {**everybody, "protection": "shares", "clip": 0.5, "noise_multiplier": 1e-4},
        {**everybody, **private, "protection": "shares", "secure": True, "rounds": 2},
        {**everybody, **private, "protection": "server", "dropout": 1.0},
        {**everybody, **private, "protection": "flower", "dropout": 0.5, "rounds": 3},
    )
    start = torch.zeros(8, 2)
    plain = clipped_updates(features[parts], labels[parts], start, Averaging(NONE, 1.0)).mean(0)
    torch.testing.assert_close(found[0], plain)
    torch.testing.assert_close(found[1], plain, rtol=0, atol=1e-5)  # of its quantization
    of = Averaging(SHARES, 1.0, clip=0.5)
    clipped = clipped_updates(features[parts], labels[parts], start, of).mean(0)
    torch.testing.assert_close(found[2], clipped, rtol=0, atol=1e-4)
    assert (found[3] - clipped).norm() > 0.05  # noise of 0.5·√(6/5)/6 an entry, twice
    assert figures[3]["used"] == [True, True]
    assert figures[4]["answers"] == [0]
    assert not found[4].any()
    assert len(set(figures[1]["messages"].values())) == 1  # four stages, nobody lost
    assert figures[1]["messages"]["down"] == 24
    low, high = figures[0]["sizes"]["up"]
    assert high - low <= 4  # numbers of nodes, in digits
    used = figures[5]["used"]
    assert used == [answers == 6 for answers in figures[5]["answers"]]  # any absence stops it


@pytest.mark.long
def test_a_server_that_lies_unmasks_one_client() -> None:
    pytest.importorskip("flwr")
    from recipes.studies.lib.lying_server import RANGE, unmasked_update

    draw = np.random.default_rng(0)
    updates = [draw.uniform(-1, 1, (2, 20)).astype(np.float32) for _ in range(4)]
    found = unmasked_update(updates, victim=2)
    assert np.abs(found - updates[2]).max() <= 2 * RANGE / 2**22 * 1.5  # one step of its grid
    assert min(np.abs(found - updates[n]).max() for n in (0, 1, 3)) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask", ""])
def test_which_absence_flowers_secagg_survives(stage: str) -> None:
    pytest.importorskip("flwr")
    from recipes.studies.lib.lying_server import mean_without_one

    draw = np.random.default_rng(0)
    updates = [draw.uniform(-1, 1, (2, 5)).astype(np.float32) for _ in range(5)]
    mean, errors = mean_without_one(updates, stage)
    if stage in ("setup", "share_keys"):  # nobody has a share of its key
        assert mean is None
        assert errors == ["ClientAppException"] * 4
        return
    assert errors == []
    there = updates[1:] if stage == "collect_masked_vectors" else updates
    np.testing.assert_allclose(mean, np.mean(there, axis=0), atol=1e-5)


@pytest.mark.long
def test_flowers_noise_follows_those_asked_and_its_mean_those_that_answer() -> None:
    """So noise is too small for the mean where clients are silent; an error stops the round."""
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from hf_gradguard.federation.flower import record_of, tensors_of

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    strategy = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 10)
    strategy.current_arrays = record_of({"0": torch.zeros(20_000)})

    def reply(node: int, is_lost: bool = False) -> Message:
        asked = Message(RecordDict({"config": ConfigRecord({})}), node, "train")
        if is_lost:
            return Message(Error(3, "gone"), reply_to=asked)
        metrics = MetricRecord({"num-examples": 1})
        update = record_of({"0": torch.ones(20_000)})
        return Message(RecordDict({"arrays": update, "metrics": metrics}), reply_to=asked)

    arrays, _ = strategy.aggregate_train(1, [reply(node) for node in range(1, 6)])
    found = tensors_of(arrays)["0"]
    assert float(found.mean()) == pytest.approx(1, abs=0.01)  # of five, each with a fifth
    assert float(found.std()) == pytest.approx(0.1, rel=0.05)  # of ten
    replies = [reply(node, is_lost=node == 1) for node in range(1, 11)]
    assert strategy.aggregate_train(2, replies) == (None, None)
