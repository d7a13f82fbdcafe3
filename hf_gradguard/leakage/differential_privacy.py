"""(ε, δ) of messages with Gaussian noise on a sum of clipped gradients of rows that were drawn at
random, by privacy loss distributions.

Neighbors are data sets of which one has one row more. A row changes a message's sum by C at most,
and is in it with probability q, independently of other rows (Poisson sampling). Sums are rounded to
the grid of their noise first (`Stream.noisy`), which adds at most GRID of its deviation to C. What
is computed here is therefore of the numbers that are shared, and not of real ones.

References: Abadi et al., "Deep Learning with Differential Privacy" (2016); Koskela, Jälkö and
Honkela, "Computing Tight Differential Privacy Guarantees Using FFT" (2020); Doroshenko et al.,
"Connect the Dots" (2022), which `dp-accounting` implements. Of single messages: Dong, Roth and Su,
"Gaussian Differential Privacy" (2022).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..randomness import GRID

INTERVAL = 5e-4
"""Of discretization, in units of ε; `dp-accounting`'s own is 1e-4. It errs upward: by 0.1 % of ε
after 14,000 messages, at a fifth of the time.
"""
TOLERANCE = 1e-3
"""Of a calibrated noise multiplier, relative to it; upward."""
SPENT = 0.99
"""The share of a target after which it counts as spent: the rest takes noise without bounds."""
LEAST = 0.3
"""Of noise multipliers that are calibrated: less is hardly noise."""


def dp_sgd_epsilon(
    noise_multiplier: float, sampling_rate: float, messages: int, delta: float
) -> float:
    """The ε of DP-SGD with Poisson-sampled batches.

    Args:
        noise_multiplier: σ of the noise σC on the sum of gradients clipped to C.
        sampling_rate: q: the probability of a row to be in a batch.
        messages: How many batches were shared.
        delta: δ.

    Returns:
        An upper bound, by `dp-accounting`.

    Raises:
        ValueError: If an argument is out of range.
        ImportError: Without `dp-accounting`, which the extra `accounting` brings.

    Example:
        >>> round(dp_sgd_epsilon(1.1, sampling_rate=256 / 60_000, messages=14_062, delta=1e-5), 2)
        2.38
    """
    return PrivacyAccount({(noise_multiplier, sampling_rate): messages}).epsilon(delta)


def membership_power(
    noise_multiplier: float, false_alarms: float = 0.01, messages: int = 1
) -> float:
    """A bound on membership inference against DP-SGD: the share of members that the
    best test finds, whatever it knows of the model, the other members and the candidate.

    A member moves the sum by C at most, and along that line the noise has standard deviation σC. So
    no test has more power than the one of a mean of 0 against 1/σ (Neyman and Pearson): Φ(Φ⁻¹(α) +
    √k/σ), where all of k messages, or none, hold the row.

    Args:
        noise_multiplier: σ of the noise σC on the sum of gradients clipped to C.
        false_alarms: α, the share of others that the test takes for members.
        messages: k.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(membership_power(1.5), 4)
        0.0485
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be above 0, but is {noise_multiplier}.")
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must be between 0 and 1, but is {false_alarms}.")
    if messages < 1:
        raise ValueError(f"messages must be at least 1, but is {messages}.")
    normal = NormalDist()
    distance = math.sqrt(messages) / of_rounded_sums(noise_multiplier)
    return normal.cdf(normal.inv_cdf(false_alarms) + distance)


def of_rounded_sums(noise_multiplier: float) -> float:
    """σ over the most that a row moves a sum on the grid of its noise, 1 + GRID · σ of C.

    Example:
        >>> round(of_rounded_sums(10.0), 4)
        9.9939
    """
    return noise_multiplier / (1 + GRID * noise_multiplier)


