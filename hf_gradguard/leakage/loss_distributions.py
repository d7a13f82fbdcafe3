"""Privacy loss distributions on grids that follow ε, for sums with Gaussian noise of any strength.

They give ε of sums whose rows were drawn at random. The privacy loss of a message is log p/q at
what was drawn from p, where p and q are the message's densities with a row and without it, or the
other way around. Losses of independent messages add up, and δ(ε) is the mean of max(0, 1 - e^(ε -
loss)). Three steps keep ε an upper bound:

- A loss between two points of a grid is split between both, so that p and q keep their masses
  ("Connect the Dots"). A pair on a grid tells at least as much as the pair that it stands for.
- The distribution of a sum is computed under an exponential tilt, which moves the losses about ε
  into its middle. Rounding of the Fourier transform is then relative to δ, however small δ is.
- What lies beyond a grid's upper end is counted as an infinite loss, by Chernoff's bound.

The grid is halved until ε no longer decreases, so that it is as fine as this ε needs.

References: Koskela, Jälkö and Honkela, "Computing Tight Differential Privacy Guarantees Using FFT"
(2020); Doroshenko et al., "Connect the Dots" (2022); Zhu, Dong and Wang, "Optimal Accounting of
Differential Privacy via Characteristic Function" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

SETTLED = 1e-3
"""A grid is fine enough where halving it lowers ε by less, relative to it."""
_MOST_POINTS = 2**20  # of a grid of a message, and half of a grid of all of them
_FEW_POINTS = 4096  # of a grid that is searched for a tilt
_LEFT_OUT = 1e-9  # of δ, for each of the parts of a sum that are counted as infinite losses
_WRAPPED = 1e-7  # of the tilted distribution, at each end, which a Fourier transform adds elsewhere
_FAR_ABOVE = 50.0  # of a loss, over twice an ε
_ROUNDING = 1e-15  # of a computed probability, relative to it
_STEEPEST = 30.0  # of a tilt, in units of a grid's interval


class LossDistribution(NamedTuple):
    """The masses of privacy losses at the points of a grid.

    Args:
        interval: The distance between two points.
        lowest: The first point, in intervals.
        masses: The mass of each point, under a tilt if there is one.
        infinite: The mass of an infinite loss, without a tilt.
    """

    interval: float
    lowest: int
    masses: np.ndarray
    infinite: float = 0.0

    @property
    def losses(self) -> np.ndarray:
        return (self.lowest + np.arange(len(self.masses))) * self.interval


class Group(NamedTuple):
    """A group of messages of the same noise and sampling rate.

    Args:
        message: The losses of one message.
        messages: The number of messages.
        losses: A few points of its grid.
        logarithms: The logarithms of its masses, split between these points.
    """

    message: LossDistribution
    messages: int
    losses: np.ndarray
    logarithms: np.ndarray

    @classmethod
    def holding(cls, message: LossDistribution, messages: int) -> Group:
        width = -(-len(message.masses) // _FEW_POINTS)
        masses = np.pad(message.masses, (0, -len(message.masses) % width)).reshape(-1, width)
        up = masses @ (np.arange(width) / width)  # means stay, and all else is further out
        fewer = np.pad(masses.sum(1) - up, (0, 1)) + np.pad(up, (1, 0))
        losses = (message.lowest + np.arange(len(fewer)) * width) * message.interval
        with np.errstate(divide="ignore"):
            return cls(message, messages, losses, np.log(np.maximum(fewer, 0)))

    def cumulant(self, tilt: float) -> tuple[float, float]:
        """Compute log E e^(tilt · loss) of a message, and the mean loss under the tilt.

        The second is the derivative of the first. The first is an upper bound, since an exponential
        is convex.
        """
        exponents = self.logarithms + tilt * self.losses
        largest = exponents.max()
        weights = np.exp(exponents - largest, out=exponents)
        total = weights.sum()
        return float(largest + math.log(total)), float(weights @ self.losses / total)


def sampled_gaussian_epsilon(
    messages: Mapping[tuple[float, float], int], delta: float, most: float
) -> float:
    """Compute ε of messages together, each of which holds a row with some probability.

    Args:
        messages: The number of messages by (noise multiplier, sampling rate).
        delta: δ.
        most: A bound on ε that is known already. It decides where the search begins.

    Returns:
        An upper bound, and at most `most`.

    Example:
        >>> round(sampled_gaussian_epsilon({(1.0, 0.01): 500}, delta=1e-5, most=100.0), 3)
        1.326
    """
    if not 0 < most < math.inf:
        return most
    with_row = _epsilon(messages, delta, most, True)
    return max(with_row, _epsilon(messages, delta, most, False, with_row))


def _epsilon(
    messages: Mapping[tuple[float, float], int], delta: float, most: float, with_row: bool,
    enough: float = 0.0,
) -> float:  # fmt: skip
    """Return ε of one of the two pairs: drawn with the row in the data, or without it.

    Below `enough` it is not computed further.
    """
    interval = 2.0 ** math.floor(math.log2(most))
    epsilon, steepest = math.inf, 1 / most
    while True:
        interval /= 2
        groups = []
        for (multiplier, rate), count in messages.items():
            # A message that tells so much more than ε may as well tell all.
            ceiling = 2 * epsilon + _FAR_ABOVE
            message = _message(multiplier, rate, interval, count, delta, with_row, ceiling)
            if message is None:
                return min(epsilon, most)
            groups.append(Group.holding(message, count))
        steepest = _tilt(groups, delta, steepest, _STEEPEST / interval)
        tilt = _centered(groups, steepest, epsilon)
        composed = _composed(groups, delta, (tilt, steepest), interval)
        if composed is None:
            return min(epsilon, most)
        coarser, finer = epsilon, _solved(*composed, tilt, delta)
        epsilon = min(coarser, finer)
        is_settled = abs(coarser - finer) <= SETTLED * finer < math.inf
        if epsilon <= enough or (is_settled and _is_fine(groups, epsilon, interval)):
            return min(epsilon, most)


def _is_fine(groups: Sequence[Group], epsilon: float, interval: float) -> bool:
    """Return whether the change that halving a grid makes tells how coarse the grid is.

    Losses far above 1 may lie equally far below a point of either grid.
    """
    coarsest = SETTLED * epsilon
    if interval > epsilon / 32 or (len(groups) > 1 and interval > max(1.0, coarsest)):
        return False
    return all(
        group.message.interval <= max(1.0, SETTLED * group.losses[-1], coarsest / group.messages)
        for group in groups
    )


def _message(
    multiplier: float, rate: float, interval: float, count: int, delta: float, with_row: bool,
    ceiling: float,
) -> LossDistribution | None:  # fmt: skip
    """Return the losses of one message, on a grid fine enough for `count` of them.

    It is `None` if that grid has too many points. Losses above the ceiling are infinite. A message
    is x ~ N(0, 1), or N(1/σ, 1) if it holds the row, and its loss increases with x.
    """
    from scipy.special import log_ndtr, ndtr, ndtri

    # A loss between two points adds a quarter of the squared interval to the variance at most.
    interval /= 2.0 ** math.ceil(math.log2(count) / 2)
    beyond = -float(ndtri(_power_of_ten(_LEFT_OUT * delta / count)))
    least, most = _loss(-beyond, multiplier, rate), _loss(beyond + 1 / multiplier, multiplier, rate)
    if with_row:
        most = max(min(most, ceiling), least)
    else:
        least = min(max(least, -ceiling), most)
    if most - least > _MOST_POINTS * interval:
        return None
    points = np.arange(math.floor(least / interval), math.ceil(most / interval) + 1)
    edges = points * interval
    places = _inverse(edges, multiplier, rate)
    without = _between(places)
    shifted = _between(places - 1 / multiplier)
    mixed = (1 - rate) * without + rate * shifted
    scale = -math.expm1(-interval)
    ends = np.abs(edges) < 1
    # What of a cell's mass goes up, from the masses that p and q have in it.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if with_row:
            low, is_small = edges[:-1], ends[:-1]
            gain = rate * (shifted - without) - np.expm1(low) * without
            log_without = log_ndtr(-places[:-1])
            log_without += np.log(-np.expm1(log_ndtr(-places[1:]) - log_without))
            far = mixed - np.exp(low + log_without)
            masses = mixed
        else:
            high, is_small = edges[1:], ends[1:]
            gain = (np.expm1(high) * without - rate * (shifted - without)) * np.exp(-high)
            far = without - np.exp(-high) * mixed
            masses = without
        gain = np.where(is_small, gain, far)
        slack = _ROUNDING * np.where(
            is_small, rate + np.abs(edges[:-1] if with_row else edges[1:]), 1
        )
        gain = np.nan_to_num(gain, nan=np.inf) + slack * masses
    up = np.clip(gain / scale, 0, masses)
    padded = np.zeros(len(points))
    if with_row:
        padded[1:] += up
        padded[:-1] += masses - up
        padded[0] += (1 - rate) * ndtr(places[0]) + rate * ndtr(places[0] - 1 / multiplier)
        infinite = (1 - rate) * ndtr(-places[-1]) + rate * ndtr(1 / multiplier - places[-1])
        return LossDistribution(interval, int(points[0]), padded, float(infinite))
    padded[:-1] += up
    padded[1:] += masses - up
    padded[-1] += ndtr(-places[-1])
    return LossDistribution(interval, -int(points[-1]), padded[::-1], float(ndtr(places[0])))


def _power_of_ten(fraction: float) -> float:
    """Return the largest power of ten within a share, so that few different ones occur."""
    return 10.0 ** math.floor(math.log10(max(fraction, 1e-300)))


def _loss(place: float, multiplier: float, rate: float) -> float:
    """Return log(1 - q + q e^(x/σ - 1/(2σ²)))."""
    exponent = place / multiplier - 1 / (2 * multiplier**2)
    if exponent < 1:
        return math.log1p(rate * math.expm1(exponent)) if rate < 1 else exponent
    return exponent + math.log(rate + (1 - rate) * math.exp(-exponent))


def _inverse(losses: np.ndarray, multiplier: float, rate: float) -> np.ndarray:
    """Return x of each loss, and -∞ below all of them."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if rate == 1:
            exponents = losses
        else:
            near = np.log1p(np.maximum(np.expm1(losses) / rate, -1))
            far = losses + np.log1p(-(1 - rate) * np.exp(-losses)) - math.log(rate)
            exponents = np.where(losses < 1, near, far)
    return multiplier * exponents + 1 / (2 * multiplier)


