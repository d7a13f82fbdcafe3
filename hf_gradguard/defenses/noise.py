"""Noise: share y = g + N(0, Σ) with diagonal Σ.

With Fisher information J_F = J Σ⁻¹ Jᵀ about the input, Tr J_F = Σ_i s_i²/Σ_ii bounds every
attacker, and U₂ = -Σ_i g_i² Σ_ii is the second-order utility. Least Tr J_F at fixed U₂
(Cauchy-Schwarz):

    Σ_ii = λ s_i / |g_i|

Reference: Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2024, 2025).
Their Algorithm 1 prints s_i squared; their theorem, its proof and this module have it plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import logging

from ..gradient_map import GradientMap, Tensors, by_differences
from ..gradient_map.views import ZeroGradient
from ..randomness import Stream
from .base import Defense, DefenseFacts, is_number
from .mechanism import Mechanism
from .message import (
    Message,
    Noise,
    OnDemand,
    cast_like,
    count,
    draw_noise,
    power,
    root,
    scaled,
    total,
    true_gradient,
)
from .sensitivity import (
    LARGEST_RATIO,
    SMALLEST_GRADIENT,
    SensitivityDefense,
    capped,
    sensitivity_ratio,
)

if TYPE_CHECKING:
    from ..sharded.shards import Shards


logger = logging.get_logger(__name__)


@dataclass
class NoiseDefense(Defense):
    """Noise of a given strength. At most one of the three; none of them means `relative_scale=1`.

    Args:
        scale: Root mean square of the noise's standard deviation over all shared parameters, in the
            gradient's unit. Defenses of equal `scale` add equal noise power Tr Σ/d = scale².
        relative_scale: `scale` as a multiple of the root mean square of the gradient that the noise
            is added to.
        utility_budget: C ≥ 0 with U₂ = -C: the variance of ⟨g, y⟩ that the noise may cause.
    """

    scale: float | None = None
    relative_scale: float | None = None
    utility_budget: float | None = None

    def __post_init__(self) -> None:
        strengths = {
            f.name: getattr(self, f.name)
            for f in fields(NoiseDefense)
            if getattr(self, f.name) is not None
        }
        if len(strengths) > 1:
            raise ValueError(
                f"Give one of scale, relative_scale and utility_budget, not "
                f"{' and '.join(strengths)}."
            )
        for name, value in strengths.items():
            if not (is_number(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, but is {value!r}.")
        if not strengths:
            self.relative_scale = 1.0

    def clipped(self, gradient: Tensors, shards: Shards | None) -> Tensors:
        """The gradient that noise is added to. Whoever overrides it overrides `referred` as
        well.
        """
        return gradient

    def referred(self, gradient: Tensors, variance: Tensors, shards: Shards | None) -> Tensors:
        """The variance that noise would have to have on the gradient itself to hide its input as
        well, or less well.

        With J̃ the Jacobian of `clipped`, any Σ' with J̃ Σ⁻¹ J̃ᵀ ≼ J Σ'⁻¹ Jᵀ, so that figures err
        toward more leakage.
        """
        return variance

    def shaped(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> tuple[Mapping[str, Tensor], float]:
        """Variances up to a common factor, and `Noise.shape_trace`. Here: the same everywhere that
        an earlier defense left something.
        """
        uniform = {name: g.new_ones(()).expand_as(g) for name, g in gradient.items()}  # no memory
        return gmap.restrict(uniform), 0.0

    def variance(
        self, gradient: Tensors, shape: Mapping[str, Tensor], shards: Shards | None
    ) -> Mapping[str, Tensor]:
        """The diagonal of Σ: `shape` times the factor λ that gives the strength asked for."""
        if self.utility_budget is not None:
            weighted = OnDemand(gradient, lambda name: gradient[name].square() * shape[name])
            unit_cost, budget = total(weighted, shards), self.utility_budget
        else:
            size = count(gradient, shards)
            unit_cost, budget = total(shape, shards) / size, (self.scale or 0.0) ** 2
            if self.relative_scale is not None:
                budget = self.relative_scale**2 * float(power(gradient, shards)) / size
        # The factor is the strength asked for over the strength of the shape as it is.
        if not budget:
            return {name: torch.zeros_like(g) for name, g in gradient.items()}
        if not unit_cost:
            logger.warning_once(
                f"{self.name} added no noise: the gradient or all its sensitivities are zero, so "
                "to first order there is nothing about the input in it."
            )
            return {name: torch.zeros_like(g) for name, g in gradient.items()}
        factor = float(budget / unit_cost)
        if isinstance(shape, OnDemand):
            return OnDemand(gradient, lambda name: scaled(shape[name], factor))
        return {name: scaled(tensor, factor) for name, tensor in shape.items()}

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        undefended, shards = true_gradient(gmap), gmap.shards
        gradient = self.clipped(undefended, shards)
        shape, shape_trace = self.shaped(gmap, gradient, generator)
        variance = self.variance(gradient, shape, shards)
        noisy = {
            name: torch.addcmul(gradient[name], root(variance, name), unit_noise, out=unit_noise)
            for name, unit_noise in draw_noise(gradient, self.draw, generator, shards)
        }

        # Only meters and audits ask for it, and it takes as much memory as gradients do.
        def noise() -> Noise:
            added = dict(variance)
            referred = self.referred(undefended, added, shards)
            return Noise(referred, added, shape_trace, plain=self._plain)

        return Message(
            cast_like(noisy, gmap),
            noise=noise if self.facts.adds_gaussian_noise else None,
            transmitted=gmap.transmitted,
        )

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(
            needs_input=False,
            post_processes=True,
            sharded_refusal=None,
            adds_gaussian_noise=type(self).draw is NoiseDefense.draw,
            noise_ratio=self.relative_scale,
        )

    @property
    def stands_alone(self) -> bool:
        """Whether a client in whose batch nothing counts shares noise: its strength follows no
        gradient.
        """
        return bool(self.scale)

    @property
    def _plain(self) -> bool:
        """Whether covariances add up where Gaussian noise was before; see `Noise`."""
        return type(self).clipped is NoiseDefense.clipped

    def draw(self, tensor: Tensor, generator: Stream) -> Tensor:
        """Independent noise of unit variance in the shape, type and place of `like`, whose values
        mean nothing. The message is written where the noise was.
        """
        return generator.normal(tensor.shape, device=tensor.device, dtype=tensor.dtype)


@dataclass
class GaussianNoise(NoiseDefense):
    """The same Gaussian noise on every parameter: Σ = scale² I."""

    name: ClassVar[str] = "gaussian_noise"
    facts = NoiseDefense.facts


@dataclass
class LaplaceNoise(NoiseDefense):
    """The same Laplace noise on every parameter, of the same variance as the Gaussian's: b =
    scale/√2.
    """

    name: ClassVar[str] = "laplace_noise"
    facts = NoiseDefense.facts

    def draw(self, tensor: Tensor, generator: Stream) -> Tensor:
        # The difference of two unit exponentials is Laplace(0, 1), of variance 2.
        upward, downward = (
            generator.exponential(tensor.shape, device=tensor.device, dtype=tensor.dtype)
            for _ in range(2)
        )
        return (upward - downward) / math.sqrt(2)

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Of relative noise, y itself tells its strength: E ‖y‖² = ‖g‖² (1 + r²)."""
        masks, entries = message.transmitted, count(message, None)
        noisy = max(entries if masks is None else int(total(masks, None)), 1)
        if self.scale is not None:
            variance = self.scale**2 * entries / noisy
        elif self.relative_scale is not None:
            share = self.relative_scale**2 / (1 + self.relative_scale**2)
            squares = sum(float(t.double().square().sum()) for t in message.values())
            variance = share * squares / noisy
        else:
            return None
        return Mechanism(noise="laplace", variance=variance) if variance else Mechanism()


