"""Bounds from leakage to an attacker's least squared error per coordinate, as plain functions.

There is one ladder for uniform noise, from loose and cheap to tight and expensive:

    1/‖FIM‖₂  ≤  m/Tr FIM  ≤  Tr(FIM⁻¹)/m = E[I²]/m

All hold for *unbiased* attackers, except `mse_bound_with_prior` and `mse_bound_of_biased`. An
attacker that knows what inputs look like is biased, and may do better than any of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)


def mse_bound_from_dfil(dfil: FloatOrTensor) -> FloatOrTensor:
    """Return the bound MSE ≥ 1/η̄² (Guo et al., Theorem 2).

    It is infinite where nothing leaks, and 0 where everything does.

    Args:
        dfil: η̄² = Tr FIM/m; a number, or one per sample.

    Example:
        >>> mse_bound_from_dfil(4.0), mse_bound_from_dfil(0.0)
        (0.25, inf)
    """
    return _inverse(dfil, "dfil")


def mse_bound_of_biased(dfil: float, bias_slope: float, squared_bias: float = 0.0) -> float:
    """Return the bound MSE ≥ (1 + Tr B/m)²/η̄² + ‖b‖²/m of a biased attacker.

    It is the biased form of `mse_bound_from_dfil`. An attacker x̂ with bias b(x) = E x̂ - x and its
    slope B = ∂b/∂x has a covariance of at least (I + B) FIM⁻¹ (I + B)ᵀ, and Tr(A FIM⁻¹ Aᵀ) ≥ (Tr
    A)²/Tr FIM. One whose answer never changes has Tr B = -m: its error is its bias alone.

    Args:
        dfil: η̄² = Tr FIM/m, in 1/input².
        bias_slope: Tr B/m, without a unit: 0 for an unbiased attacker, -1 for one that ignores what
            was shared.
        squared_bias: ‖b‖²/m, in input².

    Raises:
        ValueError: If the dFIL or the squared bias is negative.

    Reference: Guo et al. (2022), Section 2, whose Theorem 2 is of b = 0; van Trees (1968).

    Example:
        >>> mse_bound_of_biased(4.0, bias_slope=0.0), mse_bound_of_biased(4.0, -0.5, 0.1)
        (0.25, 0.1625)
    """
    if not squared_bias >= 0:
        raise ValueError(f"squared_bias must be at least 0, but is {squared_bias}.")
    slope = (1 + bias_slope) ** 2
    return (slope * mse_bound_from_dfil(dfil) if slope else 0.0) + squared_bias


def mse_bound_from_norm(norm: FloatOrTensor) -> FloatOrTensor:
    """Return the bound MSE ≥ 1/η² with η² = ‖FIM‖₂ (Guo et al., Theorem 2).

    It is never above the bound from dFIL.

    Args:
        norm: η², from `fisher_norm`.

    Example:
        >>> mse_bound_from_norm(16.0)
        0.0625
    """
    return _inverse(norm, "norm")


def mse_bound_with_prior(trace: float, prior_norm: float, num_coordinates: int) -> float:
    """Return the Bayesian Cramér-Rao bound MSE ≥ m / (E Tr J_F + m λ_max(J_P)).

    It holds for biased attackers too. (Chen et al. write d for m, their number of input
    coordinates.)

    Args:
        trace: Tr J_F averaged over inputs drawn from the prior.
        prior_norm: λ_max of J_P = E ∇log p(x) ∇log p(x)ᵀ, which must exist: p has to be smooth and
            vanish at its boundary. For N(μ, τ²I) it is 1/τ².
        num_coordinates: m, the number of input coordinates.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> mse_bound_with_prior(trace=600.0, prior_norm=2.0, num_coordinates=300)
        0.25
    """
    if num_coordinates < 1:
        raise ValueError(f"num_coordinates must be at least 1, but is {num_coordinates}.")
    for name, value in (("trace", trace), ("prior_norm", prior_norm)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, but is {value}.")
    return _inverse(float(trace) / num_coordinates + float(prior_norm), "information")


def mse_bound_from_rdp(epsilon: float, diameters: float | Sequence[float] | Tensor = 1.0) -> float:
    """Return the bound MSE ≥ Σ_i diam_i² / (4m (e^ε₂ - 1)) (Guo et al., Theorem 1).

    It is for a mechanism of (2, ε₂)-Rényi differential privacy.

    Args:
        epsilon: ε₂ ≥ 0, for neighbors that differ in one record's *content* (see
            `rdp_of_order_two`).
        diameters: The range of each coordinate: one number for all, or m of them. 1 for pixels in
            [0, 1].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(mse_bound_from_rdp(1.0), 4), mse_bound_from_rdp(0.0)
        (0.1455, inf)
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, but is {epsilon}.")
    ranges = torch.as_tensor(diameters, dtype=torch.float64)
    if not (ranges >= 0).all() or not ranges.numel():
        raise ValueError("diameters must be at least 0.")
    if epsilon == 0:
        return math.inf
    if epsilon > 700:  # e^ε overflows; the bound is 0 to double precision
        return 0.0
    return float(ranges.square().mean()) / (4 * math.expm1(epsilon))


def rdp_of_order_two(
    noise_multiplier: float, *, steps: int = 1, batch_size: int = 1, dataset_size: int = 1
) -> float:
    """Return the ε₂ of (2, ε₂)-Rényi differential privacy, for Gaussian noise on a sum of records.

    Neighbors differ in one record's content. Reconstruction needs that relation: the attacker asks
    which of two contents a record has. Replacing a record moves a sum of gradients of norm C by up
    to 2C.

    Args:
        noise_multiplier: The standard deviation of the noise, divided by the largest change that
            replacing one record makes. For noise σC on a sum of gradients clipped to C: σ/2.
        steps: The number of steps.
        batch_size: Records in a step, drawn independently at each step without replacement; equal
            to `dataset_size` for all of them.
        dataset_size: The number of records.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> n, regularization, std = 12_665, 1e-2, 1e-2
        >>> sensitivity = 2 / (n * regularization)  # of a regularized logistic loss's minimizer
        >>> round(rdp_of_order_two(std / sensitivity), 3)
        2.494
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be above 0, but is {noise_multiplier}.")
    if steps < 1 or not 1 <= batch_size <= dataset_size:
        raise ValueError(
            "steps must be at least 1 and batch_size from 1 to dataset_size, but they are "
            f"{steps}, {batch_size}, {dataset_size}."
        )
    import dp_accounting  # not where no account is asked for: it takes a second
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant([2.0], dp_accounting.NeighboringRelation.REPLACE_ONE)
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
    if batch_size < dataset_size:
        event = dp_accounting.SampledWithoutReplacementDpEvent(dataset_size, batch_size, event)
    accountant.compose(event, steps)
    return float(accountant.rdp[0])


def _inverse(value: FloatOrTensor, name: str) -> FloatOrTensor:
    if isinstance(value, Tensor):
        if not (value >= 0).all():
            raise ValueError(f"{name} must be at least 0, but has a smaller value or NaN.")
        return 1 / value
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0, but is {value}.")
    return 1 / value if value else math.inf
