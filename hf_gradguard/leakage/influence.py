"""Inversion influence (I²F): how far a change δ of the shared gradient moves a reconstruction.

    I(δ)    = ‖(J Jᵀ + εI)⁻¹ J δ‖
    I_lb(δ) = ‖J δ‖ / (λ_max(J Jᵀ) + ε)  ≤  ‖J δ‖² / ‖(J Jᵀ + εI) J δ‖  ≤  I(δ)

The unit is that of the input: the norm of its error over all coordinates; divided by √m, its root
mean square. It is a first-order figure for an attacker that inverts g exactly. Use it to rank
perturbations and samples, not to predict an attack's error.

Everything is computed in input space, by products J(Jᵀv), with a single vector of the parameters'
size at a time.

Reference: Zhang et al., "Understanding Deep Gradient Leakage via Inversion Influence Functions"
(2023), Eq. 4 to 6. They have ε only in I, so that their lower bound can exceed it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream, normal
from ..registry import ESTIMATORS
from .gram import (
    Eigenvalue,
    Estimate,
    Influence,
    NoiseVariance,
    Unknowns,
    finite,
    largest_eigenpair,
    solve,
    variances,
)

if TYPE_CHECKING:
    from ..defenses import Message

MAX_ITERATIONS = 300
"""The most iterations of the search for an eigenvalue."""


def inversion_influence(
    gmap: GradientMap,
    delta: Tensors,
    damping: float = 0.0,
    *,
    sample: int | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> Influence:
    """Return the inversion influence of δ: how far δ moves the input that inverts the gradient.

    It is I(δ) = ‖(J Jᵀ + εI)⁻¹ J δ‖, by conjugate gradients on v ↦ J(Jᵀv) + εv.

    At ε = 0 on a singular J Jᵀ this is the pseudo-inverse: a direction of the input that the
    gradient says nothing about counts as no error. So I is what δ adds to the error, not what an
    attacker cannot see anyway, and it is 0 where J is. Directions that the gradient says *nearly*
    nothing about make the problem singular to working precision; that is an error and never a
    silent cut-off.

    Args:
        gmap: The client's gradient map.
        delta: The shared gradient minus the true one. Missing parameters count as unperturbed.
        damping: ε ≥ 0, in the unit of J Jᵀ. A usual choice is 1e-3 * `largest_eigenvalue(gmap)`.
        sample: The only sample whose coordinates are unknown: the influence on an attacker that
            knows all the others. Default: all are unknown at once.
        tolerance: The relative error of I at which to stop, guaranteed by ‖r‖ ≤ tolerance · ε ·
            ‖x‖. At ε = 0 it iterates until nothing of Jδ is left but rounding. Each iteration is
            one pass for Jᵀv and one for Jδ.
        max_iterations: The most iterations. It also bounds memory: as many vectors of the input's
            size are kept.

    Returns:
        A float that also has `rmse`, `error`, `per_sample`, `iterations`, `residual` and
        `relative_error`.

    Raises:
        ValueError: If an argument is out of range.
        ArithmeticError: If the problem is singular to working precision, or the tolerance is not
            reached.

    Example:
        >>> delta = {name: 1e-3 * torch.randn_like(g) for name, g in gmap.gradient().items()}
        >>> influence = inversion_influence(gmap, delta, damping=1e-3 * largest_eigenvalue(gmap))
        >>> influence.error.shape == gmap.input.shape, influence.relative_error < 1e-2
        (True, True)
    """
    _check_iteration(damping, tolerance, max_iterations)
    unknowns = Unknowns(gmap, sample)
    solution = solve(unknowns.gram, unknowns.vjp(delta), damping, tolerance, max_iterations)
    error = unknowns.unpack(solution.x)
    influence = Influence(solution.x.double().norm())
    influence.num_coordinates, influence.error = unknowns.size, error
    influence.per_sample = error.flatten(1).norm(dim=1, dtype=torch.float64).to(error.dtype)
    influence.iterations, influence.residual = solution.iterations, solution.residual
    influence.relative_error = solution.relative_error
    return influence


def inversion_influence_lower_bound(
    gmap: GradientMap,
    delta: Tensors,
    damping: float = 0.0,
    *,
    sample: int | None = None,
    eigenvalue: Eigenvalue | None = None,
    tolerance: float = 1e-4,
    random: bool = False,
) -> Influence:
    """Return the lower bound I_lb(δ) of the inversion influence I(δ), without solving a system.

    It is ‖J δ‖ / (λ_max(J Jᵀ) + ε), which is at most I(δ) at the same ε.

    `per_sample` has ‖(Jδ)_j‖ in the numerator: a lower bound of `inversion_influence(gmap, delta,
    damping, sample=j)`, since no block of J Jᵀ has a larger eigenvalue than the whole.

    Args:
        gmap: The client's gradient map.
        delta: The shared gradient minus the true one.
        damping: ε ≥ 0, in the unit of J Jᵀ.
        sample: The only sample whose coordinates are unknown. Default: all are unknown.
        eigenvalue: The result of `largest_eigenvalue(gmap)`, if it is known already: it does not
            depend on δ.
        tolerance: The tolerance of the eigenvalue, if it is not known. Its residual is added to it.
        random: Whether δ is noise on every coordinate. Then Jδ has a component in every direction,
            larger where the eigenvalue is, and the search for the largest begins there, which saves
            one product.

    Returns:
        A float that also has `rmse`, `per_sample`, `iterations` and `residual`. 0 where J is.

    Example:
        >>> top = largest_eigenvalue(gmap)  # the same for every perturbation
        >>> damping = 1e-3 * top
        >>> bound = inversion_influence_lower_bound(gmap, delta, damping, eigenvalue=top)
        >>> 0 < bound <= inversion_influence(gmap, delta, damping)
        True
    """
    _check_damping(damping)
    unknowns = Unknowns(gmap, sample)
    product = unknowns.vjp(delta)
    if eigenvalue is None:
        start = product if random and product.any() else unknowns.random_vector()
        eigenvalue = Eigenvalue.from_pair(
            largest_eigenpair(unknowns.gram, start, tolerance, MAX_ITERATIONS), unknowns
        )
    # Lanczos approaches λ_max from below; with its residual added this stays a lower bound.
    divisor = float(eigenvalue) * (1 + 2 * gmap.product_error) + eigenvalue.residual + damping
    scale = (1 - gmap.product_error) / divisor if divisor else 0.0
    bound = Influence(finite(product.double().norm()) * scale)
    bound.num_coordinates = unknowns.size
    norms = unknowns.unpack(product).flatten(1).norm(dim=1, dtype=torch.float64)
    bound.per_sample = (norms * scale).to(product.dtype)
    bound.iterations, bound.residual = eigenvalue.iterations, eigenvalue.residual
    return bound


def one_product_bound(
    gmap: GradientMap, delta: Tensors, damping: float = 0.0, *, sample: int | None = None
) -> float:
    """Return a lower bound of the inversion influence I(δ), from one product and no eigenvalue.

    It is ‖b‖² / ‖(J Jᵀ + εI) b‖ with b = J δ, which is at most I(δ) and at least I_lb(δ): for I(δ)
    = ‖A⁻¹b‖ with a symmetric A, ‖b‖² = ⟨A⁻¹b, A b⟩ ≤ I(δ) ‖A b‖; and ‖A b‖ ≤ λ_max ‖b‖.

    Args:
        gmap: The client's gradient map. For one by differences, three times the error of a product
            is subtracted, so that it remains a lower bound.
        delta: The shared gradient minus the true one.
        damping: ε ≥ 0, in the unit of J Jᵀ.
        sample: The only sample whose coordinates are unknown. Default: all are unknown.

    Returns:
        A norm over all coordinates; divided by √m, the root mean square. 0 where Jδ is.

    Raises:
        FloatingPointError: If a product is not finite.

    Example:
        >>> from hf_gradguard.leakage import one_product_bound
        >>> damping = 1e-2 * largest_eigenvalue(gmap)
        >>> bound = one_product_bound(gmap, delta, damping)
        >>> inversion_influence_lower_bound(gmap, delta, damping) <= bound
        True
        >>> bound <= inversion_influence(gmap, delta, damping)
        True
    """
    _check_damping(damping)
    unknowns = Unknowns(gmap, sample)
    product = unknowns.vjp(delta)
    if not (size := finite(product.double().norm())):
        return 0.0
    unit = (product.double() / size).to(product.dtype)
    divisor = finite((unknowns.gram(unit) + damping * unit).norm())
    return max(0.0, 1 - 3 * gmap.product_error) * size / divisor if divisor else 0.0


def largest_eigenvalue(
    gmap: GradientMap,
    *,
    sample: int | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
) -> Eigenvalue:
    """Return the largest eigenvalue of J Jᵀ, by Lanczos' method in input space.

    It is also the largest eigenvalue of JᵀJ, at a small fraction of the memory.

    Args:
        gmap: The client's gradient map.
        sample: The only sample whose coordinates count. Default: all count.
        tolerance: A bound on ‖J Jᵀv - λv‖/λ. λ is at most that far from an eigenvalue, and usually
            its square.
        max_iterations: The most iterations. Each is one pass for Jᵀv and one for Jδ, and keeps one
            vector of the input's size.

    Returns:
        A float that also has `vector` (unit norm, the input's shape), `residual` and `iterations`.

    Raises:
        ArithmeticError: If the tolerance is not reached.

    Example:
        >>> largest_eigenvalue(gmap, sample=0) <= 1.001 * largest_eigenvalue(gmap)
        True
    """
    _check_iteration(0.0, tolerance, max_iterations)
    unknowns = Unknowns(gmap, sample)
    return Eigenvalue.from_pair(
        largest_eigenpair(unknowns.gram, unknowns.random_vector(), tolerance, max_iterations),
        unknowns,
    )


class Directions(NamedTuple):
    """Eigenvalues of J Jᵀ, ascending, `(count,)`, and unit eigenvectors, `(count, *input.shape)`.

    Example:
        >>> directions = smallest_directions(gmap, count=2, sample=0)
        >>> bool(directions.eigenvalues.diff() >= 0)
        True
    """

    eigenvalues: Tensor
    vectors: Tensor


def smallest_directions(
    gmap: GradientMap, count: int = 1, *, sample: int | None = None
) -> Directions:
    """Return the directions of the input that the gradient says least about, by a dense J Jᵀ.

    A perturbation of norm 1 along such a direction u, δ = Jᵀu/√λ, has I(δ) = 1/√λ. With `count`
    equal to the number of coordinates m this is the whole spectrum.

    Args:
        gmap: The client's gradient map.
        count: The number of directions, from 1 to m.
        sample: The only sample whose coordinates count. Default: all count.

    Raises:
        ValueError: If `count` is out of range, or m above 8192: the cost is 2m passes and m²
            numbers.

    Example:
        >>> values, vectors = smallest_directions(gmap, count=3, sample=0)
        >>> values.shape, vectors.shape
        (torch.Size([3]), torch.Size([3, 2, 8, 32]))
    """
    unknowns = Unknowns(gmap, sample)
    if not 1 <= count <= unknowns.size:
        raise ValueError(f"count must be from 1 to {unknowns.size}, but is {count}.")
    values, vectors = torch.linalg.eigh(unknowns.dense_gram())
    return Directions(values[:count], torch.stack([unknowns.unpack(v) for v in vectors.T[:count]]))


def expected_squared_influence(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    damping: float = 0.0,
    *,
    num_probes: int | None = None,
    generator: Stream | torch.Generator | None = None,
    sample: int | None = None,
    tolerance: float = 1e-3,
) -> Estimate:
    """Return the mean of the squared inversion influence I(δ)² over noise δ ~ N(0, Σ).

    At ε = 0 and Σ = σ²I it is σ² Tr((J Jᵀ)⁻¹).

    Args:
        gmap: The client's gradient map.
        noise_variance: Diagonal Σ: one number, or one tensor per shared parameter.
        damping: ε ≥ 0, in the unit of J Jᵀ.
        num_probes: How many δ to draw and solve for. `None` computes it exactly from a dense J Jᵀ,
            where at ε = 0 eigenvalues below m · eps · λ_max count as directions that the gradient
            says nothing about, as in a pseudo-inverse.
        generator: The source of the draws, a `Stream` or a generator on the input's device.
            Default: a new `Stream`.
        sample: The only sample whose coordinates are unknown. Default: all are unknown.
        tolerance: The relative error of I at which to stop solving.

    Returns:
        A float with its `standard_error`: 0 if exact, infinite for one draw.

    Example:
        >>> damping = 1e-3 * largest_eigenvalue(gmap)
        >>> expected_squared_influence(gmap, 1e-6, damping, num_probes=2).standard_error > 0
        True
    """
    _check_damping(damping)
    variance = variances(gmap, noise_variance)
    if num_probes is None:
        unknowns = Unknowns(gmap, sample)
        values, vectors = torch.linalg.eigh(unknowns.dense_gram())
        # J Σ Jᵀ in the eigenvectors of J Jᵀ
        spread = vectors.T @ unknowns.dense_gram(variance) @ vectors
        cutoff = 0.0 if damping else len(values) * torch.finfo(values.dtype).eps * float(values[-1])
        inverse = torch.where(values > cutoff, 1 / (values + damping), 0.0)
        return Estimate.exact((inverse.square() * spread.diagonal()).sum())
    check_probes(num_probes)
    generator = generator or Stream()
    deviation = {name: v.sqrt() for name, v in variance.items()}
    errors = []
    for _ in range(num_probes):
        delta = gaussian(gmap, deviation, generator)
        influence = inversion_influence(gmap, delta, damping, sample=sample, tolerance=tolerance)
        assert influence.error is not None  # a lower bound has none
        errors.append(influence.error.flatten().double())
    vectors = torch.stack(errors)
    return Estimate.mean(vectors @ vectors.T)


def gaussian(gmap: GradientMap, deviation: Tensors, generator: Stream | torch.Generator) -> Tensors:
    """Draw independent normal numbers of these standard deviations, in the parameters' shapes."""
    return {
        name: deviation[name] * normal(generator, p.shape, p.device, p.dtype)
        for name, p in gmap.parameters.items()
    }


def check_probes(num_probes: int) -> None:
    if not isinstance(num_probes, int) or num_probes < 1:
        raise ValueError(f"num_probes must be a whole number of at least 1, but is {num_probes!r}.")


def _check_damping(damping: float) -> None:
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be a finite number of at least 0, but is {damping!r}.")


def _check_iteration(damping: float, tolerance: float, max_iterations: int) -> None:
    _check_damping(damping)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, but is {tolerance!r}.")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, but is {max_iterations!r}.")


