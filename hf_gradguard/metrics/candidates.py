"""How well a ranking of candidates tells who was in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp

from .scores import Scores, check_bootstrap, summarize

FALSE_POSITIVES = {"tpr_1%": 0.01, "tpr_0.1%": 0.001}
_FAR = 50.0  # e to this is more than there are candidates


@dataclass(frozen=True)
class CandidateScores(Scores):
    """`Scores` of members, with the curve that they are points of.

    Args:
        curve: `(n, 2)`: false and true positive rates at every threshold, from (0, 0) to (1, 1).
        false_positives: How many candidates that were in no message the rates are shares of.

    Example:
        >>> score_candidates([[0.0, 2.0], [3.0, 1.0]], [[1], [0]]).area
        1.0
    """

    curve: list[tuple[float, float]]
    false_positives: int

    @property
    def area(self) -> float:
        """Under the curve: 0.5 is chance."""
        x, y = np.array(self.curve).T
        return float(np.trapezoid(y, x))


def score_candidates(
    scores: Sequence[Any],
    members: Sequence[Sequence[int]],
    *,
    bootstrap: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> CandidateScores:
    """Scores of an attack that ranks candidates, one number a member of each message.

    - `top1`: 1 if it is among the message's B best candidates, B being the number of its members.
      Who scores like one that is not among them is not, either.
    - `rank`: 1 + how many candidates that are no members come before it; who scores alike counts
      half.
    - `tpr_1%`, `tpr_0.1%`: 1 if it scores above a threshold, one for all messages, that at most so
      many of all candidates that are no members reach. Scores of one message are compared to those
      of others as `membership_log_odds`. With fewer than 1,000 such candidates, 0.1 % of them is
      none at all.

    Args:
        scores: One tensor or array `(K,)` of logarithms a message, as `Ranked.scores`.
        members: For each message the numbers of those candidates that are in it.
        bootstrap: Resamples of the intervals, over messages; thresholds stay as they are. 0 for
            none.
        confidence: Of the intervals.
        seed: Of the resamples.

    Raises:
        ValueError: If there is no message, no member, no other candidate, or a score is no number.

    Example:
        >>> found = score_candidates([[0.0, 2.0, 1.0], [5.0, 1.0, 1.0]], [[1], [1]])
        >>> found.per_sample["top1"], found.per_sample["rank"], round(found.area, 3)
        ([1.0, 0.0], [1.0, 2.5], 0.438)
    """
    check_bootstrap(bootstrap, confidence)
    rows = [np.asarray(row, dtype=float) for row in scores]
    inside = [_inside(row, own) for row, own in zip(rows, members, strict=True)]
    if not rows:
        raise ValueError("There is no message to score.")
    odds = [membership_log_odds(row, own.sum()) for row, own in zip(rows, inside, strict=True)]
    others = np.sort(np.concatenate([row[~own] for row, own in zip(odds, inside, strict=True)]))
    limits = {name: _threshold(others, rate) for name, rate in FALSE_POSITIVES.items()}
    told = [
        _ranked(row, own, number)
        | {name: float(sure[number] > limit) for name, limit in limits.items()}
        for row, sure, own, numbers in zip(rows, odds, inside, members, strict=True)
        for number in numbers
    ]
    plain = summarize(
        told, [None] * len(told), [len(one) for one in members],
        bootstrap=bootstrap, confidence=confidence, seed=seed,
    )  # fmt: skip
    own_scores = np.concatenate([row[own] for row, own in zip(odds, inside, strict=True)])
    return CandidateScores(
        plain.per_sample, plain.mean, plain.interval, plain.matched,
        curve=_curve(own_scores, others), false_positives=len(others),
    )  # fmt: skip


def membership_log_odds(scores: Any, members: int) -> np.ndarray:
    """`(K,)`: ln p/(1 - p) of each candidate's probability p of being in the message, where all
    were equally likely before and so many of them are: these probabilities add up to that many.

    Args:
        scores: `(K,)`, logarithms: for one member of p(message | candidate), up to what all have
            in common; for several of p(message | candidate in it)/p(message). Of -infinity are
            those who cannot be in it, of infinity those who must.
        members: How many of the candidates are in it, below K.

    Returns:
        The log-odds, infinite for whom there is no doubt: those who must be in it, or who are left
        when others cannot.

    Example:
        >>> membership_log_odds([0.0, 0.0, 0.0], members=1).round(3)  # ln 1/2
        array([-0.693, -0.693, -0.693])
        >>> membership_log_odds([1000.0, 990.0, 0.0], members=2).round(3)
        array([ 505.,  495., -495.])
    """
    given = np.asarray(scores, dtype=float)
    odds, left = np.empty_like(given), int(members)
    for alike in (given == np.inf, np.isfinite(given), given == -np.inf):  # the surest first
        count = int(alike.sum())
        if left <= 0 or count <= left:
            odds[alike] = np.inf if left > 0 else -np.inf
        else:
            # Those of infinite scores are alike.
            values = given[alike] if np.isfinite(given[alike]).all() else np.zeros(count)
            odds[alike] = _of_finite(values, left, exclusive=members == 1)
        left -= count
    return odds


def _of_finite(scores: np.ndarray, members: int, exclusive: bool) -> np.ndarray:
    """`membership_log_odds` where all are finite and some are in it; `exclusive` where one is, so
    that others' likelihoods exclude each other.
    """
    if exclusive:
        values, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
        return (values - _of_others(values, counts))[place]  # those that score alike stay so
    falling = np.sort(scores)[::-1]
    best, rest = falling[:members], falling[members:]

    def excess(shift: float) -> float:
        """ln of the sum of p over the rest, less that of 1 - p over the best: in logarithms it
        rises everywhere, where the sum of all p is flat in floating point.
        """
        return float(logsumexp(log_expit(rest + shift)) - logsumexp(log_expit(-(best + shift))))

    return scores + brentq(excess, -falling[0] - _FAR, -falling[-1] + _FAR)


def _of_others(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For one candidate of each score, the logarithm of the sum of all others' likelihoods."""
    whole = logsumexp(values, b=counts)
    if counts[-1] > 1:
        return whole + np.log1p(-np.exp(values - whole))
    # The best may be all of the sum but its rounding.
    rest = logsumexp(values[:-1], b=counts[:-1])
    return np.append(whole + np.log1p(-np.exp(values[:-1] - whole)), rest)


