"""Trains under a gradient scaler, where the gradient of one rank overflows, and writes what each
step exchanged and left.
"""

from __future__ import annotations

from typing import Any

import torch
from cases import IN_ORDER
from helpers import make_task
from launcher import begin, finish
from torch import Tensor

from hf_gradguard import GradGuardConfig, GradGuardTrainer

STEPS, STEP = 4, 2  # at which rank 1 overflows


class Scaled(GradGuardTrainer):
    """With a scaler, as Accelerate has one for fp16."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.sent: list[list[int]] = [[] for _ in range(STEPS)]
        self.sums: list[float] = []
        reduce = self.accelerator.reduce

        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step < STEPS:
                self.sent[self.state.global_step].append(tensor.numel())
            reduced: Tensor = reduce(tensor, *args, **kwargs)
            return reduced

        self.accelerator.reduce = watched

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.sums.append(total(self.model))
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        is_due = self.state.global_step == STEP and torch.distributed.get_rank() == 1
        return 1e38 * loss if is_due and loss.requires_grad else loss


def total(model: torch.nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def main() -> None:
    folder, _ = begin()
    torch.distributed.init_process_group("gloo")
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{name: entry[k % 2] for name, entry in batch.items()} for k in range(16)]
    args = GradGuardConfig(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", defense="pruning",
        defense_kwargs={"ratio": 0.9, "error_feedback": True, "min_batches": 1}, **IN_ORDER,
    )  # fmt: skip
    trainer = Scaled(model, args, train_dataset=rows)
    trainer.train()
    entries = sum(p.numel() for p in trainer._shared(model).values())
    finish(folder, {
        "sums": [*trainer.sums, total(model)], "sent": trainer.sent, "entries": entries,
        "scale": trainer.accelerator.scaler.get_scale(), "messages": trainer.shared_messages.total,
    })  # fmt: skip


if __name__ == "__main__":
    main()
