"""What is said of how many ranks there are."""

from __future__ import annotations

import pytest
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.launch import ranks_asked_for, say_ranks

# as `accelerate launch --cpu --num_processes 2` leaves it
SIMPLE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_what_launchers_were_asked_for() -> None:
    assert ranks_asked_for({}) == 1
    assert ranks_asked_for({"WORLD_SIZE": "2", "RANK": "0"}) == 2
    assert ranks_asked_for({"SLURM_NTASKS": "4", "WORLD_SIZE": "1"}) == 4
    assert ranks_asked_for({"WORLD_SIZE": "many"}) == 1
    assert ranks_asked_for(SIMPLE) is None
    assert ranks_asked_for({**SIMPLE, "RANK": "0", "WORLD_SIZE": "2"}) == 2
    assert ranks_asked_for({"MASTER_ADDR": "127.0.0.1"}) == 1


@pytest.mark.parametrize(
    ("ranks", "environment", "says"),
    [
        (1, {}, "There is one process, so nothing leaves it"),
        (1, SIMPLE, "Several processes were asked for, but 1 is there"),
        (1, {"WORLD_SIZE": "2"}, "2 processes were asked for, but 1 is there"),
        (2, {"SLURM_NTASKS": "4"}, "4 processes were asked for, but 2 are there"),
        (2, {"WORLD_SIZE": "2"}, ""),
        (2, {}, ""),
    ],
)
def test_what_is_said(
    ranks: int, environment: dict[str, str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_ranks(ranks, environment)
    say_ranks(ranks, environment)
    assert len(caplog.messages) == bool(says)
    assert says in caplog.text


def test_a_trainer_that_is_alone_says_so_once(
    tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    args = GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none")
    for _ in range(2):
        GradGuardTrainer(make_task("bert")[0], args, defense="pruning")
    assert caplog.text.count("so nothing leaves it") == 1
