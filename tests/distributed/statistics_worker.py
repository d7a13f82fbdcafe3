"""Batch statistics on this rank after training, for each way of treating them, with weights that
stand still.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recording
import torch
from cases import IN_ORDER
from helpers import image_batch, small_convolution
from launcher import begin, finish

from hf_gradguard import GradGuardConfig, GradGuardTrainer

STEPS = 3
CHOICES = ("local", "shared", "frozen")


def samples() -> list[dict[str, torch.Tensor]]:
    batch = image_batch(24)
    return [{"pixel_values": x.float(), "labels": y} for x, y in zip(*batch.values(), strict=True)]


def train(group: recording.Recorder, folder: Path, choice: str) -> dict[str, Any]:
    model, _ = small_convolution(dtype=torch.float32, batch_norm=True)
    args = GradGuardConfig(
        output_dir=str(folder / choice), max_steps=STEPS, per_device_train_batch_size=4,
        learning_rate=0.0, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        batch_statistics=choice, **IN_ORDER,
    )  # fmt: skip
    trainer = GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=samples())
    trainer.train()
    statistics = [model.norm.running_mean.tolist(), model.norm.running_var.tolist()]
    trainer.save_model()
    group.sent, group.on = [], True
    trainer.train()  # again, from where it stands
    again = [model.norm.running_mean.tolist(), model.norm.running_var.tolist()]
    sent, group.sent = group.sent, []
    GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=samples()).train()
    group.on = False
    return {
        "statistics": statistics,
        "again": again,
        "sent": floats(sent),
        "by another": floats(group.sent),
    }


def floats(sent: list[tuple[str, torch.Tensor]]) -> list[tuple[str, int]]:
    return [(kind, len(tensor)) for kind, tensor in sent if tensor.is_floating_point()]


def main() -> None:
    folder, _ = begin()
    group = recording.initialize()
    finish(folder, {choice: train(group, folder, choice) for choice in CHOICES})


if __name__ == "__main__":
    main()
