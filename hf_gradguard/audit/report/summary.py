"""The summary of an audit: all that tables and reports say, computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import binom, spearmanr

from ...attacks.likelihood import Distinguishability, Pair, summarize_pairs
from ...metrics import score_candidates
from ..cells import (
    Audit,
    Cell,
    Values,
    differences,
    estimates,
    values_of,
    with_open_ends,
)
from .verdicts import (
    MAIN_SCORES,
    PERCENTILE,
    TELLING,
    AttackScores,
    Estimate,
    MainScore,
    Verdict,
    base_of,
    strongest_undefended,
    verdicts,
)


@dataclass(frozen=True)
class Membership:
    """The success of one membership inference attack under one defense.

    Args:
        defense: The defense's label.
        attack: The attack's label.
        scores: Estimates of `top1`, `rank`, `tpr_1%` and `tpr_0.1%`; see `score_candidates`.
        candidates: The number of candidates.
        members: The number of batch members that were looked for, in all messages together.
        chance: The fraction of them that a random draw identifies: as many candidates as a message
            has members.
        knows_defense: Whether the attacker knows the defense.
    """

    defense: str
    attack: str
    scores: dict[str, Estimate]
    candidates: int
    members: int
    chance: float
    knows_defense: bool

    def recognizes(self, sample: str) -> str:
        """Return the words for how many members it recognizes; members are called `sample`."""
        fraction = MAIN_SCORES["text"].format_estimate(self.scores["top1"])  # in percent
        among = f"among {self.candidates} candidates ({100 * self.chance:.0f} % by chance)"
        return f"recognizes {fraction} of the {sample}s {among}"


@dataclass(frozen=True)
class Point:
    """One sample of one message under one defense.

    Args:
        defense: The defense's label.
        estimate: The figure of an estimator.
        scores: An attack's scores.
    """

    defense: str
    estimate: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of an estimator with each score of an attack.

    It is taken over defenses and samples.

    Args:
        estimator: The estimator's name.
        attack: The attack's label.
        coefficients: `{score: coefficient}`; `None` if fewer than three points, or equal ones, say
            nothing.
        points: One for each sample, repeat and defense. Those of one sample are not independent.
    """

    estimator: str
    attack: str
    coefficients: dict[str, float | None]
    points: list[Point]


@dataclass(frozen=True)
class Summary:
    """The summary of an audit.

    Args:
        audit: The audit.
        main_score: The main score, and how it is named and shown.
        rows: One for every defense and attack, in the audit's order.
        chance: The scores of guesses made without looking at the gradient.
        verdicts: One for every defense.
        shared: For each defense, means over what it shared of `relative_error`, `cosine` and every
            estimator; `None` where there is none.
        distinguishability: For each defense, how many pairs that differ in one word (one patch) a
            message distinguishes; `None` where there are none.
        labels: For each defense, the fraction of labels recovered from what it shared, by
            `recover_labels` and whether or not attacks were granted them; `None` where there are
            none.
        chance_labels: The fraction that drawing labels at random recovers.
        correlations: One for every attack and estimator that ranks, with points in common.
        membership: One for every defense and membership inference attack.
        refusals: Which attacks were not applicable under which defenses, with the reason.
        crashes: Which attacks failed, with the error.
        silent: Which estimators say nothing of which defenses, with the reason.
        samples: The number of samples that were attacked.
        unfinished: If the audit is not finished, a sentence that says how far it has come.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [row.attack for row in summarize(result).rows]
        ['span', 'span', 'span, knows the defense']
    """

    audit: Audit
    main_score: MainScore
    rows: list[AttackScores]
    chance: AttackScores
    verdicts: list[Verdict]
    shared: dict[str, dict[str, float | None]]
    distinguishability: dict[str, Distinguishability | None]
    labels: dict[str, Estimate | None]
    chance_labels: float | None
    correlations: list[Correlation]
    membership: list[Membership]
    refusals: list[str]
    crashes: list[str]
    silent: list[str]
    samples: int
    unfinished: str

    @property
    def guess(self) -> float:
        """The main score of a guess."""
        return self.chance.scores[self.main_score.name].mean

    def reconstructions(self, defense: str) -> list[AttackScores]:
        """Return rows of a defense with scores, but not membership inference.

        Membership inference reconstructs nothing.
        """
        infers = {inferred.attack for inferred in self.membership}
        rows = [row for row in self.rows if row.defense == defense and row.scores]
        return [row for row in rows if row.attack not in infers]

    @property
    def estimator_titles(self) -> dict[str, str]:
        """The estimators' titles by name."""
        estimators = self.audit.settings["estimators"]
        return {name: described["title"] for name, described in estimators.items()}

    @property
    def estimator_meanings(self) -> list[str]:
        """The sentences that say what each estimator estimates."""
        estimators = self.audit.settings["estimators"].values()
        return [f"{described['title']}: {described['meaning']}." for described in estimators]

    @property
    def estimators_note(self) -> str:
        """The sentence that says what estimators' figures are, or that no estimator was asked."""
        if not self.estimator_titles:
            return "No leakage estimator was asked (estimators=none)."
        return "Estimators predict an error of the input, here as means over samples."


