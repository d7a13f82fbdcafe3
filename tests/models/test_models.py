"""The papers' networks: their layers and sizes as printed, and that they are Hugging Face
models.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import torch_rng
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig

from hf_gradguard import GradientMap
from recipes.small_networks import (
    MODELS,
    DeepConvNetConfig,
    LeakageLeNetConfig,
    LeakyConvNetConfig,
    TanhConvNetConfig,
)

CONFIGS: dict[str, PreTrainedConfig] = {
    "lenet": LeakageLeNetConfig(),
    "leaky": LeakyConvNetConfig(),
    "deep": DeepConvNetConfig(),
    "tanh mnist": TanhConvNetConfig(),
    "tanh cifar10": TanhConvNetConfig.cifar10(),
}
# Worked out by hand, or printed in the paper. A convolution has (k·k·in + 1)·out parameters.
SIZES = {
    "lenet": (75 * 12 + 12) + 3 * (300 * 12 + 12) + (768 * 10 + 10),
    "leaky": 288 + 32 + 18_432 + 64 + 100_352 + 32 + 320 + 10,  # the paper's Table 1; "120k"
    "deep": 2_904_970,  # "2.9M"; by hand below
    "tanh mnist": 16 * 65 + 32 * (16 * 16 + 1) + 32 * (512 + 1) + 10 * 33,
    "tanh cifar10": 32 * 28
    + 32 * 289
    + 64 * 289
    + 64 * 577
    + 128 * 577
    + 128 * 1153
    + 128 * 2049
    + 10 * 129,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(CONFIGS[name])


def images(name: str, count: int = 2) -> torch.Tensor:
    config = CONFIGS[name]
    return torch.rand(
        count, config.num_channels, config.image_size, config.image_size, generator=torch_rng()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes(name: str) -> None:
    assert sum(p.numel() for p in build(name).parameters()) == SIZES[name]


def test_sizes_round_to_what_the_papers_say() -> None:
    assert round(SIZES["leaky"], -4) == 120_000
    assert round(SIZES["deep"], -5) == 2_900_000
    assert SIZES["tanh mnist"] == 26_010  # also in Papernot et al., whose networks these adapt
    assert SIZES["tanh cifar10"] == 550_570
    channels = [3, 64, 128, 128, 256, 256, 256, 256, 256]
    convolutions = sum((9 * i + 1) * o for i, o in pairwise(channels))
    assert SIZES["deep"] == convolutions + 2 * sum(channels[1:]) + (9 * 256 + 1) * 10


def test_the_mnist_convnets_layers_are_the_papers_table() -> None:
    table = {
        "conv_layers.0.weight": 288, "conv_layers.0.bias": 32,
        "conv_layers.3.weight": 18_432, "conv_layers.3.bias": 64,
        "fc_layers.1.weight": 100_352, "fc_layers.1.bias": 32,
        "fc_layers.3.weight": 320, "fc_layers.3.bias": 10,
    }  # fmt: skip
    assert {name: p.numel() for name, p in build("leaky").named_parameters()} == table


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_in_their_order(name: str) -> None:
    """The kinds of layers that run, with channels, kernel, stride and padding of convolutions and
    pools.
    """
    leaky, tanh = "LeakyReLU", "Tanh"
    normalized, paired = ("BatchNorm2d", leaky), ("avg", 2, 2)
    expected = {
        "lenet": [(12, 5, 2, 2), (12, 5, 2, 2), (12, 5, 1, 2), (12, 5, 1, 2), 10],
        "leaky": [
            *((32, 3, 1, 1), leaky, ("max", 2, 2)), *((64, 3, 1, 1), leaky, ("max", 2, 2)),
            32, leaky, 10,
        ],
        "deep": [
            *(p for w in (64, 128, 128, 256, 256, 256) for p in ((w, 3, 1, 1), *normalized)),
            ("max", 3, 3), *2 * ((256, 3, 1, 1), *normalized), ("max", 3, 3), 10,
        ],
        "tanh mnist": [
            *((16, 8, 2, 2), tanh, ("avg", 2, 1)), *((32, 4, 2, 0), tanh, ("avg", 2, 1)), 32, 10,
        ],
        "tanh cifar10": [
            *(p for w in (32, 64, 128) for p in (*2 * ((w, 3, 1, 1), tanh), paired)), 128, 10,
        ],
    }  # fmt: skip
    ran: list[object] = []

    def note(module: nn.Module, *_: object) -> None:
        if isinstance(module, nn.Conv2d):
            ran.append(
                (module.out_channels, module.kernel_size[0], module.stride[0], module.padding[0])
            )
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            ran.append((type(module).__name__[:3].lower(), module.kernel_size, module.stride))
        elif isinstance(module, nn.Linear):
            ran.append(module.out_features)
        elif not isinstance(module, nn.Flatten) and not list(module.children()):
            ran.append(type(module).__name__)

    model = build(name)
    for module in model.modules():
        module.register_forward_hook(note)
    model(pixel_values=images(name))
    assert ran == expected[name]


@pytest.mark.parametrize("name", ["lenet", "tanh mnist", "tanh cifar10"])
def test_activations_between_the_layers(name: str) -> None:
    """Of what the functional calls do: every layer but the first reads values in the activation's
    range.
    """
    model, ranges = build(name), []
    for module in [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)][1:]:
        module.register_forward_pre_hook(
            lambda _m, args: ranges.append((args[0].min().item(), args[0].max().item()))
        )
    model(pixel_values=20 * images(name) - 10)
    low = 0 if name == "lenet" else -1
    assert all(low <= least < most <= 1 for least, most in ranges)
    assert min(least for least, _ in ranges) < low + 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_they_start_as_pytorch_layers_do(name: str) -> None:
    """Uniform within 1/√(inputs); LeNet within a half, where the papers attack it."""
    for module in build(name).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 0.5 if name == "lenet" else module.weight[0].numel() ** -0.5
            assert 0.8 * bound < float(module.weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_is_the_mean_cross_entropy_and_the_gradient_map_takes_it(name: str) -> None:
    model, labels = build(name).eval(), torch.tensor([3, 7])
    batch = {"pixel_values": images(name), "labels": labels}
    output = model(**batch)
    expected = -output.logits.log_softmax(-1)[[0, 1], labels].mean()
    torch.testing.assert_close(output.loss, expected)
    assert model(pixel_values=batch["pixel_values"]).loss is None
    gmap = GradientMap(model, batch)
    assert gmap.vjp(gmap.gradient()).any()


@pytest.mark.parametrize("model_type", MODELS)
def test_named_classes(
    model_type: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    AutoConfig.for_model(model_type, id2label={0: "cat", 1: "dog", 2: "owl"}).save_pretrained(
        tmp_path
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_labels, config.id2label[2]) == (3, "owl")
    assert "num_labels" not in caplog.text
    AutoConfig.for_model(model_type, id2label={0: "cat"}, num_labels=7)
    assert "num_labels" in caplog.text  # the control


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = build(name).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    x = images(name)
    assert torch.equal(loaded(pixel_values=x).logits, model(pixel_values=x).logits)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 20)])
def test_other_images_and_classes(model_type: str, channels: int, size: int) -> None:
    config = AutoConfig.for_model(model_type, num_channels=channels, image_size=size, num_labels=4)
    model = AutoModelForImageClassification.from_config(config)
    assert model(pixel_values=torch.rand(2, channels, size, size)).logits.shape == (2, 4)
