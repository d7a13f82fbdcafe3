"""Images as untrained convolutional networks draw them: smooth first, noise last.

(Ulyanov, Vedaldi and Lempitsky, "Deep Image Prior", CVPR 2018.) Such a network fits what looks like
a picture in fewer steps than what looks like noise, so that its shape is a prior without any
training data, and the number of steps says how strong a one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...gradient_map.inputs import PixelSpace

CODE, WIDTH, LEAST = 16, 32, 8


class DeepPrior:
    """Every image of every candidate as the output of a network of its own, whose input stays.

    The input is random, of 16 channels, and its shorter side has at most 8 pixels; the sides double
    until they are the image's. At each size there is a 3 × 3 convolution to 32 channels, at the
    last one two, each with instance normalization and a leaky ReLU; then a 1 × 1 convolution and a
    sigmoid, scaled to the range of pixels. All networks run in one pass, as groups of the same
    convolutions.

    Args:
        pixels: The range of pixels.
        shape: Of the candidates, `(K, B, C, H, W)`.
        like: A tensor of their device and type.
        generator: Source of inputs and weights.

    Attributes:
        weights: What is to be descended on: leaves, each with the networks along its first axis.

    Raises:
        ValueError: If a side is below 8 pixels.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> network = DeepPrior(PixelSpace(torch.zeros(())), (2, 1, 3, 9, 20), torch.ones(1), draw)
        >>> network.draw().shape, bool((network.draw() > 0).all())
        (torch.Size([2, 1, 3, 9, 20]), True)
    """

    def __init__(
        self,
        pixels: PixelSpace,
        shape: tuple[int, ...],
        like: Tensor,
        generator: torch.Generator,
    ) -> None:
        *counts, channels, height, width = shape
        if min(height, width) < LEAST:
            raise ValueError(
                f"A deep image prior draws images from {LEAST} x {LEAST} pixels on, but these have "
                f"{height} x {width}: it says nothing about smaller ones. Take prior=None."
            )
        self.shape, self.pixels, self.networks = shape, pixels, math.prod(counts)
        self.sizes = [(height, width)]
        while len(self.sizes) == 1 or min(self.sizes[0]) > LEAST:
            high, wide = self.sizes[0]
            self.sizes.insert(0, ((high + 1) // 2, (wide + 1) // 2))
        place: dict[str, Any] = {"device": like.device, "dtype": like.dtype}

        def uniform(outputs: int, inputs: int, side: int) -> Tensor:  # as torch's layers start
            kernel = (self.networks * outputs, inputs, side, side)
            drawn = torch.rand(kernel, generator=generator, **place)
            return (2 * drawn - 1) / math.sqrt(inputs * side**2)

        code = (1, self.networks * CODE, *self.sizes[0])
        self.code = 0.5 * torch.randn(code, generator=generator, **place)
        self.weights: list[Tensor] = []
        for inputs in (CODE, *[WIDTH] * len(self.sizes)):
            gain = torch.ones(self.networks * WIDTH, **place)
            self.weights += [uniform(WIDTH, inputs, 3), gain, torch.zeros_like(gain)]
        self.weights += [uniform(channels, WIDTH, 1), uniform(channels, WIDTH, 1)[:, 0, 0, 0]]
        for weight in self.weights:
            weight.requires_grad_()

    def draw(self) -> Tensor:
        """The images `(K, B, C, H, W)`, as a function of the weights."""
        x, sizes = self.code, [*self.sizes, self.sizes[-1]]
        for block, size in enumerate(sizes):
            kernel, gain, shift = self.weights[3 * block :][:3]
            if x.shape[2:] != size:
                x = functional.interpolate(x, size=size, mode="bilinear")
            x = functional.conv2d(x, kernel, padding=1, groups=self.networks)
            x = functional.leaky_relu(functional.instance_norm(x, weight=gain, bias=shift), 0.1)
        kernel, shift = self.weights[-2:]
        share = functional.conv2d(x, kernel, shift, groups=self.networks).sigmoid()
        low, high = (end.to(share.dtype) for end in (self.pixels.low, self.pixels.high))
        return low + share.view(self.shape) * (high - low)
