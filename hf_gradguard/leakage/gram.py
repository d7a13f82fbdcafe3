"""Products with J Jᵀ in the coordinates that an attacker has to find.

They give its largest eigenpair, and solutions of systems with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors

Operator = Callable[[Tensor], Tensor]

WORST_ERROR = 0.01
"""The relative error that rounding may leave in a solution, if `tolerance` is not larger."""


@dataclass
class Eigenpair:
    """An eigenvalue, its unit eigenvector, the residual ‖Av - λv‖ and the number of products."""

    value: float
    vector: Tensor
    residual: float
    iterations: int


@dataclass
class Solution:
    """The solution x of Ax = b, with ‖b - Ax‖/‖b‖ and an estimate of x's relative error.

    `iterations` is the number of products that it took.
    """

    x: Tensor
    residual: float
    relative_error: float
    iterations: int


def largest_eigenpair(
    operator: Operator, start: Tensor, tolerance: float, max_iterations: int
) -> Eigenpair:
    """Return the largest eigenpair by Lanczos' method with full orthogonalization.

    It iterates until ‖Av - λv‖ ≤ tolerance · λ.

    Args:
        operator: The function v ↦ Av.
        start: A vector that is not orthogonal to the eigenvector, such as a random one.
        tolerance: The residual relative to the eigenvalue, whose own error is at most that and
            usually its square.
        max_iterations: The most products, and vectors kept.

    Raises:
        FloatingPointError: If a product is not finite.
        ArithmeticError: If the tolerance is not reached.
    """
    basis = _Basis(start)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for iteration in range(1, max_iterations + 1):
        product = operator(basis.newest)
        diagonal.append(finite(product @ basis.newest))
        product, length = basis.orthogonalize(product)
        values, vectors = np.linalg.eigh(_tridiagonal(diagonal, off_diagonal))
        residual = length * abs(float(vectors[-1, -1]))
        if residual <= tolerance * values[-1] or iteration == len(start) or not length:
            value, vector = max(float(values[-1]), 0.0), basis.combine(vectors[:, -1])
            return Eigenpair(value, vector, residual, iteration)
        off_diagonal.append(length)
        basis.append(product / length)
    raise ArithmeticError(
        f"The largest eigenvalue is not known to a relative residual of {tolerance:g} after "
        f"{max_iterations} iterations ({residual / values[-1]:.1g}). Give a larger tolerance or "
        "max_iterations."
    )


def solve(
    operator: Operator, b: Tensor, damping: float, tolerance: float, max_iterations: int
) -> Solution:
    """Solve (A + damping) x = b by conjugate gradients with full orthogonalization of residuals.

    With damping > 0 it stops when ‖r‖ ≤ tolerance · damping · ‖x‖, which bounds the relative error
    of x. In any case it stops when nothing of b is left but rounding. It starts from zero, so all
    iterates lie in the span of b, Ab, A²b…, and a singular A with b in its range gives the shortest
    solution. All of b above rounding has been used then, so a nearly singular A shows as a small
    Ritz value and is refused.

    Args:
        operator: The function v ↦ Av.
        b: The right-hand side.
        damping: A number of at least 0 that is added to A's diagonal.
        tolerance: The largest relative error of x.
        max_iterations: The most products, and vectors kept.

    Raises:
        FloatingPointError: If a product is not finite.
        ArithmeticError: If the system is singular to working precision, or too many iterations
            would be needed.
    """
    if not (peak := finite(b.abs().max())):
        return Solution(torch.zeros_like(b), 0.0, 0.0, 0)
    unit = math.ldexp(1.0, math.frexp(peak)[1])  # squares of small numbers are zeros
    solution = _solve(operator, b / unit, damping, tolerance, max_iterations)
    return replace(solution, x=solution.x * unit)


def _solve(
    operator: Operator, b: Tensor, damping: float, tolerance: float, max_iterations: int
) -> Solution:
    size = finite(b.norm())
    eps = torch.finfo(b.dtype).eps
    x, r, p = torch.zeros_like(b), b, b
    basis = _Basis(b)
    squared, ratio = size**2, 0.0
    # The Lanczos matrix that the coefficients of conjugate gradients spell out.
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for iteration in range(1, max_iterations + 1):
        product = operator(p) + damping * p
        curvature = finite(p @ product)
        if curvature <= 0:
            raise _singular(b)
        step = squared / curvature
        diagonal.append(1 / step + ratio)
        x = x + step * p
        r, length = basis.orthogonalize(r - step * product)
        ratio = (length**2 / squared) / step
        reached = length <= tolerance * damping * float(x.norm())
        # Rounding leaves about eps √κ ‖b‖. Below √eps ‖b‖ it is worth knowing κ.
        if reached or length <= math.sqrt(eps) * size:
            ritz = np.linalg.eigvalsh(_tridiagonal(diagonal, off_diagonal))
            if ritz[0] <= math.sqrt(len(b)) * eps * ritz[-1]:
                raise _singular(b)
            if reached or length <= 10 * eps * math.sqrt(ritz[-1] / ritz[0]) * size:
                # Not the recursion's residual: that falls below the real one.
                residual = finite((b - operator(x) - damping * x).norm())
                error = residual / (max(damping, ritz[0]) * float(x.norm()))
                if error > max(tolerance, WORST_ERROR):
                    raise _singular(b)
                return Solution(x, residual / size, float(error), iteration)
        off_diagonal.append(length / math.sqrt(squared) / step)
        p = r + (length**2 / squared) * p
        squared = length**2
        basis.append(r / length)
    raise _not_reached(tolerance, max_iterations)


def _not_reached(tolerance: float, max_iterations: int) -> ArithmeticError:
    return ArithmeticError(
        f"Conjugate gradients did not reach a relative error of {tolerance:g} in {max_iterations} "
        "iterations: some directions of the input are nearly invisible in the gradient. Give a "
        "larger damping, such as 1e-3 * largest_eigenvalue(gmap), a larger tolerance, or more "
        "max_iterations."
    )


def _singular(b: Tensor) -> ArithmeticError:
    return ArithmeticError(
        f"J Jᵀ + damping is singular to working precision ({b.dtype}): directions of the input "
        "that are nearly invisible in the gradient would decide the result, and rounding decides "
        "them. Give a larger damping, such as 1e-3 * largest_eigenvalue(gmap), or compute in "
        "float64 (model.double())."
    )


class _Basis:
    """Orthonormal vectors, in one growing matrix."""

    def __init__(self, start: Tensor) -> None:
        self._rows = (start / start.norm())[None]
        self._count = 1

    @property
    def newest(self) -> Tensor:
        return self._rows[self._count - 1]

    def append(self, vector: Tensor) -> None:
        if self._count == len(self._rows):
            self._rows = torch.cat([self._rows, torch.empty_like(self._rows)])
        self._rows[self._count] = vector
        self._count += 1

    def orthogonalize(self, vector: Tensor) -> tuple[Tensor, float]:
        """Return the component of a vector that is orthogonal to the basis, and its length."""
        rows = self._rows[: self._count]
        for _ in range(2):  # once leaves the rounding errors of the parts taken away
            vector = vector - rows.T @ (rows @ vector)
        return vector, finite(vector.norm())

    def combine(self, weights: np.ndarray) -> Tensor:
        return self._rows[: self._count].T @ torch.as_tensor(
            weights, dtype=self._rows.dtype, device=self._rows.device
        )


def _tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> np.ndarray:
    return np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)


def finite(value: Tensor) -> float:
    """Return a tensor's number, which must be finite.

    Raises:
        FloatingPointError: If it is not.
    """
    number = float(value)
    if not math.isfinite(number):
        raise not_finite()
    return number


def not_finite() -> FloatingPointError:
    """Return the error for a product that overflowed."""
    return FloatingPointError(
        "A product with the Jacobian is not finite: the loss has no second derivative here, or it "
        "overflows."
    )


NoiseVariance = float | Mapping[str, Tensor]
"""Diagonal Σ: one variance for all coordinates, or one tensor per shared parameter, of its shape or
broadcast to it.
"""


class Unknowns:
    """The m coordinates of a batch, or of one of its samples, that an attacker has to find.

    Padding is not among them: its embedding is public. All pixels are, and all real tokens, special
    ones included.

    Args:
        gmap: The client's gradient map.
        sample: The only sample whose coordinates are unknown; the others' are given. Default: all
            are unknown.

    Raises:
        ValueError: If there is no such sample, a sample has no coordinates, or the padding is
            unknown.
    """

    def __init__(self, gmap: GradientMap, sample: int | None = None) -> None:
        self._gmap, x = gmap, gmap.input
        self._mask = torch.ones_like(x, dtype=torch.bool)
        present = gmap.domain.present(gmap.batch)
        if present is not None:
            if present.shape != x.shape[:2]:
                raise ValueError(
                    f"attention_mask has shape {tuple(present.shape)}, so it does not say which "
                    f"of the {tuple(x.shape[:2])} tokens are padding. Give one number per token."
                )
            self._mask &= present[..., None]
        self.per_sample: Tensor = self._mask.flatten(1).sum(1)
        if not self.per_sample.all():
            raise ValueError(
                f"Sample {int((self.per_sample == 0).nonzero()[0])} of the batch is nothing but "
                "padding."
            )
        if sample is not None:
            if not 0 <= sample < len(x):
                raise ValueError(f"sample must be from 0 to {len(x) - 1}, but is {sample}.")
            self._mask[torch.arange(len(x), device=x.device) != sample] = False
        self._template = self.pack(x)
        self.size = len(self._template)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the unknown entries of a tensor in the input's shape as a vector.

        Its type is float32 or wider.
        """
        return tensor[self._mask].to(torch.promote_types(tensor.dtype, torch.float32))

    def unpack(self, vector: Tensor) -> Tensor:
        """Return a vector's entries in the input's shape, zero elsewhere: the inverse of `pack`."""
        x = self._gmap.input
        return torch.zeros_like(x).masked_scatter(self._mask, vector.to(x.dtype))

    def vjp(self, delta: Tensors) -> Tensor:
        """Return J δ; coordinates that an earlier defense of a chain withheld carry nothing."""
        return self.pack(self._gmap.vjp(self._gmap.restrict(delta)))

    def jvp(self, v: Tensor) -> Tensors:
        """Return Jᵀ v."""
        return self._gmap.restrict(self._gmap.jvp(self.unpack(v)))

    def gram(self, v: Tensor, weights: Tensors | None = None) -> Tensor:
        """Return J D Jᵀ v with a diagonal D of `weights`, or the identity."""
        product = self.jvp(v)
        if weights is not None:
            product = {name: tensor * weights[name] for name, tensor in product.items()}
        return self.vjp(product)

    def dense_gram(self, weights: Tensors | None = None) -> Tensor:
        """Return J D Jᵀ as an (m, m) matrix, by m products.

        Raises:
            FloatingPointError: If a product is not finite.
            ValueError: If m is above 8192.
        """
        if self.size > 8192:
            raise ValueError(
                f"{self.size} coordinates are too many for a dense (m, m) matrix. Choose one "
                "`sample`, a smaller batch, or an estimate."
            )
        matrix = torch.stack([self.gram(unit, weights) for unit in self.units()])
        if not matrix.isfinite().all():
            raise not_finite()
        return (matrix + matrix.T) / 2

    def units(self) -> Iterator[Tensor]:
        """Yield the unit vectors e_1 to e_m."""
        for index in range(self.size):
            unit = torch.zeros_like(self._template)
            unit[index] = 1
            yield unit

    def random_vector(self) -> Tensor:
        """Return a standard normal vector that is the same every time.

        The vector that an iteration starts from affects only how long it takes.
        """
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.size, generator=generator).to(self._template)


