"""How far a candidate's gradient is from the shared one, as a number that an attack can minimise.

Every objective takes a candidate's gradient and the shared one, both `{name: tensor}`, and returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..layers import layer_numbers

Objective = Callable[[Tensors, Tensors], Tensor]

_TINY = 1e-30


def squared_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """Σ_i (ĝ_i - g_i)². (Zhu, Liu and Han, "Deep Leakage from Gradients", 2019.)"""
    return _sum(_distance(candidate[name], g, 1.0, 0.0) for name, g in shared.items())


def cosine_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """1 - ⟨ĝ, g⟩ / (‖ĝ‖‖g‖), over all parameters together. (Geiping et al., "Inverting Gradients", 2020.)

    Computed as ½ ‖ĝ/‖ĝ‖ - g/‖g‖‖²: one minus a cosine near one is nothing but rounding error in float32.
    """
    there = _sum(candidate[name].square().sum() for name in shared).clamp_min(_TINY).rsqrt()
    here = _sum(g.square().sum() for g in shared.values()).clamp_min(_TINY).rsqrt()
    return _sum(_distance(candidate[name] * there, g * here, 0.5, 0.0) for name, g in shared.items())


def layerwise_cosine_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """Σ over tensors of 1 - cosine: every tensor counts alike, however small its gradient."""
    return _sum(cosine_distance({name: candidate[name]}, {name: g}) for name, g in shared.items())


class TagDistance:
    """Σ_l ½‖Δ_l‖² + a w_l ‖Δ_l‖₁, w_l falling linearly from the first layer to the last. (Deng et al., "TAG", 2021.)

    Args:
        absolute: a, the weight of the absolute differences.
    """

    def __init__(self, absolute: float = 0.1) -> None:
        self.absolute = absolute

    def __call__(self, candidate: Tensors, shared: Tensors) -> Tensor:
        layers = layer_numbers(shared)
        deepest = max(layers.values())
        weights = {name: 1 - (layer - 1) / deepest for name, layer in layers.items()}
        return _sum(_distance(candidate[name], g, 0.5, self.absolute * weights[name]) for name, g in shared.items())


class _Distance(torch.autograd.Function):
    """a Σ Δ² + b Σ |Δ|, keeping Δ alone for the derivative 2a Δ + b sign Δ: the plain form writes it five times over."""

    generate_vmap_rule = True

    @staticmethod
    def forward(candidate: Tensor, shared: Tensor, square: float, absolute: float) -> tuple[Tensor, Tensor]:
        difference = candidate - shared
        flat = difference.flatten()
        value = square * torch.linalg.vecdot(flat, flat)
        if absolute:
            value = value + absolute * flat.abs().sum()
        return value, difference

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.square, ctx.absolute = inputs[2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (difference,) = ctx.saved_tensors
        slope = difference * (2 * ctx.square * upstream)
        if ctx.absolute:
            slope = torch.addcmul(slope, difference.sign(), ctx.absolute * upstream)
        return slope, None, None, None


def _distance(candidate: Tensor, shared: Tensor, square: float, absolute: float) -> Tensor:
    value: Tensor = _Distance.apply(candidate, shared, square, absolute)[0]
    return value


def _sum(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()
