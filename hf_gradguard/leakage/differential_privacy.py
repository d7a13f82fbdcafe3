"""Differential privacy of messages: (ε, δ) by privacy loss distributions.

Messages have Gaussian noise on a sum of clipped gradients of rows that were drawn at random.
Neighbors are data sets of which one has one row more. A row changes a message's sum by C at most,
and is in it with probability q, independently of other rows (Poisson sampling). Sums are rounded to
the grid of their noise first (`Stream.noisy`), which adds at most GRID of its deviation to C. So
what is computed here is of the numbers that are shared, and not of real ones.

References: Abadi et al., "Deep Learning with Differential Privacy" (2016); Koskela, Jälkö and
Honkela, "Computing Tight Differential Privacy Guarantees Using FFT" (2020); for single messages,
Dong, Roth and Su, "Gaussian Differential Privacy" (2022). `loss_distributions` says how losses are
composed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import torch
from torch import Tensor

from ..randomness import GRID
from .accountant import gaussian_epsilon
from .loss_distributions import sampled_gaussian_epsilon

TOLERANCE = 1e-3
"""The tolerance of a calibrated noise multiplier, relative to it and upward. It leaves at most five
times as much of a target.
"""
SPENT = 0.99
"""The fraction of a target after which it counts as spent: the rest would take noise without
bounds.
"""
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""The range of noise multipliers that are calibrated."""
NO_PROTECTION = 10.0
"""The ε above which logs and cards say that there is no protection. At α false alarms (ε, δ) allows
a test that finds 1 - e^-ε (1 - δ - α) of the members. Ponomareva et al., "How to DP-fy ML" (2023),
draw the same line.
"""


def dp_sgd_epsilon(
    noise_multiplier: float, sampling_rate: float, messages: int, delta: float
) -> float:
    """Return the ε of DP-SGD with Poisson-sampled batches.

    Args:
        noise_multiplier: σ of the noise σC on the sum of gradients clipped to C.
        sampling_rate: q, the probability that a row is in a batch.
        messages: The number of batches that were shared.
        delta: δ.

    Returns:
        An upper bound, a few thousandths above the least one that privacy loss distributions give.
            It counts that sums are rounded to the grid of their noise: noise of more than about
            16,000 hides no more.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(dp_sgd_epsilon(1.1, sampling_rate=256 / 60_000, messages=14_062, delta=1e-5), 2)
        2.38
    """
    return PrivacyAccount({(noise_multiplier, sampling_rate): messages}).epsilon(delta)


