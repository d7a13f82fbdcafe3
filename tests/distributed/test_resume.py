"""A run that is killed and resumed goes on as if it had not been."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import Running, launch
from resume_worker import SAVED, STEPS, train
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a two-rank run that was killed in the middle of a later step."""
    folder = tmp_path_factory.mktemp("killed")
    checkpoint = folder / "killed" / f"checkpoint-{SAVED}"
    wanted = [
        checkpoint / "trainer_state.json",
        *[checkpoint / f"gradguard_private_rank{rank}.safetensors" for rank in range(2)],
        *[folder / f"step{SAVED + 1}.rank{rank}" for rank in range(2)],
    ]
    running = Running("resume_worker.py", folder)
    try:
        deadline = time.monotonic() + 90
        while not all(path.exists() for path in wanted):
            assert running.status() is None, running.printed.read_text()[-3000:]
            assert time.monotonic() < deadline, (
                f"no {[path for path in wanted if not path.exists()]}"
            )
            time.sleep(0.05)
    finally:
        running.kill()
    assert not list(folder.glob("report*.json"))
    assert not list(folder.glob(f"step{STEPS}.*"))
    return checkpoint


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same run on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    train(folder)
    return folder / f"checkpoint-{SAVED}"


@pytest.fixture(scope="module")
def reports(
    killed: Path, one_rank: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return launch(
        "resume_worker.py", tmp_path_factory.mktemp("resumed"), str(killed), str(one_rank)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoint_holds_every_clients_state(killed: Path, rank: int) -> None:
    state = load_file(killed / f"gradguard_private_rank{rank}.safetensors")
    assert {name.split("/")[0] for name in state} == {"0", "1", "accountant"}
    assert (
        int(state["accountant/steps"]) == SAVED * 2 * 2
    )  # two micro-batches of two clients a step
    for client in ("0", "1"):
        assert int(state[f"{client}/calls"]) == 6  # measured at the first and the fifth
        assert any(name.startswith(f"{client}/squares.") for name in state)


def test_resumed_weights_equal_those_of_a_run_left_alone(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["moved"] > 20
        assert report["resumed"] == []  # not one bit


def test_ranks_agree_on_the_newest_complete_checkpoint(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["found"] == []


def test_resumed_accounts_count_what_left_before_the_kill(reports: list[dict[str, Any]]) -> None:
    """The step after the checkpoint left twice: two micro-batches of two clients."""
    for report in reports:
        examples, messages, finite = report["accounted"]
        assert messages == STEPS * 2 * 2
        assert examples > 39  # its half of the first epoch, and others in the second
        # Infinite for those on whose batch another dropout mask left a coordinate bare that reused
        # sensitivities spare.
        assert finite > 10
        assert report["repeated"] == 4
        assert report["fewer"] == []
        assert "holds no accountant's state of this rank" in report["unaccounted"]


def test_resumed_counts_have_each_client_and_micro_batch(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["messages"] == [2 * SAVED * 2 * 2]  # of one defense, in a later checkpoint


def test_defense_state_is_needed_for_that(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["forgot"]) > 20


def test_more_ranks_resume_with_a_warning(reports: list[dict[str, Any]]) -> None:
    one, two = reports
    assert not any("no defense state of this rank" in message for message in one["warnings"])
    assert any("no defense state of this rank" in message for message in two["warnings"])
    assert one["grown"] == two["grown"]


def test_fewer_ranks_resume(killed: Path, tmp_path: Path) -> None:
    weights = train(tmp_path, killed)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
