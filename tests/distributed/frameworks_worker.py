"""Other libraries' Trainers on this rank: their stock weights, and those of defense="none"; and
what leaves the rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recording
import torch
from frameworks import Training, trainings, weights
from launcher import begin, finish
from transformers import TrainerCallback


def compare(training: Training, folder: Path) -> dict[str, Any]:
    stock = training.run(folder, None)
    found, expected = (
        training.run(folder, {"defense": "none", "share_input_embeddings": True}),
        weights(stock),
    )
    start = training.make()["model"]
    before = {name: p.detach() for name, p in start.named_parameters()}
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (found, stock)
    ]
    return {
        "difference": max(float((w - expected[n]).abs().max()) for n, w in weights(found).items()),
        "moved": max(float((w - before.get(n, w)).abs().max()) for n, w in expected.items()),
        "losses": losses,
        "ranks": found.accelerator.num_processes,
    }


class On(TrainerCallback):
    """Records what is sent while batches are processed, not while the start is agreed on."""

    def __init__(self, group: recording.Recorder) -> None:
        self.group = group

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.group.on = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.group.on = False


def exchanged(training: Training, folder: Path, group: recording.Recorder) -> dict[str, Any]:
    """Sizes of what a rank sends in three steps with noise, and whether any of it is noiseless."""
    made = training.make
    group.sent.clear()
    training.make = lambda: {**made(), "callbacks": [On(group)]}
    # every entry gets noise far beyond its gradient
    guarded = {"defense": "gaussian_noise", "defense_kwargs": {"relative_scale": 1e4}}
    trainer = training.run(folder, {**guarded, "logging_strategy": "no"})
    shared = sum(p.numel() for p in trainer._shared(trainer.model).values())
    return {
        "shared": shared,
        "parameters": len(list(trainer.model.parameters())),
        "sizes": [len(tensor) for _, tensor in group.sent],
        "names": [name for name, _ in group.sent],
        "noise": trainer.state.log_history[-1]["defense/relative_error"],
    }


def main() -> None:
    folder, names = begin()
    group = recording.initialize()
    own = folder / f"rank{group.rank()}"
    results: dict[str, Any] = {}
    for name in names:
        training = trainings(folder / "encoder")[name]
        torch.manual_seed(0)
        results[name] = compare(training, own / "out")
        results[f"{name}, sent"] = exchanged(training, own / "out", group)
    finish(folder, results)


if __name__ == "__main__":
    main()
