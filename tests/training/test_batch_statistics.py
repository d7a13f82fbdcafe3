"""What becomes of batch normalization's running statistics on one rank;
`distributed/test_statistics.py` has two.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers import LABELS, image_batch, make_task, refuses
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from hf_gradguard import GradGuardConfig, GradGuardTrainer, protect
from hf_gradguard.training.config import BATCH_STATISTICS
from hf_gradguard.training.exchange.gradients import tracking_layers
from hf_gradguard.training.refusals import check_model


def resnet() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "embedding_size": 4,
        "hidden_sizes": [4],
        "depths": [1],
        "layer_type": "basic",
        "num_labels": LABELS,
    }
    return ResNetForImageClassification(ResNetConfig(**sizes))


def make_trainer(model: nn.Module, folder: Path, **settings: object) -> GradGuardTrainer:
    args = GradGuardConfig(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2,
        save_strategy="no", per_device_train_batch_size=4, **settings,
    )  # fmt: skip
    batch = image_batch(8)
    rows = [{"pixel_values": x.float(), "labels": y} for x, y in zip(*batch.values(), strict=True)]
    return GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=rows)


def test_layers_that_keep_statistics() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.GroupNorm(1, 2),
        nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True),
    )  # fmt: skip
    assert list(tracking_layers(model)) == ["0", "4"]


@pytest.mark.parametrize(
    ("choice", "warns"), [("local", True), ("shared", False), ("frozen", False)]
)
def test_the_default_says_what_becomes_of_them(
    tmp_path: Path,
    choice: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_gradguard"), "propagate", True)
    make_trainer(resnet(), tmp_path, batch_statistics=choice)
    assert ("publishing it publishes them" in caplog.text) == warns
    caplog.clear()
    make_trainer(make_task("vit", dtype=torch.float32)[0], tmp_path, batch_statistics=choice)
    assert "publishing it publishes them" not in caplog.text


@pytest.mark.parametrize("choice", BATCH_STATISTICS)
def test_frozen_ones_stand_still_and_are_what_the_pass_uses(tmp_path: Path, choice: str) -> None:
    model = resnet()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    modes: list[bool] = []
    layer = next(iter(tracking_layers(model).values()))
    layer.register_forward_pre_hook(lambda module, _args: modes.append(module.training))
    make_trainer(model, tmp_path, batch_statistics=choice).train()
    stood = [name for name, tensor in model.named_buffers() if torch.equal(tensor, before[name])]
    assert stood == (list(before) if choice == "frozen" else [])
    assert modes[-1] == (choice != "frozen")
    assert any(
        not torch.equal(p, q)
        for p, q in zip(model.parameters(), resnet().parameters(), strict=True)
    )


def test_synchronised_batch_norm_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(resnet())
    with refuses("synchronized-batch-norm"):
        check_model(model)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("local", "stayed on their ranks; those in this model are rank 0's"),
        ("shared", "were averaged over ranks unprotected"),
        ("frozen", "are those that the model started with"),
    ],
)
def test_the_card_says_it(tmp_path: Path, choice: str, says: str) -> None:
    make_trainer(resnet(), tmp_path, batch_statistics=choice).create_model_card()
    assert f"- Batch statistics {says}" in (tmp_path / "README.md").read_text()
    make_trainer(make_task("vit", dtype=torch.float32)[0], tmp_path / "vit").create_model_card()
    assert "Batch statistics" not in (tmp_path / "vit" / "README.md").read_text()


class Remembering(nn.Module):
    """Keeps what it saw last."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 2)
        self.register_buffer("last", torch.zeros(4, 2), persistent=persistent)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.linear(pixel_values.flatten(1)) * self.scale
        self.last = logits.detach().clone()
        return {"loss": nn.functional.cross_entropy(logits, labels)}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("by", ["trainer", "protect"])
def test_buffers_that_a_pass_writes_to_are_named(
    by: str, persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are made of private data, and saved with the model."""
    model = Remembering(persistent)
    batch = {"pixel_values": torch.rand(4, 3, 2, 2), "labels": torch.tensor([0, 1, 1, 0])}
    for _ in range(2):
        if by == "protect":
            protect(model, batch, "gaussian_noise")
        else:
            rows = [{name: value[k] for name, value in batch.items()} for k in range(4)]
            args = GradGuardConfig(
                str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no"
            )
            GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=rows).train()
    said = [text for text in caplog.messages if "writes to buffers" in text]
    assert len(said) == persistent * (1 if by == "protect" else 2)
    assert all("runs: last." in text for text in said)
