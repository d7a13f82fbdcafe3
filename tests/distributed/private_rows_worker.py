"""Trains by samples on this rank, and writes what it drew and where its weights went."""

from __future__ import annotations

from typing import Any

import torch
from cases import rows
from helpers import make_task
from launcher import begin, finish

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense

ROWS, BATCH, CLIP, SIGMA = 48, 4, 1e-3, 1e4  # noise hides all else
RUNS: dict[str, dict[str, Any]] = {
    "message": {},
    "secure": {"secure_aggregation": True, "secure_aggregation_range": 64.0},
    "sum": {"secure_aggregation": True, "secure_aggregation_range": 64.0, "noise_for": "sum"},
}


class Recorded(GradGuardTrainer):
    """Notes the rows of its batches."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        self.drawn = [*getattr(self, "drawn", []), *inputs["gradguard_row"].tolist()]
        return super().training_step(model, inputs, *rest)


def main() -> None:
    folder, _ = begin()
    data, found = rows("bert", ROWS), {}
    for name, more in RUNS.items():
        model = make_task("bert", dtype=torch.float32)[0]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        args = GradGuardConfig(
            str(folder / "out"), max_steps=2, per_device_train_batch_size=BATCH, optim="sgd",
            learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, **more,
        )  # fmt: skip
        defense = make_defense(
            "dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=SIGMA, delta=1e-3
        )
        trainer = Recorded(model=model, args=args, defense=defense, train_dataset=data)
        trainer.train()
        moved = [(p.detach() - before[n]).flatten() for n, p in model.named_parameters()
                 if n in trainer.shared_names]  # fmt: skip
        found[name] = {
            "drawn": trainer.drawn,
            "own": trainer.private_rows.rows_of_clients[args.process_index].tolist(),
            "moved": torch.cat(moved).tolist(),
            "epsilon": trainer.private_rows.epsilon,
        }
    finish(folder, found)


if __name__ == "__main__":
    main()