def _ranked(row: np.ndarray, own: np.ndarray, number: int) -> dict[str, float]:
    """The scores of one member among those of its message."""
    value, rest = row[number], row[~own]
    before = float((rest > value).sum() + (rest == value).sum() / 2)
    return {"top1": float((row >= value).sum() <= own.sum()), "rank": 1 + before}


def _inside(row: np.ndarray, members: Sequence[int]) -> np.ndarray:
    if np.isnan(row).any():
        raise ValueError("A score is no number.")
    own = np.zeros(len(row), dtype=bool)
    own[list(members)] = True
    if not own.any() or own.all():
        raise ValueError(
            "Each message needs a candidate that was in it, and one that was not: there is nothing "
            "to tell apart."
        )
    return own


def _threshold(others: np.ndarray, rate: float) -> float:
    """The least number that at most such a share of sorted scores is above."""
    allowed = int(rate * len(others))
    return float(others[len(others) - 1 - allowed])


def _curve(members: np.ndarray, others: np.ndarray) -> list[tuple[float, float]]:
    values = np.unique(np.concatenate([members, others]))[::-1]
    high = np.searchsorted(np.sort(members), values, side="left")
    false = np.searchsorted(others, values, side="left")
    points = [(1 - f / len(others), 1 - t / len(members)) for f, t in zip(false, high, strict=True)]
    return [(0.0, 0.0), *((float(x), float(y)) for x, y in points)]
