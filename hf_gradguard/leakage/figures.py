"""What the estimators return: plain floats, for logs and comparisons, that also say how they were
found.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .krylov import Eigenpair
    from .unknowns import Unknowns


class Influence(float):
    """The norm of an input error.

    Attributes:
        num_coordinates: m, the number of unknown coordinates.
        per_sample: The norm of each sample's part, `(B,)`.
        error: For I itself, the predicted error of the input, in its shape. `None` for a lower
            bound.
        iterations: Products with J Jᵀ that it took.
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
    """An eigenvalue.

    Attributes:
        vector: Its unit eigenvector, in the input's shape.
        residual: ‖Av - λv‖, a bound on its distance to an exact eigenvalue.
        iterations: Products that it took.

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
    def of(cls, pair: Eigenpair, unknowns: Unknowns) -> Self:
        eigenvalue = cls(pair.value)
        eigenvalue.vector, eigenvalue.residual = unknowns.unpack(pair.vector), pair.residual
        eigenvalue.iterations = pair.iterations
        return eigenvalue


class Estimate(float):
    """A mean over random draws.

    Attributes:
        standard_error: Of the mean. 0 where the figure is exact, infinite where one draw cannot
            tell.

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
    """E‖y‖² of a Gaussian vector y = Mz and its standard error, from the inner products of k
    independent draws.

    The variance of one ‖y‖² is 2‖MMᵀ‖_F², and (y_aᵀy_b)² of two different draws is an unbiased
    estimate of ‖MMᵀ‖_F². There are k(k-1)/2 pairs of draws, so this error is far steadier than the
    spread of k squares; it matters where M has few large singular values and the squares are
    skewed.

    Args:
        gram: Inner products y_aᵀy_b, `(..., k, k)`.

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
