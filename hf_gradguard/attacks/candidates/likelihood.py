"""How likely a message of one sample is if a candidate is behind it, given the mechanism."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...defenses.mechanism import Mechanism
from ...gradient_map import Tensors


class Likelihood:
    """log p(message | candidate) of K candidates, up to what is the same for all.

    Where the mechanism says that entries are exact, or in a cell, those that are not count by their
    distance in units of what evaluations differ in by rounding.

    Args:
        mechanism: How the message was made.
        message: What was shared.
        floor: The variance of that rounding, or of draws that the attacker does not know, a
            parameter.

    Example:
        >>> mechanism = Mechanism(noise="gaussian", variance=0.5)
        >>> told = Likelihood(mechanism, {"w": torch.tensor([1.0])}, {"w": 0.0})
        >>> told({"w": torch.tensor([[0.0], [1.0]])}).tolist()
        [-1.0, 0.0]
    """

    def __init__(self, mechanism: Mechanism, message: Tensors, floor: Mapping[str, float]) -> None:
        self.mechanism, self.message, self.floor = mechanism, message, floor
        self._kept = (
            {n: y != 0 for n, y in message.items()} if mechanism.selection != "all" else None
        )
        self._least = math.inf
        if mechanism.selection == "largest":
            kept = [y[y != 0].abs().min() for y in message.values() if y.any()]
            self._least = float(torch.stack(kept).min())

    def __call__(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """`(K,)` in float64, of gradients `(K, *parameter.shape)`."""
        gradient = self._as_sent(gradient)
        count = len(next(iter(gradient.values())))
        device = next(iter(gradient.values())).device
        total = torch.zeros(count, dtype=torch.float64, device=device)
        threshold = self._threshold(gradient) if self.mechanism.selection == "largest" else None
        for name, y in self.message.items():
            shape = (count, *[1] * y.dim())
            limit = None if threshold is None else threshold.view(shape)
            total += self._of(name, y, gradient[name], limit)
        return total

    def _as_sent(self, gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if (bound := self.mechanism.clip_coordinate) is not None:
            gradient = {n: g.clamp(-bound, bound) for n, g in gradient.items()}
        if self.mechanism.clip_norm is not None:
            gradient = clipped(gradient, self.mechanism.clip_norm)
        if self.mechanism.scale != 1:
            gradient = {n: g * self.mechanism.scale for n, g in gradient.items()}
        return gradient

    def _of(self, name: str, y: Tensor, g: Tensor, threshold: Tensor | None) -> Tensor:
        mechanism, floor = self.mechanism, self.floor[name]
        if mechanism.noise is None and mechanism.rounding is not None:
            return self._rounded(y, g, floor)
        if mechanism.rounding is not None:  # noise on what was rounded
            g = _quantized(g, mechanism)
        variance = mechanism.variance_of(name) + floor
        if mechanism.noise == "laplace":
            scale = torch.as_tensor(variance, device=y.device).div(2).sqrt()
            found = (y - g).abs().div_(scale)
        else:
            found = (y - g).square_().div_(2 * variance)
        if self._kept is not None:
            kept = self._kept[name]
            found = found.masked_fill_(~kept, 0)
            if threshold is not None:
                size = g.abs()
                excess = torch.where(kept, threshold - size, size - threshold)
                found = found.add_(excess.clamp_(min=0).square_().div_(2 * floor))
        return -_sum(found)

    def _threshold(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """`(K,)`, the least |g| that is kept: the message's own, or where noise hides that, a
        candidate's.
        """
        assert self._kept is not None
        sizes = next(iter(gradient.values()))
        if self.mechanism.noise is None:
            return sizes.new_full((len(sizes),), self._least)
        flat = torch.cat([g.flatten(1).abs() for g in gradient.values()], 1)
        kept = sum(int(mask.sum()) for mask in self._kept.values())
        return flat.kthvalue(flat.shape[1] - kept + 1, dim=1).values

    def _rounded(self, y: Tensor, g: Tensor, floor: float) -> Tensor:
        """That a candidate's entries are in the cells of the message's."""
        if self.mechanism.rounding == "sign":
            size = g.abs()
            wrong = size.masked_fill(g.sign() == y.sign(), 0)
            mean = size.flatten(1).mean(1) - y.abs().max()
            return -(_sum(wrong.square()) + mean.double().square()) / (2 * floor)
        assert self.mechanism.levels is not None
        step = (y.max() - y.min()) / (self.mechanism.levels - 1)
        away = (y - g).abs()
        if self.mechanism.rounding == "nearest":
            return -_sum((away - step / 2).clamp_(min=0).square_()) / (2 * floor)
        outside = _sum((away - step).clamp_(min=0).square_()) / (2 * floor)
        if not step:
            return -outside
        return _sum((1 - away / step).clamp_(min=1e-6).log_()) - outside


def clipped(gradient: Mapping[str, Tensor], norm: float) -> Tensors:
    """Each of K gradients `(K, *parameter.shape)`, scaled down to this norm where it is longer."""
    squares = [g.flatten(1).double().square().sum(1) for g in gradient.values()]
    scale = (norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return {name: scaled(g, scale) for name, g in gradient.items()}


def scaled(gradient: Tensor, by: Tensor) -> Tensor:
    """Each of `(K, *shape)` times one number."""
    return gradient * by.to(gradient).view(-1, *[1] * (gradient.dim() - 1))


def _quantized(g: Tensor, mechanism: Mechanism) -> Tensor:
    """As a client would round each of several gradients."""
    flat = g.flatten(1)
    if mechanism.rounding == "sign":
        return g.sign() * flat.abs().mean(1).view(-1, *[1] * (g.dim() - 1))
    if mechanism.rounding == "stochastic":
        return g  # whose mean it is
    assert mechanism.levels is not None
    low, high = flat.min(1).values, flat.max(1).values
    low, step = (
        one.view(-1, *[1] * (g.dim() - 1)) for one in (low, (high - low) / (mechanism.levels - 1))
    )
    return low + ((g - low) / step.clamp(min=1e-38)).round() * step


def _sum(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).sum(1, dtype=torch.float64)
