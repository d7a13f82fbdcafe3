"""Rank 1 dies, or stops to answer, in its second step."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
from cases import make_model, rows
from exchange_worker import settings
from launcher import begin, finish
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer

TIMEOUT = 10  # seconds


class Ends(TrainerCallback):
    def __init__(self, how: int) -> None:
        self.how = how

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            print("second step", flush=True)
            if args.process_index == 1:
                os.kill(os.getpid(), self.how)


def main() -> None:
    folder, (how, secure) = begin()
    # on a CPU the stock Trainer makes the group without ddp_timeout
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    args = GradGuardConfig(
        **settings(folder, gradient_accumulation_steps=1),
        defense="gaussian_noise", secure_aggregation=secure == "secure",
    )  # fmt: skip
    model, end = make_model("plain"), Ends(int(getattr(signal, how)))
    GradGuardTrainer(model, args, train_dataset=rows("bert"), callbacks=[end]).train()
    finish(folder, {})


if __name__ == "__main__":
    main()
