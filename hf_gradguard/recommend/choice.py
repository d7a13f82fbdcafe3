"""From trials to one setting, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, Template
from scipy.stats import ttest_1samp

from ..audit.report.verdicts import Terms
from ..defenses import DEFENSES, Defense
from .settings import WARMUP, TrialSettings

MANY = 0.05  # of the samples, named by who has a list: then it is said what hides from him


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def said(self, scale: float = 100, places: int = 0, unit: str = " %") -> str:
        """As a person reads it.

        Example:
            >>> Estimate(0.831, 0.81, 0.85).said()
            '83 % [81, 85]'
        """
        mean, low, high = (f"{scale * value:.{places}f}" for value in self)
        return f"{mean}{unit} [{low}, {high}]"


@dataclass(frozen=True)
class Outcome:
    """What one defense kept and gave away, at its own best learning rate.

    Args:
        defense: Its label, as `gradguard audit` writes it.
        learning_rate: The best of those tried.
        accuracy: On samples that chose no rate.
        lost: Accuracy of the undefended model less this one's, on the same samples.
        leak: Main score of the attacker that read most, at the stage where it did.
        attack: Which one it was.
        stage: `"start"` or `"end"` of the defense's own training.
        named: The share of samples that who has a list of candidates names, at the stage where he
            names more; `None` if there was no list.
        listed: How many were on it.
        right: Of each sample that judges, what the accuracy is a mean of.
        read: Of each message, the mean of what `leak` is a mean of.

    Example:
        >>> kept, read = Estimate(0.8, 0.78, 0.82), Estimate(0.1, 0.0, 0.2)
        >>> Outcome("pruning", 2e-4, kept, Estimate(0.01, -0.01, 0.03), read, "span", "end").stage
        'end'
    """

    defense: str
    learning_rate: float
    accuracy: Estimate
    lost: Estimate
    leak: Estimate
    attack: str
    stage: str
    named: Estimate | None = None
    listed: int = 0
    right: Mapping[int, float] = field(default_factory=dict, repr=False)
    read: Mapping[int, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Choice:
    """What is recommended.

    Args:
        outcomes: One for every defense that was tried, the undefended first.
        chosen: The one to train with; `None` if none keeps the accuracy asked for.
        words: The same for a person.

    Example:
        >>> Choice([], None, "Nothing was tried.").chosen is None
        True
    """

    outcomes: list[Outcome]
    chosen: Outcome | None
    words: str


def choose(
    outcomes: Sequence[Outcome], budget: float, chance: float, scale: float = 100, unit: str = " %"
) -> Choice:
    """The defense that gives away least among those that lose at most `budget` of accuracy.

    A mean decides, and the words give its interval: a short training cannot tell single points
    apart. Where what leaks cannot be told from the least one's, message by message, accuracy
    decides, and where that cannot be told apart either, sample by sample, the one that gives away
    less. Where no search reads the undefended gradient above a guess, none says anything: then who
    has a list decides, if he names clearly fewer behind a defense than undefended.

    Args:
        outcomes: The undefended one first.
        budget: Accuracy that may be lost, as a share.
        chance: Main score of a guess.
        scale: What a score is multiplied by to be said in `unit`.
        unit: That it is said in.

    Raises:
        ValueError: If the first is not the undefended one, or there is no other.

    Example:
        >>> def outcome(name: str, accuracy: float, leak: float) -> Outcome:
        ...     around = Estimate(accuracy, accuracy - 0.01, accuracy + 0.01)
        ...     lost = Estimate(0.9 - accuracy, 0.89 - accuracy, 0.91 - accuracy)
        ...     read = Estimate(leak, leak - 0.01, leak + 0.01)
        ...     alike = {"right": dict.fromkeys(range(9), accuracy), "read": {0: leak, 1: leak}}
        ...     return Outcome(name, 1e-3, around, lost, read, "span", "end", **alike)
        >>> tried = [outcome("none", 0.9, 1.0), outcome("a", 0.7, 0.0), outcome("b", 0.89, 0.1)]
        >>> choose(tried, budget=0.02, chance=0.1).chosen.defense
        'b'
    """
    if len(outcomes) < 2 or outcomes[0].defense != "none":
        raise ValueError("A choice needs the undefended outcome first, and a defense beside it.")
    plain, *defended = outcomes
    kept = [one for one in defended if one.lost.mean <= budget]
    places = 0 if unit == " %" else 1
    said = f"{plain.attack} reads {plain.leak.said(scale, places, unit)} undefended"
    if not kept:
        return _nothing_kept(list(outcomes), budget)
    if plain.leak.low <= chance:
        guess = f"{scale * chance:.{places}f}{unit}"
        return _without_searches(list(outcomes), kept, f"{said}, and a guess {guess}")
    chosen = _least(kept)
    words = (
        f"Train with {chosen.defense} at a learning rate of {chosen.learning_rate:.2g}. It "
        f"{_kept(chosen, plain)}, and the best of the attackers tried, {chosen.attack} at the "
        f"{chosen.stage} of its training, reads "
        f"{chosen.leak.said(scale, places, unit)} (a guess: {scale * chance:.{places}f}{unit}; "
        f"{said})."
    )
    if chosen.leak.low > chance:
        words += " That is more than a guess: it hides much, and not all."
    words += _who_has_a_list(chosen)
    return Choice(list(outcomes), chosen, words)


def _who_has_a_list(chosen: Outcome) -> str:
    if chosen.named is None:
        return ""
    words = (
        f" An attacker with a list of {chosen.listed}, the right ones among them, names "
        f"{chosen.named.said()} of them."
    )
    if chosen.named.low > MANY:
        words += (
            " Where that matters, a classifier can share its linear head alone, under dp_sgd by "
            "samples: recipes/head.py and image_head.py, docs/choose.md."
        )
    return words


def _least(kept: list[Outcome]) -> Outcome:
    """Of those that cannot be told from the one that gives away least, and of these from the most
    accurate.
    """
    least = min(kept, key=lambda one: one.leak.mean)
    alike = [one for one in kept if not _apart(one.read, least.read)]
    best = max(alike, key=lambda one: one.accuracy.mean)
    as_good = [one for one in alike if not _apart(one.right, best.right)]
    return min(as_good, key=lambda one: (one.leak.mean, -one.accuracy.mean))


def _apart(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether a paired t-test at 5 % tells them apart."""
    found = np.array([one[number] - other[number] for number in one if number in other])
    if len(found) < 2:
        return False
    if np.ptp(found) == 0:  # without noise there is no test
        return bool(found[0] != 0)
    return bool(ttest_1samp(found, 0.0).pvalue < 0.05)


