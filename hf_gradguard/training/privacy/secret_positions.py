"""The privacy of rows against an attacker that does not know which messages they are in."""

from __future__ import annotations

import functools
from typing import NamedTuple

from transformers.utils import logging

from ...defenses.correlated import Factor
from ...leakage import (
    PrivacyAccount,
    balls_in_bins_epsilon,
    balls_in_bins_power,
    membership_power,
)

logger = logging.get_logger(__name__)


class SecretPositions(NamedTuple):
    """The privacy of rows against an attacker that does not know which messages they are in.

    Args:
        epsilon: The ε at the defense's δ; `None` without a δ.
        power: The largest fraction of members that such an attacker finds at 1 % false positives,
            if a row is in one message.
    """

    epsilon: float | None
    power: float


@functools.lru_cache(maxsize=4)
def positions_unknown(
    factor: Factor, messages: int, noise_multiplier: float, bins: int, scale: float,
    delta: float | None,
) -> SecretPositions:  # fmt: skip
    """Bound what correlated noise reveals of a row, if nobody knows which messages it is in.

    The figures never exceed those against an attacker that knows. Computing them takes seconds, or
    a minute for thousands of messages, once for each set of arguments.

    Args:
        factor: The factor that correlates the noise of messages.
        messages: The number of messages.
        noise_multiplier: σ of the noise, which is σ times the clip and `scale`.
        bins: The number of messages in a pass over the data, in one of which a row is.
        scale: The sensitivity that noise was made for, as for `balls_in_bins_epsilon`.
        delta: The δ of ε; `None` for no ε.
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
