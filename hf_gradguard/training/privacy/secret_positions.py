"""The privacy of rows against an attacker that does not know which messages they are in."""

from __future__ import annotations

import functools
from typing import NamedTuple

from transformers.utils import logging

from ...defenses.factorization import Factor
from ...leakage import (
    PrivacyAccount,
    balls_in_bins_epsilon,
    balls_in_bins_power,
    membership_power,
)

logger = logging.get_logger(__name__)


class SecretPositions(NamedTuple):
    """The figures against an attacker that does not know in which messages a row is.

    Args:
        epsilon: The ε at the defense's δ; `None` without a δ.
        power: The most members, as a fraction, that it finds at 1 % false positives, where a row is
            in one message.
    """

    epsilon: float | None
    power: float


@functools.lru_cache(maxsize=4)
def positions_unknown(
    factor: Factor, messages: int, noise_multiplier: float, bins: int, scale: float,
    delta: float | None,
) -> SecretPositions:  # fmt: skip
    """Bound what a plan reveals of a row that was put into a message in secret.

    Draws take seconds, or a minute for thousands of messages, once for each plan. No attacker knows
    less than one that knows the place.
    """
    mechanism = factor.column(messages), noise_multiplier, bins
    power = balls_in_bins_power(*mechanism, scale=scale)
    power, epsilon = min(power, membership_power(noise_multiplier)), None
    if delta is not None:
        epsilon = PrivacyAccount({(noise_multiplier, 1.0): 1}).epsilon(delta)
        try:
            epsilon = min(epsilon, balls_in_bins_epsilon(*mechanism, delta, scale=scale))
        except ArithmeticError as error:
            logger.warning(f"ε of secret messages is that of known ones: {error}")
    return SecretPositions(epsilon, power)
