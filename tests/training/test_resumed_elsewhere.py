"""One checkpoint may be gone on with more than once: in two folders, from a copy or a backup, on
another machine, by two processes. No noise is ever shared twice, and ε counts all that is known.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import DELTA, SIGMA, STEPS, Stop, trainer
from transformers import TrainerCallback

from hf_gradguard.defenses import correlated
from hf_gradguard.leakage import PrivacyAccount, gaussian_epsilon

ONCE, TWICE, THRICE = (gaussian_epsilon(SIGMA / n**0.5, DELTA) for n in (1, 2, 3))
FILE = "gradguard_account_rank0.jsonl"


@pytest.fixture(autouse=True)
def noises(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The noise of every message that is shared in a test: none may come twice."""
    seen: list[torch.Tensor] = []
    add = correlated.add_on_grid

    def kept(values: Any, noise: Any, *rest: Any) -> Any:
        seen.append(noise[:8].clone())
        return add(values, noise, *rest)

    monkeypatch.setattr(correlated, "add_on_grid", kept)
    yield seen
    assert len({tuple(noise.tolist()) for noise in seen}) == len(seen)


def killed(folder: Path, step: int, kind: str = "correlated", **settings: Any) -> Any:
    run = trainer(folder, kind, **settings)
    run.add_callback(Stop(step))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    return run


def resumed(checkpoint: Path, folder: Path, kind: str = "correlated", **settings: Any) -> Any:
    run = trainer(folder, kind, **settings)
    run.train(resume_from_checkpoint=str(checkpoint))
    return run


def epsilon(run: Any) -> float:
    found: float = run.private_rows.epsilon
    logged = [row["defense/epsilon"] for row in run.state.log_history if "train_loss" in row]
    assert float(logged[-1]) == pytest.approx(found, rel=1e-3)
    return found


def test_where_it_was_trained_it_goes_on(tmp_path: Path) -> None:
    """Also when it is preempted again and again, before its next checkpoint and after it."""
    killed(tmp_path, 3)
    for checkpoint, step in (("checkpoint-2", 3), ("checkpoint-2", 5)):
        run = trainer(tmp_path)
        run.add_callback(Stop(step))  # steps are counted from the checkpoint on
        with pytest.raises(KeyboardInterrupt):
            run.train(resume_from_checkpoint=str(tmp_path / checkpoint))
    run = resumed(tmp_path / "checkpoint-4", tmp_path)
    assert run.state.global_step == 5  # three messages of eight had been left behind
    assert epsilon(run) == pytest.approx(ONCE, rel=2e-3)


def test_one_checkpoint_in_two_folders(tmp_path: Path, caplog: Any) -> None:
    killed(tmp_path / "a", 5)
    checkpoint = tmp_path / "a/checkpoint-2"
    one = resumed(checkpoint, tmp_path / "b")
    assert "goes on in another folder" in caplog.text
    assert "ε = 4.09 at" in caplog.text  # announced before anything is shared
    assert one.state.global_step == STEPS  # all of its steps: nothing is taken out of the other's
    assert epsilon(one) == pytest.approx(TWICE, rel=2e-3)
    two = resumed(checkpoint, tmp_path / "c")
    assert epsilon(two) == pytest.approx(THRICE, rel=2e-3)  # the first had said so
    # where it began, both are known
    back = resumed(tmp_path / "a/checkpoint-4", tmp_path / "a")
    assert epsilon(back) == pytest.approx(THRICE, rel=2e-3)


def test_a_branch_goes_on_where_it_is_trained(tmp_path: Path) -> None:
    killed(tmp_path / "a", 4)
    branch = trainer(tmp_path / "b")
    branch.add_callback(Stop(7))
    with pytest.raises(KeyboardInterrupt):
        branch.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    again = resumed(tmp_path / "b/checkpoint-6", tmp_path / "b")
    assert epsilon(again) == pytest.approx(TWICE, rel=2e-3)


def test_nothing_is_left_to_go_on_with(tmp_path: Path) -> None:
    killed(tmp_path, 7)
    resumed(tmp_path / "checkpoint-6", tmp_path)
    with pytest.raises(ValueError, match=r"8 of the 8 messages .* Take the model of the last"):
        resumed(tmp_path / "checkpoint-6", tmp_path)


def begun(checkpoint: Path, folder: Path, step: int) -> Any:
    run = trainer(folder)
    run.add_callback(Stop(step))
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(checkpoint))
    return run


def test_a_branch_is_tried_again(tmp_path: Path, caplog: Any) -> None:
    """With the command that began it: the checkpoint's transcript is still another folder's."""
    killed(tmp_path / "a", 5)
    checkpoint = tmp_path / "a/checkpoint-2"
    begun(checkpoint, tmp_path / "b", 4)
    caplog.clear()
    again = resumed(checkpoint, tmp_path / "b")
    assert "goes on in another folder" in caplog.text
    assert epsilon(again) == pytest.approx(THRICE, rel=2e-3)
    back = resumed(tmp_path / "a/checkpoint-4", tmp_path / "a")
    assert epsilon(back) == pytest.approx(THRICE, rel=2e-3)


