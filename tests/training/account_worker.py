"""Trains until it is killed, and says after each exchange that its messages have left.

Usage: account_worker.py FOLDER KIND
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.leakage import FisherAccountant

ROWS = 24


def trainer(folder: Path, kind: str, cls: type = GradGuardTrainer, **settings: Any) -> Any:
    """With an account: of (ε, δ), or of the Fisher information."""
    torch.manual_seed(0)
    model, batch = make_task("bert", dtype=torch.float32, batch_size=ROWS)
    data = [{key: value[row] for key, value in batch.items()} for row in range(ROWS)]
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100,
        per_device_train_batch_size=6, **{"max_steps": 10_000, "save_steps": 4, **settings},
    )  # fmt: skip
    if kind == "epsilon":
        defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0, delta=1e-3)
        return cls(model=model, args=args, defense=defense, train_dataset=data)
    noise = make_defense("gaussian_noise", scale=0.1)
    account = FisherAccountant()
    return cls(model=model, args=args, defense=noise, train_dataset=data, accountant=account)


class Telling(GradGuardTrainer):
    def _exchange(self, module: Any) -> None:
        super()._exchange(module)
        print("left", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    trainer(Path(sys.argv[1]), sys.argv[2], Telling).train()
