"""Fisher information of what is shared about the input, and dFIL, its average per coordinate.

A client shares y = g(x) + N(0, Σ) with diagonal Σ. About sample j, with J_j the rows of J that
belong to it (g is the batch mean, so they hold the factor 1/B),

    FIM_j = J_j Σ⁻¹ J_jᵀ,    dFIL_j = η̄² = Tr FIM_j / m_j

and no unbiased attacker, even one that knows all other samples, has a mean squared error per
coordinate under 1/η̄².

Tr FIM_j = E‖J_j w‖² over w = Σ^(-1/2) z with random signs z, 1 or -1: one pass for J w gives one
unbiased draw for *every* sample of the batch. Its variance is at most 2‖FIM_j‖_F², that of probing
FIM_j itself with normal numbers, which would take a pass per sample.

With a prior there is a bound on *every* attacker, `bayesian_bound`.

References: Guo et al., "Bounding Training Data Reconstruction in Private (Deep) Learning" (2022),
Eq. 1 to 5, Theorem 2. Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks"
(2025), Theorem 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import embed
from ..randomness import Stream, signs
from .bounds import mse_bound_from_dfil, mse_bound_with_prior
from .gram import (
    Eigenvalue,
    Estimate,
    NoiseVariance,
    Unknowns,
    largest_eigenpair,
    mean_square_norm,
    not_finite,
    variances,
)
from .influence import Estimator, check_probes, gaussian

if TYPE_CHECKING:
    from ..defenses import Message


class DFIL(NamedTuple):
    """The diagonal Fisher information leakage (dFIL) of every sample, with its standard error.

    Args:
        value: The dFIL η̄² of every sample, `(B,)`, in units of 1/input².
        standard_error: The standard error of each, `(B,)`.

    Example:
        >>> leakage = dfil(gmap, noise_variance=1e-6, num_probes=4)
        >>> leakage.value.shape, leakage.standard_error.shape
        (torch.Size([2]), torch.Size([2]))
    """

    value: Tensor
    standard_error: Tensor


def dfil(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    num_probes: int | None = 50,
    generator: Stream | torch.Generator | None = None,
) -> DFIL:
    """Return the diagonal Fisher information leakage (dFIL) of every sample.

    It is η̄² = Tr FIM_j / m_j, the information about sample j per coordinate. The figure is private,
    like the sample.

    Args:
        gmap: The client's gradient map. `smoothly_clipped` makes one of a clipped gradient.
        noise_variance: Diagonal Σ of the noise on the client's mean gradient: one number, or one
            tensor per shared parameter. An infinite variance stands for a coordinate that is not
            shared.
        num_probes: The number of independent draws, one pass each for the whole batch. `None`
            computes it exactly, in m passes.
        generator: The source of the draws, a `Stream` or a generator on the input's device.
            Default: a new `Stream`.

    Returns:
        η̄² and its standard error, one per sample. m_j counts pixels, or real tokens times hidden
            size. η̄² is infinite for a sample that some coordinate without noise depends on. The
            standard error is 0 where the figure is exact or infinite, and infinite for one probe.
            It is that of normal probes: with signs, which are used, it is a little less where few
            parameters tell most.

    Raises:
        ValueError: If `num_probes` is below 1, or the variances do not fit.

    Example:
        >>> from hf_gradguard.leakage import mse_bound_from_dfil
        >>> leakage, standard_error = dfil(gmap, noise_variance=1e-6)
        >>> mse_bound_from_dfil(leakage).shape  # one for each sample
        torch.Size([2])
    """
    unknowns, variance = Unknowns(gmap), variances(gmap, noise_variance)
    if num_probes is None:
        value = _exact_traces(unknowns, variance)
        error = torch.zeros_like(value)
    else:
        value, error = mean_square_norm(_gram(gmap, unknowns, variance, num_probes, generator))
    exposed = unknowns.unpack(_unprotected(gmap, unknowns, variance)).flatten(1).any(1)
    value, error = (figure / unknowns.per_sample for figure in (value, error))
    return DFIL(value.masked_fill(exposed, math.inf), error.masked_fill(exposed, 0.0))


def fisher_trace(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    num_probes: int | None = None,
    generator: Stream | torch.Generator | None = None,
) -> Estimate:
    """Return the trace of the Fisher information that a message holds about the whole batch.

    It is Tr J_F = Tr(J Σ⁻¹ Jᵀ) = Σ_i s_i²/Σ_ii.

    Args:
        gmap: The client's gradient map.
        noise_variance: Diagonal Σ, as in `dfil`.
        num_probes: The number of independent draws, one pass each. `None` computes it exactly, in m
            passes.
        generator: The source of the draws, a `Stream` or a generator on the input's device.
            Default: a new `Stream`.

    Returns:
        A float with its `standard_error`. Infinite if a coordinate without noise depends on the
            input.

    Example:
        >>> estimate = fisher_trace(gmap, noise_variance=1e-6, num_probes=10)
        >>> estimate > 0, estimate.standard_error < estimate
        (True, True)
    """
    unknowns, variance = Unknowns(gmap), variances(gmap, noise_variance)
    if num_probes is not None:
        figure = Estimate.mean(_gram(gmap, unknowns, variance, num_probes, generator).sum(0))
    else:
        figure = Estimate.exact(_exact_traces(unknowns, variance).sum())
    return Estimate.exact(math.inf) if _unprotected(gmap, unknowns, variance).any() else figure


def fisher_norm(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    *,
    sample: int | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 300,
) -> Eigenvalue:
    """Return the Fisher information about the most visible direction of the input.

    It is η² = ‖J Σ⁻¹ Jᵀ‖₂. Lanczos' method computes it: power iteration that keeps its vectors, and
    so needs fewer of the same products.

    Args:
        gmap: The client's gradient map.
        noise_variance: Diagonal Σ, as in `dfil`.
        sample: The sample whose information is computed, given the others. Default: the whole
            batch.
        tolerance: The relative residual of the eigenvalue.
        max_iterations: The most products with J and Jᵀ.

    Returns:
        A float with its `vector`, `residual` and `iterations`. Infinite if a coordinate without
        noise depends on the input.

    Example:
        >>> norm = fisher_norm(gmap, noise_variance=1e-6)
        >>> norm.vector.shape == gmap.input.shape
        True
    """
    unknowns = Unknowns(gmap, sample)
    variance = variances(gmap, noise_variance)
    if _unprotected(gmap, unknowns, variance).any():
        eigenvalue = Eigenvalue(math.inf)
        eigenvalue.vector = torch.zeros_like(gmap.input)
        eigenvalue.residual, eigenvalue.iterations = 0.0, 0
        return eigenvalue
    precision = {name: _precision(v) for name, v in variance.items()}
    pair = largest_eigenpair(
        lambda v: unknowns.gram(v, precision), unknowns.random_vector(), tolerance, max_iterations
    )
    return Eigenvalue.from_pair(pair, unknowns)


def bayesian_bound(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    deviation: float | None = None,
    num_probes: int | None = None,
    generator: Stream | torch.Generator | None = None,
) -> Estimate:
    """Bound the MSE of any attacker, biased or not: MSE ≥ 1/(Tr J_F/m + 1/τ²) per coordinate.

    That is Theorem 3.2 of Chen et al. where the data's prior has J_P = I/τ². It holds

    - for inputs N(μ, τ²I), whatever μ is, and
    - for *any* inputs to which noise N(0, τ²I) was added, whatever else attackers know of them. The
      score of such a prior is -E[n | x]/τ for the standard normal n that was added. So J_P ≼ I/τ²,
      and a better denoiser does not raise it.

    An attacker that ignores the message has τ². So the fraction that is left of it, bound/τ², says
    how little the message reveals at a resolution of τ.

    Args:
        gmap: The client's gradient map. E Tr J_F is taken here, at one batch. For several, average
            `fisher_trace`, and give that to `mse_bound_with_prior`.
        noise_variance: Diagonal Σ, as in `dfil`.
        deviation: τ, in the input's unit. Default: `prior_deviation(gmap)`.
        num_probes: The number of draws for Tr J_F, as in `fisher_trace`. `None` computes it
            exactly.
        generator: The source of the draws.

    Returns:
        A float with its `standard_error`. 0 if a coordinate without noise depends on the input.

    Raises:
        ValueError: If τ is not above 0.

    Example:
        >>> tau = prior_deviation(gmap)
        >>> weak, strong = (bayesian_bound(gmap, v, num_probes=4) for v in (1e-6, 1.0))
        >>> 0 < weak < strong < tau**2
        True
    """
    deviation = prior_deviation(gmap) if deviation is None else deviation
    if not 0 < deviation < math.inf:
        raise ValueError(f"deviation must be a finite number above 0, but is {deviation!r}.")
    trace = fisher_trace(gmap, noise_variance, num_probes, generator)
    coordinates = Unknowns(gmap).size
    bound = mse_bound_with_prior(trace, deviation**-2, coordinates)
    estimate = Estimate(bound)
    error = trace.standard_error  # infinite of one draw, and then of the bound too
    estimate.standard_error = bound**2 * error / coordinates if error else 0.0
    return estimate


_EMBEDDINGS = 2**10
"""The number of rows of an embedding matrix that estimate how far words lie apart."""


def prior_deviation(gmap: GradientMap) -> float:
    """Return the standard deviation of one input coordinate under what attackers may expect.

    It is that of embeddings over the vocabulary, or of pixels over this batch's images, from the
    mean of each channel.

    Example:
        >>> prior_deviation(gmap) > 0
        True
    """
    if gmap.embedding is not None:
        weight = next(gmap.embedding.parameters())
        count = min(len(weight), _EMBEDDINGS)  # of a large vocabulary as many, evenly spread
        ids = torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
        rows = embed(gmap.embedding, ids).double()
    else:
        rows = gmap.input.double().movedim(1, -1).flatten(0, -2)
    return float(rows.var(0).mean().sqrt())


def _exact_traces(unknowns: Unknowns, variance: Tensors) -> Tensor:
    """Return Tr FIM_j of every sample, `(B,)`, by a pass for every coordinate."""
    precision = {name: _precision(v) for name, v in variance.items()}
    squares = [
        torch.stack(
            [(t.square() * precision[name]).sum() for name, t in unknowns.jvp(unit).items()]
        ).sum()
        for unit in unknowns.units()
    ]
    if not (traces := torch.stack(squares)).isfinite().all():
        raise not_finite()
    by_sample = traces.split(unknowns.per_sample.tolist())
    return torch.stack([sample_traces.sum(dtype=torch.float64) for sample_traces in by_sample])


def _gram(
    gmap: GradientMap,
    unknowns: Unknowns,
    variance: Tensors,
    num_probes: int,
    generator: Stream | torch.Generator | None,
) -> Tensor:
    """Return inner products of the (Jw)_j of k independent w, `(B, k, k)`.

    It keeps k vectors of the input's size.
    """
    check_probes(num_probes)
    generator, parameters = generator or Stream(), gmap.parameters
    deviation = {name: _precision(v).sqrt() for name, v in variance.items()}
    draws = []
    for _ in range(num_probes):
        probe = {n: signs(generator, p.shape, p.device, p.dtype) for n, p in parameters.items()}
        draws.append(unknowns.vjp({n: z.mul_(deviation[n]) for n, z in probe.items()}))
    products = torch.stack(draws)
    if not torch.isfinite(products).all():
        raise not_finite()
    by_sample = products.split(unknowns.per_sample.tolist(), dim=1)
    return torch.stack([(x @ x.T).double() for x in by_sample])


def _unprotected(gmap: GradientMap, unknowns: Unknowns, variance: Tensors) -> Tensor:
    """Return J w for a random w on the coordinates without noise.

    It is non-zero, with probability 1, wherever one of them depends on the input.
    """
    bare = {name: v == 0 for name, v in variance.items()}
    if not any(mask.any() for mask in bare.values()):
        return torch.zeros_like(unknowns.random_vector())
    generator = torch.Generator(device=gmap.input.device).manual_seed(0)
    return unknowns.vjp(gaussian(gmap, bare, generator))


def _precision(variance: Tensor) -> Tensor:
    """Return 1/Σ_ii, and 0 where there is no noise; `_unprotected` handles those coordinates."""
    return torch.where(variance > 0, 1 / variance, 0.0)


class DFILBound(Estimator):
    """The bound 1/√dFIL by 50 probes: the least RMSE per coordinate of an unbiased attacker.

    The attacker knows the covariance of the message's Gaussian noise. The bound is infinite where
    nothing depends on the input.
    """

    title = "dFIL bound"
    meaning = (
        "the least RMSE per coordinate of an unbiased attacker under Gaussian noise; one that "
        "knows what inputs look like may be below it"
    )
    needs_noise = True
    probes: ClassVar[int] = 50

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        assert message.noise is not None
        leakage = dfil(self.gmap, message.noise.variance, self.probes, generator).value
        return mse_bound_from_dfil(leakage).sqrt()


class BayesianBound(Estimator):
    """The root of each sample's `bayesian_bound`, for data that all leak as much as this sample."""

    title = "Bayesian bound"
    meaning = (
        "the least RMSE per coordinate of every attacker, biased or not, on normal inputs of the "
        "model's own spread, or on any inputs with normal noise of that size"
    )
    needs_noise = True
    ranks = False  # as dFIL does
    probes: ClassVar[int] = 20

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        assert message.noise is not None
        leakage = dfil(self.gmap, message.noise.variance, self.probes, generator).value
        return (leakage + prior_deviation(self.gmap) ** -2).rsqrt()