def dp_sgd_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    messages: int,
    account: PrivacyAccount | None = None,
) -> float:
    """The smallest σ, to a thousandth of it, that keeps ε within a target.

    Args:
        target_epsilon: ε > 0.
        delta: δ.
        sampling_rate: q of the messages to come.
        messages: How many they are.
        account: Of messages that were shared already, which count too.

    Raises:
        ValueError: If an argument is out of range, or those messages have spent it all.
        ImportError: Without `dp-accounting`.

    Example:
        >>> sigma = dp_sgd_noise_multiplier(4.0, 1e-5, sampling_rate=0.05, messages=50)
        >>> 3.9 < dp_sgd_epsilon(sigma, 0.05, 50, 1e-5) <= 4
        True
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be above 0 and finite, but is {target_epsilon!r}.")
    spent = (account or PrivacyAccount()).messages
    return _multiplier(target_epsilon, delta, sampling_rate, messages, tuple(spent.items()))


@functools.lru_cache(maxsize=16)
def _multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    messages: int,
    shared: tuple[tuple[tuple[float, float], int], ...],
) -> float:
    spent = dict(shared)

    def epsilon(sigma: float, interval: float = INTERVAL) -> float:
        key = (sigma, sampling_rate)
        account = PrivacyAccount({**spent, key: spent.get(key, 0) + messages})
        return account.epsilon(delta, interval)

    spent_epsilon = PrivacyAccount(spent).epsilon(delta)
    if spent_epsilon >= SPENT * target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} is spent: what was shared of this data so far has "
            f"ε = {spent_epsilon:.4g} at δ = {delta:g}. Stop here, or set a larger one."
        )
    roughly = _least(lambda sigma: epsilon(sigma, 10 * INTERVAL) <= target_epsilon, 1.0, 0.5, 0.02)
    return _least(lambda sigma: epsilon(sigma) <= target_epsilon, roughly, 0.02, TOLERANCE)


def _least(enough: Callable[[float], bool], start: float, step: float, tolerance: float) -> float:
    """The least σ that is enough, at most `tolerance` of it too large; never below `LEAST`."""
    high = start
    while not enough(high):
        if high > 1e6:
            raise ValueError("No noise is enough for this ε: too many messages, or too small a δ.")
        high *= 1 + step
        step *= 2
    low = high / (1 + step)
    while low > LEAST and enough(low):
        low, high = low / (1 + step), low
    low = max(low, LEAST)
    while high - low > tolerance * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class PrivacyAccount:
    """What messages a client has shared, and their ε together.

    Args:
        messages: How many there were, by (noise multiplier, sampling rate).

    Raises:
        ValueError: For a noise multiplier, a sampling rate or a number out of range.

    Example:
        >>> account = PrivacyAccount()
        >>> account.add(noise_multiplier=1.0, sampling_rate=0.01)
        >>> 0 < account.epsilon(delta=1e-5) < 1
        True
    """

    def __init__(self, messages: Mapping[tuple[float, float], int] | None = None) -> None:
        self.messages: dict[tuple[float, float], int] = {}
        self._cached: tuple[Any, float] | None = None
        for (multiplier, rate), count in (messages or {}).items():
            self.add(multiplier, rate, count)

    def add(self, noise_multiplier: float, sampling_rate: float, messages: int = 1) -> None:
        """Some messages were shared."""
        if not 0 < noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be above 0, but is {noise_multiplier!r}.")
        if not 0 < sampling_rate <= 1:
            raise ValueError(
                f"sampling_rate must be above 0 and at most 1, but is {sampling_rate!r}."
            )
        if messages < 0:
            raise ValueError(f"messages must be at least 0, but is {messages!r}.")
        key = (float(noise_multiplier), float(sampling_rate))
        self.messages[key] = self.messages.get(key, 0) + messages

    def epsilon(self, delta: float, interval: float = INTERVAL) -> float:
        """ε of all messages together at that δ, 0 before the first.

        Args:
            delta: δ.
            interval: Of discretization. Whatever it is, the result is an upper bound.

        Raises:
            ValueError: Unless δ is between 0 and 1.
            ImportError: Without `dp-accounting`, which the extra `accounting` brings.
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta must be between 0 and 1, but is {delta!r}.")
        shared = {key: count for key, count in self.messages.items() if count}
        if not shared:
            return 0.0
        question = (delta, interval, tuple(sorted(shared.items())))
        if self._cached is None or self._cached[0] != question:
            self._cached = (question, _epsilon(shared, delta, interval))
        return self._cached[1]

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, as tensors."""
        rows = [(*key, count) for key, count in self.messages.items()]
        return {"messages": torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take in what `state_dict` returned. What this account has counted beyond that stays:
        those messages were shared as well.
        """
        for multiplier, rate, count in state["messages"].tolist():
            key = (multiplier, rate)
            self.messages[key] = max(self.messages.get(key, 0), int(count))


def _epsilon(messages: Mapping[tuple[float, float], int], delta: float, interval: float) -> float:
    try:
        from dp_accounting.pld.privacy_loss_distribution import identity
    except ImportError as error:
        raise ImportError(
            "(ε, δ) is computed by the package dp-accounting. Install it with: pip install "
            "'hf-gradguard[accounting]'. Without target_epsilon and delta nothing is computed."
        ) from error
    all_losses = identity(value_discretization_interval=interval)
    for (noise_multiplier, rate), count in messages.items():
        multiplier = of_rounded_sums(noise_multiplier)
        if rate < 1:
            losses = _losses(multiplier, rate, interval).self_compose(count)
        else:
            losses = _losses(multiplier / math.sqrt(count), rate, interval)
        all_losses = all_losses.compose(losses)
    return float(all_losses.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)
def _losses(multiplier: float, rate: float, interval: float) -> Any:
    """The privacy losses of a message: it takes longer to find them than to compose them."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        multiplier, value_discretization_interval=interval, sampling_prob=rate
    )
