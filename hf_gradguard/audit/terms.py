"""How the results of each kind of input are said and drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


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

    def said(self, mean: float) -> str:
        """A number in a sentence: `"92 %"`."""
        return f"{self.scale * mean:.{self.places}f} {self.unit}"

    def interval(self, low: float, high: float, between: str = ", ") -> str:
        """An interval behind it: `" [85, 100]"`."""
        ends = (f"{self.scale * end:.{self.places}f}" for end in (low, high))
        return f" [{between.join(ends)}]"

    def ticks(self, values: Iterable[float]) -> list[tuple[float, str]]:
        """Where an axis from 0 has its ticks, with their labels. The last one is its end."""
        highest = max([self.top, *values])
        count = math.ceil(round(highest / self.step, 6))  # a mean of ones may be 1 + 2e-16
        return [
            (self.step * k, f"{self.scale * self.step * k:.0f} {self.unit}")
            for k in range(count + 1)
        ]


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
    ),
}
"""By a domain's name."""
