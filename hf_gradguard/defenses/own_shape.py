"""What lies in the shape of noise that follows the batch itself: the Fisher information in Σ.

    ½ Σ_i ‖∂ log Σ_ii/∂x‖²,   Σ_ii = λ w_i,   w_i = s_i/|g_i|

s_i is held: what changes of it is of third order in the loss, and small beside coordinates that are
nearly zero. Ratios at their cap do not follow the input, and neither does what carries no noise. λ
brings the noise to the strength asked for, so it follows the input wherever w does:

    λ = scale² d/Σ w,   relative_scale² ‖g‖²/Σ w,   or utility_budget/Σ g² w
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..gradient_map import GradientMap, Tensors, by_differences
from .message import OnDemand, cast_like, power, total
from .sensitivity import LARGEST_RATIO, SMALLEST_GRADIENT

if TYPE_CHECKING:
    from ..sharded.shards import Shards


def shape_trace(gmap: GradientMap, gradient: Tensors, weight: Tensors, noise: Any) -> float:
    """The trace, about the whole batch's input.

    Args:
        gmap: The batch's map, for two products with J.
        gradient: g, to which noise is added.
        weight: w, capped, 0 where there is no noise.
        noise: The defense, for its strength and granularity. With one ratio per tensor, and on
            several devices, the trace is a bound from above.
    """
    whole = float(total(weight, gmap.shards))
    if not whole:
        return 0.0
    follows = {name: w.where(w < LARGEST_RATIO, 0) for name, w in weight.items()}
    vjp = None if noise.granularity == "layer" else _product(gmap)
    if vjp is None:
        return _bound(gradient, weight, follows, noise, gmap.shards)
    free = float(power(OnDemand(follows, lambda name: follows[name].double()), None))
    inverse = {
        name: (1 / g).where((follows[name] > 0) & (g.abs() >= SMALLEST_GRADIENT), 0)
        for name, g in gradient.items()
    }
    if noise.utility_budget is not None:
        power_of = {name: g.square() * weight[name] for name, g in gradient.items()}
        size = float(total(power_of, None))
        factor = {
            name: -g * weight[name] * (1 + (inverse[name] == 0).to(g)) / (size or 1.0)
            for name, g in gradient.items()
        }
    else:
        factor = {name: weight[name] * inverse[name] / whole for name in gradient}
        if noise.relative_scale is not None:
            size = float(power(gradient, None)) or 1.0
            moves = {name: g.where(weight[name] > 0, 0) for name, g in gradient.items()}
            factor = {name: f + 2 * moves[name] / size for name, f in factor.items()}
    slope = vjp(cast_like(factor, gmap)).double()
    cross = (vjp(cast_like(inverse, gmap)).double() * slope).sum()
    noisy = int(total({name: (w > 0).sum() for name, w in weight.items()}, None))
    return max(free / 2 - float(cross) + noisy / 2 * float(slope.square().sum()), 0.0)


def _product(gmap: GradientMap) -> Callable[[Tensors], Tensor] | None:
    """δ ↦ J δ, by differences where there are no second derivatives; `None` on several devices."""
    plain = gmap.undefended
    if gmap.shards is not None:
        return None
    if plain.replay.second_order:
        return plain.vjp
    return (by_differences(plain) or plain.twice()).vjp


def _bound(
    gradient: Tensors, weight: Tensors, follows: Tensors, noise: Any, shards: Shards | None
) -> float:
    """With r the ratio of a coordinate, or of its tensor: ‖∂ log w‖ ≤ r, ‖∂ ‖g‖²‖ ≤ 2 r ‖g‖², and
    the triangle inequality.
    """

    def mean(weights: Tensors) -> float:
        size = float(total(weights, shards))
        following = {name: w * follows[name] for name, w in weights.items()}
        return float(total(following, shards)) / (size or 1.0)

    if noise.utility_budget is not None:
        most = 3 * mean({name: g.square() * weight[name] for name, g in gradient.items()})
    else:
        most = mean(weight)
        if noise.relative_scale is not None:
            most += 2 * mean({name: g.square() for name, g in gradient.items()})
    each = OnDemand(follows, lambda n: (follows[n].double() + most).where(weight[n] > 0, 0))
    return float(power(each, shards)) / 2
