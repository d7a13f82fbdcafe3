"""Every case of `IDENTITY` on this rank: the stock Trainer's weights, and those of
defense="none".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import IDENTITY, Case, make_model
from helpers import pad
from launcher import begin, finish
from transformers import Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer

STEPS = 6


def train(
    case: Case, guarded: bool, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Trainer]:
    """The weights before and after, and the trainer."""
    settings = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_steps": 1, **case.args,
    }  # fmt: skip
    model = make_model(case.model, case.dropout)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    collator = pad if case.data == "ragged" else None
    if guarded:
        args: TrainingArguments = GradGuardConfig(**settings, **case.guarded)
        trainer: Trainer = GradGuardTrainer(
            model, args, defense="none", train_dataset=case.rows(), data_collator=collator
        )
    else:
        if case.freeze:
            model.get_input_embeddings().requires_grad_(False)
        trainer = Trainer(
            model, TrainingArguments(**settings), train_dataset=case.rows(), data_collator=collator
        )
    trainer.train()
    return before, {name: p.detach() for name, p in model.named_parameters()}, trainer


def compare(case: Case, folder: Path) -> dict[str, Any]:
    _, stock, stock_trainer = train(case, guarded=False, folder=folder)
    before, guarded, trainer = train(case, guarded=True, folder=folder)
    mismatch = ""
    try:
        torch.testing.assert_close(guarded, stock, rtol=1e-6, atol=case.atol)
    except AssertionError as error:
        mismatch = str(error)
    statistics, stock_statistics = (
        {
            name: b
            for name, b in t.accelerator.unwrap_model(t.model).named_buffers()
            if "running" in name
        }
        for t in (trainer, stock_trainer)
    )
    losses, stock_losses = (
        [(entry["loss"], entry["grad_norm"]) for entry in t.state.log_history if "loss" in entry]
        for t in (trainer, stock_trainer)
    )
    return {
        "mismatch": mismatch,
        "difference": max(float((guarded[n] - stock[n]).abs().max()) for n in stock),
        "moved": max(float((stock[n] - before[n]).abs().max()) for n in stock),
        "still": [n for n in stock if torch.equal(stock[n], before[n])],
        "guarded_still": [n for n in stock if torch.equal(guarded[n], before[n])],
        "checksum": [float(guarded[n].double().sum()) for n in stock],
        "statistics": {name: tensor.tolist() for name, tensor in statistics.items()},
        "stock_statistics": {name: tensor.tolist() for name, tensor in stock_statistics.items()},
        "losses": losses,
        "stock_losses": stock_losses,
        "ranks": trainer.accelerator.num_processes,
    }


def main() -> None:
    folder, _ = begin()
    finish(folder, {name: compare(case, folder) for name, case in IDENTITY.items()})


if __name__ == "__main__":
    main()
