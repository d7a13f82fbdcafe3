"""How well rankings of candidates told who was in the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...metrics import score_candidates
from .labels import Values
from .verdicts import PERCENTILE, Estimate


@dataclass(frozen=True)
class Listed:
    """One attack that ranks candidates, under one defense.

    Args:
        defense: Its label.
        attack: Its label.
        scores: Estimates of `top1`, `rank`, `tpr_1%` and `tpr_0.1%`; see `score_candidates`.
        candidates: How many there were.
        members: How many samples were looked for.
        others: How many candidates false alarms are a share of, in all messages together.
        blind: The share of samples that a blind draw names: as many entries as a message has.
        knows: Whether the attacker knows the defense.
    """

    defense: str
    attack: str
    scores: dict[str, Estimate]
    candidates: int
    members: int
    others: int
    blind: float
    knows: bool


def listed(place: tuple[str, str], cells: Sequence[Mapping[str, Any]]) -> Listed | None:
    """What the cells of a defense and an attack say of candidates; `None` if they rank none."""
    rows = _ranked(cells)
    if not rows:
        return None
    found = score_candidates([row["scores"] for row in rows], [row["members"] for row in rows])
    ends = found.interval if len(rows) > 1 else {}
    scores = {name: Estimate(mean, *ends.get(name, ())) for name, mean in found.mean.items()}
    sizes = [len(row["members"]) for row in rows]
    blind = np.average([len(row["members"]) / len(row["scores"]) for row in rows], weights=sizes)
    return Listed(
        *place,
        scores=scores,
        candidates=len(rows[0]["scores"]),
        members=len(found.per_sample["rank"]),
        others=found.false_positives,
        blind=float(blind),
        knows=any(cell.get("knows", False) for cell in cells),
    )


def percentiles(cells: Sequence[Mapping[str, Any]]) -> Values:
    """The share of other candidates that come after each member, message by message."""
    values: Values = {}
    for cell in cells:
        for row in _ranked([cell]):
            found = score_candidates([row["scores"]], [row["members"]], bootstrap=0)
            shares = [1 - (r - 1) / found.false_positives for r in found.per_sample["rank"]]
            values[cell["message"]] = {PERCENTILE: shares}
    return values


def _ranked(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of first repeats: others are of the same samples. A message of which nobody, or everybody, is
    listed tells nothing.
    """
    rows = [cell["ranked"] for cell in cells if "ranked" in cell and not cell["repeat"]]
    return [row for row in rows if 0 < len(row["members"]) < len(row["scores"])]
