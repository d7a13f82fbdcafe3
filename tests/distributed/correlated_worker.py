"""Trains with correlated noise on this rank, so little that weights hardly move, and goes on from a
checkpoint; writes where weights went, and where the undefended gradient would have taken them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from cases import rows
from helpers import make_task
from launcher import begin, finish
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense

ROWS, CLIENTS, BATCH, STEPS, SAVED = 72, 2, 4, 6, 3  # a pass of three ranks' clients
CLIP, SIGMA, RATE = 50.0, 4e-4, 1e-6  # nothing is clipped
SECURE = {"secure_aggregation": True, "secure_aggregation_range": 64.0}
RUNS: dict[str, dict[str, Any]] = {
    "message": {}, "secure": SECURE, "sum": {**SECURE, "noise_for": "sum"},
    "bins": {"sampling": "balls_in_bins"},
}  # fmt: skip


def undefended(model: nn.Module, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean gradient of all rows, each of which is in one message."""
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trainer(
    folder: Path, data: Any, sampling: str | None = None, **settings: Any
) -> GradGuardTrainer:
    args = GradGuardConfig(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, optim="sgd",
        clients_per_process=CLIENTS, learning_rate=RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        save_steps=SAVED, noise_seed=5, **settings,
    )  # fmt: skip
    defense = make_defense(
        "dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=SIGMA, correlated=True,
        sampling=sampling,
    )  # fmt: skip
    return GradGuardTrainer(
        model=make_task("bert", dtype=torch.float64)[0], args=args, defense=defense,
        train_dataset=data,
    )  # fmt: skip


def as_at_the_checkpoint(alone: Path, again: Path, rank: int) -> Path:
    """What a run that ended there had on its disk."""
    name, account = f"checkpoint-{SAVED}", f"gradguard_account_rank{rank}.jsonl"
    if rank == 0:
        shutil.copytree(alone / name, again / name)
    torch.distributed.barrier()
    lines = (alone / account).read_text().splitlines(keepends=True)
    (again / account).write_text("".join(lines[:SAVED]))
    return again / name


def main() -> None:
    folder, _ = begin()
    data, found = rows("bert", ROWS), {}
    for name, more in RUNS.items():
        alone = trainer(folder / name, data, **more)
        before = {n: p.detach().clone() for n, p in alone.model.named_parameters()}
        gradient = undefended(alone.model, data)
        alone.model.zero_grad()
        alone.train()
        rank = alone.args.process_index
        torch.distributed.barrier()
        resumed = trainer(folder / f"{name}_again", data, **more)
        checkpoint = as_at_the_checkpoint(folder / name, folder / f"{name}_again", rank)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        again, shared = dict(resumed.model.named_parameters()), alone.shared_names
        moved = {n: p.detach() - before[n] for n, p in alone.model.named_parameters()}
        found[name] = {
            "moved": torch.cat([moved[n].flatten() for n in shared]).tolist(),
            "undefended": torch.cat([gradient[n].flatten() for n in shared]).tolist(),
            "differing": [
                n for n, p in alone.model.named_parameters() if not torch.equal(p, again[n])
            ],
            "steps": [alone.state.global_step, resumed.state.global_step],
        }
    finish(folder, found)


if __name__ == "__main__":
    main()