def summarize(result: Audit) -> Summary:
    """Compute the summary of an audit.

    Args:
        result: The result of `audit`, whole or of the first messages only.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [verdict.defense for verdict in summarize(result).verdicts]
        ['none', 'pruning']
    """
    # Pairs in the audit's order, also those without any cell yet.
    cells: dict[tuple[str, str], list[Cell]] = {
        (defense, attack): [] for defense in result.defenses for attack in result.attacks
    }
    for cell in result.cells:
        cells[cell["defense"], cell["attack"]].append(cell)
    # An attacker that knows a defense has cells only where that makes a difference.
    is_base = {pair: base_of(pair[1]) == pair[1] for pair in cells}
    cells = {pair: of_pair for pair, of_pair in cells.items() if of_pair or is_base[pair]}
    values = {pair: values_of(pair_cells) for pair, pair_cells in cells.items()}
    guesses = dict(enumerate(result.chance))
    rows = [_row(result, pair, cells[pair], values[pair], guesses) for pair in cells]
    rows = _compared_to_undefended(rows, values, result.settings["main_score"])
    chance = AttackScores("chance", result.settings["chance"], estimates(guesses), len(guesses))
    main_score = MAIN_SCORES[result.settings["kind"]]
    samples = sum(len(message["labels"]) for message in result.messages)
    inferred = [_membership(pair, pair_cells) for pair, pair_cells in cells.items()]
    membership = [item for item in inferred if item is not None]
    recognized = _recognized(membership, rows, main_score)
    defenses = len(result.defenses)
    distinguishability = {label: _distinguishability(result, label) for label in result.defenses}
    return Summary(
        audit=result,
        main_score=main_score,
        rows=rows,
        chance=chance,
        verdicts=verdicts(rows, chance, main_score, samples, distinguishability, recognized),
        shared=_shared_means(result),
        distinguishability=distinguishability,
        labels={
            label: with_open_ends(estimates(of_labels), len(of_labels)).get("labels")
            for label in result.defenses
            for of_labels in [recovered_labels(result, label)]
        },
        chance_labels=labels_by_chance(result),
        correlations=correlate(result),
        membership=membership,
        refusals=_grouped({(r.attack, r.defense): r.reasons for r in rows}, defenses),
        crashes=_grouped({(r.attack, r.defense): r.crashes for r in rows}, defenses),
        silent=_silent_estimators(result),
        samples=samples,
        unfinished=_unfinished(result),
    )


def _row(
    result: Audit, pair: tuple[str, str], cells: Sequence[Cell], values: Values, guesses: Values
) -> AttackScores:
    main = result.settings["main_score"]
    over_chance = differences(values, guesses, {main, *TELLING})
    scores, percentile = estimates(values), estimates(_percentiles(cells)).get(PERCENTILE)
    telling = {score: over_chance[score] for score in over_chance if score in TELLING}
    beats = [score for score, difference in telling.items() if difference.above_zero]
    if percentile is not None:
        # Its best candidates are whole texts, and right at times by luck: only the order counts.
        scores[PERCENTILE] = percentile
        beats = [PERCENTILE] * (percentile.low is not None and percentile.low > 0.5)
    return AttackScores(
        *pair,
        scores=with_open_ends(scores, len(values)),
        messages=len(values),
        over_chance=over_chance.get(main),
        beats_chance=tuple(beats),
        reasons=sorted({cell["reason"] for cell in cells if "reason" in cell}),
        crashes=sorted({cell["crash"] for cell in cells if "crash" in cell}),
        knows_defense=any(cell.get("knows_defense", False) for cell in cells),
    )


