"""How many labels can be read off what was shared, beside what guessing finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scipy.stats import binom

from ..result import Audit

Values = dict[int, dict[str, list[float]]]
"""For each message, for each score, one number per sample."""


def share_found(found: Sequence[int], true: Sequence[int]) -> float:
    """As many labels as both have in common, each as often as both have it, over all.

    Example:
        >>> share_found([1, 1, 2, 3], true=[1, 2, 2, 2])
        0.5
    """
    return (Counter(found) & Counter(true)).total() / len(true)


def found_under(result: Audit, defense: str) -> Values:
    """The share of labels found in each message under a defense, a mean over repeats."""
    shares: dict[int, list[float]] = {}
    for row in result.shared:
        if row["defense"] == defense and "labels" in row:
            true = result.messages[row["message"]]["labels"]
            shares.setdefault(row["message"], []).append(share_found(row["labels"], true))
    return {at: {"labels": [sum(found) / len(found)]} for at, found in shares.items()}


def found_by_chance(result: Audit) -> float | None:
    """The share that drawing each label uniformly from all classes finds on average."""
    classes = result.settings.get("classes")
    if not classes or not result.messages:
        return None
    common = size = 0.0
    for message in result.messages:
        true = Counter(message["labels"])
        size += true.total()
        common += sum(
            float(binom.sf(place, true.total(), 1 / classes))
            for count in true.values()
            for place in range(count)
        )
    return common / size
