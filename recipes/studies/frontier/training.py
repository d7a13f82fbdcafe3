"""One client's training on SST-2 under a defense, as `GradGuardTrainer` does it."""

import functools
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense

from ..lib.text import sst2
from .settings import GRID, HELD_OUT, LENGTH, NOISY, STAGES

TEXTS = {"--model": "a text encoder and its tokenizer", "--data_dir": "folder of SST-2"}
TEST = ("dev", "test_labelled_sst")


class Stage(NamedTuple):
    """A client in its own training.

    Args:
        model: As it is then, without dropout.
        defense: The client's, with what it remembers.
    """

    model: torch.nn.Module
    defense: object


class Task:
    """Sentences, the encoder, and trainings on them. What was trained is kept in `folder`."""

    def __init__(self, model: str, data_dir: str, folder: str | None = None) -> None:
        torch.set_num_threads(1)
        self.name, self.folder = model, folder and Path(folder)
        self._scratch = tempfile.TemporaryDirectory()
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._data_dir = data_dir

    @functools.cached_property
    def train_rows(self) -> Dataset:
        return self._encoded("train").shuffle(seed=0)

    @functools.cached_property
    def test_rows(self) -> list[dict]:
        return [row for split in TEST for row in self._encoded(split)]

    def _encoded(self, split: str) -> Dataset:
        rows = sst2(self._data_dir, split)
        return rows.map(
            lambda row: self.tokenizer(row["sentence"], truncation=True, max_length=LENGTH),
            remove_columns=["sentence"],
        )

    def start(self, seed: int) -> torch.nn.Module:
        """The encoder with the head that a seed gives it."""
        set_seed(seed)
        return AutoModelForSequenceClassification.from_pretrained(
            self.name, num_labels=2, trust_remote_code=False
        )

    def train(self, cell: dict, keep: bool = False) -> torch.nn.Module:
        """By the cell's defense, rate, steps, batch and seed."""
        trainer = self.trainer(self.start(cell["seed"]), self.rows_to_learn(), cell)
        if keep:
            trainer.add_callback(_Keeper(trainer, self, cell))
        trainer.train()
        return trainer.model

    def rows_to_learn(self) -> Dataset:
        """Without those that are held out."""
        return self.train_rows.select(range(HELD_OUT, len(self.train_rows)))

    def trainer(self, model: torch.nn.Module, rows: Dataset, cell: dict) -> GradGuardTrainer:
        """One client. It logs at the end, and keeps nothing."""
        args = GradGuardConfig(
            self._scratch.name, defense=cell["defense"], defense_kwargs=cell["strength"],
            learning_rate=cell["learning_rate"], max_steps=cell["steps"], warmup_steps=0.1,
            per_device_train_batch_size=cell["batch"], seed=cell["seed"], use_cpu=True,
            noise_seed=cell["seed"], scale_learning_rate=False, save_strategy="no",
            logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
        )  # fmt: skip
        return GradGuardTrainer(model, args, train_dataset=rows, processing_class=self.tokenizer)

    def right(self, model: torch.nn.Module, rows) -> np.ndarray:
        """`(N,)`, which rows it classifies rightly."""
        model.eval()
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        found = np.zeros(len(rows), dtype=bool)
        for start in range(0, len(rows), 64):
            some = by_length[start : start + 64]
            batch = self.tokenizer.pad(
                [{"input_ids": rows[i]["input_ids"]} for i in some], return_tensors="pt"
            )
            with torch.no_grad():
                classes = model(**batch).logits.argmax(1).tolist()
            found[some] = [c == rows[i]["label"] for c, i in zip(classes, some, strict=True)]
        return found

    def held_out(self) -> Dataset:
        return self.train_rows.select(range(HELD_OUT))

    def stage(self, cell: dict, stage: str) -> Stage:
        """A client at a stage of its training, which is run if it was not kept."""
        folder = self._kept(cell)
        if not (folder / "end.defense").exists():
            self.train(cell, keep=True)
        model = self.start(cell["seed"])
        model.load_state_dict(load_file(folder / f"{stage}.safetensors"), strict=False)
        defense = make_defense(cell["defense"], **cell["strength"])
        defense.prepare(model, self.tokenizer)
        defense.load_state_dict(load_file(folder / f"{stage}.defense"))
        return Stage(model.eval(), defense)

    def _kept(self, cell: dict) -> Path:
        assert self.folder is not None
        strength = "-".join(f"{k}={v}" for k, v in cell["strength"].items())
        numbers = [cell[k] for k in ("learning_rate", "steps", "batch", "seed")]
        return self.folder / "-".join(map(str, (cell["defense"], strength, *numbers)))


class _Keeper(TrainerCallback):
    """Keeps model and defense at every stage."""

    def __init__(self, trainer: GradGuardTrainer, task: Task, cell: dict) -> None:
        self._trainer, self._folder = trainer, task._kept(cell)
        self._stages = {round(share * cell["steps"]): name for name, share in STAGES.items()}
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._keep(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._keep(state.global_step)

    def _keep(self, step: int) -> None:
        if step not in self._stages:
            return
        stage, model = self._stages[step], self._trainer.model
        trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        save_file(trained, self._folder / f"{stage}.safetensors")
        state = self._trainer._clients[0].state_dict()
        save_file({n: t.contiguous() for n, t in state.items()}, self._folder / f"{stage}.defense")


def rates(defense: str, strength: dict, spread: int) -> tuple[float, ...]:
    """Of the grid: around 2e-4, or for noise of r times the gradient that times √(1 + r²), by
    which AdamW divides its steps.
    """
    ratio = strength["relative_scale"] if defense in NOISY else 0.0
    wanted = 2e-4 * math.sqrt(1 + ratio**2)
    near = min(range(len(GRID)), key=lambda i: abs(math.log(GRID[i] / wanted)))
    near = min(max(near, spread), len(GRID) - 1 - spread)
    return GRID[near - spread : near + spread + 1]


def row_of(defense: str, strength: dict) -> str:
    return " ".join(
        [
            defense,
            *(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in strength.items()),
        ]
    )
