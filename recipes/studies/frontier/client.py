"""One client's training under a defense, as `GradGuardTrainer` does it, and what is kept of it."""

import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses.pruning import PruningDefense
from hf_gradguard.leakage import dp_sgd_epsilon

from ..lib.device import DEVICE
from .settings import DELTA, GRID, RATES_SEED, STAGES


class Stage(NamedTuple):
    """A client in its own training.

    Args:
        model: As it is then, without dropout.
        defense: The client's, with what it remembers.
        batches: Of how many batches each entry of its next message is the sum, where a pruning
            feeds back what it left out: everybody can count it.
    """

    model: torch.nn.Module
    defense: object
    batches: dict[str, torch.Tensor] | None = None


class Client:
    """Trainings of one client. A subclass has the model and the data. What was trained is kept in
    `folder`.
    """

    processing_class: Any = None
    test_rows: Any  # to judge on

    def __init__(self, folder: str | Path | None = None) -> None:
        torch.set_num_threads(1)
        self.folder = folder and Path(folder)
        self._scratch = tempfile.TemporaryDirectory()

    def start(self, seed: int) -> torch.nn.Module:
        """The model as a seed gives it."""
        raise NotImplementedError

    def rows_to_learn(self) -> Any:
        """Without those that are held out."""
        raise NotImplementedError

    def held_out(self) -> Any:
        """On which rates are chosen."""
        raise NotImplementedError

    def right(self, model: torch.nn.Module, rows: Any) -> np.ndarray:
        """`(N,)`, which rows it classifies rightly."""
        raise NotImplementedError

    def train(self, cell: dict, keep: bool = False) -> torch.nn.Module:
        """By the cell's defense, rate, steps, batch and seed."""
        trainer = self.trainer(self.start(cell["seed"]), self.rows_to_learn(), cell)
        if keep:
            trainer.add_callback(_Keeper(trainer, self, cell))
        trainer.train()
        return trainer.model

    def trained(self, cell: dict) -> dict:
        """Figures of a training: by the seed that chooses rates, or another one."""
        return self.on_held_out(cell) if cell["seed"] == RATES_SEED else self.learned(cell)

    def on_held_out(self, cell: dict) -> dict:
        """What a rate is chosen by."""
        model = self.train(cell)
        return {"held_out": round(float(self.right(model, self.held_out()).mean()), 4)}

    def learned(self, cell: dict) -> dict:
        """Accuracies, which test rows are right, and what a proof says; the training is kept."""
        model = self.train(cell, keep=True)
        right = self.right(model, self.test_rows)
        held_out = self.right(model, self.held_out())
        bits = np.packbits(right).tobytes().hex()
        found = {"accuracy": float(right.mean()), "held_out": float(held_out.mean()),
                 "right": bits, "of": len(right)}  # fmt: skip
        noise = cell["strength"].get("noise_multiplier")
        if noise is not None:
            chance = cell["batch"] / len(self.rows_to_learn())
            found["epsilon"] = dp_sgd_epsilon(noise, chance, cell["steps"], DELTA)
        return found

    def trainer(self, model: torch.nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        """One client. It logs at the end, and keeps nothing."""
        args = GradGuardConfig(
            self._scratch.name, defense=cell["defense"], defense_kwargs=cell["strength"],
            learning_rate=cell["learning_rate"], max_steps=cell["steps"], warmup_steps=0.1,
            per_device_train_batch_size=cell["batch"], seed=cell["seed"],
            noise_seed=cell["seed"], scale_learning_rate=False, save_strategy="no",
            logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
        )  # fmt: skip
        return GradGuardTrainer(
            model, args, train_dataset=rows, processing_class=self.processing_class
        )

    def stage(self, cell: dict, stage: str) -> Stage:
        """A client at a stage of its training, which is run if it was not kept."""
        folder = self._kept(cell)
        if not (folder / "end.defense").exists():
            self.train(cell, keep=True)
        model = self.start(cell["seed"])
        model.load_state_dict(load_file(folder / f"{stage}.safetensors"), strict=False)
        model.to(DEVICE)
        defense = make_defense(cell["defense"], **cell["strength"])
        defense.prepare(model, self.processing_class)
        defense.load_state_dict(load_file(folder / f"{stage}.defense", device=DEVICE))
        return Stage(model.eval(), defense, _batches(defense))

    def _kept(self, cell: dict) -> Path:
        assert self.folder is not None
        strength = "-".join(f"{k}={v}" for k, v in cell["strength"].items())
        numbers = [cell[k] for k in ("learning_rate", "steps", "batch", "seed")]
        return self.folder / "-".join(map(str, (cell["defense"], strength, *numbers)))


class _Keeper(TrainerCallback):
    """Keeps model and defense at every stage."""

    def __init__(self, trainer: GradGuardTrainer, client: Client, cell: dict) -> None:
        self._trainer, self._folder = trainer, client._kept(cell)
        held = trainer._clients[0].facts.warmup_messages  # nothing can be read of these
        self._stages = {name: max(held, round(s * cell["steps"])) for name, s in STAGES.items()}
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._keep(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._keep(state.global_step)

    def _keep(self, step: int) -> None:
        for stage in (name for name, of in self._stages.items() if of == step):
            model = self._trainer.model
            trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
            save_file(trained, self._folder / f"{stage}.safetensors")
            state = self._trainer._clients[0].state_dict()
            kept = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(kept, self._folder / f"{stage}.defense")


def _batches(defense: Any) -> dict[str, torch.Tensor] | None:
    """What a pruning counts, and everybody can count: of how many batches the next entries are."""
    if not isinstance(defense, PruningDefense) or not defense._left_out.batches:
        return None
    return {name: count.short() + 1 for name, count in defense._left_out.batches.items()}


def rates(
    strength: dict, spread: int, usual: float = 2e-4, grid: tuple[float, ...] = GRID
) -> tuple[float, ...]:
    """Of the grid: around the usual one, or for noise of r times the gradient around that times
    √(1 + r²), by which AdamW divides its steps. Noise in proportion to a clip is far larger.
    """
    ratio = 1e3 if "noise_multiplier" in strength else strength.get("relative_scale", 0.0)
    wanted = usual * math.sqrt(1 + ratio**2)
    near = min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / wanted)))
    near = min(max(near, spread), len(grid) - 1 - spread)
    return grid[near - spread : near + spread + 1]


def row_of(defense: str, strength: dict) -> str:
    return " ".join(
        [
            defense,
            *(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in strength.items()),
        ]
    )
