"""An audit's scores as rows, as a verdict in words for each defense, and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from ..metrics.scores import bootstrap_intervals
from .estimators import FIGURES
from .run import Audit


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95 % bootstrap interval; `None` where a single message gives no
    interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One attack under one defense.

    Args:
        defense: Label of the defense.
        attack: Label of the attack.
        scores: Estimates by score; empty if the attack was not applicable to any message.
        messages: Messages that the estimates are of.
        over_chance: Main score minus that of a guess, message by message.
        beats_chance: Which of `TELLING` scores are above a guess's, by intervals of the difference.
        under_reference: Main score of the same attack on the undefended gradient minus this one,
            message by message.
        labels: Share of labels read off the gradient correctly, where they were not granted.
        reasons: Why the attack was not applicable to the other messages.
    """

    defense: str
    attack: str
    scores: dict[str, Estimate]
    messages: int
    over_chance: Estimate | None = None
    beats_chance: tuple[str, ...] = ()
    under_reference: Estimate | None = None
    labels: float | None = None
    reasons: list[str] = field(default_factory=list)


TELLING = ("token_f1", "position_accuracy", "psnr", "ssim")
"""Scores that show a leak if they beat a guess. Few words, but each in its place, are no chance;
nor is noise with a face in it.
"""


@dataclass(frozen=True)
class Verdict:
    """What the audit says of a defense.

    Args:
        defense: Its label.
        standing: `"open"` (no different from sharing everything), `"reduced"`, `"chance"` (attacks
            do no better than guessing), or `"unknown"`.
        text: The same in a sentence or two.
    """

    defense: str
    standing: str
    text: str


Values = dict[int, dict[str, list[float]]]
"""For each message, for each score, one number a sample."""


def rows(result: Audit) -> list[Row]:
    """One row for every defense and attack, in the audit's order."""
    main = result.settings["main_score"]
    guesses = dict(enumerate(result.chance))
    scores = list(result.chance[0])
    table = []
    for defense in result.defenses:
        for attack in result.attacks:
            cells = [c for c in result.cells if (c["defense"], c["attack"]) == (defense, attack)]
            values = _values(cells)
            undefended = _values(
                [c for c in result.cells if (c["defense"], c["attack"]) == ("none", attack)]
            )
            table.append(
                Row(
                    defense=defense,
                    attack=attack,
                    scores=_estimates(values),
                    messages=len(values),
                    over_chance=_difference(values, guesses, main),
                    beats_chance=tuple(
                        score
                        for score in scores
                        if score in TELLING and _above_zero(_difference(values, guesses, score))
                    ),
                    under_reference=None
                    if defense == "none"
                    else _difference(undefended, values, main),
                    labels=_labels_right(cells, result),
                    reasons=sorted({c["reason"] for c in cells if "reason" in c}),
                )
            )
    return table


def chance_row(result: Audit) -> Row:
    """The scores of guesses made without looking at the gradient."""
    values = dict(enumerate(result.chance))
    return Row("chance", result.settings["chance"], _estimates(values), len(values))


def verdicts(result: Audit) -> list[Verdict]:
    """One verdict a defense, drawn from intervals. Attacks that fail prove nothing, and the words
    say no more than that.
    """
    table, say = rows(result), _Wording(result)
    reference = [row for row in table if row.defense == "none" and row.scores]
    return [
        _verdict(defense, [r for r in table if r.defense == defense and r.scores], reference, say)
        for defense in result.defenses
    ]


def _verdict(defense: str, own: Sequence[Row], reference: Sequence[Row], say: _Wording) -> Verdict:
    if not own:
        return Verdict(defense, "unknown", "No attack was applicable, so nothing is known.")
    best = max(own, key=say.main)
    what = f"{say.attacks[best.attack]} {say.verb} {say.amount(best.scores[say.score])}"
    others = [
        f"{say.attacks[row.attack]} {say.short(row.scores[say.score])}"
        for row in own
        if row is not best
    ]
    what += f" ({', '.join(others)})" if others else ""
    chance = f"chance is {say.short(say.chance)}"
    if best.over_chance is None or best.over_chance.low is None:
        return Verdict(
            defense,
            "unknown",
            f"{what}; {chance}. One message gives no interval, so this is an anecdote.",
        )
    above = any(row.beats_chance for row in own)
    if defense == "none":
        if above:
            more = "" if any(say.score in row.beats_chance for row in own) else f" {say.leak(own)}"
            return Verdict(defense, "open", f"{what}; {chance}.{more}")
        text = f"{what}; {chance}. These attacks fail even undefended: the audit says nothing about any defense. Give them more steps, or try others."
        return Verdict(defense, "unknown", text)
    if not above:
        if not any(row.beats_chance for row in reference):
            why = (
                "fail undefended as well"
                if reference
                else "may fail undefended as well, which was not tried"
            )
            return Verdict(
                defense, "unknown", f"{what}; {chance}. These attacks {why}, so this says nothing."
            )
        below = best.over_chance.high is not None and best.over_chance.high < 0
        standing = "No better than chance" if below else "Not distinguishable from chance"
        return Verdict(
            defense, "chance", f"{what}; {chance}. {standing} under these attacks on {say.data}."
        )
    if best.under_reference is None:
        return Verdict(
            defense, "unknown", f"{what}; {chance}. {say.leak(own)} Undefended was not tried."
        )
    if not _above_zero(best.under_reference):
        return Verdict(
            defense,
            "open",
            f"{what}; {chance}. Against {say.attacks[best.attack]}, not distinguishable from no "
            "defense.",
        )
    strongest = max(reference, key=say.main)
    text = f"{what}, where undefended {say.attacks[strongest.attack]} {say.verb} {say.short(strongest.scores[say.score])}; {chance}. {say.leak(own)}"
    return Verdict(defense, "reduced", text)