def membership_power(
    noise_multiplier: float, false_alarms: float = 0.01, messages: int = 1
) -> float:
    """Bound membership inference against DP-SGD: the fraction of members that the best test finds.

    The test may know the model, the other members and the candidate. A member moves the sum by C at
    most, and along that line the noise has standard deviation σC. So no test has more power than
    that of a mean of 0 against 1/σ (Neyman and Pearson): Φ(Φ⁻¹(α) + √k/σ), where all of k messages,
    or none, hold the row.

    Args:
        noise_multiplier: σ of the noise σC on the sum of gradients clipped to C.
        false_alarms: α, the fraction of non-members that the test takes for members.
        messages: k, the number of messages.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> round(membership_power(1.5), 4)
        0.0485
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be above 0 and finite, but is {noise_multiplier}.")
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must be between 0 and 1, but is {false_alarms}.")
    if messages < 1:
        raise ValueError(f"messages must be at least 1, but is {messages}.")
    normal = NormalDist()
    distance = math.sqrt(messages) / of_rounded_sums(noise_multiplier)
    return normal.cdf(normal.inv_cdf(false_alarms) + distance)


def of_rounded_sums(noise_multiplier: float) -> float:
    """Return σ relative to the most that a row moves a rounded sum, (1 + GRID · σ) of C.

    Example:
        >>> round(of_rounded_sums(10.0), 4)
        9.9939
    """
    return noise_multiplier / (1 + GRID * noise_multiplier)


def protection_note(epsilon: float) -> str:
    """Return a warning in parentheses if ε is too large to protect, else an empty string.

    Args:
        epsilon: ε, as it stands before the note.

    Example:
        >>> protection_note(8.0)
        ''
        >>> protection_note(30.0)[:33]
        ' (no protection to speak of: an ε'
    """
    if epsilon <= NO_PROTECTION:
        return ""
    return (
        f" (no protection to speak of: an ε above {NO_PROTECTION:g} allows attacks that find "
        "99.99 % of the members at 1 % FPR)"
    )


def dp_sgd_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    messages: int,
    account: PrivacyAccount | None = None,
) -> float:
    """Return the smallest σ, to a thousandth of it, that keeps ε within a target.

    Args:
        target_epsilon: The largest ε, above 0.
        delta: δ.
        sampling_rate: q of the messages to come.
        messages: The number of messages to come.
        account: The account of messages that were shared already, which count too.

    Raises:
        ValueError: If an argument is out of range, the shared messages have spent the whole target,
            no noise keeps it, or even the least noise does.

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
    spent_epsilon = PrivacyAccount(spent).epsilon(delta)
    if spent_epsilon >= SPENT * target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} is spent: what was shared of this data so far has "
            f"ε = {spent_epsilon:.4g} at δ = {delta:g}. Stop here, or set a larger one."
        )
    messages = max(messages, 1)

    def epsilon(sigma: float) -> float:
        key = (sigma, sampling_rate)
        account = PrivacyAccount({**spent, key: spent.get(key, 0) + messages})
        return account.epsilon(delta)

    # Where losses are nearly normal; a start is all that it is.
    normal = -NormalDist().inv_cdf(delta)
    distance = 2 * target_epsilon / (normal + math.hypot(normal, math.sqrt(2 * target_epsilon)))
    start = math.log1p((distance / sampling_rate) ** 2 / messages) ** -0.5
    return least_noise(epsilon, target_epsilon, start, TOLERANCE)


def least_noise(
    epsilon: Callable[[float], float], target: float, start: float, tolerance: float
) -> float:
    """Find the least σ whose ε is within a target.

    Args:
        epsilon: A function that returns ε of a σ and decreases.
        target: The largest ε.
        start: A guess of σ.
        tolerance: How much too large σ may be, relative to it. Five times that is how much of the
            target may be left.

    Raises:
        ValueError: If the most noise is not enough, or the least is.

    Example:
        >>> round(least_noise(lambda sigma: 1 / sigma**2, 4.0, start=3.0, tolerance=1e-3), 2)
        0.5
    """
    step = 1.25
    low = high = min(max(start, LEAST_NOISE), MOST_NOISE)
    spent = {high: epsilon(high)}
    while spent[high] > target:
        if high == MOST_NOISE:
            raise ValueError(
                f"target_epsilon={target:g} is out of reach: noise_multiplier={high:g}, the most "
                f"that is looked for, still has ε = {spent[high]:.4g}. (Sums are rounded to the "
                f"grid of their noise, so that more than about {1 / GRID:.0f} hides no more.) "
                "Share fewer messages, draw fewer rows of the data for each, or set a larger "
                "target_epsilon or delta."
            )
        low, high = high, min(high * step, MOST_NOISE)
        spent[high], step = epsilon(high), step**2
    while spent[low] <= target:
        if low == LEAST_NOISE:
            raise ValueError(
                f"target_epsilon={target:g} asks for no noise: noise_multiplier={low:g}, the least "
                f"that is looked for, has ε = {spent[low]:.4g} only. Set a smaller target_epsilon, "
                "or a delta below the probability that a row is in any message, or set "
                "noise_multiplier yourself."
            )
        low, high = max(low / step, LEAST_NOISE), low
        spent[low], step = epsilon(low), step**2
    while high > (1 + tolerance) * low or spent[high] < (1 - 5 * tolerance) * target:
        if high <= (1 + 1e-9) * low:
            break  # ε jumps here
        fraction = 0.5
        if spent[high] > 0 and spent[low] < math.inf and len(spent) % 3:  # a line, in logarithms
            fraction = math.log(spent[low] / target) / math.log(spent[low] / spent[high])
        fraction = min(max(fraction, 0.01), 0.99)
        middle = low * (high / low) ** fraction
        spent[middle] = epsilon(middle)
        low, high = (low, middle) if spent[middle] <= target else (middle, high)
    return high


