"""Several small batches make the step of one large one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from recipes.small_networks import LeakyConvNetConfig, LeakyConvNetForImageClassification


@pytest.mark.parametrize("kind", [Trainer, GradGuardTrainer])
def test_accumulated_steps_are_those_of_the_whole_batch(kind: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LeakyConvNetForImageClassification(LeakyConvNetConfig(channels=[4], hidden_size=8))
    rows = [{"pixel_values": torch.rand(1, 28, 28), "labels": i % 10} for i in range(8)]

    def step(size: int, accumulated: int) -> tuple[torch.Tensor, float]:
        settings: dict[str, Any] = {
            "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated,
            "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1,
            "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none",
            "use_cpu": True,
        }  # fmt: skip
        trained = copy.deepcopy(model)
        args = GradGuardConfig(str(tmp_path), defense="none", **settings)
        loss = kind(trained, args, train_dataset=rows).train().training_loss
        change = [p - q for p, q in zip(trained.parameters(), model.parameters(), strict=True)]
        return torch.cat([c.flatten() for c in change]).detach(), loss

    (whole, one), (several, other) = step(8, 1), step(2, 4)
    assert float((whole - several).norm() / whole.norm()) < 1e-5
    assert one == pytest.approx(other, rel=1e-5)
