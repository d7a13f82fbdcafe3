"""`GradGuardTrainer` with FSDP: two clients of two devices each, beside two of one device each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import Running, launch
from safetensors.torch import load_file
from scipy.stats import ks_2samp
from shards_worker import CASES, CLIENTS, DEVICES, DRAWS, NOISE, NOISY, REFUSED, SAVED, STEPS
from torch import Tensor

pytestmark = pytest.mark.distributed

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def cut(folder: Path) -> Reports:
    return launch("shards_worker.py", folder / "cut", "train", ranks=CLIENTS * DEVICES, limit=240)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Reports:
    return launch("shards_worker.py", folder / "whole", "train", ranks=CLIENTS, limit=240)


def difference(one: Path, other: Path) -> float:
    """The largest of saved weights."""
    weights, others = (
        load_file(one / "weights.safetensors"),
        load_file(other / "weights.safetensors"),
    )
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_clients_of_one_device(
    folder: Path, cut: Reports, whole: Reports, case: str
) -> None:
    """Undefended ones, and those of defenses that draw nothing: a threshold, a bound and what error
    feedback keeps are of the whole client. Float64 for BERT, float32 for Llama, and bfloat16, by
    which weights move 0.01 elsewhere than in float32.
    """
    bound = 1e-9 if case.startswith("bert") else 3e-3 if case.endswith("bf16") else 1e-6
    assert difference(folder / "cut" / case, folder / "whole" / case) < bound
    assert difference(folder / "cut" / case, folder / "cut" / _other(case)) > 1e-3
    for report in cut:
        found, wanted = report[case], whole[0][case]
        assert found["senders"] == wanted["senders"] == CLIENTS
        losses, others = torch.tensor(found["losses"]), torch.tensor(wanted["losses"])
        assert losses.allclose(others, *((2e-2, 0) if case.endswith("bf16") else (1e-5, 1e-6)))


def _other(case: str) -> str:
    """Of the same model."""
    return next(name for name in CASES if name != case and name.split(",")[0] == case.split(",")[0])


def test_evaluation_and_measures_are_of_whole_clients(cut: Reports, whole: Reports) -> None:
    assert len(cut[0]["llama"]["evaluated"]) == 3
    for rank, report in enumerate(cut):
        for case in CASES.keys() - {"llama, bf16"}:
            wanted = whole[rank // DEVICES][case]
            for figures in ("errors", "cosines"):
                assert report[case][figures] == pytest.approx(wanted[figures], rel=1e-5, abs=1e-6)
        assert report["llama"]["evaluated"] == pytest.approx(whole[0]["llama"]["evaluated"], 1e-6)


def noise_of(folder: Path, ranks: int, name: str) -> list[Tensor]:
    """Of each rank's part of the mean message: `(draws, entries)`."""
    return [load_file(folder / f"noise{rank}.safetensors")[name] for rank in range(ranks)]


@pytest.mark.parametrize("name", NOISY)
def test_noise_has_the_law_of_clients_of_one_device(
    folder: Path, cut: Reports, whole: Reports, name: str
) -> None:
    """By the norm of a device's part alone its size would be off by √2, which the statistic shows
    at 0.09, or more. Chance alone exceeds 0.014 once in 10⁴ times where entries are alike.
    """
    first, second = noise_of(folder / "cut", DEVICES, name)
    (of_whole, *_) = noise_of(folder / "whole", CLIENTS, name)
    of_cut = torch.cat([first, second], 1)
    assert of_cut.shape == of_whole.shape
    assert of_cut.shape[0] == DRAWS
    spread = 0.25 if name == "optimal_noise" else 0.05  # which a few entries have most of
    assert of_cut.square().sum() == pytest.approx(float(of_whole.square().sum()), rel=spread)
    samples = of_cut.flatten().numpy(), of_whole.flatten().numpy()
    assert ks_2samp(*samples).statistic < (0.06 if name == "optimal_noise" else 0.02)
    third, fourth = noise_of(folder / "cut", CLIENTS * DEVICES, name)[DEVICES:]
    assert torch.equal(first, third)  # the mean over clients, on both of them
    assert torch.equal(second, fourth)


def test_noise_follows_whole_clients_norms(folder: Path, cut: Reports) -> None:
    """Twice the gradient, spread over all of its entries, of each client; dp_sgd's as told."""
    entries = sum(report["noise"]["size"] for report in cut[:DEVICES])
    powers = [(2.0 * size) ** 2 for size in cut[0]["noise"]["norms"]]
    for name in ("gaussian_noise", "laplace_noise"):
        parts = noise_of(folder / "cut", DEVICES, name)
        power = float(torch.cat(parts, 1).square().sum()) / DRAWS
        assert power == pytest.approx(sum(powers) / CLIENTS**2, rel=0.05), name
    parts = noise_of(folder / "cut", DEVICES, "dp_sgd")
    std = float(torch.cat(parts, 1).square().mean().sqrt())
    assert std == pytest.approx(0.3 / CLIENTS**0.5, rel=0.02)
    assert entries * DRAWS > 50_000


