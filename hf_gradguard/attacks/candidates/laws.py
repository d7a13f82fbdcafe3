"""How messages were made, as far as candidates follow it."""

from __future__ import annotations

from collections.abc import Sequence

from ...gradient_map.law import Law
from ..observation import Observation


def law_of(seen: Observation) -> Law | None:
    """The law of a message as it was granted; of `noise_variance` alone that of Gaussian noise.

    Example:
        >>> from dataclasses import replace
        >>> law_of(replace(seen, noise_variance=0.5)).variance, law_of(seen)
        (0.5, None)
    """
    if seen.law is not None and seen.law.fitted is not None and seen.local is not None:
        return None  # an update is in the span of others
    if seen.law is None and seen.noise_variance is not None:
        return Law(noise="gaussian", variance=seen.noise_variance)
    return seen.law


def clip_of_samples(laws: Sequence[Law | None]) -> float | None:
    """The norm that each sample's gradient is clipped to, by laws of messages.

    Raises:
        ValueError: If messages differ in it.

    Example:
        >>> clip_of_samples([Law(clip_sample=2.0), Law(clip_sample=2.0)])
        2.0
    """
    bounds = {None if law is None else law.clip_sample for law in laws}
    if len(bounds) > 1:
        raise ValueError(
            "Messages that are attacked together must have samples clipped alike. Attack the "
            "others by themselves."
        )
    return bounds.pop()
