"""Images of other sizes than a network's: judged at full resolution, tile by tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import make_task
from transformers import ViTConfig, ViTForImageClassification

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.networks import (
    ImageEvaluationNetwork,
    ImageEvaluationNetworkConfig,
    adapt_images,
    judge_images,
    load_network,
    network_for,
)
from hf_gradguard.randomness import Stream


@pytest.fixture(scope="module")
def network() -> ImageEvaluationNetwork:
    torch.manual_seed(0)
    return ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[4]))


def test_an_image_of_its_own_size_is_judged_as_it_is(network: ImageEvaluationNetwork) -> None:
    x = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(judge_images(x, network), network.noise_ratio(x))


def test_tiles_are_averaged(network: ImageEvaluationNetwork) -> None:
    """48 × 70: 2 rows that overlap by 16, and 3 columns by 13."""
    x = torch.rand(2, 3, 48, 70)
    tiles = [x[:, :, a : a + 32, b : b + 32] for a in (0, 16) for b in (0, 19, 38)]
    expected = torch.stack([network.noise_ratio(tile) for tile in tiles]).mean(0)
    torch.testing.assert_close(judge_images(x, network), expected)


def test_small_gray_images_are_framed(network: ImageEvaluationNetwork) -> None:
    x = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(
        judge_images(x, network), network.noise_ratio(adapt_images(x, network))
    )


def test_every_pixel_counts(network: ImageEvaluationNetwork) -> None:
    x = torch.rand(1, 3, 70, 40, requires_grad=True)
    (slope,) = torch.autograd.grad(judge_images(x, network).sum(), x)
    assert slope.abs().sum(1).gt(0).all()


@pytest.mark.parametrize(("channels", "size"), [(3, 96), (1, 28)])
def test_the_packaged_network_judges_and_refiner_runs(channels: int, size: int) -> None:
    """A smooth picture with a little grain, as photographs are, beside uniform noise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(
        image_size=size, patch_size=size // 4, num_channels=channels, intermediate_size=16, **sizes
    )
    model = ViTForImageClassification(config).eval()
    found = network_for(model)
    assert found.name_or_path == "image-evaluation-network-32"
    ramp = torch.linspace(0.2, 0.8, size)
    picture = (ramp[:, None] * ramp).expand(2, channels, size, size).clone()
    picture += 0.02 * torch.rand(picture.shape)
    assert judge_images(picture, found).max() < judge_images(torch.rand(picture.shape), found).min()
    batch = {"pixel_values": picture, "labels": torch.tensor([0, 1])}
    defense = make_defense(
        "refiner", evaluation_network=load_network(found.name_or_path), iterations=2
    )
    defense.prepare(model)
    message = defense(GradientMap(model, batch), Stream.from_seeds(1))
    assert all(torch.isfinite(tensor).all() for tensor in message.values())


def test_the_name_of_a_folder_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network from the cache may be pushed, and a folder's name may tell whose it is."""
    model, _ = make_task("bert")
    kept = []
    monkeypatch.setattr(
        "hf_gradguard.networks.fitting.cached_text_network",
        lambda *_, base_model: kept.append(base_model),
    )
    for name in (str(tmp_path), "organization/model"):
        model.config.name_or_path = name
        network_for(model, object())
    assert kept == ["", "organization/model"]