def _nothing_kept(outcomes: list[Outcome], budget: float) -> Choice:
    plain, *defended = outcomes
    best = min(defended, key=lambda one: one.lost.mean)
    words = (
        f"None of the defenses tried kept accuracy within {100 * budget:g} points of the "
        f"undefended {plain.accuracy.said()}. The nearest is {best.defense} at a learning rate "
        f"of {best.learning_rate:.2g}: it loses {best.lost.said()}. Train longer (--steps), try "
        "weaker settings, or allow more (--budget)."
    )
    return Choice(outcomes, None, words)


def _without_searches(outcomes: list[Outcome], kept: list[Outcome], said: str) -> Choice:
    """Where no search reads even the undefended gradient: by who has a list, if he can tell."""
    plain = outcomes[0]
    words = (
        f"No search that was tried reads this model even undefended ({said}), so none says what a "
        "defense hides. "
    )
    everybody = plain.named or Estimate(0, 0, 0)
    fewer = [(one.named, one) for one in kept if one.named and one.named.high < everybody.low]
    if not fewer:
        words += (
            "Nothing is recommended. Attack more samples (--attacked), with other attacks "
            "(--attack), or a model that was trained further: adapters give little away in their "
            "first step."
        )
        return Choice(outcomes, None, words)
    named, chosen = min(fewer, key=lambda one: one[0].mean)
    words += (
        f"An attacker with a list of {chosen.listed}, the right ones among them, names "
        f"{everybody.said()} of them undefended, and least under {chosen.defense}: "
        f"{named.said()}. At a learning rate of {chosen.learning_rate:.2g} it "
        f"{_kept(chosen, plain)}."
    )
    return Choice(outcomes, chosen, words)


def _kept(chosen: Outcome, plain: Outcome) -> str:
    return (
        f"kept an accuracy of {chosen.accuracy.said()} in this short training (undefended "
        f"{plain.accuracy.said()}; loss {chosen.lost.said()})"
    )


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 380, 60, 50, 20, 34

