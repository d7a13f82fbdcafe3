"""How scores are said, and what an audit says of each defense, drawn from intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Terms:
    """The words and the scale of a domain's main score.

    Args:
        one: What a sample is called.
        many: What several are.
        score: The main score.
        verb: What an attack does with it.
        amount: What follows a number of it in a sentence.
        scale: What it is multiplied by to be in `unit`.
        unit: That it is said in.
        places: Digits after the point.
        legend: The score and its range, for a table's legend.
        note: What a reader should know of it.
        step: Between ticks of an axis.
        top: The least end of an axis.
        most: The farthest end. What is more stands there: an exact copy would press all others
            together.
        well: How far above chance an attack has to be undefended, so that its failing says
            something of a defense.
    """

    one: str
    many: str
    score: str
    verb: str
    amount: str
    scale: float
    unit: str
    places: int
    legend: str
    note: str
    step: float
    top: float
    most: float
    well: float

    def said(self, mean: float) -> str:
        """A number in a sentence: `"92 %"`."""
        return f"{self.scale * mean:.{self.places}f} {self.unit}"

    def interval(self, low: float, high: float, between: str = ", ") -> str:
        """An interval behind it: `" [85, 100]"`."""
        ends = (f"{self.scale * end:.{self.places}f}" for end in (low, high))
        return f" [{between.join(ends)}]"

    def ticks(self, values: Iterable[float]) -> list[tuple[float, str]]:
        """Where an axis from 0 has its ticks, with their labels. The last one is its end."""
        highest = round(max([self.top, *values]), 6)  # a mean of ones may be 1 + 2e-16
        count = math.ceil(min(highest, self.most) / self.step)
        ends = ["≥ " * (k == count and highest > self.most) for k in range(count + 1)]
        return [
            (self.step * k, f"{end}{self.scale * self.step * k:.0f} {self.unit}")
            for k, end in enumerate(ends)
        ]


INFORMED = ", knows the defense"
"""What the label of an attack ends with where somebody set it who does."""

TERMS = {
    "text": Terms(
        one="text",
        many="texts",
        score="token_f1",
        verb="recovers",
        amount="of the words",
        scale=100,
        unit="%",
        places=0,
        legend="token F1, from 0 to 1",
        note="A share of words is the token F1: precision and recall together, special tokens not "
        "counted.",
        step=0.25,
        top=1.0,
        most=1.0,
        well=0.25,
    ),
    "image": Terms(
        one="image",
        many="images",
        score="psnr",
        verb="reaches",
        amount="PSNR",
        scale=1,
        unit="dB",
        places=1,
        legend="PSNR in dB",
        note="PSNR in decibels: higher is nearer. Look at the images as well: no number says what "
        "a person recognizes.",
        step=10.0,
        top=30.0,
        most=40.0,
        well=5.0,
    ),
}
"""By a domain's name."""

PERCENTILE = "percentile"
"""Which share of candidates that were in no message come after one that was: 0.5 is chance."""

TELLING = ("token_f1", "position_accuracy", "psnr", "ssim", PERCENTILE)
"""Scores that show a leak if they beat a guess. Few words, but each in its place, are no chance;
nor is noise with a face in it.
"""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95 % bootstrap interval; `None` where a single message gives no
    interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def above_zero(self) -> bool:
        """Whether the interval is."""
        return self.low is not None and self.low > 0


