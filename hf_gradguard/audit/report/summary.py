"""All that tables and reports say of an audit, computed once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...metrics.scores import bootstrap_intervals
from ..result import Audit
from .figures import Correlation, correlate, silent
from .judge import rival, verdicts
from .labels import Values, found_by_chance, found_under, share_found
from .ranked import Listed, listed, percentiles
from .verdicts import PERCENTILE, TELLING, TERMS, Estimate, Row, Terms, Verdict, base_of


@dataclass(frozen=True)
class Summary:
    """What an audit comes to.

    Args:
        audit: The audit.
        terms: How its scores are said.
        rows: One for every defense and attack, in the audit's order.
        chance: The scores of guesses made without looking at the gradient.
        verdicts: One for every defense.
        shared: For each defense, means over what it shared of `relative_error`, `cosine` and every
            estimator's figure; `None` where there is none.
        labels: For each defense, the share of labels read off what it shared, by `recover_labels`
            and whether or not attacks were granted them; `None` where none could be read.
        chance_labels: What drawing labels at random finds.
        correlations: One for every estimator and attack that have points in common.
        ranked: For each defense and attack that ranks candidates how well it told who was in the
            messages.
        refusals: Which attacks were not applicable under which defenses, with the reason.
        crashes: Which failed, with the error.
        silent: Which estimators say nothing of which defenses, with the reason.
        samples: How many samples were attacked.
        unfinished: If the audit has not come to its end, how far it has come, in a sentence.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [row.attack for row in summarize(result).rows]
        ['span', 'span', 'span, knows the defense']
    """

    audit: Audit
    terms: Terms
    rows: list[Row]
    chance: Row
    verdicts: list[Verdict]
    shared: dict[str, dict[str, float | None]]
    labels: dict[str, Estimate | None]
    chance_labels: float | None
    correlations: list[Correlation]
    ranked: list[Listed]
    refusals: list[str]
    crashes: list[str]
    silent: list[str]
    samples: int
    unfinished: str

    @property
    def figures(self) -> dict[str, str]:
        """The estimators' names with their titles."""
        told = self.audit.settings["estimators"]
        return {name: one["title"] for name, one in told.items()}

    @property
    def meanings(self) -> list[str]:
        """What each of them estimates."""
        told = self.audit.settings["estimators"].values()
        return [f"{one['title']}: {one['meaning']}." for one in told]


def summarize(result: Audit) -> Summary:
    """Compute a summary.

    Args:
        result: Of `audit`, whole or of the first messages only.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [verdict.defense for verdict in summarize(result).verdicts]
        ['none', 'pruning']
    """
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {
        (defense, attack): [] for defense in result.defenses for attack in result.attacks
    }
    for cell in result.cells:
        cells[cell["defense"], cell["attack"]].append(cell)
    # Somebody who knows a defense is there only where that makes a difference.
    cells = {at: found for at, found in cells.items() if found or base_of(at[1]) == at[1]}
    values = {place: values_of(found) for place, found in cells.items()}
    guesses = dict(enumerate(result.chance))
    rows = [_row(result, at, found, values[at], guesses) for at, found in cells.items()]
    rows = _beside_undefended(rows, values, result.settings["main_score"])
    chance = Row("chance", result.settings["chance"], _estimates(guesses), len(guesses))
    terms = TERMS[result.settings["kind"]]
    samples = sum(len(message["labels"]) for message in result.messages)
    return Summary(
        audit=result,
        terms=terms,
        rows=rows,
        chance=chance,
        verdicts=verdicts(rows, chance, terms, samples),
        shared=_shared(result),
        labels={one: _estimates(found_under(result, one)).get("labels") for one in result.defenses},
        chance_labels=found_by_chance(result),
        correlations=correlate(result),
        ranked=[one for at, found in cells.items() if (one := listed(at, found)) is not None],
        refusals=_said({(r.attack, r.defense): r.reasons for r in rows}, len(result.defenses)),
        crashes=_said({(r.attack, r.defense): r.crashes for r in rows}, len(result.defenses)),
        silent=silent(result),
        samples=samples,
        unfinished=_unfinished(result),
    )


def _row(
    result: Audit,
    place: tuple[str, str],
    cells: Sequence[Mapping[str, Any]],
    own: Values,
    guesses: Values,
) -> Row:
    main = result.settings["main_score"]
    over_chance = _differences(own, guesses, {main, *TELLING})
    scores, percentile = _estimates(own), _percentile(cells)
    beats = [
        score
        for score, difference in over_chance.items()
        if score in TELLING and difference.above_zero
    ]
    if percentile is not None:
        scores[PERCENTILE] = percentile
        beats = [PERCENTILE] * (percentile.low is not None and percentile.low > 0.5)
    return Row(
        *place,
        scores=scores,
        messages=len(own),
        over_chance=over_chance.get(main),
        beats_chance=tuple(beats),
        labels=_labels_right(cells, result),
        reasons=sorted({cell["reason"] for cell in cells if "reason" in cell}),
        crashes=sorted({cell["crash"] for cell in cells if "crash" in cell}),
        knows=any(cell.get("knows", False) for cell in cells),
    )


