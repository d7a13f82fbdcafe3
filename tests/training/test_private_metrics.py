"""Metrics of true gradients: on the rank's console, and in no file and no tracker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        str(folder), defense="gaussian_noise", defense_kwargs={"scale": 0.1}, max_steps=4,
        logging_steps=2, leakage_logging_steps=1, save_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = GradGuardTrainer(bert(), args, train_dataset=rows(), callbacks=[tracker])
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
        assert {"loss", "defense/seconds"} <= names
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


def test_who_asks_for_it_gets_them_in_the_log(tmp_path: Path) -> None:
    _, tracker = train(tmp_path, private_metrics="log")
    for names in (tracker.names, names_in(tmp_path)):
        assert set(OF_GRADIENTS) <= names


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
