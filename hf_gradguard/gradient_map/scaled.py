"""The gradient of a loss that is scaled while it is differentiated, as fp16 needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .map import GradientMap
from .types import Batch, Tensors


class ScaleOverflow(FloatingPointError):
    """An error: a gradient is not finite, of a loss that was scaled.

    Args:
        scale: The scale of the loss.
        loss: The loss without the scale.
    """

    def __init__(self, scale: float, loss: Tensor) -> None:
        super().__init__(
            f"The gradient overflowed at a loss scale of {scale:g}: nothing is shared."
        )
        self.loss = loss


class ScaledMap(GradientMap):
    """A map whose loss is scaled before it is differentiated, and its gradient divided afterwards.

    Numbers that fp16 does not have are so not lost on the way.

    Args:
        *args: Arguments of `GradientMap`.
        loss_scale: The scale.
        **settings: Settings of `GradientMap`.

    Raises:
        ScaleOverflow: If the gradient is not finite; `gradient` raises it.

    Example:
        >>> scaled = ScaledMap(model, batch, second_order=False, loss_scale=1024.0)
        >>> bias = gmap.gradient()["classifier.bias"]
        >>> torch.allclose(scaled.gradient()["classifier.bias"], bias)
        True
    """

    def __init__(self, *args: Any, loss_scale: float, **settings: Any) -> None:
        self._loss_scale = loss_scale
        super().__init__(*args, **settings)

    def _own_gradient(self) -> Tensors:
        with self.replay.kernels():
            loss = self._loss * self._loss_scale
            scaled = self._differentiate(loss, retain_graph=self.replay.second_order)
        gradient = {name: g / self._loss_scale for name, g in scaled.items()}
        if not all(bool(torch.isfinite(g).all()) for g in gradient.values()):
            raise ScaleOverflow(self._loss_scale, self.loss)
        return gradient

    def _on(self, batch: Batch, **needed: bool) -> GradientMap:
        return ScaledMap(
            self.model, batch, loss_fn=self.loss_fn, shards=self.shards,
            share_input_embeddings=self._share, withhold=self._withhold,
            loss_scale=self._loss_scale, **needed,
        )  # fmt: skip
