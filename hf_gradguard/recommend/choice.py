"""The choice of one row from trials: of a head by proof, or else of a measured defense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..audit.report.verdicts import MAIN_SCORES, Estimate, MainScore
from . import evidence, explanation
from .evidence import (
    SAME_ACCURACY,
    Evidence,
    Outcome,
    exceeds,
    has_learned,
    leak_of,
    low_end,
)

SAME_LEAK = 0.2
"""Leaks that differ by no more than this fraction of `MainScore.clear_margin` count as equal."""


@dataclass(frozen=True)
class Choice:
    """The row that is recommended, and all outcomes that it was chosen from.

    Args:
        outcomes: One for every row that was tried, the undefended first.
        chosen: The one to train with; `None` if none qualifies.
        words: The explanation for a person, in short paragraphs.
        untrained: The accuracy of the model before any training, on the samples that judge. A
            defense that loses nothing on a model that knew its task has shown nothing.
        limits: What there was no time for, and which rows are missing for another reason.

    Example:
        >>> Choice([], None, "Nothing was tried.").chosen is None
        True
    """

    outcomes: list[Outcome]
    chosen: Outcome | None
    words: str
    untrained: Estimate | None = None
    limits: str = ""


def choose(
    outcomes: Sequence[Outcome],
    budget: float,
    chance: float,
    score: MainScore = MAIN_SCORES["text"],
    untrained: Sequence[float] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> Choice:
    """Choose a head by proof if one is within the budget, or else a measured defense.

    A row is within the budget if it loses no more accuracy than that and `SAME_ACCURACY`, against
    the undefended whole model on the same samples.

    **Heads by proof come before all that was only measured.** Of several the first in order is
    chosen that is not shown to be less accurate than the best.

    **A measured defense** also needs an interval which shows that the best attack recovers little
    (its upper end is at most `score.clear_margin` above a guess). Of these, defenses that are shown
    to leak more than the least leaky are left out, and then those that are shown to be less
    accurate than the most accurate, by margins that matter. If several remain, the first in order
    is chosen, so that chance does not choose. The sentence that names it says which members are
    recognized behind it, and what attacks found elsewhere.

    If no attack reconstructs the undefended gradient above a guess, membership inference decides
    between measured defenses, provided that it recognizes clearly fewer members behind a defense
    than undefended. If the undefended training taught nothing, no price of a defense was measured,
    and none is chosen.

    Args:
        outcomes: The undefended one first, then in order of preference.
        budget: The accuracy that may be lost, as a fraction.
        chance: The main score of a guess.
        score: The score, with its margins and how it is shown.
        untrained: The accuracy by sample before any training, of the samples that judge.
        elsewhere: What attacks recovered elsewhere behind a defense, by its label.

    Raises:
        ValueError: If the first is not the undefended one, or there is no other.

    Example:
        >>> def outcome(name: str, accuracy: float, leak: float) -> Outcome:
        ...     around = Estimate(accuracy, accuracy - 0.01, accuracy + 0.01)
        ...     lost = Estimate(0.9 - accuracy, 0.89 - accuracy, 0.91 - accuracy)
        ...     recovered = Estimate(leak, leak - 0.01, leak + 0.01)
        ...     details = dict.fromkeys(range(9), accuracy), dict.fromkeys(range(16), leak)
        ...     where = "span", "end", None, 0
        ...     return Outcome(name, 1e-3, around, lost, recovered, *where, *details)
        >>> tried = [outcome("none", 0.9, 1.0), outcome("a", 0.7, 0.0), outcome("b", 0.89, 0.1)]
        >>> choose(tried, budget=0.02, chance=0.1).chosen.defense
        'b'
    """
    if len(outcomes) < 2 or outcomes[0].defense != "none":
        raise ValueError("A choice needs the undefended outcome first, and a defense beside it.")
    plain, *protected = outcomes
    shown = Evidence(
        plain=plain,
        heads=[outcome for outcome in protected if outcome.proof is not None],
        measured=[outcome for outcome in protected if outcome.proof is None],
        budget=budget, chance=chance, score=score, untrained=untrained, elsewhere=elsewhere or {},
    )  # fmt: skip
    head, (defense, words) = _choose_head(shown), _choose_measured(shown)
    if head is not None:
        paragraphs = explanation.of_head(head, shown)
        paragraphs += explanation.beside_head(defense, words, shown)
    elif defense is not None:
        paragraphs = [*words, *explanation.of_nearest_head(shown)]
    else:
        paragraphs = explanation.of_nothing(words, shown)
    return Choice(list(outcomes), head or defense, "\n\n".join(paragraphs))


def is_affordable(outcome: Outcome, budget: float) -> bool:
    """Return whether a row is within the budget."""
    return outcome.lost.mean <= budget + SAME_ACCURACY


def _choose_head(shown: Evidence) -> Outcome | None:
    """Return the head by proof to train, or `None` if none learned within the budget."""
    affordable = [
        head
        for head in shown.heads
        if is_affordable(head, shown.budget) and has_learned(head, shown.untrained)
    ]
    if not affordable:
        return None
    best = max(affordable, key=lambda head: head.accuracy.mean)
    return next(h for h in affordable if not _is_less_accurate(h, best, SAME_ACCURACY))


def _choose_measured(shown: Evidence) -> tuple[Outcome | None, list[str]]:
    """Return the measured defense to train with, or `None`, and paragraphs that explain it."""
    plain, budget, chance, score = shown.plain, shown.budget, shown.chance, shown.score
    if budget < plain.accuracy.mean and not has_learned(plain, shown.untrained):
        return None, [explanation.untaught(shown)]
    affordable = [outcome for outcome in shown.measured if is_affordable(outcome, budget)]
    if affordable and low_end(leak_of(plain)) <= chance:
        return _choose_by_membership(affordable, shown)
    private = [o for o in shown.measured if evidence.is_shown_private(o, chance, score)]
    qualified = [outcome for outcome in affordable if outcome in private]
    if not qualified:
        return None, explanation.of_none(affordable, private, shown)
    chosen = _equals(qualified, chance, score)[0]
    return chosen, explanation.of_measured(chosen, shown)


def _choose_by_membership(
    affordable: list[Outcome], shown: Evidence
) -> tuple[Outcome | None, list[str]]:
    """Choose by membership inference, where no attack reconstructs even the undefended gradient."""
    limit = low_end(shown.plain.membership) if shown.plain.membership is not None else 0.0
    inferred = [(outcome.membership, outcome) for outcome in affordable if outcome.membership]
    fewer = [
        (fraction.mean, outcome) for fraction, outcome in inferred if (fraction.high or 0) < limit
    ]
    if not fewer:
        return None, [explanation.of_blind_attacks(shown)]
    _, chosen = min(fewer, key=lambda pair: pair[0])
    return chosen, explanation.of_fewest_members(chosen, shown)


def finalists(
    outcomes: Sequence[Outcome], budget: float, chance: float, score: MainScore, most: int = 3
) -> list[Outcome]:
    """Return the outcomes of first trials that are worth more seeds and messages, in order.

    None of them is shown to cost more than the budget, or to leak or cost more than another one.
    Heads by proof are none: each of their trainings takes seconds.

    Example:
        >>> finalists([], budget=0.02, chance=0.1, score=MAIN_SCORES["text"])
        []
    """
    possible = [
        outcome
        for outcome in outcomes
        if outcome.defense != "none"
        and outcome.proof is None
        and low_end(outcome.lost) <= budget
        and leak_of(outcome).mean <= chance + score.clear_margin
    ]
    # One training's luck is worth a point or so.
    return _equals(possible, chance, score, 2 * SAME_ACCURACY)[:most]


def promising_first(
    outcomes: Sequence[Outcome], budget: float, chance: float, score: MainScore
) -> list[Outcome]:
    """Return outcomes sorted by how promising they are.

    Those that keep the budget so far come first, of them those that are shown to leak little.
    Equals keep their order.

    Example:
        >>> promising_first([], budget=0.02, chance=0.1, score=MAIN_SCORES["text"])
        []
    """
    return sorted(
        outcomes,
        key=lambda outcome: (
            not is_affordable(outcome, budget),
            not evidence.is_shown_private(outcome, chance, score),
        ),
    )


def _equals(
    outcomes: list[Outcome], chance: float, score: MainScore, same_accuracy: float = SAME_ACCURACY
) -> list[Outcome]:
    """Return outcomes that are not shown to be worse than the best.

    Those that are shown to leak more than the least leaky are left out, then those that are shown
    to be less accurate than the most accurate.
    """
    if not outcomes:
        return []
    # Below a guess nothing is more private.
    leaks = {
        outcome.defense: {n: max(leak, chance) for n, leak in outcome.leak_by_message.items()}
        for outcome in outcomes
    }
    least = leaks[min(outcomes, key=lambda outcome: leak_of(outcome).mean).defense]
    margin = SAME_LEAK * score.clear_margin
    private = [o for o in outcomes if not exceeds(leaks[o.defense], least, margin)]
    best = max(private, key=lambda outcome: outcome.accuracy.mean)
    return [o for o in private if not _is_less_accurate(o, best, same_accuracy)]


def _is_less_accurate(outcome: Outcome, best: Outcome, margin: float) -> bool:
    """Return whether an outcome is shown to be less accurate than the best.

    The samples have to show it, and each training of the same seed.
    """
    pairs = zip(best.trainings, outcome.trainings, strict=False)
    return all(high - low > margin for high, low in pairs) and exceeds(
        best.accuracy_by_sample, outcome.accuracy_by_sample, margin
    )
