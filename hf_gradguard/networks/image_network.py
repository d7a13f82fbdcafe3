"""The evaluation network of images."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from .configuration import (
    EvaluationNetworkBase,
    EvaluationNetworkOutput,
    ImageEvaluationNetworkConfig,
)


class ImageEvaluationNetwork(EvaluationNetworkBase):
    """A network that says how much of an image is noise.

    It has strided 3x3 convolutions with ReLU, a dense layer, and a sigmoid. Fan et al., "Refiner"
    (2025), Appendix D: filters 128, 256 and 512, stride 2, padding 1.

    Example:
        >>> config = ImageEvaluationNetworkConfig(num_channels=1, image_size=28, filters=[8, 16])
        >>> network = ImageEvaluationNetwork(config)
        >>> network.noise_ratio(torch.rand(4, 1, 28, 28)).shape
        torch.Size([4])
    """

    config_class = ImageEvaluationNetworkConfig
    config: ImageEvaluationNetworkConfig
    base_model_prefix = "network"
    main_input_name = "pixel_values"

    def __init__(self, config: ImageEvaluationNetworkConfig) -> None:
        super().__init__(config)
        channels = [config.num_channels, *config.filters]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1)
            for inputs, outputs in itertools.pairwise(channels)
        )
        height, width = config.size
        for _ in config.filters:
            height, width = (height + 1) // 2, (width + 1) // 2
        self.head = nn.Linear(channels[-1] * height * width, 1)
        self.post_init()

    def noise_ratio(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return how much of each image is noise.

        Args:
            x: Pixels `(B, C, H, W)` on the scale [0, 1]. Values outside are not clipped, so that
                their gradient does not vanish.
            attention_mask: Ignored; it makes the calls of both kinds of network the same.

        Returns:
            `(B,)` in [0, 1].

        Raises:
            ValueError: If the channels or the size are not the network's.
        """
        return torch.sigmoid(self._logit(x))

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool = True, **_: Any
    ) -> EvaluationNetworkOutput | tuple[Tensor, ...]:
        """Return the `noise_ratio`, and the loss if there are labels.

        Args:
            pixel_values: Pixels `(B, C, H, W)` on the scale [0, 1].
            labels: The true ratios, `(B,)`.
            return_dict: Whether to return an object rather than a tuple.
        """
        logit = self._logit(pixel_values)
        loss = (
            None
            if labels is None
            else F.binary_cross_entropy_with_logits(logit, labels.to(logit.dtype))
        )
        output = EvaluationNetworkOutput(loss=loss, noise_ratio=torch.sigmoid(logit))
        return output if return_dict else output.to_tuple()

    def _logit(self, x: Tensor) -> Tensor:
        expected = (self.config.num_channels, *self.config.size)
        if tuple(x.shape[1:]) != expected or not torch.is_floating_point(x):
            raise ValueError(
                "This evaluation network judges floating-point images of shape (B, "
                f"{', '.join(map(str, expected))}) with pixels in [0, 1], but was given "
                f"{tuple(x.shape)} of {x.dtype}. Pass smaller or gray images through "
                "`hf_gradguard.networks.adapt_images(x, network)`, or train a network of their "
                "shape with `gradguard evalnet train --dataset ... --num_channels ... --image_size "
                "...`."
            )
        hidden = x.to(self.dtype)
        for convolution in self.convolutions:
            hidden = torch.relu(convolution(hidden))
        return self.head(hidden.flatten(1)).squeeze(1)


def adapt_images(x: Tensor, network: ImageEvaluationNetwork) -> Tensor:
    """Bring gray or smaller images to a network's shape: repeat the gray channel, pad with black.

    MNIST's 28x28 gray digits become 32x32 with three equal channels. Images are padded and not
    resized: resizing mixes neighboring pixels, and noise is recognized by how little neighbors have
    in common. A side below three quarters of the network's is filled with copies of the image.
    Networks are trained with no wider frame, and take noise of 20x20 in black for an image. The
    result is differentiable.

    Args:
        x: `(B, C, H, W)` pixels in [0, 1].
        network: The network that is to judge them.

    Raises:
        ValueError: If the images are larger than the network's, or have several channels but not
            its number.

    Example:
        >>> network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[8]))
        >>> adapt_images(torch.rand(4, 1, 28, 28), network).shape
        torch.Size([4, 3, 32, 32])
    """
    channels, (height, width) = network.config.num_channels, network.config.size
    if x.ndim != 4 or x.shape[1] not in (1, channels) or x.shape[2] > height or x.shape[3] > width:
        raise ValueError(
            f"Images of shape {tuple(x.shape)} do not fit a network for (B, {channels}, {height}, "
            f"{width}): only gray ones can be repeated and only smaller ones padded. Shrinking "
            "would average the noise away. Train a network of their shape with `gradguard evalnet "
            "train --dataset ... --num_channels ... --image_size ...`."
        )
    for dim, length in ((2, height), (3, width)):
        if 4 * x.shape[dim] < 3 * length:
            copies = math.ceil(length / x.shape[dim])
            x = torch.cat([x] * copies, dim).narrow(dim, 0, length)
    down, right = height - x.shape[2], width - x.shape[3]
    padded = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
    return padded.expand(-1, channels, -1, -1)


def judge_images(x: Tensor, network: ImageEvaluationNetwork) -> Tensor:
    """Return how much of images of any size is noise, `(B,)`, differentiable.

    Smaller and gray images pass through `adapt_images`. Larger ones are judged tile by tile, at
    full resolution, and the tiles' ratios averaged: shrinking would average the noise away. Tiles
    cover the image, and overlap where its size is no multiple of the network's.

    Args:
        x: `(B, C, H, W)` pixels in [0, 1].
        network: The network that judges.

    Raises:
        ValueError: If the images have several channels, but not the network's number.

    Example:
        >>> network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[8]))
        >>> judge_images(torch.rand(2, 3, 224, 224), network).shape
        torch.Size([2])
    """
    height, width = network.config.size
    rows, columns = _starts(x.shape[2], height), _starts(x.shape[3], width)
    cut = (x[:, :, row : row + height, col : col + width] for row in rows for col in columns)
    tiles = [adapt_images(tile, network) for tile in cut]
    return network.noise_ratio(torch.cat(tiles)).view(len(tiles), len(x)).mean(0)


def _starts(length: int, tile: int) -> list[int]:
    """Return where tiles begin that cover a length."""
    count = math.ceil(length / tile)
    return [0] if count <= 1 else [round(k * (length - tile) / (count - 1)) for k in range(count)]


_CONFIG = ImageEvaluationNetworkConfig
AutoConfig.register(_CONFIG.model_type, _CONFIG, exist_ok=True)
AutoModel.register(ImageEvaluationNetworkConfig, ImageEvaluationNetwork, exist_ok=True)
