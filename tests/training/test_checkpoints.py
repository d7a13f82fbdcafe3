"""Half-written and damaged checkpoints are told by what they lack, and skipped for the newest
complete one. Kills are in `distributed/test_kill.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import make_task
from huggingface_hub.utils import filter_repo_objects
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HPSearchBackend

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.checkpoints import complete
from hf_gradguard.training.checkpoints.complete import LIST, missing_from


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    batch = make_task("bert", dtype=torch.float32, batch_size=count)[1]
    return [{key: value[k] for key, value in batch.items()} for k in range(count)]


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4,
        "use_cpu": True, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True,
        "save_steps": 2, **more,
    }  # fmt: skip


def trainer_of(
    folder: Path, callbacks: list[TrainerCallback] | None = None, **more: Any
) -> GradGuardTrainer:
    noise = {"defense": "gaussian_noise", "noise_seed": 2}
    args = GradGuardConfig(**{**settings_of(folder), **noise, **more})
    model = make_task("bert", dtype=torch.float32)[0]
    data = rows()
    return GradGuardTrainer(
        model, args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Checkpoints 2, 4 and 6 of a run, and its weights."""
    folder = tmp_path_factory.mktemp("finished")
    trainer = trainer_of(folder)
    trainer.train()
    return folder, weights(trainer)


