"""Membership inference scores: how well a ranking of candidates finds the batch members."""

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
    """The `Scores` of members, with the ROC curve that they are points of.

    Args:
        curve: False and true positive rates at every threshold, `(n, 2)`, from (0, 0) to (1, 1).
        false_positives: The number of candidates that were in no message, of which the false
            positive rates are fractions.

    Example:
        >>> score_candidates([[0.0, 2.0], [3.0, 1.0]], [[1], [0]]).area
        1.0
    """

    curve: list[tuple[float, float]]
    false_positives: int

    @property
    def area(self) -> float:
        """The area under the curve; 0.5 is chance."""
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
    """Score an attack that ranks candidates, with one number for each member of each message.

    - `top1`: 1 if the member is among the message's B best candidates, where B is the number of
      members. A member that scores the same as a candidate outside them is outside, too.
    - `rank`: 1 + the number of non-members that come before the member; equal scores count half.
    - `tpr_1%`, `tpr_0.1%`: 1 if the member scores above a threshold that at most this fraction of
      all non-members reaches. All messages have one threshold. Scores of one message are compared
      to those of others as `membership_log_odds`. With fewer than 1,000 non-members, 0.1 % of them
      is none at all.

    Args:
        scores: Log-likelihoods, one tensor or array `(K,)` for each message, as in `Ranked.scores`.
        members: For each message the numbers of those candidates that are in it.
        bootstrap: Resamples of the intervals, over messages; thresholds are not resampled. 0 for no
            intervals.
        confidence: The confidence of the intervals.
        seed: The seed of the resamples.

    Raises:
        ValueError: If there is no message, no member or no non-member, or a score is NaN.

    Example:
        >>> found = score_candidates([[0.0, 2.0, 1.0], [5.0, 1.0, 1.0]], [[1], [1]])
        >>> found.per_sample["top1"], found.per_sample["rank"], round(found.area, 3)
        ([1.0, 0.0], [1.0, 2.5], 0.438)
    """
    check_bootstrap(bootstrap, confidence)
    log_scores = [np.asarray(row, dtype=float) for row in scores]
    masks = [_member_mask(row, numbers) for row, numbers in zip(log_scores, members, strict=True)]
    if not masks:
        raise ValueError("There is no message to score.")
    odds = [membership_log_odds(x, mask.sum()) for x, mask in zip(log_scores, masks, strict=True)]
    all_odds, is_member = np.concatenate(odds), np.concatenate(masks)
    other_odds = np.sort(all_odds[~is_member])
    limits = {name: _threshold(other_odds, rate) for name, rate in FALSE_POSITIVES.items()}
    rows = [
        _ranked(x, mask, number)
        | {name: float(message_odds[number] > limit) for name, limit in limits.items()}
        for x, message_odds, mask, numbers in zip(log_scores, odds, masks, members, strict=True)
        for number in numbers
    ]
    summary = summarize(
        rows, [None] * len(rows), [len(numbers) for numbers in members],
        bootstrap=bootstrap, confidence=confidence, seed=seed,
    )  # fmt: skip
    return CandidateScores(
        summary.per_sample, summary.mean, summary.interval, summary.matched,
        curve=_curve(all_odds[is_member], other_odds), false_positives=len(other_odds),
    )  # fmt: skip


