"""Privacy of a row whose place among a training's messages is secret.

Each row is put into one of the messages, drawn uniformly and independently (balls in bins, random
allocation). An attacker that asks "was this row used at all?" has to look at all places. With the
row, messages C g + σ z follow a mixture of Gaussians N(m_i, 1), one for each place i; without it
they follow N(0, 1). That pair dominates any rows, also where gradients depend on earlier messages,
if C is lower triangular and not negative (Choquette-Choo et al., 2025). A mixture in thousands of
dimensions cannot be integrated: figures here are upper ends of Monte Carlo estimates, at 99.9 %.

An attacker that knows the place, or asks whether the row is in one given message, is not covered:
for it, `gaussian_epsilon(σ, δ)` and `membership_power(σ)` hold.

References: Chua et al., "Balls-and-Bins Sampling for DP-SGD" (2024); Choquette-Choo et al.,
"Near-Exact Privacy Amplification for Matrix Mechanisms" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..defenses.correlated import response, sensitivity
from .differential_privacy import least_noise, of_rounded_sums

DRAWS = 100_000
CONFIDENCE = 0.999
"""The confidence of an upper end, one-sided."""
_DEVIATIONS = 3.0902  # of a normal estimate, by that confidence
_OF_BOTH = (1 + CONFIDENCE) / 2  # of a threshold and of a share, so that both hold by it
_CHUNK = 2**22  # entries of messages drawn at a time
_SHIFTS = (0.0, 1.5, 3.0, 4.5, 6.0)
"""Shifts of draws, in deviations, to where losses are large; each is used equally often."""
_COARSEST = 0.1  # of a δ, its standard error relative to it
_DOUBLINGS = 4  # of draws that were too few for it
_MOST_EPSILON = 200.0
_MOST_SQUARE = 1e5  # of a row's mean, in the noise's variances: of more, draws keep no digits


def balls_in_bins_epsilon(
    column: Tensor, noise_multiplier: float, bins: int, delta: float,
    scale: float | None = None, draws: int = DRAWS,
) -> float:  # fmt: skip
    """Return ε of a whole training against an attacker that does not know the places of rows.

    Args:
        column: The column c of the messages' factor, `(T,)`: at least 0, never rising.
        noise_multiplier: σ of the noise, which is σ times the clip and `scale`.
        bins: The number of places in a pass, each equally likely. A row is in messages i, i + bins,
            i + 2 bins, …
        delta: δ.
        scale: The sensitivity that noise was made for. Default: that of the same number of passes.
        draws: The number of draws to begin with. If they are too few for this δ, up to 16 times as
            many are used.

    Returns:
        The upper end of an interval at 99.9 %, by the estimate's standard error (it is taken for
            normal). In the neighboring data set the row's gradient is zero, or it is in this one;
            the larger ε of both counts. It is infinite above 200, and with next to no noise.

    Raises:
        ValueError: If an argument is out of range.
        ArithmeticError: If there are too few draws.

    Example:
        >>> from hf_gradguard.defenses.correlated import make_factor
        >>> column = make_factor("blt", 500, falling_rate=True).column(500)  # as a Trainer has it
        >>> known, secret = 4.65, balls_in_bins_epsilon(column, 0.95, 500, 1e-5)
        >>> 2.6 < secret < 2.9 < known
        True
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, but is {delta!r}.")
    pair = _Pair(column, noise_multiplier, bins, scale)
    if pair.is_plain:
        return math.inf
    return max(_epsilon(draw, draws, delta) for draw in (pair.with_row, pair.without_row))


def balls_in_bins_power(
    column: Tensor, noise_multiplier: float, bins: int, false_alarms: float = 0.01,
    scale: float | None = None, draws: int = DRAWS,
) -> float:  # fmt: skip
    """Bound membership inference by an attacker that does not know the places of rows.

    The bound is the fraction of members that the best test of all messages finds.

    Args:
        column: The column c of the messages' factor, as for `balls_in_bins_epsilon`.
        noise_multiplier: σ of the noise, which is σ times the clip and `scale`.
        bins: The number of places in a pass. Of rows whose place is in no message, none is found.
        false_alarms: α, the fraction of non-members that the test takes for members.
        scale: The sensitivity that noise was made for, as for `balls_in_bins_epsilon`.
        draws: The number of draws.

    Returns:
        The upper end of its interval, at 99.9 % (Clopper and Pearson; both the threshold and the
            fraction are drawn); 1 with next to no noise.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from hf_gradguard.defenses.correlated import make_factor
        >>> column = make_factor("blt", 500, falling_rate=True).column(500)
        >>> round(balls_in_bins_power(column, 0.95, 500), 2)
        0.05
    """
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must be between 0 and 1, but is {false_alarms}.")
    pair = _Pair(column, noise_multiplier, bins, scale)
    if pair.is_plain:
        return 1.0
    from scipy.stats import beta, binom

    least = int(binom.ppf(_OF_BOTH, draws, false_alarms)) + 1
    if least > draws:
        raise ValueError(f"draws={draws} are too few for false_alarms={false_alarms}.")
    threshold = pair.without_row(draws).losses.neg().topk(least).values[-1]
    detections = int((pair.with_row(draws).losses >= threshold).sum())
    missed = draws - detections
    return float(beta.ppf(_OF_BOTH, detections + 1, missed)) if missed else 1.0