def _between(places: np.ndarray) -> np.ndarray:
    """Return the mass of N(0, 1) between each place and the next."""
    from scipy.special import ndtr

    is_right = places[:-1] > 0
    below, above = ndtr(places), ndtr(-places)
    return np.where(is_right, above[:-1] - above[1:], below[1:] - below[:-1])


def _tilt(groups: Sequence[Group], delta: float, start: float, most: float) -> float:
    """Return the tilt at which Chernoff's bound on ε is least, to about a twentieth.

    The bound is (log E e^(tilt · loss) - log δ) / tilt; the losses' mean under that tilt is the
    bound.
    """

    def is_too_small(tilt: float) -> bool:
        excess = 0.0
        for group in groups:
            log, mean = group.cumulant(tilt)
            excess += group.messages * (tilt * mean - log)
        return excess < -math.log(delta)

    low, high, step = 0.0, min(start, most), 1.1
    while is_too_small(high):
        if high == most:
            return most
        low, high, step = high, min(step * high, most), step**2
    while low == 0 or not is_too_small(low):
        low, high, step = (low or high) / step, low or high, step**2
    while high > 1.1 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_too_small(middle) else (low, middle)
    return math.sqrt(low * high)


def _centered(groups: Sequence[Group], steepest: float, epsilon: float) -> float:
    """Return a tilt under which losses lie about ε, where Chernoff's bound is far above it.

    That happens where a few rare messages tell nearly everything.
    """
    tilt = steepest
    while tilt > 1e-3 * steepest:
        if sum(group.messages * group.cumulant(tilt)[1] for group in groups) <= 2 * epsilon:
            break
        tilt /= 1.5
    return tilt


