"""The Fisher information about a batch that lies in noise whose shape or strength follows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors, by_differences
from ..gradient_map.types import Shards
from .base import OnDemand, cast_like, power, total
from .sensitivity import LARGEST_RATIO


def strength_trace(
    gmap: GradientMap, gradient: Tensors, moving: Tensors, shape: Mapping[str, Tensor], noise: Any
) -> float:
    """Return the Fisher information about the input that lies in the strength of the noise.

    It concerns noise relative to the batch's own gradient. For Σ = λ W with n noisy entries it is

        n/2 ‖∂ log λ/∂x‖²,   λ ∝ ‖g‖² or 1/Σ g² w

    For uniform noise that is 2n ‖∂ log ‖g‖/∂x‖²: the second term of the information J Jᵀ/σ² + 2d (∂
    log σ/∂x)(∂ log σ/∂x)ᵀ of N(g, σ² I).

    Args:
        gmap: The batch's map, for a product with J.
        gradient: g, to which noise is added.
        moving: g where it moves as the input does, 0 where it is clipped.
        shape: w, 0 where there is no noise.
        noise: The defense, for its strength.

    Returns:
        Infinity where the map knows no input, or one device's shard of it.
    """
    if noise.strength != "own" or noise.scale is not None:
        return 0.0
    try:
        vjp = _product(gmap)
    except (RuntimeError, ValueError):
        vjp = None
    if vjp is None:
        return math.inf
    is_budget = noise.utility_budget is not None
    weight = {name: shape[name] if is_budget else torch.ones(()) for name in gradient}
    unit = float(total({name: g.square() * weight[name] for name, g in gradient.items()}, None))
    change = {name: 2 / (unit or 1.0) * g * weight[name] for name, g in moving.items()}
    slope = vjp(cast_like(change, gmap)).double()
    noisy = int(total({name: (shape[name] > 0).sum() for name in gradient}, None))
    return noisy / 2 * float(slope.square().sum())


def own_shape_trace(gmap: GradientMap, gradient: Tensors, weight: Tensors, noise: Any) -> float:
    """Return the Fisher information about the input that lies in the shape of the noise.

    It concerns noise that follows the batch itself:

        ½ Σ_i ‖∂ log Σ_ii/∂x‖²,   Σ_ii = λ w_i,   w_i = s_i/|g_i|

    s_i counts as a constant: what changes of it is of third order in the loss, and small beside
    coordinates that are nearly zero. Ratios at their cap do not follow the input, and neither does
    what carries no noise. λ brings the noise to the strength asked for, so it follows the input
    wherever w does:

        λ = scale² d/Σ w,   relative_scale² ‖g‖²/Σ w,   or utility_budget/Σ g² w

    With the strength of the usual gradient λ has a constant in ‖g‖²'s place.

    Args:
        gmap: The batch's map, for two products with J.
        gradient: g, to which noise is added.
        weight: w, capped, 0 where there is no noise.
        noise: The defense, for its strength and granularity. With one ratio per tensor, and on
            several devices, the trace is a bound from above.
    """
    weight_sum = float(total(weight, gmap.shards))
    if not weight_sum:
        return 0.0
    uncapped = {name: w.where(w < LARGEST_RATIO, 0) for name, w in weight.items()}
    vjp = None if noise.granularity == "layer" else _product(gmap)
    if vjp is None:
        return _bound(gradient, weight, uncapped, noise, gmap.shards)
    own_part = float(power(OnDemand(uncapped, lambda name: uncapped[name].double()), None))
    inverse = {
        name: (1 / g).where((uncapped[name] > 0) & (g.abs() >= noise.smallest_gradient), 0)
        for name, g in gradient.items()
    }
    is_relative = noise.relative_scale is not None and not noise.follows_transcript
    if noise.utility_budget is not None:
        weighted_squares = {name: g.square() * weight[name] for name, g in gradient.items()}
        weighted_power = float(total(weighted_squares, None))
        factor = {
            name: -g * weight[name] * (1 + (inverse[name] == 0).to(g)) / (weighted_power or 1.0)
            for name, g in gradient.items()
        }
    else:
        factor = {name: weight[name] * inverse[name] / weight_sum for name in gradient}
        if is_relative:
            squared_norm = float(power(gradient, None)) or 1.0
            noisy_gradient = {name: g.where(weight[name] > 0, 0) for name, g in gradient.items()}
            factor = {
                name: slope_of_weight + 2 * noisy_gradient[name] / squared_norm
                for name, slope_of_weight in factor.items()
            }
    slope = vjp(cast_like(factor, gmap)).double()
    cross = (vjp(cast_like(inverse, gmap)).double() * slope).sum()
    noisy = int(total({name: (w > 0).sum() for name, w in weight.items()}, None))
    return max(own_part / 2 - float(cross) + noisy / 2 * float(slope.square().sum()), 0.0)


def _product(gmap: GradientMap) -> Callable[[Tensors], Tensor] | None:
    """δ ↦ J δ, by differences where there are no second derivatives; `None` on several devices."""
    plain = gmap.undefended
    if gmap.shards is not None:
        return None
    if plain.replay.second_order:
        return plain.vjp
    return (by_differences(plain) or plain.twice()).vjp


def _bound(
    gradient: Tensors, weight: Tensors, uncapped: Tensors, noise: Any, shards: Shards | None
) -> float:
    """Bound the shape's information by the triangle inequality.

    With r the ratio of a coordinate, or of its tensor, ‖∂ log w‖ ≤ r and ‖∂ ‖g‖²‖ ≤ 2 r ‖g‖².
    """

    def weighted_mean(weights: Tensors) -> float:
        weight_sum = float(total(weights, shards))
        following = {name: w * uncapped[name] for name, w in weights.items()}
        return float(total(following, shards)) / (weight_sum or 1.0)

    if noise.utility_budget is not None:
        slope_bound = 3 * weighted_mean(
            {name: g.square() * weight[name] for name, g in gradient.items()}
        )
    else:
        slope_bound = weighted_mean(weight)
        if noise.relative_scale is not None and not noise.follows_transcript:
            slope_bound += 2 * weighted_mean({name: g.square() for name, g in gradient.items()})
    bounds = OnDemand(
        uncapped, lambda name: (uncapped[name].double() + slope_bound).where(weight[name] > 0, 0)
    )
    return float(power(bounds, shards)) / 2
