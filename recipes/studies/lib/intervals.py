"""95 % intervals of means over samples and over trainings."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, sem, t


class Interval(NamedTuple):
    """A mean and its interval; `None` where one value gives none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def text(self, digits: int = 3) -> str:
        """As tables show it."""
        if self.low is None:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    @property
    def bar(self) -> tuple[float, float]:
        """How far it reaches to either side."""
        if self.low is None or self.high is None:
            return 0.0, 0.0
        return self.mean - self.low, self.high - self.mean


def half_width(values: Sequence[float]) -> float:
    """Of the interval of a mean (Student's t)."""
    return float(t.ppf(0.975, len(values) - 1) * sem(values))


ANYWHERE, WITHIN_ONE = (-np.inf, np.inf), (0.0, 1.0)  # limits of a mean


def around(mean: float, half: float, limits: tuple[float, float] = ANYWHERE) -> Interval:
    """As far to either side, within limits."""
    return Interval(mean, max(limits[0], mean - half), min(limits[1], mean + half))


def student(values: Sequence[float], limits: tuple[float, float] = ANYWHERE) -> Interval:
    """Of a mean of values between limits."""
    mean = float(np.mean(values))
    return Interval(mean) if len(values) < 2 else around(mean, half_width(values), limits)


def share(hits: int, trials: int) -> Interval:
    """Of so many: Clopper and Pearson's, which has a width also where none or all were found."""
    exact = binomtest(hits, trials).proportion_ci()
    return Interval(hits / trials, float(exact.low), float(exact.high))


# By what members found in one training vary more than independent ones: the root of the mean ratio
# of variances, over 89 rows of the frontiers with two trainings or more.
DISPERSION = 1.43


def over_seeds(groups: Sequence[Sequence[float]], kind: str) -> Interval:
    """Of what attackers recover of samples, in trainings of several seeds: another training would
    differ, and so would other samples. At either end the interval over samples and that over the
    trainings' means are added as squares. Members of one training have its luck in common, so that
    their interval alone is wider by `DISPERSION`.

    Args:
        groups: Samples by training.
        kind: `"shares"` of zeros and ones; `"part"`, between 0 and 1; else anything.
    """
    values = [value for group in groups for value in group]
    limits, is_share = WITHIN_ONE if kind in ("shares", "part") else ANYWHERE, kind == "shares"
    samples = share(round(sum(values)), len(values)) if is_share else student(values, limits)
    half, factor = 0.0, 1.0
    if len(groups) > 1:
        half = half_width([float(np.mean(group)) for group in groups])
    elif is_share:
        factor = DISPERSION
    if samples.low is None:
        return samples
    low, high = (float(np.hypot(factor * bar, half)) for bar in samples.bar)
    mean = samples.mean
    return Interval(mean, max(limits[0], mean - low), min(limits[1], mean + high))


def paired(differences: np.ndarray) -> Interval:
    """Of `(seeds, samples)`, what two trainings of a seed differ by on each of the same samples.

    Student's half-width over seeds, and that over samples of their means over seeds, as squares
    added up: another training would differ, and so would other samples. Of one seed it is over
    samples alone.
    """
    seeds, samples = differences.mean(1), differences.mean(0)
    half = half_width(samples.tolist())
    if len(seeds) > 1:
        half = float(np.hypot(half, half_width(seeds.tolist())))
    return around(float(differences.mean()), half)