def _composed(
    groups: Sequence[Group], delta: float, tilts: tuple[float, float], interval: float
) -> tuple[LossDistribution, float] | None:
    """Return all messages' losses under a tilt, and the log of what masses are relative to."""
    from scipy.signal import fftconvolve

    total, log_total = None, 0.0
    for group in groups:
        composed = _self_composed(group, delta / len(groups), *tilts)
        if composed is None:
            return None
        losses, log_scale = composed
        log_total += log_scale
        if len(groups) > 1:
            losses = _coarsened(losses, interval, tilts[0])
        if total is None:
            total = losses
            continue
        masses = np.maximum(fftconvolve(total.masses, losses.masses), 0)
        infinite = total.infinite + losses.infinite
        total = LossDistribution(interval, total.lowest + losses.lowest, masses, infinite)
    assert total is not None
    return total, log_total


def _self_composed(
    group: Group, delta: float, tilt: float, steepest: float
) -> tuple[LossDistribution, float] | None:
    from scipy.fft import irfft, next_fast_len, rfft

    message, count = group.message, group.messages
    interval, lowest, points = message.interval, message.lowest, len(message.masses)
    log_scale, _ = group.cumulant(tilt)
    bottom, top, left_out = count * lowest, count * (lowest + points - 1), 0.0
    for factor in (1, 1.1, 1.3, 2, 4, 9):
        log, _ = group.cumulant(factor * steepest)
        bound = (count * log - math.log(_LEFT_OUT * delta)) / (factor * steepest)
        if bound < top * interval:
            top, left_out = math.ceil(bound / interval), _LEFT_OUT * delta
    end = count * (lowest + points - 1)
    for away in (0.1, 0.3, 0.6, 1, 2):
        step = away * steepest
        below, above = group.cumulant(tilt - step)[0], group.cumulant(tilt + step)[0]
        bound = count * (log_scale - below) + math.log(_WRAPPED)
        bottom = max(bottom, math.floor(bound / step / interval))
        bound = count * (above - log_scale) - math.log(_WRAPPED)
        end = min(end, math.ceil(bound / step / interval))
    points_left = max(top - bottom + 1, 1)
    least = max(points_left, points)
    if least > 2 * _MOST_POINTS:
        return None
    # What is above the end wraps around to lower losses, which adds to δ where there is no room.
    length = next_fast_len(min(max(least, end - bottom + 1), 2 * _MOST_POINTS), real=True)
    with np.errstate(divide="ignore"):
        exponents = np.log(message.masses) + tilt * message.losses
    largest = float(exponents.max())
    tilted = np.exp(exponents - largest)
    total = float(tilted.sum())
    tilted /= total
    masses = irfft(rfft(tilted, length) ** count, length)
    masses = np.roll(masses, -((bottom - count * lowest) % length))[:points_left]
    infinite = left_out - math.expm1(count * math.log1p(-min(message.infinite, 1 - 1e-15)))
    composed = LossDistribution(interval, bottom, np.maximum(masses, 0), infinite)
    return composed, count * (largest + math.log(total))


