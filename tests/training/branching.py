"""A small training with a proof, that is killed and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import make_task
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense

ROWS, STEPS, SIGMA, DELTA = 16, 8, 1.5, 1e-5


class Stop(TrainerCallback):
    """Kills a run after so many steps, as far as files show."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer(
    folder: Path, kind: str = "correlated", strength: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:  # fmt: skip
    model, batch = make_task("bert", dtype=torch.float32, batch_size=ROWS)
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    rows = [{name: entry[row] for name, entry in batch.items()} for row in range(ROWS)]
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        max_grad_norm=0.0, learning_rate=0.1, optim="sgd", save_steps=2,
        **{"per_device_train_batch_size": 2, "max_steps": STEPS, **arguments},
    )  # fmt: skip
    strength: dict[str, Any] = {"noise_multiplier": SIGMA, "delta": DELTA, **(strength or {})}
    if kind == "correlated":
        strength["correlated"] = True
    defense = make_defense("dp_sgd", per_sample=True, **strength)
    return GradGuardTrainer(model=model, args=args, defense=defense, train_dataset=rows)
