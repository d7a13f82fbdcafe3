"""What a push uploads beside the model, whoever wrote it, tells of no single message and no row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import encoders, sentences, sft
from helpers import make_task
from huggingface_hub.utils import filter_repo_objects
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.train import write_metrics
from hf_gradguard.training.logs import MESSAGES, MESSAGES_OF_RUN, PooledLogs

NUMBER = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?")


class Hub:
    """Keeps the texts of what would be uploaded."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def create_repo(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id="me/net")

    def upload_folder(
        self, folder_path: str, ignore_patterns: list[str] | None = None, **kwargs: Any
    ) -> SimpleNamespace:
        paths = {p.relative_to(folder_path).as_posix(): p for p in Path(folder_path).rglob("*")}
        for name in filter_repo_objects(paths, ignore_patterns=ignore_patterns):
            if paths[name].is_file() and paths[name].suffix != ".safetensors":
                self.files[name] = paths[name].read_text("utf-8", errors="replace")
        return SimpleNamespace(is_done=lambda: True, done=lambda: True)

    def numbers(self) -> list[float]:
        return [float(n) for text in self.files.values() for n in NUMBER.findall(text)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    return hub


class Writer(TrainerCallback):
    """As TensorBoard's: a file in the output folder."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logged.append({**logs, "step": state.global_step})
        folder = Path(args.output_dir) / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events").write_text("\n".join(map(str, self.logged)))


def train(folder: Path, resume: Any = None, **settings: Any) -> tuple[Any, Writer, Any]:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=8)
    rows: list[dict[str, Tensor]] = [{n: v[k] for n, v in batch.items()} for k in range(8)]
    writer = Writer()
    given: dict[str, Any] = {
        "defense": "gaussian_noise", "logging_steps": 1, "per_device_train_batch_size": 1,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", **settings,
    }  # fmt: skip
    args = GradGuardConfig(str(folder), **given)
    trainer = GradGuardTrainer(model, args, train_dataset=rows, callbacks=[writer])
    return trainer, writer, trainer.train(resume_from_checkpoint=resume)


def test_no_file_holds_a_loss_of_few_messages(tmp_path: Path, hub: Hub) -> None:
    """Nor two files whose difference is one: of 51 messages and of the first 50."""
    trainer, writer, output = train(tmp_path, max_steps=51)
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    metrics = {**output.metrics, "eval_accuracy": 0.5}
    trainer.eval_dataset = trainer.train_dataset
    write_metrics(trainer, metrics, "eval_rows")  # of true gradients
    trainer.push_to_hub()
    assert (tmp_path / "metrics.json").is_file()
    assert "metrics.json" not in hub.files
    assert {"runs/events", "trainer_state.json", "train_results.json", "README.md"} <= set(
        hub.files
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 51
    for loss in losses:
        assert min(abs(number / loss - 1) for number in hub.numbers()) > 1e-6
    mean = float(f"{sum(losses[:50]) / 50:.4g}")
    assert [entry["loss"] for entry in writer.logged if "loss" in entry] == [mean]
    assert writer.logged[-1]["train_loss"] == mean
    assert json.loads(hub.files["train_results.json"])["train_loss"] == mean
    history = json.loads(hub.files["trainer_state.json"])["log_history"]
    assert [e.get("loss", e.get("train_loss")) for e in history if {"loss", "train_loss"} & set(e)]
    assert MESSAGES not in hub.files["trainer_state.json"]


def test_trackers_of_no_defense_get_each_log(tmp_path: Path) -> None:
    """Its messages tell all anyhow."""
    trainer, writer, _ = train(tmp_path, defense="none", max_steps=3)
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in writer.logged if "loss" in entry] == expected
    assert len(expected) == 3


def test_a_run_that_was_resumed_counts_its_own_messages(tmp_path: Path) -> None:
    """The first loss after the checkpoint at step 4 is of two messages, though logged at step 6
    after one at step 3.
    """
    saved = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 4}
    train(tmp_path, max_steps=4, **saved)
    trainer, _, _ = train(tmp_path, resume=True, max_steps=7, **saved)
    counts = {e["step"]: e[MESSAGES] for e in trainer.state.log_history if "loss" in e}
    assert counts == {3: 3, 6: 2}
    assert trainer.state.log_history[-1][MESSAGES_OF_RUN] == 3


def test_what_is_shown_is_of_many_messages_whatever_was_resumed() -> None:
    log = PooledLogs(messages_per_step=1)
    assert log.add({"loss": 1.0, "step": 50, MESSAGES: 50})["loss"] == 1.0
    assert "loss" not in log.add({"loss": 9.0, "step": 100, MESSAGES: 10})
    assert log.add({"loss": 2.0, "step": 140, MESSAGES: 40})["loss"] == 3.4
    summary = {"train_loss": 5.0, "step": 140, MESSAGES: 0, MESSAGES_OF_RUN: 50}
    assert log.add(summary)["train_loss"] == 2.2
    few = {"train_loss": 5.0, "step": 103, MESSAGES: 103, MESSAGES_OF_RUN: 3}
    assert "train_loss" not in PooledLogs(1).add(few)


def test_evaluations_and_what_users_log_stay() -> None:
    log = PooledLogs(messages_per_step=1)
    for entry in ({"eval_loss": 0.5, "step": 1}, {"validation_loss": 0.5}, {"mine": "text"}):
        assert log.add(entry) == entry


def test_figures_of_other_libraries_are_of_many_messages(tmp_path: Path) -> None:
    """TRL logs the entropy of a batch, and how many tokens there were so far."""
    writer = Writer()
    settings = {"max_steps": 55, "logging_steps": 1, "defense": "gaussian_noise"}
    settings |= {"per_device_train_batch_size": 1}
    trainer = sft().run(tmp_path, settings, callbacks=[writer])
    of_batches = {"loss", "entropy", "mean_token_accuracy", "num_tokens"}
    assert of_batches <= set(trainer.state.log_history[0])
    for entry in writer.logged:
        assert (set(entry) & of_batches) == (of_batches if entry["step"] == 50 else set())
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history[:55]]
    shown = next(entry for entry in writer.logged if "loss" in entry)
    assert shown["num_tokens"] == tokens[49]
    entropies = [entry["entropy"] for entry in trainer.state.log_history[:50]]
    assert shown["entropy"] == pytest.approx(sum(entropies) / 50, rel=1e-3)


def test_a_card_of_sentence_transformers_shows_no_row(
    tmp_path: Path, folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would show three rows of each data set, texts to try, and a table of losses."""
    # The class of these arguments was made in a function, so they cannot be saved.
    monkeypatch.setattr(GradGuardConfig, "__reduce__", lambda self: (dict, ()))
    settings = {"max_steps": 3, "logging_steps": 1, "defense": "gaussian_noise"}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    training = encoders(folder)
    texts = [text for k in range(2) for text in sentences(k)]
    for k, guarded in enumerate((None, settings)):
        trainer = training.run(tmp_path / str(k), guarded)
        trainer.push_to_hub()
        card = hub.files["README.md"]
        assert any(text in card for text in texts) == (guarded is None)
        assert ("min:" in card) == (guarded is None)
    assert "Size: 12 training samples" in card
    assert "Training Loss" not in card
    saved = (tmp_path / "1" / "checkpoint-2" / "README.md").read_text("utf-8")
    assert not any(text in saved for text in texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder")