@dataclass(frozen=True)
class Row:
    """One attack under one defense.

    Args:
        defense: Label of the defense.
        attack: Label of the attack.
        scores: Estimates by score; empty if the attack gave nothing for any message.
        messages: Messages that the estimates are of.
        over_chance: Main score minus that of a guess, message by message.
        beats_chance: Which of `TELLING` scores are above a guess's, by intervals of the difference.
        under_reference: Main score of the same attack on the undefended gradient minus this one,
            message by message.
        labels: Share of labels read off the gradient correctly, where they were not granted.
        reasons: Why the attack was not applicable to the other messages.
        crashes: How it failed on the others.
        knows: Whether the attacker knows the defense, or there is nothing to know.
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
    crashes: list[str] = field(default_factory=list)
    knows: bool = False

    @property
    def silence(self) -> str:
        """What stands in place of scores."""
        return "crashed" if self.crashes else "not applicable"


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


def verdicts(rows: Sequence[Row], chance: Row, terms: Terms, samples: int) -> list[Verdict]:
    """One verdict for each defense. Attacks that fail prove nothing, and the words say no more than
    that.
    """
    say = _Wording(rows, chance, terms, samples)
    scored = [row for row in rows if row.scores]
    reference = [row for row in scored if row.defense == "none"]
    return [
        _verdict(label, [row for row in scored if row.defense == label], reference, say)
        for label in dict.fromkeys(row.defense for row in rows)
    ]


def _verdict(defense: str, own: Sequence[Row], reference: Sequence[Row], say: _Wording) -> Verdict:
    if not own:
        return Verdict(defense, "unknown", "No attack gave anything, so nothing is known.")
    best = max(own, key=say.main)
    what = say.found(best, own)
    if best.over_chance is None or best.over_chance.low is None:
        text = f"{what}. One message gives no interval, so this is an anecdote."
        return Verdict(defense, "unknown", text)
    if defense == "none":
        return _undefended(what, own, say)
    if not any(row.beats_chance for row in own):
        return _at_chance(defense, what, best.over_chance, own, reference, say)
    if best.under_reference is None:
        text = f"{what}. {say.leak(own)} Undefended was not tried."
        return Verdict(defense, "unknown", text)
    if not best.under_reference.above_zero:
        against = f"Against {say.attacks[best.attack]}, not distinguishable from no defense."
        return Verdict(defense, "open", f"{what}. {against}")
    strongest = max(reference, key=say.main)
    than = (
        f"where undefended {say.attacks[strongest.attack]} {say.terms.verb} {say.short(strongest)}"
    )
    return Verdict(defense, "reduced", f"{say.found(best, own, than)}. {say.leak(own)}")


def _undefended(what: str, own: Sequence[Row], say: _Wording) -> Verdict:
    if any(row.beats_chance for row in own):
        in_main = any(say.terms.score in row.beats_chance for row in own)
        return Verdict("none", "open", f"{what}." if in_main else f"{what}. {say.leak(own)}")
    text = (
        f"{what}. These attacks fail even undefended: the audit says nothing about any defense. "
        "Give them more steps, or try others."
    )
    return Verdict("none", "unknown", text)


def _untold(own: Sequence[Row], reference: Sequence[Row], terms: Terms) -> str:
    """Why failing attackers say nothing of a defense; empty if one does who knows it, and whose
    attack reads what is not defended.
    """
    informed = [row for row in own if row.knows]
    if not informed:
        return "No attacker was tried who knows the defense, so this says nothing."
    read = {row.attack for row in reference if _reads(row, terms)}
    if not any(base_of(row.attack) in read for row in informed):
        return (
            "Attackers who know the defense hardly read what is not defended, so this says nothing."
        )
    return ""


def _reads(row: Row, terms: Terms) -> bool:
    """Whether an attack is well above chance."""
    over = row.over_chance
    return over is not None and over.above_zero and over.mean >= terms.well


def _at_chance(
    defense: str,
    what: str,
    over_chance: Estimate,
    own: Sequence[Row],
    reference: Sequence[Row],
    say: _Wording,
) -> Verdict:
    if not any(row.beats_chance for row in reference):
        why = "fail" if reference else "may fail"
        tried = "" if reference else ", which was not tried"
        text = f"{what}. These attacks {why} undefended as well{tried}, so this says nothing."
        return Verdict(defense, "unknown", text)
    if lacking := _untold(own, reference, say.terms):
        return Verdict(defense, "unknown", f"{what}. {lacking}")
    below = over_chance.high is not None and over_chance.high < 0
    standing = "No better than chance" if below else "Not distinguishable from chance"
    return Verdict(defense, "chance", f"{what}. {standing} under these attacks on {say.data}.")


class _Wording:
    """How scores are said: shares of words, or decibels."""

    def __init__(self, rows: Sequence[Row], chance: Row, terms: Terms, samples: int) -> None:
        self.terms, self.chance = terms, chance
        self.attacks = short_labels(list(dict.fromkeys(row.attack for row in rows)))
        self.data = f"this 1 {terms.one}" if samples == 1 else f"these {samples} {terms.many}"

    def main(self, row: Row) -> float:
        return row.scores[self.terms.score].mean

    def short(self, row: Row) -> str:
        return self.terms.said(self.main(row))

    def found(self, best: Row, own: Sequence[Row], than: str = "") -> str:
        """What the attacks found, the strongest first, and what a guess finds."""
        value = best.scores[self.terms.score]
        said = (
            f"{self.attacks[best.attack]} {self.terms.verb} {self.short(best)} {self.terms.amount}"
        )
        if value.low is not None and value.high is not None:
            said += self.terms.interval(value.low, value.high, " to ")
        others = [f"{self.attacks[row.attack]} {self.short(row)}" for row in own if row is not best]
        said += f" ({', '.join(others)})" if others else ""
        said += f", {than}" if than else ""
        return f"{said}; chance is {self.short(self.chance)}"

    def leak(self, own: Sequence[Row]) -> str:
        """In which score some attack is better than chance."""
        if any(self.terms.score in row.beats_chance for row in own):
            return "Better than chance: it still leaks."
        row = next(row for row in own if row.beats_chance)
        score = row.beats_chance[0]
        guess = 0.5 if score == PERCENTILE else self.chance.scores[score].mean
        figures = f"{row.scores[score].mean:.2f} against {guess:.2f}"
        better = f"{self.attacks[row.attack]} is better than chance ({figures})"
        return f"In {score} {better}: it still leaks."


def base_of(label: str) -> str:
    """The attack that somebody set who knows the defense, as it is without that.

    Example:
        >>> base_of("tag" + INFORMED), base_of("span")
        ('tag', 'span')
    """
    return label.removesuffix(INFORMED)


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Labels without their settings, where that leaves them apart."""
    names = [base_of(label).split(":")[0] + label[len(base_of(label)) :] for label in labels]
    return {
        label: name if names.count(name) == 1 else label
        for label, name in zip(labels, names, strict=True)
    }
