"""All that tables and reports say of an audit, computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import binom, spearmanr

from ...metrics import score_candidates
from ...metrics.scores import bootstrap_intervals
from ..cells import Audit
from .verdicts import (
    PERCENTILE,
    TELLING,
    TERMS,
    Estimate,
    Row,
    Terms,
    Verdict,
    base_of,
    rival,
    verdicts,
)


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


@dataclass(frozen=True)
class Point:
    """One sample of one message under one defense: an estimator's figure and an attack's scores."""

    defense: str
    figure: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of an estimator's figure with each score of an attack, over
    defenses and samples.

    Args:
        figure: Name of the estimator.
        attack: Label of the attack.
        coefficients: `{score: coefficient}`; `None` where fewer than three points, or equal ones,
            say nothing.
        common: The points, one for each sample, repeat and defense. Those of one sample are not
            independent.
    """

    figure: str
    attack: str
    coefficients: dict[str, float | None]
    common: list[Point]

    @property
    def points(self) -> int:
        """How many there are."""
        return len(self.common)


def correlate(result: Audit) -> list[Correlation]:
    """One for every estimator and attack that have points in common."""
    found = []
    for figure in result.settings["estimators"]:
        for attack in result.attacks:
            common = points(result, figure, attack)
            if not common:
                continue
            x = [point.figure for point in common]
            coefficients: dict[str, float | None] = {}
            for score in common[0].scores:
                y = [point.scores[score] for point in common]
                telling = len(common) >= 3 and len(set(x)) > 1 and len(set(y)) > 1
                coefficients[score] = float(spearmanr(x, y).statistic) if telling else None
            found.append(Correlation(figure, attack, coefficients, common))
    return found


def points(result: Audit, figure: str, attack: str) -> list[Point]:
    """Where both the figure and the attack's scores are there and finite."""
    found = {
        (row["message"], row["repeat"], row["defense"]): row.get("figures", {}).get(figure)
        for row in result.shared
    }
    return [
        Point(
            cell["defense"], value, {name: scores[place] for name, scores in cell["scores"].items()}
        )
        for cell in result.cells
        if cell["attack"] == attack and "scores" in cell
        for place, value in enumerate(
            found.get((cell["message"], cell["repeat"], cell["defense"])) or []
        )
        if value is not None
    ]


def silent(result: Audit) -> list[str]:
    """Which estimators say nothing of which defenses, with the reason."""
    under: dict[tuple[str, str], list[str]] = {}
    for row in result.shared:
        for name, reason in row.get("no_figures", {}).items():
            title = result.settings["estimators"][name]["title"]
            where = under.setdefault((reason, title), [])
            if row["defense"] not in where:
                where.append(row["defense"])
    return [
        f"{reason} ({title}, under {', '.join(where)})" for (reason, title), where in under.items()
    ]
