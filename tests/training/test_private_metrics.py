"""Metrics of true gradients: on the rank's console, and in no file and no tracker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task
from torch import Tensor
from transformers import (
    BertForSequenceClassification,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.logs import LogPolicy, PrivateMetrics

OF_GRADIENTS = ("defense/relative_error", "defense/cosine", "leakage/dfil_max", "leakage/mse_bound")


def bert() -> BertForSequenceClassification:
    model: BertForSequenceClassification = make_task("bert", dtype=torch.float32)[0]
    return model


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    batch = make_task("bert", dtype=torch.float32, batch_size=count)[1]
    return [{key: value[k] for key, value in batch.items()} for k in range(count)]


class Tracker(TrainerCallback):
    """What an experiment tracker gets."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.names |= set(logs)


def train(folder: Path, **settings: Any) -> tuple[GradGuardTrainer, Tracker]:
    tracker = Tracker()
    args = GradGuardConfig(
        str(folder), defense="gaussian_noise", defense_kwargs={"scale": 0.1},
        leakage_logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        **{"max_steps": 4, "save_steps": 2, "logging_steps": 2, **settings},
    )  # fmt: skip
    trainer = GradGuardTrainer(
        bert(), args, train_dataset=rows(), eval_dataset=rows(2), callbacks=[tracker]
    )
    trainer.train()
    trainer.save_state()
    return trainer, tracker


def names_in(folder: Path) -> set[str]:
    """Of what `save_state` writes, which a push uploads."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {name for entry in history for name in entry}


def test_no_file_and_no_tracker_gets_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A push uploads `trainer_state.json`. What is of no gradient is logged as ever."""
    trainer, tracker = train(tmp_path)
    for names in (tracker.names, names_in(tmp_path)):
        assert not names & set(OF_GRADIENTS)
        assert not any(name.startswith("leakage/") for name in names)
        assert "defense/seconds" in names
        assert not names & {"loss", "train_loss"}
    printed = capsys.readouterr().out
    for name in OF_GRADIENTS:
        assert name in printed
        assert any(name in entry for entry in trainer.state.log_history)


def test_what_is_printed_has_two_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So much names nobody among two hundred; three digits of two metrics do."""
    trainer, _ = train(tmp_path)
    printed = capsys.readouterr().out
    for entry in trainer.state.log_history:
        for name in OF_GRADIENTS:
            if name in entry:
                assert f"{entry[name]:.8g}" not in printed
                assert f"{entry[name]:.2g}".rstrip("0").rstrip(".") in printed


@pytest.mark.long
def test_who_asks_for_it_gets_means_over_many_messages(tmp_path: Path) -> None:
    _, tracker = train(tmp_path / "few", private_metrics="log")
    for names in (tracker.names, names_in(tmp_path / "few")):
        assert not names & set(OF_GRADIENTS)
    trainer, tracker = train(
        tmp_path / "many", private_metrics="log", max_steps=110, save_steps=200
    )
    for names in (tracker.names, names_in(tmp_path / "many")):
        assert set(OF_GRADIENTS) <= names
    entries = [e for e in trainer.state.log_history if OF_GRADIENTS[0] in e]
    assert [entry["step"] for entry in entries] == [50, 100]
    for entry in entries:
        assert all(entry[name] == float(f"{entry[name]:.2g}") for name in OF_GRADIENTS)


@pytest.mark.long
def test_pushed_figures_name_nobody() -> None:
    """Of 200 sentences, behind noise of a known strength, 1,000 times as large. Two figures of one
    message name the sentence, and two digits of them do so more often than chance; of what is
    pushed, means over 50 messages, every sentence's part is lost.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(200, 5_000, generator=generator, dtype=torch.float64)
    gradients *= torch.rand(200, 1, generator=generator, dtype=torch.float64) + 0.5
    deviation = 1e3 * float(gradients.square().mean().sqrt())
    noise = deviation * torch.randn(250, 5_000, generator=generator, dtype=torch.float64)

    def figures(message: Tensor, gradient: Tensor) -> dict[str, float]:
        error = (message - gradient).norm() / gradient.norm()
        cosine = torch.cosine_similarity(message, gradient, 0)
        return dict(zip(OF_GRADIENTS[:2], (float(error), float(cosine)), strict=True))

    named = {"exact": 0, "rounded": 0, "means": 0}
    private = PrivateMetrics()
    for truth in range(100):
        message = gradients[truth] + noise[truth]
        candidates = [figures(message, gradient) for gradient in gradients]
        others = [
            figures(gradients[k] + noise[100 + k], gradients[k])
            for k in torch.randint(150, (49,), generator=generator).tolist()
        ]
        for shown in named:
            seen = candidates[truth]
            away = [sum(abs(c[name] / seen[name] - 1) for name in seen) for c in candidates]
            if shown == "rounded":
                seen = private.rounded(seen)
                away = [sum(private.rounded(c)[n] != seen[n] for n in seen) for c in candidates]
            if shown == "means":
                private.means(seen, 50 * truth + 1)
                rest = {n: sum(other[n] for other in others) / 49 for n in seen}
                seen = private.means(rest, 50 * truth + 50)
                away = [sum(abs(c[name] / seen[name] - 1) for name in seen) for c in candidates]
            named[shown] += int(truth in np.argsort(away, kind="stable")[:2])
    assert named["exact"] == 100
    assert named["rounded"] > 8
    assert named["means"] <= 6  # one by chance: P(more than 6) < 1e-4


LOSS = re.compile(
    r"\| (No log|[\d.]+) +\| [\d.]+ +\| \d+ +\|"
)  # of a row of a card: loss, epoch, step


@pytest.mark.parametrize("private_metrics", ["console", "log"])
def test_pushed_losses_are_of_many_messages(tmp_path: Path, private_metrics: str) -> None:
    """The loss of one text names it among hundreds, to who knows the model: as the first step's
    does, of a public checkpoint.
    """
    few = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    few |= {"private_metrics": private_metrics, "per_device_train_batch_size": 1}
    trainer, tracker = train(tmp_path, **few)
    assert not tracker.names & {"loss", "train_loss"}
    assert "learning_rate" in tracker.names
    assert sum("loss" in entry for entry in trainer.state.log_history) == 4
    assert not names_in(tmp_path) & {"loss", "train_loss"}
    trainer.create_model_card()
    rows_of_card = LOSS.findall((tmp_path / "README.md").read_text())
    assert rows_of_card == ["No log"] * 2
    assert sum("loss" in entry for entry in trainer.state.log_history) == 4


def test_losses_of_many_messages_are_as_logged() -> None:
    log = [{"step": step, "loss": float(step), "grad_norm": 1.0} for step in range(10, 130, 10)]
    log += [{"step": 120, "train_loss": 2.0}]
    assert LogPolicy(messages_per_step=5).public_history(log) == log
    pooled = LogPolicy(messages_per_step=1).public_history(log)
    assert {entry["step"]: entry["loss"] for entry in pooled if "loss" in entry} == {
        50: 30.0, 100: 80.0,
    }  # fmt: skip
    # of the losses above: else the difference would be the mean of the last 20
    assert pooled[-1] == {"step": 120, "train_loss": 55.0}
    assert all(entry["grad_norm"] == 1.0 for entry in pooled[:-1])


def test_other_arguments_have_the_same_default(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = GradGuardTrainer(bert(), args, train_dataset=rows(), defense="gaussian_noise")
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_state()
    assert "defense/cosine" not in names_in(tmp_path)
    assert "defense/cosine" in trainer.state.log_history[0]


def test_another_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="private_metrics"):
        GradGuardConfig(str(tmp_path), defense="none", private_metrics="file")
