"""Eigenvalues and linear systems of a symmetric positive semi-definite operator that is only known
by its products.

Both methods keep all their vectors and orthogonalize against them: an operator here is as long as a
client's input, a product is a pass through a model, and a few hundred vectors are cheap beside it.
Without that, rounding would cost passes, and would let directions back in that the gradient says
nothing about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]

WORST_ERROR = 0.01
"""The relative error that rounding may leave in a solution, if `tolerance` is not larger."""


@dataclass
class Eigenpair:
    """An eigenvalue, its unit eigenvector, ‖Av - λv‖ and the products it took."""

    value: float
    vector: Tensor
    residual: float
    iterations: int


@dataclass
class Solution:
    """x with Ax = b, ‖b - Ax‖/‖b‖, an estimate of the relative error of x, and the products it
    took.
    """

    x: Tensor
    residual: float
    relative_error: float
    iterations: int


def largest_eigenpair(
    operator: Operator, start: Tensor, tolerance: float, max_iterations: int
) -> Eigenpair:
    """Lanczos with full orthogonalization, until ‖Av - λv‖ ≤ tolerance · λ.

    Args:
        operator: v ↦ Av.
        start: A vector that is not orthogonal to the eigenvector, such as a random one.
        tolerance: Relative to the eigenvalue, whose own error is at most that and usually its
            square.
        max_iterations: Products, and vectors kept.

    Raises:
        FloatingPointError: If a product is not finite.
        ArithmeticError: If the tolerance is not reached.
    """
    basis = _Basis(start)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for iteration in range(1, max_iterations + 1):
        product = operator(basis.last)
        diagonal.append(finite(product @ basis.last))
        product, length = basis.orthogonalize(product)
        values, vectors = np.linalg.eigh(_tridiagonal(diagonal, off_diagonal))
        residual = length * abs(float(vectors[-1, -1]))
        if residual <= tolerance * values[-1] or iteration == len(start) or not length:
            return Eigenpair(
                max(float(values[-1]), 0.0), basis.combine(vectors[:, -1]), residual, iteration
            )
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
    """x with (A + damping) x = b, by conjugate gradients from zero with full orthogonalization of
    the residuals.

    With damping > 0 it stops when ‖r‖ ≤ tolerance · damping · ‖x‖, which bounds the relative error
    of x. Otherwise, and in any case, it stops when nothing of b is left but rounding. From zero,
    all iterates lie in the span of b, Ab, A²b…, so a singular A with b in its range gives the
    shortest solution. Every part of b above rounding has been looked at then, so a nearly singular
    A shows as a small Ritz value and is refused.

    Raises:
        FloatingPointError: If a product is not finite.
        ArithmeticError: If the system is singular to working precision, or too many iterations
            would be needed.
    """
    if not (peak := finite(b.abs().max())):
        return Solution(torch.zeros_like(b), 0.0, 0.0, 0)
    unit = math.ldexp(1.0, math.frexp(peak)[1])  # squares of small numbers are zeros
    found = _solve(operator, b / unit, damping, tolerance, max_iterations)
    return replace(found, x=found.x * unit)


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
    def last(self) -> Tensor:
        return self._rows[self._count - 1]

    def append(self, vector: Tensor) -> None:
        if self._count == len(self._rows):
            self._rows = torch.cat([self._rows, torch.empty_like(self._rows)])
        self._rows[self._count] = vector
        self._count += 1

    def orthogonalize(self, vector: Tensor) -> tuple[Tensor, float]:
        """The part of a vector that is orthogonal to all of these, and its length."""
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
    """A number.

    Raises:
        FloatingPointError: If it is none.
    """
    number = float(value)
    if not math.isfinite(number):
        raise not_finite()
    return number


def not_finite() -> FloatingPointError:
    """The error for a product that overflowed."""
    return FloatingPointError(
        "A product with the Jacobian is not finite: the loss has no second derivative here, or it "
        "overflows."
    )
