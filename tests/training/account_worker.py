"""Trains until it is killed, and says after each exchange that its messages have left.

Usage: account_worker.py FOLDER KIND
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.leakage import FisherAccountant

ROWS, SIGMA = 24, 1.5


def trainer(folder: Path, kind: str, cls: type = GradGuardTrainer, **settings: Any) -> Any:
    """With an account: of (ε, δ), or the Fisher information. `correlated` trains a head alone."""
    torch.manual_seed(0)
    model, batch = make_task("bert", dtype=torch.float32, batch_size=ROWS)
    data = [{key: value[row] for key, value in batch.items()} for row in range(ROWS)]
    if kind == "correlated":  # a pass of twelve messages is all that it may share
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
        settings = {
            "max_steps": 12, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.1,
            "max_grad_norm": 0.0, "noise_seed": 7, **settings,
        }  # fmt: skip
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100,
        **{"per_device_train_batch_size": 6, "max_steps": 10_000, "save_steps": 4, **settings},
    )  # fmt: skip
    if kind == "correlated":
        defense = make_defense(
            "dp_sgd", per_sample=True, noise_multiplier=SIGMA, delta=1e-3, correlated=True
        )
        return cls(model=model, args=args, defense=defense, train_dataset=data)
    if kind == "epsilon":
        defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0, delta=1e-3)
        return cls(model=model, args=args, defense=defense, train_dataset=data)
    noise = make_defense("gaussian_noise", scale=0.1)
    account = FisherAccountant()
    return cls(model=model, args=args, defense=noise, train_dataset=data, accountant=account)


class Telling(GradGuardTrainer):
    """Keeps of each message of correlated noise its place, its rows, and the noise's sums."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        self.rows = inputs["gradguard_row"].tolist() if "gradguard_row" in inputs else []
        return super().training_step(model, inputs, *rest)

    def _exchange(self, module: Any) -> None:
        super()._exchange(module)
        noise = self._clients[0].state.get("noise")
        about = {}
        if noise is not None:
            sums = noise.memory[:, :2].flatten().tolist()
            about = {"place": noise.position - 1, "rows": self.rows, "sums": sums}
        self.left = [*getattr(self, "left", []), about]
        self.tell(about)

    def tell(self, about: dict[str, Any]) -> None:
        """For the test, when it keeps messages of its own process."""


class Printing(Telling):
    """Says what left, and gives the test time to kill it."""

    def tell(self, about: dict[str, Any]) -> None:
        print("left", json.dumps(about), flush=True)
        time.sleep(0.2 if about else 0.02)


if __name__ == "__main__":
    trainer(Path(sys.argv[1]), sys.argv[2], Printing).train(resume_from_checkpoint=True)
