"""How far a candidate's gradient is from the shared one, as numbers an attack can minimise.

Every objective takes the candidates' gradients, `{name: (K, *shape)}`, and the shared one, `{name: (K or 1, *shape)}`,
and returns `(K,)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..layers import layer_numbers

Objective = Callable[[Tensors, Tensors], Tensor]


def squared_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """Σ_i (ĝ_i - g_i)². (Zhu, Liu and Han, "Deep Leakage from Gradients", 2019.)"""
    return _sum(_square_and_absolute(candidate[name], g, 1.0, 0.0) for name, g in shared.items())


def cosine_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """1 - ⟨ĝ, g⟩ / (‖ĝ‖‖g‖), over all parameters together. (Geiping et al., "Inverting Gradients", 2020.)"""
    inner = _sum(_inner(candidate[name], g) for name, g in shared.items())
    square = _sum(_inner(candidate[name], candidate[name]) for name in shared)
    size = _sum(_inner(g, g) for g in shared.values())
    return 1 - inner / (square * size).clamp_min(torch.finfo(inner.dtype).tiny).sqrt()


def layerwise_cosine_distance(candidate: Tensors, shared: Tensors) -> Tensor:
    """Σ over tensors of 1 - cosine, leaving out those shared as zeros. (Balunović et al., "LAMP", 2022.)"""
    return _sum(cosine_distance({name: candidate[name]}, {name: g}) for name, g in shared.items() if g.any())


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
        return _sum(
            _square_and_absolute(candidate[name], g, 0.5, self.absolute * weights[name]) for name, g in shared.items()
        )


class _Distance(torch.autograd.Function):
    """a Σ Δ² + b Σ |Δ| a candidate, with the derivative made in the same pass: the plain form writes Δ five times over."""

    @staticmethod
    def forward(ctx: Any, candidate: Tensor, shared: Tensor, square: float, absolute: float) -> Tensor:
        difference = candidate.detach() - shared
        rows = difference.flatten(1)
        value = square * torch.linalg.vecdot(rows, rows)
        if absolute:
            value += absolute * torch.linalg.vector_norm(rows, ord=1, dim=1)
        ctx.save_for_backward(difference)
        ctx.square, ctx.absolute = square, absolute
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (difference,) = ctx.saved_tensors
        slope = 2 * ctx.square * difference
        if ctx.absolute:
            slope.add_(difference.sign(), alpha=ctx.absolute)
        return slope.mul_(upstream.view(-1, *[1] * (slope.dim() - 1))), None, None, None


def _square_and_absolute(candidate: Tensor, shared: Tensor, square: float, absolute: float) -> Tensor:
    value: Tensor = _Distance.apply(candidate, shared, square, absolute)
    return value


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def _sum(values: Any) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*values)).sum(0)
