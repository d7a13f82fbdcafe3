"""Trains where some clients' batches hold nothing that counts, and writes what was exchanged."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from cases import IN_ORDER, UNEVEN
from helpers import make_task, token_batch
from launcher import begin, finish

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.exchange.gradients import average_gradients
from hf_gradguard.training.message import MessageMaker

SCALE = 50.0  # hides every gradient here
SUM = {"secure_aggregation": True, "noise_for": "sum", "secure_aggregation_range": 4096.0}
# The rows of some ranks have no labels; in turn, each is a batch of a rank.
RUNS: dict[str, dict[str, Any]] = {
    "all count": {"silent": (), **SUM},
    "one is empty": {"silent": (1,), **SUM},
    "two are empty": {"silent": (1, 2), **SUM},
    "none counts": {"silent": (0, 1, 2), **SUM},
    "accumulated": {"silent": (1,), "gradient_accumulation_steps": 2, **SUM},
    "short batch": {
        "silent": (), "rows": 4 * 5 + 1, "per_device_train_batch_size": 4,
        "clients_per_process": 4, "max_steps": 2, **UNEVEN, **SUM,
    },
    "message": {"silent": (1,)},
}  # fmt: skip
STEPS = 2


def trained(folder: Any, rank: int, silent: tuple[int, ...], rows: int = 24, **more: Any) -> Any:
    """The gradient before and after each exchange."""
    batch = token_batch(rows, 6)
    data = [{"input_ids": ids, "labels": ids.clone()} for ids in batch["input_ids"]]
    for index, row in enumerate(data):
        if index % 3 in silent:
            row["labels"][:] = -100
    settings = {"per_device_train_batch_size": 1, "max_steps": STEPS, **IN_ORDER, **more}
    args = GradGuardConfig(
        str(folder / "out"), learning_rate=0.0, max_grad_norm=0.0, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", defense="gaussian_noise",
        defense_kwargs={"scale": SCALE}, **settings,
    )  # fmt: skip
    own: list[float] = []
    means: list[float] = []
    exchange = average_gradients

    def watched(parameters: Any, *rest: Any) -> None:
        parameters = list(parameters)
        own.append(_size(parameters))
        exchange(parameters, *rest)
        means.append(_size(parameters))

    with patch.object(MessageMaker, "average", staticmethod(watched)):
        model = make_task("gpt2_lm", dtype=torch.float32)[0]
        GradGuardTrainer(model, args, train_dataset=data).train()
    return {"own": own, "means": means}


def _size(parameters: Any) -> float:
    grads = [torch.zeros(1) if p.grad is None else p.grad.flatten() for p in parameters]
    return float(torch.cat(grads).std())


def main() -> None:
    folder, _ = begin()
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    finish(folder, {name: trained(folder, rank, **run) for name, run in RUNS.items()})


if __name__ == "__main__":
    main()