def _beside_undefended(
    rows: Sequence[Row], values: Mapping[tuple[str, str], Values], main: str
) -> list[Row]:
    """Defended rows with their distance from the undefended gradient's: their own attack's, and the
    strongest one's.
    """
    reference = [row for row in rows if row.defense == "none" and row.scores]

    def beside(row: Row) -> Row:
        def under(attack: str) -> Estimate | None:
            theirs = values.get(("none", attack), {})
            return _differences(theirs, values[row.defense, row.attack], {main}).get(main)

        if row.defense == "none":
            return row
        itself, most = base_of(row.attack), rival(row, reference, main)
        own = under(itself)
        strongest = own if most is None or most.attack == itself else under(most.attack)
        return replace(row, under_reference=own, under_strongest=strongest)

    return [beside(row) for row in rows]


def _percentile(cells: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """Of members among candidates, if the attack ranks these."""
    return _estimates(percentiles(cells)).get(PERCENTILE)


def values_of(cells: Sequence[Mapping[str, Any]]) -> Values:
    """Per message and score, the mean over repeats of each sample: repeats are no new samples."""
    collected: dict[int, list[dict[str, list[float]]]] = {}
    for cell in cells:
        if "scores" in cell:
            collected.setdefault(cell["message"], []).append(cell["scores"])
    return {
        message: {
            name: np.mean([scores[name] for scores in several], axis=0).tolist()
            for name in several[0]
        }
        for message, several in sorted(collected.items())
    }


def _estimates(values: Values) -> dict[str, Estimate]:
    """The mean of each score with its interval, all from one bootstrap."""
    messages = list(values.values())
    if not messages or not messages[0]:
        return {}
    per_sample = {name: [x for message in messages for x in message[name]] for name in messages[0]}
    sizes = [len(next(iter(message.values()))) for message in messages]
    ends: dict[str, tuple[float, float]] = {}
    if len(messages) > 1:
        ends = bootstrap_intervals(per_sample, sizes, bootstrap=2000, confidence=0.95, seed=0)
    return {
        name: Estimate(float(np.mean(x)), *ends.get(name, ())) for name, x in per_sample.items()
    }


def _differences(ours: Values, theirs: Values, scores: set[str]) -> dict[str, Estimate]:
    """Means and intervals of ours minus theirs, over the messages that both have."""
    return _estimates(
        {
            message: {
                score: (np.array(found) - np.array(theirs[message][score])).tolist()
                for score, found in ours[message].items()
                if score in scores and score in theirs[message]
            }
            for message in ours
            if message in theirs
        }
    )


def _labels_right(cells: Sequence[Mapping[str, Any]], result: Audit) -> float | None:
    """As many labels as a message's recovered and true ones have in common, over all."""
    shares, sizes = [], []
    for cell in cells:
        if cell.get("labels") is not None:
            true = result.messages[cell["message"]]["labels"]
            shares.append(share_found(cell["labels"], true))
            sizes.append(len(true))
    return float(np.average(shares, weights=sizes)) if shares else None


def _shared(result: Audit) -> dict[str, dict[str, float | None]]:
    means: dict[str, dict[str, float | None]] = {}
    for defense in result.defenses:
        rows = [row for row in result.shared if row["defense"] == defense]
        means[defense] = {
            name: _mean([row[name] for row in rows if row.get(name) is not None])
            for name in ("relative_error", "cosine")
        }
        for name in result.settings["estimators"]:
            found = [x for row in rows for x in row.get("figures", {}).get(name, [])]
            means[defense][name] = _mean([math.inf if x is None else x for x in found])
    return means


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _said(reasons: Mapping[tuple[str, str], list[str]], defenses: int) -> list[str]:
    """`"attack under defenses: reason"`, defenses with the same reason together."""
    under: dict[tuple[str, str], list[str]] = {}
    for (attack, defense), several in reasons.items():
        for reason in several:
            under.setdefault((attack, reason), []).append(defense)
    said = []
    for (attack, reason), where in under.items():
        place = "" if len(where) == defenses else f" under {', '.join(where)}"
        said.append(f"{attack}{place}: {reason}")
    return said


def _unfinished(result: Audit) -> str:
    settings = result.settings
    done = len({(row["message"], row["repeat"]) for row in result.shared})
    planned = settings["messages"] * settings["repeats"]
    if done == planned:
        return ""
    times = f", each {settings['repeats']} times" if settings["repeats"] > 1 else ""
    return (
        f"This audit is not finished: it is of {done} of {planned} messages{times}. The same "
        "command goes on where it stopped."
    )