@pytest.mark.parametrize("name", NOISY)
def test_devices_draw_other_noise_for_their_shards(folder: Path, cut: Reports, name: str) -> None:
    first, second = noise_of(folder / "cut", DEVICES, name)
    size = min(first.shape[1], second.shape[1])
    both = torch.corrcoef(torch.stack([first[:, :size].flatten(), second[:, :size].flatten()]))
    assert abs(float(both[0, 1])) < 5 * (DRAWS * size) ** -0.5
    repeated = first.numel() - len(first.flatten().unique())
    assert repeated < 10  # by chance: of float32, in which a repeated message would have hundreds


def test_one_message_a_step_leaves_a_client(folder: Path, cut: Reports) -> None:
    """It goes to the same device of other clients alone, and is protected."""
    for report in cut:
        size = report["noise"]["size"]
        clear, noisy = (torch.tensor(report["crossing"][n]["largest"]) for n in ("none", NOISE))
        for name in ("none", NOISE):
            assert report["crossing"][name]["numbers"] == [[CLIENTS, size]]
        assert abs(float(torch.cosine_similarity(clear, noisy, 0))) < 0.25  # 1/30, and 5/√d
    one, other = (torch.tensor(cut[rank]["crossing"]["none"]["largest"]) for rank in (0, DEVICES))
    assert not torch.allclose(one, other)  # as other clients' own messages are seen where sent


def test_the_page_s_trainer_trains_all_ranks_alike(cut: Reports) -> None:
    for report in cut:
        assert report["page"]["moved"] > 1e-6
        assert report["page"]["checksum"] == cut[0]["page"]["checksum"]
        assert "2, of 2 devices each" in report["page"]["card"]


REASONS = {
    "soteria": ("[sharded-defense]",),
    "refiner": ("[sharded-defense]",),
    "rows": ("[sharded-defense]",),
    "no sizes": ("[fsdp-sizes]",),
    "no clients": ("[fsdp-sizes]",),
    "no devices": ("[fsdp-sizes]",),
    "unsharded": ("[shard-size-without-fsdp]",),
    "shards": ("[fsdp-state-dict]",),
    "first": ("[fsdp-version]",),
    "compiled": ("[fsdp-compile]",),
    "several": ("[fsdp-clients]",),
    "simulated": ("[fsdp-clients]",),
    "labels": ("[fsdp-protect-labels]",),
    "measured": ("[fsdp-leakage]",),
    "more": ("are 8 processes, and 4 were started",),
    "accountant": ("[fsdp-accountant]",),
    "loss": ("a loss that exchanges", "c10d.allreduce_"),
    "backward": ("will not step", "is not its own work", "INSTEAD"),
}


@pytest.mark.parametrize("what", REASONS)
def test_refused_on_all_ranks_with_the_way_out(cut: Reports, what: str) -> None:
    for report in cut:
        assert (
            report["refusals"].keys()
            == REASONS.keys()
            == {*REFUSED, "accountant", "loss", "backward"}
        )
        for words in REASONS[what]:
            assert words in report["refusals"][what]


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """The checkpoint of a run that was killed in the middle of a later step."""
    checkpoint = folder / "kill" / "killed" / f"checkpoint-{SAVED}"
    wanted = [folder / "kill" / f"step{SAVED + 1}.rank{rank}" for rank in range(CLIENTS * DEVICES)]
    running = Running("shards_worker.py", folder / "kill", "kill", ranks=CLIENTS * DEVICES)
    try:
        deadline = time.monotonic() + 90
        while not all(path.exists() for path in wanted):
            assert running.status() is None, running.printed.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        running.kill()
    assert not list((folder / "kill").glob(f"step{STEPS}.*"))
    return checkpoint


def test_a_killed_run_goes_on_as_if_it_had_not_been(folder: Path, killed: Path) -> None:
    """With what each device remembers of its shards, and the optimizer of its own."""
    states = [load_file(killed / f"gradguard_private_rank{rank}.safetensors") for rank in range(4)]
    assert all(int(state["0/calls"]) == SAVED for state in states)
    place = folder / "resume"
    launch("shards_worker.py", place, "resume", str(killed), ranks=CLIENTS * DEVICES)
    assert difference(place / "resumed", place / "left alone") == 0
    assert difference(place / "llama resumed", place / "llama") == 0
    saved = killed / "model.safetensors"
    left = load_file(place / "left alone" / "weights.safetensors")
    assert max(float((left[n] - t).abs().max()) for n, t in load_file(saved).items()) > 1e-3