class PrivacyAccount:
    """The account of what messages a client has shared, which gives their ε together.

    Args:
        messages: The number of messages by (noise multiplier, sampling rate).

    Raises:
        ValueError: If a noise multiplier, a sampling rate or a number is out of range.

    Example:
        >>> account = PrivacyAccount()
        >>> account.add(noise_multiplier=1.0, sampling_rate=0.01)
        >>> 0 < account.epsilon(delta=1e-5) < 1
        True
    """

    def __init__(self, messages: Mapping[tuple[float, float], int] | None = None) -> None:
        self.messages: dict[tuple[float, float], int] = {}
        self._answered: tuple[float, dict[tuple[float, float], int], float] | None = None
        for (multiplier, rate), count in (messages or {}).items():
            self.add(multiplier, rate, count)

    def add(self, noise_multiplier: float, sampling_rate: float, messages: int = 1) -> None:
        """Record that messages were shared.

        Args:
            noise_multiplier: σ of their noise.
            sampling_rate: q, the probability that a row is in a batch.
            messages: How many were shared.

        Raises:
            ValueError: If an argument is out of range.
        """
        if not 0 < noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be above 0 and finite, but is {noise_multiplier!r}."
            )
        if not 0 < sampling_rate <= 1:
            raise ValueError(
                f"sampling_rate must be above 0 and at most 1, but is {sampling_rate!r}."
            )
        if messages < 0:
            raise ValueError(f"messages must be at least 0, but is {messages!r}.")
        key = (float(noise_multiplier), float(sampling_rate))
        self.messages[key] = self.messages.get(key, 0) + messages

    def epsilon(self, delta: float, interval: float | None = None) -> float:
        """Return ε of all messages together at this δ; 0 before the first.

        Args:
            delta: δ.
            interval: Ignored, and accepted so that older calls keep working: grids follow ε.

        Returns:
            An upper bound, a few thousandths above the least one that privacy loss distributions
                give. For the same δ it never decreases while messages are added.

        Raises:
            ValueError: If δ is not between 0 and 1.
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta must be between 0 and 1, but is {delta!r}.")
        shared = {key: count for key, count in self.messages.items() if count}
        least = 0.0
        if self._answered is not None and self._answered[0] == delta:
            _, before, epsilon = self._answered
            if shared == before:
                return epsilon
            if all(shared.get(key, 0) >= count for key, count in before.items()):
                least = epsilon  # a finer grid may tell a little less of a little more
        epsilon = max(least, _epsilon(shared, delta))
        self._answered = (delta, shared, epsilon)
        return epsilon

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole account as tensors."""
        rows = [(*key, count) for key, count in self.messages.items()]
        return {"messages": torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Add what `state_dict` returned to this account.

        What this account has counted beyond that stays: those messages were shared as well.
        """
        for multiplier, rate, count in state["messages"].tolist():
            key = (multiplier, rate)
            self.messages[key] = max(self.messages.get(key, 0), int(count))


def _epsilon(messages: Mapping[tuple[float, float], int], delta: float) -> float:
    if not messages:
        return 0.0
    sampled: dict[tuple[float, float], int] = {}
    certain = 0.0  # Σ 1/σ² of messages that hold a row for sure: they are one Gaussian mechanism
    strength = 0.0  # of all, if they held it for sure
    for (noise_multiplier, rate), count in messages.items():
        multiplier = of_rounded_sums(noise_multiplier)
        strength += count * (1 / multiplier) * (1 / multiplier)
        if rate < 1:
            sampled[multiplier, rate] = sampled.get((multiplier, rate), 0) + count
        else:
            certain += count * (1 / multiplier) * (1 / multiplier)
    unsampled = gaussian_epsilon(strength**-0.5, delta)
    if not sampled:
        return unsampled
    if certain > 0:
        sampled[certain**-0.5, 1.0] = 1
    return sampled_gaussian_epsilon(sampled, delta, most=unsampled)