@pytest.fixture
def run(finished: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy of them to be damaged."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def cut(name: str, part: float = 0.5) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * part)])

    return act


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (remove("model.safetensors"), r"model\.safetensors is missing"),
    "half the weights": (cut("model.safetensors"), r"model\.safetensors has \d+ bytes, but was"),
    "weights cut to nothing": (cut("model.safetensors", 0), r"model\.safetensors has 0 bytes"),
    "no optimizer": (remove("optimizer.pt"), r"optimizer\.pt is missing"),
    "half an optimizer": (cut("optimizer.pt"), r"optimizer\.pt has \d+ bytes, but was saved with"),
    "no schedule": (remove("scheduler.pt"), r"scheduler\.pt is missing"),
    "no random state": (remove("rng_state.pth"), r"rng_state\.pth is missing"),
    "half a random state": (cut("rng_state.pth"), r"rng_state\.pth has \d+ bytes"),
    "no state": (remove("trainer_state.json"), r"trainer_state\.json is missing"),
    "half a state": (cut("trainer_state.json"), r"trainer_state\.json is cut off"),
    "half a list": (cut(LIST), f"{LIST} is cut off"),
    "neither list nor state": (
        lambda folder: (remove(LIST)(folder), remove("trainer_state.json")(folder))[0],
        r"trainer_state\.json is missing",
    ),
    "neither list nor weights": (
        lambda folder: (remove(LIST)(folder), remove("model.safetensors")(folder))[0],
        "it holds no weights",
    ),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir())[0], "is missing"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named_and_the_newest_complete_one_is_found(
    run: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, says = DAMAGES[case]
    damage(run / "checkpoint-6")
    with pytest.raises(ValueError, match=rf"checkpoint-6 is no complete .*{says}.*checkpoint-4"):
        trainer_of(run).train(resume_from_checkpoint=str(run / "checkpoint-6"))
    accelerator = trainer_of(run).accelerator
    assert complete.newest_complete(run, accelerator) == str(run / "checkpoint-4")
    assert "checkpoint-6: " in caplog.text


@pytest.mark.parametrize("asked", [True, "True", "true"])  # as text from a command line
def test_training_goes_on_from_the_newest_complete_one(
    finished: tuple[Path, dict[str, Tensor]], run: Path, asked: bool | str
) -> None:
    cut("model.safetensors")(run / "checkpoint-6")
    trainer = trainer_of(run)
    trainer.train(resume_from_checkpoint=asked)
    assert trainer.state.global_step == 6
    assert all(torch.equal(p, finished[1][n]) for n, p in trainer.model.named_parameters())
    assert not missing_from(run / "checkpoint-6")  # written anew


def test_a_run_without_a_complete_checkpoint_begins_anew(
    finished: tuple[Path, dict[str, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert "There is no complete checkpoint in" in caplog.text
    assert all(torch.equal(p, finished[1][n]) for n, p in trainer.model.named_parameters())


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no such folder.*no complete one beside it"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_a_private_file_that_is_damaged_is_named(run: Path) -> None:
    cut("gradguard_private_rank0.safetensors")(run / "checkpoint-6")
    with pytest.raises(ValueError, match=r"gradguard_private_rank0\.safetensors is cut off"):
        trainer_of(run, max_steps=8).train(resume_from_checkpoint=True)


def test_stock_checkpoints_count_by_their_last_file(tmp_path: Path) -> None:
    args = TrainingArguments(**settings_of(tmp_path, max_steps=4))
    Trainer(make_task("bert", dtype=torch.float32)[0], args, train_dataset=rows()).train()
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    shutil.rmtree(tmp_path / "checkpoint-6")
    cut("trainer_state.json")(tmp_path / "checkpoint-4")
    found = complete.newest_complete(tmp_path, trainer.accelerator)
    assert found == str(tmp_path / "checkpoint-2")


def test_a_model_alone_resumes_as_in_the_stock_trainer(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_only_model=True, max_steps=4).train()
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


class Killed(BaseException):
    """What nothing but a test catches."""


def killed_in_save(trainer: GradGuardTrainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save = type(trainer)._save_optimizer_and_scheduler

    def killed(self: GradGuardTrainer, folder: str) -> None:
        if self.state.global_step == step:
            raise Killed
        save(self, folder)

    monkeypatch.setattr(type(trainer), "_save_optimizer_and_scheduler", killed)
    with pytest.raises(Killed):
        trainer.train(resume_from_checkpoint=True)
    monkeypatch.undo()


def test_a_complete_checkpoint_that_is_overwritten_no_longer_counts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoint-4")
    for name in ("checkpoint-2", "checkpoint-6"):
        assert not missing_from(run / name)
    remove("optimizer.pt")(run / "checkpoint-6")
    killed_in_save(trainer_of(run), 6, monkeypatch)
    assert missing_from(run / "checkpoint-6") == "trainer_state.json is missing"
    assert sorted(complete.complete_steps(run)) == [2, 4]


@pytest.mark.long
@pytest.mark.parametrize("best", [False, True])
def test_rotation_leaves_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    """At one checkpoint to keep, and with the best one to be loaded at the end."""
    more: dict[str, Any] = {"save_total_limit": 1, "max_steps": 10, "save_steps": 1}
    if best:
        more |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    for step in (3, 4, 4, 8):
        killed_in_save(trainer_of(tmp_path, **more), step, monkeypatch)
        assert max(complete.complete_steps(tmp_path)) == step - 1
    trainer = trainer_of(tmp_path, **more)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 10
    assert complete.complete_steps(tmp_path)


def test_the_list_names_what_resuming_reads(finished: tuple[Path, dict[str, Tensor]]) -> None:
    names = set(json.loads((finished[0] / "checkpoint-2" / LIST).read_text()))
    private = "gradguard_private_rank0.safetensors"
    assert names == {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", private}


def test_a_list_of_an_older_version_has_sizes_alone(run: Path) -> None:
    path = run / "checkpoint-6" / LIST
    listed = json.loads(path.read_text())
    assert all(len(checksum) == 64 for _, checksum in listed.values())
    path.write_text(json.dumps({name: size for name, (size, _) in listed.items()}))
    assert not missing_from(run / "checkpoint-6", checks_content=True)
    (run / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    assert "0 bytes" in missing_from(run / "checkpoint-6", checks_content=True)


def test_ranks_agree_on_the_newest_that_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has 2 and 5, on a disk of its own; this is rank 0, with 2 and 6."""
    theirs = iter([5, 2])  # rank 1's newest, then its newest up to rank 0's

    def gather(step: Tensor) -> Tensor:
        return torch.cat([step, torch.tensor([next(theirs)])])

    monkeypatch.setattr(complete, "gather", gather)
    for step in (2, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")
    newest = complete.newest_complete(tmp_path, Accelerator(cpu=True))
    assert newest == str(tmp_path / "checkpoint-2")
    assert not list(theirs)


# Pushing


class Hub:
    """Keeps the names of what would be uploaded."""

    def __init__(self) -> None:
        self.uploads: list[set[str]] = []

    def create_repo(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id="me/net")

    def upload_folder(
        self, folder_path: str, ignore_patterns: list[str] | None = None, **kwargs: Any
    ) -> SimpleNamespace:
        files = (p for p in Path(folder_path).rglob("*") if p.is_file())
        names = (path.relative_to(folder_path).as_posix() for path in files)
        self.uploads.append(set(filter_repo_objects(names, ignore_patterns=ignore_patterns)))
        return SimpleNamespace(is_done=lambda: True, done=lambda: True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: {})
    return hub


def test_a_searchs_checkpoints_are_not_pushed(tmp_path: Path, hub: Hub) -> None:
    feedback = {"defense": "pruning", "defense_kwargs": {"error_feedback": True}}
    args = GradGuardConfig(**settings_of(tmp_path, push_to_hub=True, max_steps=2), **feedback)
    trainer = GradGuardTrainer(
        None,
        args,
        train_dataset=rows(),
        model_init=lambda: make_task("bert", dtype=torch.float32)[0],
    )
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space, trainer.compute_objective = lambda trial: {}, lambda metrics: 0.0
    trainer.train(trial=SimpleNamespace(number=0, params={}))  # type: ignore[call-arg]
    trial = tmp_path / "run-0" / "checkpoint-2"
    assert (trial / "gradguard_private_rank0.safetensors").is_file()
    trainer_of(tmp_path, max_steps=1).push_to_hub()  # with what that search has left
    during, after = hub.uploads
    assert "model.safetensors" in during & after
    assert not [n for n in during | after if "gradguard_" in n or "checkpoint-" in n]


def test_private_files_that_were_copied_are_not_pushed(tmp_path: Path, hub: Hub) -> None:
    for name in ("gradguard_private_rank0.safetensors", "notes/gradguard_account_rank0.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    trainer_of(tmp_path).push_to_hub()
    assert not any("gradguard_" in name for name in hub.uploads[0])


def test_no_file_holds_the_seed_of_noise(tmp_path: Path) -> None:
    """Whoever has it has all noise. It is in no file beside a model, and in no tracker's record."""
    seed = 987_654_321
    trainer = trainer_of(tmp_path, noise_seed=seed, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.create_model_card()
    saved = [tmp_path / "checkpoint-2", tmp_path / "model"]
    assert [torch.load(one / TRAINING_ARGS_NAME, weights_only=False).noise_seed
            for one in saved] == [None, None]  # fmt: skip
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert str(seed).encode() not in content, path
            assert seed.to_bytes(4, "little") not in content, path
    assert str(seed) not in trainer.args.to_json_string()
    assert trainer.args.noise_seed == seed