@dataclass
class OptimalNoise(SensitivityDefense, NoiseDefense):
    """Noise shaped by sensitivity, Σ_ii = λ s_i / |g_i|: the least information about the input at a
    given utility, of all shapes that know s and g.

    With `shape="own"` they are this batch's, as published, and parameters with s_i = 0 get no
    noise. With `"public"` and `"past"` Σ does not depend on the batch.

    Args:
        floor: ρ in [0, 1], the share of the noise's power that `"public"` and `"past"` spread over
            all coordinates alike, so that none of an unusual batch stays bare. Default: 0.2.
    """

    name: ClassVar[str] = "optimal_noise"
    facts = SensitivityDefense.facts
    floor: float | None = None

    def __post_init__(self) -> None:
        NoiseDefense.__post_init__(self)
        SensitivityDefense.__post_init__(self)
        if self.shape == "own":
            if self.floor is not None:
                raise ValueError(
                    "shape='own' leaves coordinates bare that know nothing of this batch, as "
                    "published: leave floor out, or take shape='public' or 'past'."
                )
            return
        self.floor = 0.2 if self.floor is None else self.floor
        if not (is_number(self.floor) and 0 <= self.floor <= 1):
            raise ValueError(f"floor must be from 0 to 1, but is {self.floor!r}.")

    @property
    def _plain(self) -> bool:
        return super()._plain and self.shape != "own"

    def informed(self) -> dict[str, Any]:
        return {"noise_variance": True}

    def bare_where_clipped(self, ratio: Tensors, gradient: Tensors) -> Tensors:
        """Ratios, without those of coordinates that clipping holds."""
        return ratio

    def shaped(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> tuple[Mapping[str, Tensor], float]:
        is_empty = isinstance(gmap, ZeroGradient)
        if self.shape == "own" and not is_empty:
            own_ratio = gmap.restrict(
                sensitivity_ratio(*self.own_sensitivity(gmap, gradient, generator))
            )
            own_ratio = capped(self.bare_where_clipped(own_ratio, gradient))
            return own_ratio, shape_trace(gmap, gradient, own_ratio, self)
        known_ratio = self.known_ratio(gradient) if is_empty else None
        averaged = known_ratio if is_empty else self.averaged_ratio(gmap, generator)
        if averaged is None:
            return NoiseDefense.shaped(self, gmap, gradient, generator)
        # What an earlier defense withheld gets no noise, so the floor is spread over the rest.
        shape, masks = averaged, gmap.transmitted
        entries = count(gradient, gmap.shards) if masks is None else int(total(masks, gmap.shards))
        if masks is not None:
            shape = OnDemand(gradient, lambda name: gmap.restrict({name: averaged[name]})[name])
        shape_sum = float(total(shape, gmap.shards))
        assert self.floor is not None
        lift = self.floor * shape_sum / max(int(entries), 1)

        spread = 1 - self.floor

        def lifted(name: str) -> Tensor:
            lifted_shape = scaled(shape[name], spread, lift)
            return gmap.restrict({name: lifted_shape})[name]

        # The power that is lifted off is as much as what is spread.
        return OnDemand(gradient, lifted, shape_sum), 0.0


def shape_trace(gmap: GradientMap, gradient: Tensors, weight: Tensors, noise: Any) -> float:
    """The Fisher information about the whole batch's input that lies in the shape of noise which
    follows the batch itself:

        ½ Σ_i ‖∂ log Σ_ii/∂x‖²,   Σ_ii = λ w_i,   w_i = s_i/|g_i|

    s_i counts as a constant: what changes of it is of third order in the loss, and small beside
    coordinates that are nearly zero. Ratios at their cap do not follow the input, and neither does
    what carries no noise. λ brings the noise to the strength asked for, so it follows the input
    wherever w does:

        λ = scale² d/Σ w,   relative_scale² ‖g‖²/Σ w,   or utility_budget/Σ g² w

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
    follows = {name: w.where(w < LARGEST_RATIO, 0) for name, w in weight.items()}
    vjp = None if noise.granularity == "layer" else _product(gmap)
    if vjp is None:
        return _bound(gradient, weight, follows, noise, gmap.shards)
    own_part = float(power(OnDemand(follows, lambda name: follows[name].double()), None))
    inverse = {
        name: (1 / g).where((follows[name] > 0) & (g.abs() >= SMALLEST_GRADIENT), 0)
        for name, g in gradient.items()
    }
    if noise.utility_budget is not None:
        weighted_squares = {name: g.square() * weight[name] for name, g in gradient.items()}
        weighted_power = float(total(weighted_squares, None))
        factor = {
            name: -g * weight[name] * (1 + (inverse[name] == 0).to(g)) / (weighted_power or 1.0)
            for name, g in gradient.items()
        }
    else:
        factor = {name: weight[name] * inverse[name] / weight_sum for name in gradient}
        if noise.relative_scale is not None:
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
    gradient: Tensors, weight: Tensors, follows: Tensors, noise: Any, shards: Shards | None
) -> float:
    """With r the ratio of a coordinate, or of its tensor: ‖∂ log w‖ ≤ r, ‖∂ ‖g‖²‖ ≤ 2 r ‖g‖², and
    the triangle inequality.
    """

    def weighted_mean(weights: Tensors) -> float:
        weight_sum = float(total(weights, shards))
        following = {name: w * follows[name] for name, w in weights.items()}
        return float(total(following, shards)) / (weight_sum or 1.0)

    if noise.utility_budget is not None:
        slope_bound = 3 * weighted_mean(
            {name: g.square() * weight[name] for name, g in gradient.items()}
        )
    else:
        slope_bound = weighted_mean(weight)
        if noise.relative_scale is not None:
            slope_bound += 2 * weighted_mean({name: g.square() for name, g in gradient.items()})
    bounds = OnDemand(
        follows, lambda name: (follows[name].double() + slope_bound).where(weight[name] > 0, 0)
    )
    return float(power(bounds, shards)) / 2
