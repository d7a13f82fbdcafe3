"""How scores are said, and what verdicts are drawn from."""

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
nor is noise with a face in it. Of who ranks a list the percentile alone does: entries drawn blindly
are right as often as the list is short.
"""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95 % bootstrap interval; `None` where a single message gives no
    interval, however many samples it has.
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
        under_strongest: The same with the strongest attack on it; see `rival`.
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
    under_strongest: Estimate | None = None
    labels: float | None = None
    reasons: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    knows: bool = False

    @property
    def sure(self) -> bool:
        """Whether there are messages enough for an interval."""
        return self.over_chance is not None and self.over_chance.low is not None

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


ENOUGH = 5
"""Messages without which failing says nothing. Of four, all are above chance by luck once in 16
times, and the interval of fewer than five says no more than that.
"""


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


def rival(row: Row, reference: Sequence[Row], score: str) -> Row | None:
    """Which undefended row reads most, of several messages. Who has a list reads nothing: he is
    compared with his like, and readers with readers.
    """
    ranks = PERCENTILE in row.scores
    alike = [one for one in reference if one.sure and (PERCENTILE in one.scores) == ranks]
    return max(alike, key=lambda one: one.scores[score].mean, default=None)


def _verdict(defense: str, own: Sequence[Row], reference: Sequence[Row], say: _Wording) -> Verdict:
    if not own:
        return Verdict(defense, "unknown", "No attack gave anything, so nothing is known.")
    sure = [row for row in own if row.sure]
    best = max(sure or own, key=say.main)
    what = say.found(best, own)
    if not sure:
        text = f"{what}. One message gives no interval, so this is an anecdote: give more samples."
        return Verdict(defense, "unknown", text)
    if defense == "none":
        return _undefended(what, own, say)
    if not any(row.beats_chance for row in own):
        return _at_chance(defense, best, own, reference, say)
    return _leaking(defense, best, own, reference, say)


def _undefended(what: str, own: Sequence[Row], say: _Wording) -> Verdict:
    beaten = {score for row in own for score in row.beats_chance}
    if beaten:
        leak = "" if beaten & {say.terms.score, PERCENTILE} else f" {say.leak(own)}"
        return Verdict("none", "open", f"{what}.{leak}{_weakness(own)}")
    text = (
        f"{what}. These attacks fail even undefended: the audit says nothing about any defense. "
        "Give them more steps, or try others."
    )
    return Verdict("none", "unknown", text)


def _leaking(
    defense: str, best: Row, own: Sequence[Row], reference: Sequence[Row], say: _Wording
) -> Verdict:
    """Whether a defense that leaks leaks less: than the same attack reads undefended, or than the
    strongest one does.
    """
    itself, against, weakness = best.under_reference, say.attacks[best.attack], _weakness(own)
    told = [one for one in (itself, best.under_strongest) if one and one.low is not None]
    if not told:
        lacking = "Undefended was not tried on the same messages."
        return Verdict(
            defense, "unknown", f"{say.found(best, own)}. {say.leak(own)} {lacking}{weakness}"
        )
    if not any(one.above_zero for one in told):
        text = f"Against {against}, not distinguishable from no defense."
        return Verdict(defense, "open", f"{say.found(best, own)}. {text}{weakness}")
    strongest = rival(best, reference, say.terms.score)
    than = f"where undefended {say.read(strongest)}" if strongest else ""
    text = f"{say.found(best, own, than)}. {say.leak(own)}"
    if itself in told and not itself.above_zero:
        text += f" It is no better than none against {against}."
    return Verdict(defense, "reduced", text + weakness)


def _weakness(own: Sequence[Row]) -> str:
    """What is to be said of a leak that few messages show."""
    if max(row.messages for row in own if row.beats_chance) >= ENOUGH:
        return ""
    return f" Fewer than {ENOUGH} messages are weak evidence: give more samples."


def _at_chance(
    defense: str, best: Row, own: Sequence[Row], reference: Sequence[Row], say: _Wording
) -> Verdict:
    what, over = say.found(best, own), best.over_chance
    if not any(row.beats_chance for row in reference):
        why = "fail" if reference else "may fail"
        tried = "" if reference else ", which was not tried"
        text = f"{what}. These attacks {why} undefended as well{tried}, so this says nothing."
        return Verdict(defense, "unknown", text)
    if lacking := _untold(own, reference, say):
        return Verdict(defense, "unknown", f"{what}. {lacking}")
    below = over is not None and over.high is not None and over.high < 0
    luck = "a blind draw from the list" if PERCENTILE in best.scores else "chance"
    standing = "No better than chance" if below else f"Not distinguishable from {luck}"
    return Verdict(defense, "chance", f"{what}. {standing} under these attacks on {say.data}.")


def _untold(own: Sequence[Row], reference: Sequence[Row], say: _Wording) -> str:
    """Why failing attackers say nothing of a defense; empty if one does who knows it, whose attack
    reads what is not defended, and who had messages enough.
    """
    informed = [row for row in own if row.knows]
    if not informed:
        return "No attacker was tried who knows the defense, so this says nothing."
    read = {row.attack for row in reference if row.beats_chance and _well(row, say.terms)}
    telling = [row for row in informed if base_of(row.attack) in read]
    if not telling:
        return (
            "Attackers who know the defense hardly read what is not defended, so this says nothing."
        )
    if max(row.messages for row in telling) < ENOUGH:
        return f"Fewer than {ENOUGH} messages do not say that attacks fail: give more samples."
    for row in own:
        if not row.sure and _well(row, say.terms):
            reads = f"{say.attacks[row.attack]} reads the one message that it works on"
            return f"{reads}, so this says nothing: give more samples."
    return ""


def _well(row: Row, terms: Terms) -> bool:
    """Whether an attack is well above chance, by an interval if there is one."""
    over = row.over_chance
    return over is not None and over.mean >= terms.well and (over.above_zero or not row.sure)


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

    def read(self, row: Row) -> str:
        return f"{self.attacks[row.attack]} {self.terms.verb} {self.short(row)}{self.part(row)}"

    def part(self, row: Row) -> str:
        """Of how many messages a row is, if not of all."""
        if row.messages >= self.chance.messages:
            return ""
        return f" on {row.messages} of {self.chance.messages} messages"

    def found(self, best: Row, own: Sequence[Row], than: str = "") -> str:
        """What the attacks found, the strongest first, and what a guess finds."""
        value = best.scores[self.terms.score]
        said = (
            f"{self.attacks[best.attack]} {self.terms.verb} {self.short(best)} {self.terms.amount}"
        )
        if value.low is not None and value.high is not None:
            said += self.terms.interval(value.low, value.high, " to ")
        others = [
            f"{self.attacks[row.attack]} {self.short(row)}{self.part(row)}"
            for row in own
            if row is not best
        ]
        said += self.part(best) + (f" ({', '.join(others)})" if others else "")
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
