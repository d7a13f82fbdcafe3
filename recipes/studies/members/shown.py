"""Tables and picture: who is told, and how that stands beside what learns as much."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..frontier.shown import PROOF
from ..lib.intervals import half_width
from ..lib.results import named
from ..lib.tables import interval, plt, save, write_table
from .settings import NOISE, STOPPED
from .telling import ATTACKERS

TRAINED, TOLD = "trained", "told"
FIGURES = {"area": "area", "tpr_1%": "told at 1 %"}
BEST = ATTACKERS[-1]
CURVES = {"no defense, stopped": ("none", *STOPPED), "gaussian_noise": ("none", *NOISE)}


def table(figures: dict, output: Path) -> None:
    """One row a defense: what it learned, and what each attacker tells."""
    header = ["", "accuracy", "less than none", "on its own images", PROOF]
    header += [f"{attacker}: {what}" for attacker in ATTACKERS for what in FIGURES.values()]
    plain, rows = _learned(figures["none"]), []
    for row, found in figures.items():
        learned = _learned(found)
        own = [one["trained_on"] for one in found[TRAINED].values()]
        lost = [before - now for before, now in zip(plain, learned, strict=True)]
        proved = next(iter(found[TRAINED].values())).get("epsilon")
        shown = [interval(learned), "" if row == "none" else interval(lost), interval(own)]
        shown += [f"{proved:.2g}" if proved else ""]
        shown += [interval(_told(found, who, name)) for who in ATTACKERS for name in FIGURES]
        rows.append([f"`{row}`", *shown])
    write_table(output, header, rows)


def beside(figures: dict, output: Path) -> None:
    """How much more the best attacker tells of a row than of what learns as much."""
    header = ["more than behind", *(f"{c}: {what}" for c in CURVES for what in FIGURES.values())]
    rows = [
        [f"`{row}`", *(_beyond(figures, row, curve, name) for curve in CURVES.values()
                       for name in FIGURES)]
        for row in figures
        if row != "none" and row not in STOPPED
    ]  # fmt: skip
    write_table(named(output, "_beside"), header, rows)


def _beyond(figures: dict, row: str, curve: Iterable[str], name: str) -> str:
    """Nothing for a row that is on the curve itself, or learns less, or more, than all that is."""
    if row in curve:
        return ""
    every = np.array([_learned(figures[other]) for other in curve if other in figures])
    told = np.array([_told(figures[other], BEST, name) for other in curve if other in figures])
    learned, found = _learned(figures[row]), _told(figures[row], BEST, name)
    middles = every.mean(1)
    if not middles.min() <= np.mean(learned) <= middles.max():
        return ""
    seeds = zip(learned, found, every.T, told.T, strict=True)
    return interval([share - at(x, y, accuracy) for accuracy, share, x, y in seeds])


def at(x: np.ndarray, y: np.ndarray, place: float) -> float:
    """What a curve through points, in any order, has at a place: on a line between the two nearest,
    beyond its ends what the end has.

    Example:
        >>> at(np.array([0.5, 0.4]), np.array([0.9, 0.6]), place=0.45)
        0.75
    """
    order = np.argsort(x)
    return float(np.interp(place, x[order], y[order]))


def _learned(found: dict) -> list[float]:
    return [one["accuracy"] for one in found[TRAINED].values()]


def _told(found: dict, attacker: str, name: str) -> list[float]:
    return [one[attacker][name] for one in found[TOLD].values()]


def picture(figures: dict, output: Path) -> None:
    """Area against accuracy: the curves, and the other rows."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    drawn = set[str]()
    for number, (label, rows) in enumerate(CURVES.items()):
        there = [row for row in rows if row in figures]
        there.sort(key=lambda row: float(np.mean(_learned(figures[row]))))
        _draw(axes, figures, there, {"label": label, "color": f"C{number}", "linestyle": "-"})
        drawn |= set(rows)
    for number, row in enumerate(row for row in figures if row not in drawn):
        style = {"label": row, "color": f"C{number + len(CURVES)}", "linestyle": ""}
        _draw(axes, figures, [row], style | {"marker": "s^Dv<>pP*X"[number]})
    axes.axhline(0.5, color="gray", linestyle=":", label="chance")
    axes.set_xlabel("accuracy on images that nobody trained on (95 % intervals over seeds)")
    axes.set_ylabel("area under the curve of who tells members (less is better)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, output)


def _draw(axes, figures: dict, rows: Sequence[str], style: dict) -> None:
    spread = [(_learned(figures[row]), _told(figures[row], BEST, "area")) for row in rows]
    means = np.array([[np.mean(values) for values in one] for one in spread])
    halves = np.array([[half_width(values) for values in one] for one in spread])
    marker = {"marker": "o", "markersize": 5, "capsize": 2, "elinewidth": 1}
    axes.errorbar(*means.T, halves[:, 1], halves[:, 0], **marker | style)
