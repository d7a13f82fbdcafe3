"""Images smaller than the packaged network's are judged as well as larger ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_gradguard.networks import adapt_images, load_network
from hf_gradguard.networks.judging import evaluate_image_network


def smooth_images(count: int, size: int) -> torch.Tensor:
    """Cut out of 32x32, where neighboring pixels are alike, as in photos."""
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    images = F.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)
    start = (32 - size) // 2
    return images[:, :, start : start + size, start : start + size]


@pytest.mark.long
@pytest.mark.parametrize("size", [12, 16, 20, 23, 24, 28, 32])
def test_noise_is_told_from_images_of_every_size(size: int) -> None:
    """Padded, pure noise of 20x20 had a ratio of 0.2, and of 12x12 0.01."""
    network = load_network("image-evaluation-network-32")
    metrics = evaluate_image_network(network, smooth_images(60, size))
    natural, *_, noise = metrics.mean_predictions
    assert noise > 0.9
    assert noise - natural > 0.5
    assert metrics.spearman > 0.9


def test_small_sides_are_filled_and_others_padded() -> None:
    network = load_network("image-evaluation-network-32")
    images = torch.rand(2, 1, 12, 28, generator=torch.Generator().manual_seed(0))
    adapted = adapt_images(images, network)
    assert adapted.shape == (2, 3, 32, 32)
    filled = torch.cat([images] * 3, 2)[:, :, :32]
    assert torch.equal(adapted[:, :, :, 2:30], filled.expand(-1, 3, -1, -1))
    assert not adapted[..., :2].any()
    assert not adapted[..., 30:].any()