def variances(gmap: GradientMap, noise_variance: NoiseVariance) -> Tensors:
    """Return the diagonal of Σ as tensors that broadcast to the shared parameters.

    Raises:
        ValueError: If a name is missing or unknown, a shape does not fit, or a variance is negative
            or NaN.
    """
    parameters = gmap.parameters
    if isinstance(noise_variance, Mapping):
        if noise_variance.keys() != parameters.keys():
            wrong = sorted(noise_variance.keys() ^ parameters.keys())
            raise ValueError(
                "noise_variance must name every shared parameter and no other; it differs in "
                f"{', '.join(wrong)}. The shared parameters are: {', '.join(parameters)}."
            )
        result = {name: _compact(noise_variance[name]) for name in parameters}
    else:
        # A small variance would be zero in half precision.
        result = {
            name: torch.tensor(
                noise_variance, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device
            )
            for name, p in parameters.items()
        }
    for name, variance in result.items():
        try:
            variance.expand(parameters[name].shape)
        except RuntimeError as error:
            raise ValueError(
                f"noise_variance[{name!r}] has shape {tuple(variance.shape)}, the parameter "
                f"{tuple(parameters[name].shape)}."
            ) from error
        if not (variance >= 0).all():  # also where it is NaN
            raise ValueError(
                f"Variances must be at least 0, but noise_variance[{name!r}] has a smaller one or "
                "NaN."
            )
    return result


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor that is one number expanded to a shape as that number."""
    is_expanded = tensor.numel() and not any(tensor.stride())
    return tensor[(0,) * tensor.dim()] if is_expanded else tensor


class Influence(float):
    """The norm of an input error, as a float.

    Attributes:
        num_coordinates: m, the number of unknown coordinates.
        per_sample: The norm of each sample's error, `(B,)`.
        error: For I itself, the predicted error of the input, in its shape. `None` for a lower
            bound.
        iterations: The number of products with J Jᵀ.
        residual: For I, ‖b - Ax‖/‖b‖ of the system that was solved; for a lower bound, that of its
            eigenvalue.
        relative_error: For I, a bound on its own relative error, from the residual; an estimate
            where damping is 0.

    Example:
        >>> from hf_gradguard.leakage import inversion_influence_lower_bound
        >>> bound = inversion_influence_lower_bound(gmap, delta)
        >>> bound.per_sample.shape, bound.rmse < bound
        (torch.Size([2]), True)
    """

    num_coordinates: int
    per_sample: Tensor
    error: Tensor | None = None
    iterations: int
    residual: float
    relative_error: float = 0.0

    @property
    def rmse(self) -> float:
        """The root mean square over coordinates: the norm divided by √m."""
        return self / math.sqrt(self.num_coordinates)


class Eigenvalue(float):
    """An eigenvalue, as a float with its eigenvector.

    Attributes:
        vector: The unit eigenvector, in the input's shape.
        residual: ‖Av - λv‖, a bound on its distance to an exact eigenvalue.
        iterations: The number of products.

    Example:
        >>> from hf_gradguard.leakage import largest_eigenvalue
        >>> top = largest_eigenvalue(gmap)
        >>> top.residual <= 1e-4 * top, top.vector.shape == gmap.input.shape
        (True, True)
    """

    vector: Tensor
    residual: float
    iterations: int

    @classmethod
    def from_pair(cls, pair: Eigenpair, unknowns: Unknowns) -> Self:
        eigenvalue = cls(pair.value)
        eigenvalue.vector, eigenvalue.residual = unknowns.unpack(pair.vector), pair.residual
        eigenvalue.iterations = pair.iterations
        return eigenvalue


class Estimate(float):
    """A mean over random draws, as a float with its standard error.

    Attributes:
        standard_error: The standard error of the mean. 0 where the figure is exact, infinite where
            one draw cannot tell.

    Example:
        >>> from hf_gradguard.leakage import fisher_trace
        >>> estimate = fisher_trace(gmap, noise_variance=1e-6, num_probes=4)
        >>> 0 < estimate.standard_error < estimate
        True
    """

    standard_error: float

    @classmethod
    def exact(cls, value: float | Tensor) -> Self:
        estimate = cls(value)
        estimate.standard_error = 0.0
        return estimate

    @classmethod
    def mean(cls, gram: Tensor) -> Self:
        value, error = mean_square_norm(gram)
        estimate = cls(value)
        estimate.standard_error = float(error)
        return estimate


def mean_square_norm(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return E‖y‖² of a Gaussian vector y = Mz and its standard error.

    The variance of one ‖y‖² is 2‖MMᵀ‖_F², and (y_aᵀy_b)² of two different draws is an unbiased
    estimate of ‖MMᵀ‖_F². There are k(k-1)/2 pairs of draws, so this error is far steadier than the
    spread of k squares; it matters where M has few large singular values and the squares are
    skewed.

    Args:
        gram: Inner products y_aᵀy_b of k independent draws, `(..., k, k)`.

    Returns:
        The mean and its standard error, `(...)`; infinite for k = 1.
    """
    k = gram.shape[-1]
    squares = gram.diagonal(dim1=-2, dim2=-1)
    value = squares.mean(-1)
    if k == 1:
        return value, torch.full_like(value, math.inf)
    norm = (gram.square().sum((-2, -1)) - squares.square().sum(-1)).clamp(min=0) / (k * (k - 1))
    return value, (2 * norm / k).sqrt()
