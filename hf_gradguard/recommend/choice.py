"""From trials to one setting, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_1samp

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