def _compared_to_undefended(
    rows: Sequence[AttackScores], values: Mapping[tuple[str, str], Values], main: str
) -> list[AttackScores]:
    """Return defended rows with how far their scores are below undefended ones.

    They are compared with the same attack, and with the strongest one.
    """
    undefended = [row for row in rows if row.defense == "none" and row.scores]

    def below(row: AttackScores, attack: str) -> Estimate | None:
        reference = values.get(("none", attack), {})
        return differences(reference, values[row.defense, row.attack], {main}).get(main)

    compared = []
    for row in rows:
        if row.defense != "none":
            itself, strongest = base_of(row.attack), strongest_undefended(row, undefended, main)
            drop = below(row, itself)
            # The same difference twice would bootstrap twice.
            same = strongest is None or strongest.attack == itself
            row = replace(
                row,
                below_itself=drop,
                below_strongest=drop if same else below(row, strongest.attack),  # type: ignore[union-attr]
            )
        compared.append(row)
    return compared


# --- membership inference


def _membership(pair: tuple[str, str], cells: Sequence[Cell]) -> Membership | None:
    """Return the membership inference of one attack, or `None` if it ranks no candidates."""
    rankings = _rankings(cells)
    if not rankings:
        return None
    scored = score_candidates(
        [ranking["scores"] for ranking in rankings], [ranking["members"] for ranking in rankings]
    )
    ends = scored.interval if len(rankings) > 1 else {}
    # A message with more members weighs more, as in the mean over samples.
    sizes = [len(ranking["members"]) for ranking in rankings]
    fractions = [len(ranking["members"]) / len(ranking["scores"]) for ranking in rankings]
    return Membership(
        *pair,
        scores=with_open_ends(
            {name: Estimate(mean, *ends.get(name, ())) for name, mean in scored.mean.items()},
            len(rankings),
        ),
        candidates=len(rankings[0]["scores"]),
        members=len(scored.per_sample["rank"]),
        chance=float(np.average(fractions, weights=sizes)),
        knows_defense=any(cell.get("knows_defense", False) for cell in cells),
    )


def _recognized(
    membership: Sequence[Membership], rows: Sequence[AttackScores], score: MainScore
) -> dict[str, tuple[bool, str]]:
    """Return by defense whether members are shown to be recognized, and a sentence on it.

    The sentence says how many the attack recognizes that recognizes most, and whether members at
    least rank above others.
    """
    ranked, by_defense = {row.defense for row in rows if PERCENTILE in row.beats_chance}, {}
    for item in sorted(membership, key=lambda item: item.scores["top1"].mean):
        is_shown = (item.scores["top1"].low or 0.0) > item.chance
        also = "" if is_shown or item.defense not in ranked else ", and ranks them above others"
        by_defense[item.defense] = is_shown, f"A server {item.recognizes(score.sample)}{also}."
    return by_defense


def _percentiles(cells: Sequence[Cell]) -> Values:
    """Return the fraction of candidates outside a message that rank below each member."""
    values: Values = {}
    for cell in cells:
        for ranking in _rankings([cell]):
            scored = score_candidates([ranking["scores"]], [ranking["members"]], bootstrap=0)
            fractions = [1 - (r - 1) / scored.false_positives for r in scored.per_sample["rank"]]
            values[cell["message"]] = {PERCENTILE: fractions}
    return values


