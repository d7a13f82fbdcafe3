"""The mechanism of messages, as an attacker who knows the defense knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..gradient_map.per_sample.span import Granularity


@dataclass(frozen=True)
class Fitted:
    """The synthetic samples that span the space in which a message is fitted.

    A message is the nearest point in the span of their gradients to the client's gradient, and to
    what its earlier messages left out. Which samples they are is drawn independently for each
    message. Others, drawn the same way, span as much of a gradient.

    Args:
        samples: The number of samples; `None` for the usual number of texts, or of images.
        factors: The granularity of the fitted factors.
        special: Ids of special tokens, which stand at a text's ends only.
    """

    samples: int | None
    factors: Granularity
    special: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mechanism:
    """The steps that turn a gradient into a message, in this order.

    Each sample's gradient is clipped, their mean is clipped and scaled, some of its entries are
    withheld, the others are rounded, and noise is added; or it is fitted. A mechanism says how
    messages come about, and nothing of one client's data but what the message itself shows.
    Attackers are granted it; defenses state it (`Defense.mechanism`).

    Args:
        clip_sample: The norm that each sample's gradient is scaled down to.
        clip_norm: The norm that the gradient is scaled down to.
        scale: The factor of the clipped gradient, as where a sum of samples is divided by their
            expected number.
        clip_coordinate: The bound that every entry is clipped to, from both sides.
        selection: Which entries are transmitted: `"all"`; `"largest"`, those of the largest |g|; or
            `"chosen"`, by a rule that the attacker does not follow. What was withheld is zero.
        rounding: How each tensor is rounded, to `levels` from its smallest to its largest entry:
            `"nearest"`, or `"stochastic"` up or down; or `"sign"`, which shares signs times the
            mean |g|.
        levels: The number of levels.
        noise: The distribution of the noise.
        variance: The variance of the noise: one number, or a tensor per parameter.
        relative_to: The ‖g‖² that `variance` belongs to, if noise's strength is the batch's own:
            behind another gradient it is in proportion to that one's. Default: the same behind all.
        fitted: The span that it was fitted in, if nothing else was done to it.
        has_residual: Whether what earlier messages left out was added first. How large that is,
            nobody knows.
        batches: How many batches each entry is then the sum of, per parameter: whoever keeps the
            client's messages knows it.
        later_messages: The client's next messages, which bring what a fitted one left out.

    Raises:
        ValueError: If a name is unknown, or settings that go together are not given together.

    Example:
        >>> Mechanism(noise="gaussian", variance=0.01).uniform
        True
    """

    clip_sample: float | None = None
    clip_norm: float | None = None
    scale: float = 1.0
    clip_coordinate: float | None = None
    selection: Literal["all", "largest", "chosen"] = "all"
    rounding: Literal["nearest", "stochastic", "sign"] | None = None
    levels: int | None = None
    noise: Literal["gaussian", "laplace"] | None = None
    variance: float | Mapping[str, Tensor] | None = None
    relative_to: float | None = None
    fitted: Fitted | None = None
    has_residual: bool = False
    batches: Mapping[str, Tensor] | None = None
    later_messages: tuple[Mapping[str, Tensor], ...] = ()

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("selection", self.selection, ("all", "largest", "chosen")),
            ("rounding", self.rounding, (None, "nearest", "stochastic", "sign")),
            ("noise", self.noise, (None, "gaussian", "laplace")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, but is {value!r}.")
        if (self.noise is None) != (self.variance is None):
            raise ValueError("Noise has a variance: give both, or neither.")
        if self.batches is not None and not self.has_residual:
            raise ValueError(
                "Entries are sums of several batches where earlier ones left some out."
            )
        if self.later_messages and self.fitted is None:
            raise ValueError("Later messages bring what a fitted one left out: give fitted too.")
        if (self.rounding in ("nearest", "stochastic")) != (self.levels is not None):
            raise ValueError("Rounding to levels needs their number, and nothing else has one.")

    def of_mean(self, count: int) -> Mechanism | None:
        """Return the mechanism of the mean of `count` messages of one gradient, or `None`.

        Their noise is independent. It is `None` if the mean has no mechanism of this kind.
        """
        if count == 1:
            return self
        if self.rounding == "stochastic" or self.fitted is not None or self.has_residual:
            return None
        if self.variance is None:
            return self
        variance: float | dict[str, Tensor]
        if isinstance(self.variance, Mapping):
            variance = {name: tensor / count for name, tensor in self.variance.items()}
        else:
            variance = self.variance / count
        return replace(self, noise="gaussian", variance=variance)  # Laplace's mean is nearly so

    @property
    def uniform(self) -> bool:
        """Whether entries differ in nothing but noise of one variance.

        Then comparing gradients by their distance gains nothing by knowing the mechanism.
        """
        clipped = self.clip_sample or self.clip_norm or self.clip_coordinate or self.scale != 1
        if clipped or self.rounding or self.selection != "all" or self.fitted or self.has_residual:
            return False
        if not isinstance(self.variance, Mapping):
            return True
        ends = [(float(v.min()), float(v.max())) for v in self.variance.values() if v.numel()]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        return math.isclose(low, high, rel_tol=1e-5)

    def variance_of(self, name: str) -> Tensor | float:
        """Return the variance of the noise on a parameter, to be broadcast; 0 without noise."""
        if self.variance is None:
            return 0.0
        return self.variance[name] if isinstance(self.variance, Mapping) else self.variance

    def mean_variance(self, gradient: Mapping[str, Tensor]) -> float:
        """Return the mean variance of the noise, over all entries of a gradient."""
        if not isinstance(self.variance, Mapping):
            return float(self.variance or 0.0)
        total = sum(float(torch.sum(self.variance[n], dtype=torch.float64)) for n in gradient)
        return total / max(1, sum(self.variance[n].numel() for n in gradient))