class _Wording:
    """How scores are said: shares of words, or decibels."""

    def __init__(self, result: Audit) -> None:
        settings = result.settings
        self.text = settings["kind"] == "text"
        self.attacks = short_labels(list(result.attacks))
        self.score: str = settings["main_score"]
        self.verb = "recovers" if self.text else "reaches"
        self.guess = chance_row(result).scores
        self.chance = self.guess[self.score]
        kind = "text" if self.text else "image"
        self.data = f"{'this' if settings['samples'] == 1 else 'these'} {settings['samples']} {kind}{'s' * (settings['samples'] > 1)}"

    def main(self, row: Row) -> float:
        return row.scores[self.score].mean

    def leak(self, own: Sequence[Row]) -> str:
        """In which score some attack is better than chance."""
        if any(self.score in row.beats_chance for row in own):
            return "Better than chance: it still leaks."
        row = next(row for row in own if row.beats_chance)
        score = row.beats_chance[0]
        figures = f"{row.scores[score].mean:.2f} against {self.guess[score].mean:.2f}"
        return f"In {score} {self.attacks[row.attack]} is better than chance ({figures}): it still leaks."

    def short(self, value: Estimate) -> str:
        return f"{100 * value.mean:.0f} %" if self.text else f"{value.mean:.1f} dB"

    def amount(self, value: Estimate) -> str:
        said = f"{self.short(value)} of the words" if self.text else f"{self.short(value)} PSNR"
        if value.low is None or value.high is None:
            return said
        low, high = (100 * value.low, 100 * value.high) if self.text else (value.low, value.high)
        places = 0 if self.text else 1
        return f"{said} [{low:.{places}f} to {high:.{places}f}]"


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Labels without their settings, where that leaves them apart."""
    names = [label.split(":")[0] for label in labels]
    return {
        label: name if names.count(name) == 1 else label
        for label, name in zip(labels, names, strict=True)
    }


def markdown_table(result: Audit) -> str:
    """Defenses down, attacks across; the main score with its interval. Verdicts above, legend
    below.
    """
    score, table = result.settings["main_score"], rows(result)
    lines = [f"- **{v.defense}**: {v.text}" for v in verdicts(result)]
    header = ["defense", *result.attacks, "relative error", "cosine", *FIGURES.values()]
    lines += ["", _line(header), _line(["---"] * len(header))]
    for defense in result.defenses:
        own = [row for row in table if row.defense == defense]
        entries = [show(row.scores[score]) if row.scores else "not applicable" for row in own]
        entries = [
            f"{entry} ({row.messages} of {len(result.messages)})"
            if 0 < row.messages < len(result.messages)
            else entry
            for entry, row in zip(entries, own, strict=True)
        ]
        error = shared_mean(result, defense, "relative_error")
        cosine = shared_mean(result, defense, "cosine")
        estimates = [figure_mean(result, defense, figure) for figure in FIGURES]
        lines.append(_line([f"`{defense}`", *entries, error, cosine, *estimates]))
    guess = show(chance_row(result).scores[score])
    lines.append(_line(["chance", *[guess] * len(result.attacks), *[""] * (2 + len(FIGURES))]))
    unit = "token F1, from 0 to 1" if score == "token_f1" else "PSNR in dB"
    lines += [
        "",
        f"{unit}: mean over {result.settings['samples']} samples, with 95 % bootstrap intervals "
        f"over messages of {result.settings['batch_size']}. Chance: {result.settings['chance']}. "
        "Relative error and cosine: of what was shared, to the true gradient. I²F lower bound, "
        "dFIL bound: errors of the input that estimators predict, the former as a norm, the latter "
        "as an RMSE per coordinate; means over samples.",
    ]
    if found := correlations(result):
        scores = list(found[0].coefficients)
        lines += [
            "",
            _line(["Spearman's correlation with", *scores, "points"]),
            _line(["---"] * (len(scores) + 2)),
        ]
        lines += [
            _line(
                [
                    f"{FIGURES[c.figure]}, {c.attack}",
                    *(show_coefficient(c.coefficients[s]) for s in scores),
                    str(c.points),
                ]
            )
            for c in found
        ]
    if silent := estimator_refusals(result):
        lines += ["", "No estimates:", "", *(f"- {reason}" for reason in silent)]
    if refused := refusals(result):
        lines += ["", "Not applicable:", "", *(f"- {refusal}" for refusal in refused)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of an estimator's figure with each score of an attack, over
    defenses and samples.

    Args:
        figure: One of `FIGURES`.
        attack: Label of the attack.
        coefficients: `{score: coefficient}`; `None` where fewer than three points, or equal ones,
            say nothing.
        points: How many there are: one a sample, repeat and defense. Those of one sample are not
            independent.
    """

    figure: str
    attack: str
    coefficients: dict[str, float | None]
    points: int