def _rankings(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the rankings of first repeats; later ones are of the same samples.

    A message of which all candidates are members, or none, says nothing.
    """
    rankings = [cell["membership"] for cell in cells if "membership" in cell and not cell["repeat"]]
    return [ranking for ranking in rankings if 0 < len(ranking["members"]) < len(ranking["scores"])]


# --- labels


def _fraction_recovered(recovered: Sequence[int], true: Sequence[int]) -> float:
    """Return the fraction of true labels that were recovered, each as often as both have it."""
    return (Counter(recovered) & Counter(true)).total() / len(true)


def recovered_labels(result: Audit, defense: str) -> Values:
    """Return the fraction of labels recovered from each message under a defense, over repeats."""
    fractions: dict[int, list[float]] = {}
    for row in result.shared:
        if row["defense"] == defense and "labels" in row:
            true = result.messages[row["message"]]["labels"]
            fractions.setdefault(row["message"], []).append(
                _fraction_recovered(row["labels"], true)
            )
    return {
        message: {"labels": [float(np.mean(fraction))]} for message, fraction in fractions.items()
    }


def labels_by_chance(result: Audit) -> float | None:
    """Return the mean fraction of labels that a uniform draw from all classes recovers."""
    classes = result.settings.get("classes")
    if not classes or not result.messages:
        return None
    common = size = 0.0
    for message in result.messages:
        true = Counter(message["labels"])
        size += true.total()
        # E[min(drawn, true)] of a class is the sum of P(drawn > k) over k below its true count.
        ks = [k for count in true.values() for k in range(count)]
        common += sum(float(binom.sf(k, true.total(), 1 / classes)) for k in ks)
    return common / size


# --- what was shared, and estimators


def _shared_means(result: Audit) -> dict[str, dict[str, float | None]]:
    means: dict[str, dict[str, float | None]] = {}
    for defense in result.defenses:
        rows = [row for row in result.shared if row["defense"] == defense]
        means[defense] = {
            name: _mean([row[name] for row in rows if row.get(name) is not None])
            for name in ("relative_error", "cosine")
        }
        for name in result.settings["estimators"]:
            # JSON has no infinity, so it is stored as `None`.
            numbers = [x for row in rows for x in row.get("estimates", {}).get(name, [])]
            means[defense][name] = _mean([math.inf if x is None else x for x in numbers])
    return means


def _distinguishability(result: Audit, defense: str) -> Distinguishability | None:
    """Return the summary of all messages' pairs; each pair has a message and a coin of its own."""
    shared = [row.get("pairs", []) for row in result.shared if row["defense"] == defense]
    pairs = [Pair(p[0], p[1], math.inf if p[2] is None else p[2]) for row in shared for p in row]
    return summarize_pairs(pairs) if pairs else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def correlate(result: Audit) -> list[Correlation]:
    """Return one correlation for every attack and ranking estimator with points in common."""
    correlations = []
    estimators = result.settings["estimators"].items()
    for estimator in (name for name, described in estimators if described.get("ranks", True)):
        for attack in result.attacks:
            points = _points(result, estimator, attack)
            if not points:
                continue
            x = [point.estimate for point in points]
            coefficients: dict[str, float | None] = {}
            for score in points[0].scores:
                y = [point.scores[score] for point in points]
                # Ranks of equal values say nothing, and two points always correlate perfectly.
                varies = len(points) >= 3 and len(set(x)) > 1 and len(set(y)) > 1
                coefficients[score] = float(spearmanr(x, y).statistic) if varies else None
            correlations.append(Correlation(estimator, attack, coefficients, points))
    return correlations


def _points(result: Audit, estimator: str, attack: str) -> list[Point]:
    """Return points for which both the estimate and the attack's scores exist and are finite."""
    estimates = {
        (row["message"], row["repeat"], row["defense"]): row.get("estimates", {}).get(estimator)
        for row in result.shared
    }
    return [
        Point(
            cell["defense"],
            estimate,
            {name: scores[index] for name, scores in cell["scores"].items()},
        )
        for cell in result.cells
        if cell["attack"] == attack and "scores" in cell
        for index, estimate in enumerate(
            estimates.get((cell["message"], cell["repeat"], cell["defense"])) or []
        )
        if estimate is not None
    ]


def _silent_estimators(result: Audit) -> list[str]:
    """Return which estimators say nothing of which defenses, with the reason."""
    defenses: dict[tuple[str, str], list[str]] = {}
    for row in result.shared:
        for name, reason in row.get("no_estimates", {}).items():
            title = result.settings["estimators"][name]["title"]
            silenced = defenses.setdefault((reason, title), [])
            if row["defense"] not in silenced:
                silenced.append(row["defense"])
    grouped = defenses.items()
    return [f"{why} ({title}, under {', '.join(labels)})" for (why, title), labels in grouped]


def _grouped(reasons: Mapping[tuple[str, str], list[str]], defenses: int) -> list[str]:
    """Return `"attack under defenses: reason"`, with defenses of the same reason together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for (attack, defense), of_pair in reasons.items():
        for reason in of_pair:
            grouped.setdefault((attack, reason), []).append(defense)
    lines = []
    for (attack, reason), labels in grouped.items():
        under = "" if len(labels) == defenses else f" under {', '.join(labels)}"
        lines.append(f"{attack}{under}: {reason}")
    return lines


def _unfinished(result: Audit) -> str:
    settings = result.settings
    # Every defense has a row for each finished message, whether or not it refused.
    done = len({(row["message"], row["repeat"]) for row in result.shared})
    planned = settings["messages"] * settings["repeats"]
    if done == planned:
        return ""
    times = f", each {settings['repeats']} times" if settings["repeats"] > 1 else ""
    return (
        f"This audit is not finished: it is of {done} of {planned} messages{times}. The same "
        "command continues where it stopped."
    )
