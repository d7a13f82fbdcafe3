"""Where images may lie, and how to get back there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PixelSpace:
    """Where images may lie whose pixels were in [0, 1] before mean and deviation were taken out.

    Args:
        like: Images `(B, C, H, W)`, for device and type.
        mean: Per channel, what was subtracted; `None` is 0.
        std: Per channel, what they were divided by afterwards; `None` is 1.
    """

    def __init__(
        self, like: Tensor, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        self.mean, self.std = (
            torch.tensor(list(values), device=like.device, dtype=like.dtype).view(1, -1, 1, 1)
            for values in (mean or [0.0], std or [1.0])
        )
        self.low, self.high = (0 - self.mean) / self.std, (1 - self.mean) / self.std

    def noise(self, shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform over the pixel range."""
        drawn = torch.rand(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)
        return self.low.to(like.dtype) + drawn * (self.high - self.low).to(like.dtype)

    def project_(self, x: Tensor) -> None:
        """Back into the pixel range, in place."""
        torch.minimum(torch.maximum(x, self.low.to(x.dtype)), self.high.to(x.dtype), out=x)

    def plain(self, x: Tensor) -> Tensor:
        """Pixels as they were before normalization."""
        return x * self.std + self.mean