def membership_log_odds(scores: Any, members: int) -> np.ndarray:
    """Return the log-odds ln p/(1 - p) that each candidate is in the message, `(K,)`.

    All candidates are equally likely beforehand, and `members` of them are in the message: the
    probabilities p add up to that number.

    Args:
        scores: Logarithms, `(K,)`. For one member, of p(message | candidate), up to a common
            constant; for several, of p(message | candidate in it)/p(message). -infinity for
            candidates that cannot be in it, infinity for those that must.
        members: How many of the candidates are in it, fewer than K.

    Returns:
        The log-odds. They are infinite where there is no doubt: for candidates that must be in it,
            or that remain when others cannot.

    Example:
        >>> membership_log_odds([0.0, 0.0, 0.0], members=1).round(3)  # ln 1/2
        array([-0.693, -0.693, -0.693])
        >>> membership_log_odds([1000.0, 990.0, 0.0], members=2).round(3)
        array([ 505.,  495., -495.])
    """
    log_scores = np.asarray(scores, dtype=float)
    odds, remaining = np.empty_like(log_scores), int(members)
    # The surest first.
    for is_group in (log_scores == np.inf, np.isfinite(log_scores), log_scores == -np.inf):
        count = int(is_group.sum())
        if remaining <= 0 or count <= remaining:
            odds[is_group] = np.inf if remaining > 0 else -np.inf
        else:
            # Those of infinite scores are alike.
            group = np.nan_to_num(log_scores[is_group], posinf=0.0, neginf=0.0)
            odds[is_group] = _of_finite(group, remaining, exclusive=members == 1)
        remaining -= count
    return odds


def _of_finite(scores: np.ndarray, members: int, exclusive: bool) -> np.ndarray:
    """Return `membership_log_odds` of finite scores where some candidates are members.

    With `exclusive` there is one member, so that candidates exclude each other.
    """
    if exclusive:
        values, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
        return (values - _of_others(values, counts))[place]  # those that score alike stay so
    falling = np.sort(scores)[::-1]
    top, others_scores = falling[:members], falling[members:]

    def excess(shift: float) -> float:
        """Return ln of the sum of p over the rest, less that of 1 - p over the best.

        In logarithms it increases everywhere; the sum of all p is flat in floating point.
        """
        below, above = log_expit(others_scores + shift), log_expit(-(top + shift))
        return float(logsumexp(below) - logsumexp(above))

    return scores + brentq(excess, -falling[0] - _FAR, -falling[-1] + _FAR)


def _of_others(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each score the logarithm of the sum of all other candidates' likelihoods."""
    total = logsumexp(values, b=counts)
    if counts[-1] > 1:
        return total + np.log1p(-np.exp(values - total))
    # The best may be all of the sum but its rounding.
    without_best = logsumexp(values[:-1], b=counts[:-1])
    return np.append(total + np.log1p(-np.exp(values[:-1] - total)), without_best)


def _ranked(row: np.ndarray, is_member: np.ndarray, number: int) -> dict[str, float]:
    """Return the scores of one member among the candidates of its message."""
    value, other_scores = row[number], row[~is_member]
    rank_before = float((other_scores > value).sum() + (other_scores == value).sum() / 2)
    return {"top1": float((row >= value).sum() <= is_member.sum()), "rank": 1 + rank_before}


def _member_mask(row: np.ndarray, members: Sequence[int]) -> np.ndarray:
    if np.isnan(row).any():
        raise ValueError("A score is no number.")
    is_member = np.zeros(len(row), dtype=bool)
    is_member[list(members)] = True
    if not is_member.any() or is_member.all():
        raise ValueError(
            "Each message needs a candidate that was in it, and one that was not: there is nothing "
            "to tell apart."
        )
    return is_member


def _threshold(other_odds: np.ndarray, rate: float) -> float:
    """Return the least number that at most this fraction of the sorted scores exceeds."""
    allowed = int(rate * len(other_odds))
    return float(other_odds[len(other_odds) - 1 - allowed])


def _curve(members: np.ndarray, other_odds: np.ndarray) -> list[tuple[float, float]]:
    values = np.unique(np.concatenate([members, other_odds]))[::-1]
    high = np.searchsorted(np.sort(members), values, side="left")
    false = np.searchsorted(other_odds, values, side="left")
    counts = len(other_odds), len(members)
    points = [(1 - f / counts[0], 1 - t / counts[1]) for f, t in zip(false, high, strict=True)]
    return [(0.0, 0.0), *((float(x), float(y)) for x, y in points)]