_WIDE, _HIGH = 20, 15  # of a point's number


def markdown_table(choice: Choice, terms: Terms) -> str:
    """The words, and a line for every defense."""
    header = [
        "defense", "learning rate", "accuracy", "lost", f"{terms.score}, best attacker", "by",
        "named of a list",
    ]  # fmt: skip
    rows = [header, ["---"] * len(header), *(_cells(one, terms) for one in choice.outcomes)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{choice.words}\n\n{table}\n"


def _cells(one: Outcome, terms: Terms) -> list[str]:
    leak = one.leak.said(terms.scale, terms.places, f" {terms.unit}")
    accuracies = [one.accuracy.said(places=1), one.lost.said(places=1)]
    return [
        f"`{one.defense}`", f"{one.learning_rate:.2g}", *accuracies, leak,
        f"{one.attack}, {one.stage}", "–" if one.named is None else one.named.said(),
    ]  # fmt: skip


def configuration(choice: Choice, flags: Mapping[str, Any], terms: TrialSettings) -> str:
    """A file of flags for the recipes: the setting that is recommended, with its own `flags`."""
    assert choice.chosen is not None
    values = {
        **flags,
        "learning_rate": float(f"{choice.chosen.learning_rate:.3g}"),
        "scale_learning_rate": False,  # it is in the rate
        "warmup_steps": WARMUP,
        "per_device_train_batch_size": terms.batch_size,
    }
    words = "\n".join(f"# {line}" for line in textwrap.wrap(choice.words, 96))
    return f"{words}\n{yaml.safe_dump(values, sort_keys=False)}"


def flags_of(defense: Defense) -> dict[str, Any] | None:
    """What names a defense in a file; `None` where a file cannot: for a chain, a class that is not
    registered, or a setting that is an object.
    """
    if DEFENSES.get(defense.name) is not type(defense):
        return None
    flags = {"defense": defense.name, "defense_kwargs": defense.settings()}
    try:
        yaml.safe_dump(flags)
    except yaml.representer.RepresenterError:
        return None
    return flags


def html_report(choice: Choice, chance: float, settings: TrialSettings, terms: Terms) -> str:
    """The page: one file, no script, nothing from elsewhere."""
    ticks = terms.ticks([chance, *(one.leak.high for one in choice.outcomes)])
    highest = ticks[-1][0]
    lowest = min(one.accuracy.low for one in choice.outcomes) - 0.02
    best = min(max(one.accuracy.high for one in choice.outcomes) + 0.02, 1.0)

    def x(leak: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(leak / highest, 0), 1)

    def y(accuracy: float) -> float:
        share = (accuracy - lowest) / (best - lowest)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share

    points = [
        {
            "number": number,
            "x": x(one.leak.mean), "x_low": x(one.leak.low), "x_high": x(one.leak.high),
            "y": y(one.accuracy.mean), "y_low": y(one.accuracy.low), "y_high": y(one.accuracy.high),
            "chosen": one is choice.chosen, "plain": one.defense == "none",
            "beyond": terms.said(one.leak.mean) if one.leak.mean > highest else "",
        }
        for number, one in enumerate(choice.outcomes, 1)
    ]  # fmt: skip
    levels = [lowest + i / 4 * (best - lowest) for i in range(5)]
    _place_numbers(points)
    page: str = _template().render(
        choice=choice,
        settings=settings,
        terms=terms,
        rows=[_cells(one, terms) for one in choice.outcomes],
        points=points,
        ticks=[(x(value), said) for value, said in ticks],
        levels=[(y(value), f"{100 * value:.0f} %") for value in levels],
        floor=y(choice.outcomes[0].accuracy.mean - settings.budget),
        chance=x(chance),
        width=_WIDTH, height=_HEIGHT, left=_LEFT, bottom=_HEIGHT - _BOTTOM, top=_TOP,
        right=_WIDTH - _RIGHT,
    )  # fmt: skip
    return page


def _place_numbers(points: list[dict[str, Any]]) -> None:
    """Each beside its point, and below those of others that stand there."""
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: (one["y"], one["number"])):
        at = point["y"] - 7
        while near := [y for x, y in placed if abs(x - point["x"]) < _WIDE and abs(y - at) < _HIGH]:
            at = max(near) + _HIGH
        point["at"] = at
        placed.append((point["x"], at))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hf_gradguard", "recommend"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("recommend.html.jinja")
