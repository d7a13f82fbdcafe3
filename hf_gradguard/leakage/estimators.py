"""Estimators by name: what a message leaks, one number for each sample, without an attack.

estimator = make_estimator("i2f_lower_bound", gmap)
errors = estimator(message)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..gradient_map import GradientMap
from ..randomness import Stream
from ..registry import ESTIMATORS
from .bounds import mse_bound_from_dfil
from .fisher import dfil
from .influence import Eigenvalue, inversion_influence_lower_bound, largest_eigenvalue

if TYPE_CHECKING:
    from ..defenses import Message


class Estimator(ABC):
    """Base of all estimators. A subclass has a `title` and one method, `estimate`.

    An estimator is made for one gradient map, and asked about each message that a defense made of
    it. What does not depend on the message it computes once.

    Args:
        gmap: The client's gradient map.

    Attributes:
        title: What tables call it. It is an error of the input, so higher leaks less.
        meaning: What kind of error, for legends: the end of a sentence that begins with the title.

    Example:
        >>> message = make_defense("gaussian_noise")(gmap)
        >>> make_estimator("dfil_bound", gmap)(message).shape == (len(gmap.input),)
        True
    """

    title: ClassVar[str]
    meaning: ClassVar[str]

    def __init__(self, gmap: GradientMap) -> None:
        self.gmap = gmap

    def __call__(
        self, message: Message, generator: Stream | torch.Generator | None = None
    ) -> Tensor:
        """The error of every sample that is to be expected from this message.

        Args:
            message: What a defense shared of the map's gradient.
            generator: Source of random probes, a `Stream` or a generator on the input's device.
                Default: a new `Stream`.

        Returns:
            `(B,)` errors of the input, from 0 (all is known) to infinity (nothing is).

        Raises:
            ValueError: If the estimator says nothing of such a message, with the reason.
            ArithmeticError: If it cannot be computed, with the reason.
        """
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
        """The estimate itself. Implemented by subclasses."""


class I2FLowerBound(Estimator):
    """I_lb of what the defense did to the gradient, a norm; see `inversion_influence_lower_bound`.

    Divided by √m it would put short texts, which are found more easily, above long ones.
    """

    title = "I²F lower bound"
    meaning = (
        "a norm, to first order, of what was done to the gradient; it ranks, and claims no size"
    )

    @cached_property
    def eigenvalue(self) -> Eigenvalue:
        """λ_max(J Jᵀ), which no defense changes."""
        return largest_eigenvalue(self.gmap)

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        delta = {name: message[name] - g for name, g in self.gmap.gradient().items()}
        bound = inversion_influence_lower_bound(self.gmap, delta, eigenvalue=self.eigenvalue)
        return bound.per_sample


class DFILBound(Estimator):
    """1/√dFIL by 50 probes: the least RMSE per coordinate of an unbiased attacker who knows the
    covariance of the message's Gaussian noise. Infinite where nothing depends on the input.
    """

    title = "dFIL bound"
    meaning = (
        "the least RMSE per coordinate of an unbiased attacker under Gaussian noise; one who knows "
        "what inputs look like may be below it"
    )
    probes: ClassVar[int] = 50

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        if message.noise is None:
            raise ValueError(
                "What was shared is not the true gradient with Gaussian noise of known covariance."
            )
        leakage = dfil(self.gmap, message.noise.variance, self.probes, generator).value
        return mse_bound_from_dfil(leakage).sqrt()


def make_estimator(name: str, gmap: GradientMap) -> Estimator:
    """The estimator of that name, for a gradient map.

    Raises:
        ValueError: For an unknown name, listing the right ones.

    Example:
        >>> estimator = make_estimator("i2f_lower_bound", gmap)
        >>> errors = [estimator(make_defense("pruning", ratio=p)(gmap)) for p in (0.1, 0.9)]
        >>> bool((errors[0] < errors[1]).all())
        True
    """
    estimator: Estimator = ESTIMATORS[name](gmap)
    return estimator