@pytest.mark.parametrize("kind", ["correlated", "independent"])
def test_a_branch_is_removed_and_tried_again(kind: str, tmp_path: Path) -> None:
    killed(tmp_path / "a", 4, kind)
    checkpoint = tmp_path / "a/checkpoint-2"
    resumed(checkpoint, tmp_path / "b", kind)
    shutil.rmtree(tmp_path / "b")
    again = resumed(checkpoint, tmp_path / "b", kind)
    counted = sum(again.private_rows.account.messages.values())
    assert counted == (3 if kind == "correlated" else 4 + 6 + 6)


def test_a_branch_of_a_branch_is_told_to_both(tmp_path: Path) -> None:
    killed(tmp_path / "a", 5)
    begun(tmp_path / "a/checkpoint-2", tmp_path / "b", 5)
    resumed(tmp_path / "b/checkpoint-4", tmp_path / "c")
    for name in "ab":
        run = resumed(tmp_path / name / "checkpoint-4", tmp_path / name)
        assert epsilon(run) == pytest.approx(THRICE, rel=2e-3)


def test_a_copy_is_never_what_it_was_copied_from(tmp_path: Path) -> None:
    """Nor after it went on in its place: the original may go on with what was copied."""
    original = killed(tmp_path / "a", 5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    names = {original.private_rows.saved_transcript()["name"]}
    for step in (4, 7):
        run = trainer(tmp_path / "b")
        run.add_callback(Stop(step))
        with pytest.raises(KeyboardInterrupt):
            run.train(resume_from_checkpoint=str(tmp_path / "b/checkpoint-2"))
        names.add(run.private_rows.saved_transcript()["name"])
    assert len(names) == 3
    assert run.private_rows.epsilon == pytest.approx(THRICE, rel=2e-3)
    # what began in the copy is its own
    last = resumed(tmp_path / "b/checkpoint-6", tmp_path / "b")
    assert last.private_rows.saved_transcript()["name"] in names
    assert epsilon(last) == pytest.approx(THRICE, rel=2e-3)


def test_a_copied_output_folder(tmp_path: Path) -> None:
    killed(tmp_path / "a", 5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [resumed(tmp_path / name / "checkpoint-4", tmp_path / name) for name in "ab"]
    assert [epsilon(run) for run in copies] == pytest.approx([ONCE, TWICE], rel=2e-3)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_restored_backup(is_replaced: bool, tmp_path: Path) -> None:
    killed(tmp_path / "a", 4)
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    resumed(tmp_path / "a/checkpoint-2", tmp_path / "a")
    if is_replaced:
        shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "backup", tmp_path / "a", dirs_exist_ok=True)
    run = resumed(tmp_path / "a/checkpoint-2", tmp_path / "a")
    assert epsilon(run) == pytest.approx(TWICE, rel=2e-3)


def test_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(tmp_path, 5)
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    run = resumed(tmp_path / "checkpoint-4", tmp_path)
    assert epsilon(run) == pytest.approx(TWICE, rel=2e-3)


@pytest.mark.parametrize("kind", ["correlated", "independent"])
def test_two_processes_on_one_folder(kind: str, tmp_path: Path) -> None:
    """The one that finds the other's messages stops before its own leaves."""
    killed(tmp_path, 4, kind)
    first, second = trainer(tmp_path, kind), trainer(tmp_path, kind)

    class Other(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    first.add_callback(Other())
    with pytest.raises(RuntimeError, match="another process has shared messages of this run"):
        first.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_run_that_is_still_alive_learns_of_another(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a")

    class Branch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                resumed(tmp_path / "a/checkpoint-2", tmp_path / "b")

    run.add_callback(Branch())
    run.train()
    assert epsilon(run) == pytest.approx(TWICE, rel=2e-3)
    rows = [float(row["defense/epsilon"]) for row in run.state.log_history if "loss" in row]
    assert rows == sorted(rows)  # it never falls


def test_a_target_that_both_exceed_is_refused(tmp_path: Path) -> None:
    settings = {"strength": {"noise_multiplier": None, "target_epsilon": 2.0}}
    killed(tmp_path / "a", 4, **settings)
    with pytest.raises(ValueError, match="target_epsilon=2 would be exceeded"):
        resumed(tmp_path / "a/checkpoint-2", tmp_path / "b", **settings)
    assert epsilon(resumed(tmp_path / "a/checkpoint-2", tmp_path / "a", **settings)) <= 2.0


def test_independent_noise_counts_what_others_plan(tmp_path: Path) -> None:
    killed(tmp_path / "a", 4, "independent")
    checkpoint = tmp_path / "a/checkpoint-2"
    one = resumed(checkpoint, tmp_path / "b", "independent")
    assert sum(one.private_rows.account.messages.values()) == 4 + 6
    two = resumed(checkpoint, tmp_path / "c", "independent")
    assert sum(two.private_rows.account.messages.values()) == 4 + 6 + 6
    rate = two.private_rows.rate
    expected = PrivacyAccount({(SIGMA, rate): 4 + 6 + 6}).epsilon(DELTA)
    assert epsilon(two) == pytest.approx(expected)


def test_an_origin_that_cannot_be_written_is_said(tmp_path: Path, caplog: Any) -> None:
    killed(tmp_path / "a", 4)
    (tmp_path / "a" / f"{FILE}.lock").unlink(missing_ok=True)
    (tmp_path / "a" / f"{FILE}.lock").mkdir()  # no file can be opened there
    run = resumed(tmp_path / "a/checkpoint-2", tmp_path / "b")
    assert "does not learn of this one" in caplog.text
    assert epsilon(run) == pytest.approx(TWICE, rel=2e-3)