def balls_in_bins_noise_multiplier(
    target_epsilon: float, delta: float, column: Tensor, bins: int, draws: int = DRAWS
) -> float:
    """Return the least σ, to half a percent, with which `balls_in_bins_epsilon` meets a target.

    Args:
        target_epsilon: The largest ε, above 0 and at most 200.
        delta: δ.
        column: The column c of the messages' factor, as for `balls_in_bins_epsilon`.
        bins: The number of places in a pass.
        draws: The number of draws to begin with.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> column = torch.tensor([1.0])  # one message: no secret, and 3.73 is exact
        >>> 3.73 < balls_in_bins_noise_multiplier(1.0, 1e-5, column, bins=1) < 3.85
        True
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be above 0 and finite, but is {target_epsilon!r}.")
    if target_epsilon > _MOST_EPSILON:
        raise ValueError(
            f"target_epsilon must be at most {_MOST_EPSILON:g}, but is {target_epsilon!r}: draws "
            "tell no larger ε apart. Take dp_sgd_noise_multiplier(target_epsilon, delta, 1.0, 1), "
            "whose ε holds for an attacker that knows the places, too."
        )

    def epsilon(sigma: float) -> float:
        return balls_in_bins_epsilon(column, sigma, bins, delta, draws=draws)

    return least_noise(epsilon, target_epsilon, 1.0, 0.005)


class _Losses(NamedTuple):
    """Privacy losses log p/q of draws from p, and the weights of the draws.

    Draws may come from a mixture of densities instead of p. A weight is p over that mixture, which
    is bounded.
    """

    losses: Tensor
    weights: Tensor


class _Pair:
    """The distributions of messages with a row and without it, in units of the noise's deviation.

    A factor that is the same from message to message moves a row's mean along with its place: m_i
    is one pulse, i messages later. Nothing is drawn if the pulse is plain to see behind the noise.
    """

    def __init__(
        self, column: Tensor, noise_multiplier: float, bins: int, scale: float | None
    ) -> None:
        if not 0 < noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be above 0 and finite, but is {noise_multiplier}."
            )
        if bins < 1:
            raise ValueError(f"bins must be at least 1, but is {bins}.")
        messages = len(column)
        passes = -(-messages // bins)
        strength = sensitivity(column, passes, bins)  # refuses columns that it cannot judge
        deviation = of_rounded_sums(noise_multiplier) * (strength if scale is None else scale)
        pulse = response(column.double(), passes, bins) / deviation
        self.is_plain = not float(pulse.square().sum()) <= _MOST_SQUARE
        self._pulse = pulse.float()  # far finer than what so many draws can tell
        self._bins, self._used = bins, min(bins, messages)  # the others' rows are in no message
        from scipy.fft import next_fast_len  # not where no such ε is asked for

        self._length = next_fast_len(2 * messages - 1, real=True)
        self._spectrum = torch.fft.rfft(self._pulse, self._length).conj()
        squares = pulse.square().cumsum(0).flip(0)[: self._used].float()
        self._squares = torch.nn.functional.pad(squares, (0, self._bins - self._used))

    def with_row(self, draws: int, shifts: Sequence[float] = (0.0,)) -> _Losses:
        """Draw losses of messages with the row, shifted along the row's mean."""
        norms = self._squares.sqrt().clamp(min=1e-6)
        factors = 1 + torch.tensor(shifts)[:, None] / norms  # (shifts, bins)
        chunks = []
        for kinds, generator in self._chunks(draws, len(shifts)):
            places = torch.randint(self._bins, (len(kinds),), generator=generator)
            means = factors[kinds, places][:, None] * self._means(places)
            exponents = self._exponents(self._white(len(kinds), generator) + means)
            losses = self._log_mean(exponents - self._squares / 2)
            shifted = [self._log_mean(f * exponents - f**2 * self._squares / 2) for f in factors]
            chunks.append(_Losses(losses, _weights(losses, shifted)))
        return _joined(chunks)

    def without_row(self, draws: int, shifts: Sequence[float] = (0.0,)) -> _Losses:
        """Draw losses of messages without the row, shifted against the mean of all means."""
        direction = self._pulse.cumsum(0)  # in proportion to that mean: each place adds a pulse
        direction[self._used :] -= direction[: -self._used].clone()
        direction /= direction.norm()
        chunks = []
        for kinds, generator in self._chunks(draws, len(shifts)):
            messages = self._white(len(kinds), generator)
            messages -= torch.tensor(shifts)[kinds, None] * direction
            losses = -self._log_mean(self._exponents(messages) - self._squares / 2)
            along = messages @ direction
            shifted = [-size * along - size**2 / 2 for size in shifts]
            chunks.append(_Losses(losses, _weights(torch.zeros_like(losses), shifted)))
        return _joined(chunks)

    def _chunks(self, draws: int, kinds: int) -> Iterator[tuple[Tensor, torch.Generator]]:
        """Yield for chunks of draws which shift each one has, all shifts in turn."""
        generator = torch.Generator().manual_seed(0)  # the same settings, the same figures
        for chunk in torch.arange(draws).split(max(1, _CHUNK // len(self._pulse))):
            yield chunk % kinds, generator

    def _white(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, len(self._pulse), generator=generator)

    def _means(self, places: Tensor) -> Tensor:
        """Return the means of messages for these places, `(n, T)`."""
        messages = len(self._pulse)
        padded = torch.nn.functional.pad(self._pulse, (messages, 0))
        steps = torch.arange(messages) + messages
        return padded[steps - places.clamp(max=messages)[:, None]]

    def _exponents(self, messages: Tensor) -> Tensor:
        """Return ⟨m_i, y⟩ for each place, `(n, bins)`."""
        spectrum = torch.fft.rfft(messages, self._length) * self._spectrum
        products = torch.fft.irfft(spectrum, self._length)
        used = products[:, : self._used]
        return torch.nn.functional.pad(used, (0, self._bins - self._used))

    def _log_mean(self, exponents: Tensor) -> Tensor:
        return exponents.logsumexp(1) - math.log(self._bins)


def _weights(log_density: Tensor, drawn_from: Sequence[Tensor]) -> Tensor:
    """Return the weights of draws from a mixture of densities, given relative to one of them."""
    mixture = torch.stack(list(drawn_from)).logsumexp(0) - math.log(len(drawn_from))
    return (log_density - mixture).exp()


def _joined(chunks: list[_Losses]) -> _Losses:
    return _Losses(*(torch.cat(column).double() for column in zip(*chunks, strict=True)))


def _epsilon(draw: Callable[..., _Losses], draws: int, delta: float) -> float:
    for doubling in range(_DOUBLINGS + 1):
        epsilon, error = _solved(draw(draws * 2**doubling, _SHIFTS), delta, _DEVIATIONS)
        if error <= _COARSEST:
            return epsilon
    raise ArithmeticError(
        f"draws={draws} and {2**_DOUBLINGS} times as many give a δ of {delta:g} with a standard "
        f"error of {error:.0%} of it. Take more of them, or a larger δ."
    )


def _solved(sample: _Losses, delta: float, deviations: float) -> tuple[float, float]:
    """Return the ε at which the estimate of δ, plus some standard errors, is this δ.

    The second number is the standard error relative to the estimate, infinite if nothing was drawn
    beyond ε.
    """
    low, high = 0.0, _MOST_EPSILON

    def estimate(epsilon: float) -> tuple[float, float]:
        beyond = sample.weights * -torch.expm1((epsilon - sample.losses).clamp(max=0))
        return float(beyond.mean()), float(beyond.std()) / math.sqrt(len(beyond))

    mean, error = estimate(high)
    if mean + deviations * error > delta:
        return math.inf, 0.0
    for _ in range(50):
        middle = (low + high) / 2
        mean, error = estimate(middle)
        low, high = (low, middle) if mean + deviations * error <= delta else (middle, high)
    mean, error = estimate(low)
    if low == 0 and mean + deviations * error <= delta:
        return 0.0, error / delta
    return high, error / mean if mean else math.inf
