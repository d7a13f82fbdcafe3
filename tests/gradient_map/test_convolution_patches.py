"""What a convolution's kernel covers, and products that are written in chunks of samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_gradguard.gradient_map import changes
from hf_gradguard.gradient_map.changes import Change
from hf_gradguard.gradient_map.layers import Layer, _patches


@pytest.mark.parametrize("size", [6, 17])  # short rows of places, and long ones
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3},
        {"kernel_size": (2, 3), "padding": (1, 2)},
        {"kernel_size": (3, 2), "dilation": (1, 2), "padding": 1},
        {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 1), "dilation": (3, 2)},
    ],
)
def test_patches_are_those_of_unfold(size: int, settings: dict) -> None:
    convolution = nn.Conv2d(3, 2, **settings)
    features = torch.randn(2, 3, size, size + 1)
    m = convolution
    unfolded = nn.functional.unfold(features, m.kernel_size, m.dilation, m.padding, m.stride)
    assert torch.equal(_patches(features, convolution), unfolded)


@pytest.mark.parametrize("entries", [1, 10**3, 10**9])
@pytest.mark.parametrize("kind", ["convolution", "long", "short"])
def test_samples_products_are_those_of_their_gradients(
    kind: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many samples are in a chunk, and whether factors are joined or products added up."""
    monkeypatch.setattr(changes, "_CACHED_ENTRIES", entries)
    draw = torch.Generator().manual_seed(0)

    def pair(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2)]

    if kind == "convolution":
        module: nn.Module = nn.Conv2d(2, 3, 3)
        features, slopes = pair(5, 2, 12, 12), pair(5, 3, 10, 10)
    else:
        module, length = nn.Linear(4, 3), 20 if kind == "long" else 1
        features, slopes = pair(5, length, 4), pair(5, length, 3)
    layer = Layer(module.double(), "weight", None)
    change = Change([slopes[0]], [features[0]], [slopes[1]], [features[1]])
    expected = sum(map(layer.weight_gradients, slopes, features))
    found = [product.clone() for product in change.weight(layer)]
    torch.testing.assert_close(torch.cat(found), expected)
    squares = change.weight_squares(layer)
    torch.testing.assert_close(squares, torch.as_tensor(expected).square().sum(0))
