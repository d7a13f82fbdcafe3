"""How messages were made, as far as candidates follow it."""

from __future__ import annotations

from collections.abc import Sequence

from ...defenses.mechanism import Mechanism
from ..observation import Observation


def mechanism_of(seen: Observation) -> Mechanism | None:
    """A message's mechanism as it was granted; of `noise_variance` alone that of Gaussian noise.

    Example:
        >>> from dataclasses import replace
        >>> mechanism_of(replace(seen, noise_variance=0.5)).variance, mechanism_of(seen)
        (0.5, None)
    """
    if seen.mechanism is not None and seen.mechanism.fitted is not None and seen.local is not None:
        return None  # an update is in the span of others
    if seen.mechanism is None and seen.noise_variance is not None:
        return Mechanism(noise="gaussian", variance=seen.noise_variance)
    return seen.mechanism


def clip_of_samples(mechanisms: Sequence[Mechanism | None]) -> float | None:
    """The norm that each sample's gradient is clipped to, by mechanisms of messages.

    Raises:
        ValueError: If messages differ in it.

    Example:
        >>> clip_of_samples([Mechanism(clip_sample=2.0), Mechanism(clip_sample=2.0)])
        2.0
    """
    bounds = {None if mechanism is None else mechanism.clip_sample for mechanism in mechanisms}
    if len(bounds) > 1:
        raise ValueError(
            "Messages that are attacked together must have samples clipped alike. Attack the "
            "others by themselves."
        )
    return bounds.pop()
