"""Means of trainings of several seeds on the same samples, with their intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import beta, t

from ..audit.report.verdicts import Estimate


def mean_over_seeds(values: Any, are_fractions: bool = False) -> Estimate:
    """Return the mean with its 95 % interval over samples, and over trainings if there are several.

    Args:
        values: The values, `(trainings, samples)`.
        are_fractions: Whether they are from -1 to 1. Then samples without any spread have an
            interval too, of what this many samples may not have shown.

    Example:
        >>> mean_over_seeds([[0.0, 1.0, 1.0, 0.0]])
        Estimate(mean=0.5, low=-0.065..., high=1.065...)
        >>> mean_over_seeds([[0.0] * 100], are_fractions=True).high
        0.036...
    """
    values = np.asarray(values, dtype=float)
    samples = values.mean(0)
    spread_of_samples = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    half = 1.96 * spread_of_samples
    if are_fractions and half < 1e-12:  # but for rounding
        half = 1 - 0.025 ** (1 / len(samples))
    half = math.hypot(half, _half_of_trainings(values))
    mean = float(values.mean())
    low, high = mean - half, mean + half
    return (
        Estimate(mean, max(-1.0, low), min(1.0, high))
        if are_fractions
        else Estimate(mean, low, high)
    )


def lost_over_seeds(plain: Any, accuracies: Any) -> Estimate:
    """Return the mean loss of accuracy against other trainings on the same samples.

    The trainings are independent, and there may be more of one kind. Its 95 % interval is over
    samples, which are paired, and over the trainings of either kind where there are several.

    Args:
        plain: The accuracies of the undefended trainings, `(trainings, samples)`.
        accuracies: The accuracies of the others, `(trainings, samples)`.

    Example:
        >>> lost_over_seeds([[1.0, 1.0] * 50], [[1.0, 0.0] * 50] * 2).mean
        0.5
    """
    plain, accuracies = (np.asarray(values, dtype=float) for values in (plain, accuracies))
    lost = mean_over_seeds([plain.mean(0) - accuracies.mean(0)], are_fractions=True)
    assert lost.high is not None
    half = math.hypot(lost.high - lost.mean, *map(_half_of_trainings, (plain, accuracies)))
    return Estimate(lost.mean, max(-1.0, lost.mean - half), min(1.0, lost.mean + half))


def _half_of_trainings(values: Any) -> float:
    """Return half the width of the 95 % interval over trainings' means; 0 for one training."""
    trainings = values.mean(1)
    if len(trainings) < 2:
        return 0.0
    spread = float(np.std(trainings, ddof=1)) / math.sqrt(len(trainings))
    return float(t.ppf(0.975, len(trainings) - 1)) * spread


def accuracy_over_seeds(values: Any) -> Estimate:
    """Return the mean of values from 0 to 1 with its 95 % interval, as `mean_over_seeds` does.

    The interval is at least as wide as Clopper and Pearson's.

    Args:
        values: The values, `(trainings, samples)`.

    Example:
        >>> accuracy_over_seeds([[1.0] * 20])
        Estimate(mean=1.0, low=0.831..., high=1.0)
    """
    estimate, count = mean_over_seeds(values, are_fractions=True), np.shape(values)[1]
    assert estimate.low is not None
    assert estimate.high is not None
    correct = count * estimate.mean
    low = beta.ppf(0.025, correct, count - correct + 1) if correct > 0 else 0.0
    high = beta.ppf(0.975, correct + 1, count - correct) if correct < count else 1.0
    ends = min(estimate.low, float(low)), max(estimate.high, float(high))
    return Estimate(estimate.mean, max(0.0, ends[0]), min(1.0, ends[1]))
