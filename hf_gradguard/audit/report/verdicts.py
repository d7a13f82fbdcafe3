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