# --- estimators by name: what a message leaks, one number per sample, without an attack


class Estimator(ABC):
    """A base of all estimators; a subclass has a `title` and one method, `estimate`.

    An estimator is made for one gradient map, and asked about each message that a defense made of
    it. It computes once what does not depend on the message.

    Args:
        gmap: The client's gradient map.

    Attributes:
        title: The estimator's name in tables. An estimate is an error of the input, so a higher one
            leaks less.
        meaning: The kind of error, for legends: the end of a sentence that begins with the title.
        needs_noise: Whether it takes only messages with Gaussian noise of known covariance.
        ranks: Whether audits compare it to what attacks recover.

    Example:
        >>> message = make_defense("gaussian_noise")(gmap)
        >>> make_estimator("dfil_bound", gmap)(message).shape == (len(gmap.input),)
        True
    """

    title: ClassVar[str]
    meaning: ClassVar[str]
    needs_noise: ClassVar[bool] = False
    ranks: ClassVar[bool] = True

    def __init__(self, gmap: GradientMap) -> None:
        self.gmap = gmap

    def __call__(
        self, message: Message, generator: Stream | torch.Generator | None = None
    ) -> Tensor:
        """Return the error of every sample that is to be expected from this message.

        Args:
            message: The message that a defense made of the map's gradient.
            generator: The source of random probes, a `Stream` or a generator on the input's device.
                Default: a new `Stream`.

        Returns:
            `(B,)` errors of the input, from 0 (everything is known) to infinity (nothing is).

        Raises:
            ValueError: If the estimator says nothing of such a message; the message has the reason.
            ArithmeticError: If it cannot be computed; the message has the reason.
        """
        if self.needs_noise and message.noise is None:
            raise ValueError(
                "What was shared is not the true gradient with Gaussian noise of known covariance."
            )
        errors = self.estimate(message, generator)
        samples = len(self.gmap.input)
        if tuple(errors.shape) != (samples,) or bool((errors.isnan() | (errors < 0)).any()):
            raise ValueError(
                f"{type(self).__name__} gave no error from 0 to infinity for each of {samples} "
                f"samples, but {errors.tolist()}."
            )
        return errors

    @abstractmethod
    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        """Estimate the errors, `(B,)`; subclasses implement it."""


