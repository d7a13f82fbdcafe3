"""Means over samples with their intervals, of what an audit's cells hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...metrics.scores import bootstrap_intervals, open_ends
from ...metrics.text import TEXT_SCORES
from ..cells import Cell
from .verdicts import PERCENTILE, Estimate

SHARES = {*TEXT_SCORES, PERCENTILE}
"""Scores from 0 to 1."""

COUNTED = {"labels", "top1", "tpr_1%", "tpr_0.1%"}
"""Of these a sample has all or nothing."""

Values = dict[int, dict[str, list[float]]]
"""For each message, for each score, one number per sample."""


def values_of(cells: Sequence[Cell]) -> Values:
    """Per message and score, the mean over repeats of each sample: repeats are no new samples."""
    repeats: dict[int, list[dict[str, list[float]]]] = {}
    for cell in cells:
        if "scores" in cell:
            repeats.setdefault(cell["message"], []).append(cell["scores"])
    means = {}
    for message, rows in sorted(repeats.items()):
        means[message] = {n: np.mean([row[n] for row in rows], axis=0).tolist() for n in rows[0]}
    return means


def estimates(values: Values) -> dict[str, Estimate]:
    """The mean of each score with its interval, all from one bootstrap."""
    messages = list(values.values())
    if not messages or not messages[0]:
        return {}
    # Messages are resampled whole: samples of one message are not independent.
    per_sample = {name: [x for message in messages for x in message[name]] for name in messages[0]}
    sizes = [len(next(iter(message.values()))) for message in messages]
    ends: dict[str, tuple[float, float]] = {}
    if len(messages) > 1:
        ends = bootstrap_intervals(per_sample, sizes, bootstrap=2000, confidence=0.95, seed=0)
    return {
        name: Estimate(float(np.mean(x)), *ends.get(name, ())) for name, x in per_sample.items()
    }


def with_open_ends(scores: Mapping[str, Estimate], messages: int) -> dict[str, Estimate]:
    """With room for what no message showed, where counts or equal messages give no spread."""
    opened = dict(scores)
    for name, estimate in scores.items():
        mean, low, high = estimate.mean, estimate.low, estimate.high
        if low is None or high is None:
            continue
        if name in COUNTED or (name in SHARES and low == high):
            opened[name] = Estimate(mean, *open_ends(mean, low, high, messages))
    return opened


def differences(minuend: Values, subtrahend: Values, scores: set[str]) -> dict[str, Estimate]:
    """Means and intervals of the difference, over the messages that both have."""
    return estimates(
        {
            message: {
                score: (np.array(numbers) - np.array(subtrahend[message][score])).tolist()
                for score, numbers in minuend[message].items()
                if score in scores and score in subtrahend[message]
            }
            for message in minuend
            if message in subtrahend
        }
    )