@dataclass(frozen=True)
class Point:
    """One sample of one message under one defense: an estimator's figure and an attack's scores."""

    defense: str
    figure: float
    scores: dict[str, float]


def points(result: Audit, figure: str, attack: str) -> list[Point]:
    """Where both the figure and the attack's scores are there and finite."""
    found = {
        (s["message"], s["repeat"], s["defense"]): s.get("figures", {}).get(figure)
        for s in result.shared
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


def correlations(result: Audit) -> list[Correlation]:
    """One for every figure and attack that have points in common."""
    rows = []
    for figure in FIGURES:
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
            rows.append(Correlation(figure, attack, coefficients, len(common)))
    return rows


def figure_mean(result: Audit, defense: str, figure: str) -> str:
    """Mean of an estimator's figure over samples, to three digits; "" where no message has one."""
    found = [
        s["figures"][figure]
        for s in result.shared
        if s["defense"] == defense and figure in s.get("figures", {})
    ]
    values = [math.inf if value is None else value for sample in found for value in sample]
    return f"{np.mean(values):.3g}".replace("inf", "∞") if values else ""


def estimator_refusals(result: Audit) -> list[str]:
    """Why estimators say nothing of some messages."""
    return sorted(
        {s["figures"]["reason"] for s in result.shared if "reason" in s.get("figures", {})}
    )


def refusals(result: Audit) -> list[str]:
    """Which attacks were not applicable under which defenses, with the reason."""
    under: dict[tuple[str, str], list[str]] = {}
    for row in rows(result):
        for reason in row.reasons:
            under.setdefault((row.attack, reason), []).append(row.defense)
    said = []
    for (attack, reason), defenses in under.items():
        where = "" if len(defenses) == len(result.defenses) else f" under {', '.join(defenses)}"
        said.append(f"{attack}{where}: {reason}")
    return said


def show(value: Estimate) -> str:
    """A mean with its interval."""
    digits = 2 if abs(value.mean) < 10 else 1
    interval = "" if value.low is None else f" [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return f"{value.mean:.{digits}f}{interval}"


def show_coefficient(value: float | None) -> str:
    """A correlation to two digits."""
    return "–" if value is None else f"{value:+.2f}"


def shared_mean(result: Audit, defense: str, figure: str) -> str:
    """Mean of a figure of what a defense shared, to three digits."""
    found = [
        s[figure] for s in result.shared if s["defense"] == defense and s.get(figure) is not None
    ]
    return f"{np.mean(found):.3g}" if found else ""


def _line(entries: Sequence[str]) -> str:
    escaped = (entry.replace("|", "\\|").replace("\n", " ") for entry in entries)
    return f"| {' | '.join(escaped)} |"


def _values(cells: Sequence[Mapping[str, Any]]) -> Values:
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
    if not values:
        return {}
    messages = list(values.values())
    per_sample = {name: [x for message in messages for x in message[name]] for name in messages[0]}
    sizes = [len(next(iter(message.values()))) for message in messages]
    intervals = bootstrap_intervals(per_sample, sizes, bootstrap=2000, confidence=0.95, seed=0)
    return {
        name: Estimate(
            float(np.mean(x)), *(None if np.isnan(limit) else limit for limit in intervals[name])
        )
        for name, x in per_sample.items()
    }


def _difference(ours: Values, theirs: Values, score: str) -> Estimate | None:
    """Mean and interval of ours minus theirs, over the messages that both have."""
    common = [message for message in ours if message in theirs]
    return _estimates(
        {
            m: {score: (np.array(ours[m][score]) - np.array(theirs[m][score])).tolist()}
            for m in common
        }
    ).get(score)


def _labels_right(cells: Sequence[Mapping[str, Any]], result: Audit) -> float | None:
    """As many labels as a message's recovered and true ones have in common, over all."""
    right = total = 0
    for cell in cells:
        if cell.get("labels") is not None:
            left = list(result.messages[cell["message"]]["labels"])
            total += len(left)
            for label in cell["labels"]:
                if label in left:
                    left.remove(label)
                    right += 1
    return right / total if total else None


def _above_zero(value: Estimate | None) -> bool:
    return value is not None and value.low is not None and value.low > 0