def _coarsened(losses: LossDistribution, interval: float, tilt: float) -> LossDistribution:
    """Return the losses on a coarser grid, split between its points as `_message` splits them."""
    ratio = round(interval / losses.interval)
    if ratio == 1:
        return losses
    points = losses.lowest + np.arange(len(losses.masses))
    below = points // ratio
    remainder = (points - below * ratio) * losses.interval
    fraction = np.expm1(-remainder) / math.expm1(-interval)
    below -= below[0]
    up = losses.masses * fraction * np.exp(tilt * (interval - remainder))
    down = losses.masses * (1 - fraction) * np.exp(-tilt * remainder)
    masses = np.bincount(below, down, below[-1] + 2) + np.bincount(below + 1, up, below[-1] + 2)
    return LossDistribution(interval, losses.lowest // ratio, masses, losses.infinite)


def _solved(tilted: LossDistribution, log_scale: float, tilt: float, delta: float) -> float:
    """Return the least ε at which the losses have this δ."""
    from scipy.signal import lfilter

    allowance = delta * (1 - _LEFT_OUT) - tilted.infinite
    if allowance <= 0:
        return math.inf
    losses, decay = tilted.losses, math.exp(-tilted.interval)
    with np.errstate(divide="ignore"):
        exponents = np.log(tilted.masses) + log_scale - tilt * losses
    masses = np.exp(np.minimum(exponents, 500.0))[::-1]  # from the top; more is too much anyway
    above = np.cumsum(masses)
    discounted = lfilter([1.0], [1.0, -decay], masses)  # Σ mass · e^(this loss - loss), from it on
    too_much = np.nonzero(above - decay * discounted > allowance)[0]
    if not len(too_much):
        return max(0.0, float(losses[0]))
    point = too_much[0]  # what lies above the next lower point, seen from there
    epsilon = losses[::-1][point] + math.log((above[point] - allowance) / discounted[point])
    return max(0.0, float(epsilon))