class I2FLowerBound(Estimator):
    """The norm I_lb of what the defense did to the gradient; see `inversion_influence_lower_bound`.

    Divided by √m it would put short texts, which are found more easily, above long ones.
    """

    title = "I²F lower bound"
    meaning = (
        "a norm, to first order, of what was done to the gradient; it ranks, and claims no size"
    )

    @cached_property
    def eigenvalue(self) -> Eigenvalue:
        """The largest eigenvalue λ_max(J Jᵀ), which no defense changes."""
        return largest_eigenvalue(self.gmap)

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        delta = {name: message[name] - g for name, g in self.gmap.gradient().items()}
        bound = inversion_influence_lower_bound(self.gmap, delta, eigenvalue=self.eigenvalue)
        return bound.per_sample


def make_estimator(name: str, gmap: GradientMap) -> Estimator:
    """Return the estimator of this name, for a gradient map.

    Raises:
        ValueError: If the name is unknown; the message lists the names.

    Example:
        >>> estimator = make_estimator("i2f_lower_bound", gmap)
        >>> errors = [estimator(make_defense("pruning", ratio=p)(gmap)) for p in (0.1, 0.9)]
        >>> bool((errors[0] < errors[1]).all())
        True
    """
    estimator: Estimator = ESTIMATORS[name](gmap)
    return estimator
