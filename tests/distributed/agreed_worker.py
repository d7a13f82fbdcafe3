"""Begins trainings that ranks ask for in different ways, and writes what became of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import make_model, rows
from launcher import begin, finish

from hf_gradguard import GradGuardConfig, GradGuardTrainer

EPOCHS: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1}
LENGTHS = (16, 24)
# What rank 0 and rank 1 ask for; `rows` and `evaluated` are numbers of rows.
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lengths": (EPOCHS | {"rows": 16}, EPOCHS | {"rows": 24}),
    "lengths, logged by epochs": (
        {"rows": 16, "logging_strategy": "epoch"}, {"rows": 24, "logging_strategy": "epoch"},
    ),
    "lengths, random states sent": tuple(
        {"rows": n, "accelerator_config": {"use_seedable_sampler": False}} for n in LENGTHS
    ),
    "batch size": (EPOCHS, EPOCHS | {"per_device_train_batch_size": 2}),
    "logging_steps": ({"logging_steps": 1}, {"logging_steps": 3}),
    "learning_rate": ({"learning_rate": 1e-1}, {"learning_rate": 1e-3}),
    "evaluation": tuple(
        {"eval_strategy": "steps", "eval_steps": 2, "evaluated": n} for n in LENGTHS
    ),
    "optimizer": tuple({"given_rate": rate} for rate in (1e-3, 2e-3)),
    "lengths, max_steps": ({"rows": 16}, {"rows": 24}),
    "lengths, max_steps, accumulated": tuple(
        {"rows": n, "gradient_accumulation_steps": 2, "logging_steps": 2} for n in LENGTHS
    ),
    "batch size, max_steps": ({}, {"per_device_train_batch_size": 2}),
    "clients": ({}, {"clients_per_process": 2}),
}  # fmt: skip


def begun(
    folder: Path, rows_: int = 16, evaluated: int = 8, given_rate: float | None = None, **more: Any
) -> dict[str, Any]:
    """Steps, final weights, and why there are none."""
    settings = {"max_steps": 7, "per_device_train_batch_size": 4, **more}
    args = GradGuardConfig(
        str(folder / "out"), use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", defense="gaussian_noise", **settings,
    )  # fmt: skip
    model, data = make_model("bert", dropout=0.0), rows("bert", max(rows_, evaluated))
    optimizer = None
    if given_rate is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=given_rate)
    trainer = GradGuardTrainer(
        model, args, train_dataset=data[:rows_], eval_dataset=data[:evaluated],
        optimizers=(optimizer, None),
    )  # fmt: skip
    try:
        trainer.train()
    except ValueError as error:
        return {"said": str(error), "steps": trainer.state.global_step}
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"steps": trainer.state.global_step, "weights": weights.tolist()}


def main() -> None:
    folder, _ = begin()
    torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), {}
    for name, asked in APART.items():
        own = dict(asked[rank])
        found[name] = begun(folder, own.pop("rows", 16), own.pop("evaluated", 8), **own)
    finish(folder, found)


if __name__ == "__main__":
    main()
