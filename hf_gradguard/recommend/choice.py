"""The choice of one defense from trials, and its explanation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import t, ttest_1samp

from ..audit.report.verdicts import MAIN_SCORES, Estimate, MainScore
from ..metrics.scores import open_ends

MANY_MEMBERS = 0.05
"""The fraction of recognized members from which the words name a defense against membership
inference.
"""

SAME_LEAK = 0.2
"""Leaks that differ by no more than this fraction of `MainScore.clear_margin` count as equal."""
SAME_ACCURACY = 0.01
"""Accuracies that differ by no more than this count as equal."""

_GAP = "\n\n"  # between paragraphs


@dataclass(frozen=True)
class Outcome:
    """The privacy and utility of one defense, at its own best learning rate.

    Args:
        defense: The defense's label, as `gradguard audit` writes it.
        learning_rate: The best of those tried.
        accuracy: The accuracy on samples that chose no rate.
        lost: The accuracy of the undefended model less this one's, on the same samples.
        leak: The main score of the attack that recovered most, at the stage where it did.
        attack: The name of that attack.
        stage: `"start"` or `"end"` of the defense's own training.
        membership: The fraction of batch members that membership inference recognizes, at the stage
            where it recognizes more; `None` if there were no candidates.
        candidates: The number of candidates.
        accuracy_by_sample: The values that the accuracy is a mean of.
        leak_by_message: For each message the mean of the values that `leak` is a mean of.
        trainings: The accuracy of each training, by seed.
        leak_elsewhere: `leak_by_message` at the other stage, of the attack that recovered most
            there. Fewer messages may be attacked at one stage, where time ended a round.

    Example:
        >>> accuracy, leak = Estimate(0.8, 0.78, 0.82), Estimate(0.1, 0.0, 0.2)
        >>> lost = Estimate(0.01, -0.01, 0.03)
        >>> Outcome("pruning", 2e-4, accuracy, lost, leak, "span", "end").stage
        'end'
    """

    defense: str
    learning_rate: float
    accuracy: Estimate
    lost: Estimate
    leak: Estimate
    attack: str
    stage: str
    membership: Estimate | None = None
    candidates: int = 0
    accuracy_by_sample: Mapping[int, float] = field(default_factory=dict, repr=False)
    leak_by_message: Mapping[int, float] = field(default_factory=dict, repr=False)
    trainings: Sequence[float] = ()
    leak_elsewhere: Mapping[int, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Choice:
    """The defense that is recommended, and all outcomes that it was chosen from.

    Args:
        outcomes: One for every defense that was tried, the undefended first.
        chosen: The one to train with; `None` if none qualifies.
        words: The explanation for a person, in short paragraphs.
        untrained: The accuracy of the model before any training, on the samples that judge. A
            defense that loses nothing on a model that knew its task has shown nothing.
        limits: What slower attacks recovered elsewhere behind the chosen defense, and what there
            was no time for.

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
) -> Choice:
    """Choose the most accurate of the defenses that are shown to leak least, within the budget.

    A defense qualifies if an interval shows that the best attack recovers little (its upper end is
    at most `score.clear_margin` above a guess), and if it loses no more accuracy than the budget
    and `SAME_ACCURACY`. Of these, defenses that are shown to leak more than the least leaky are
    left out, and then those that are shown to be less accurate than the most accurate, by margins
    that matter. If several remain, the first in order is chosen, so that chance does not choose.

    If no attack reconstructs the undefended gradient above a guess, membership inference decides,
    provided that it recognizes clearly fewer members behind a defense than undefended. If the
    undefended training taught nothing, no price was measured, and nothing is chosen.

    Args:
        outcomes: The undefended one first, then in order of preference.
        budget: The accuracy that may be lost, as a fraction.
        chance: The main score of a guess.
        score: The score, with its margins and how it is shown.
        untrained: The accuracy by sample before any training, of the samples that judge.

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
    plain, *defended = outcomes
    if untrained is not None and budget < plain.accuracy.mean and not _taught(plain, untrained):
        return Choice(list(outcomes), None, _untaught_words(plain, untrained))
    affordable = [outcome for outcome in defended if outcome.lost.mean <= budget + SAME_ACCURACY]
    undefended = f"a server {score.verb} {_amount(plain, score)}"
    if affordable and low_end(plain.leak) <= chance:
        undefended += f" undefended, and a guess {score.format(chance)}"
        return _by_membership(list(outcomes), affordable, undefended, untrained)
    private = [outcome for outcome in defended if is_shown_private(outcome, chance, score)]
    qualified = [outcome for outcome in affordable if outcome in private]
    if not qualified:
        words = _none_words(plain, affordable, private, budget, chance, score)
        return Choice(list(outcomes), None, f"Unprotected: {undefended}.{_GAP}{words}")
    chosen = _equals(qualified, chance, score)[0]
    protected = f"{_amount(chosen, score)}; a guess has {score.format(chance)}"
    words = f"Unprotected: {undefended}.{_GAP}With {chosen.defense}: {protected}.{_GAP}"
    words += _cost(chosen, plain, untrained) + _membership_words(chosen, score)
    return Choice(list(outcomes), chosen, words)


def _taught(plain: Outcome, untrained: Sequence[float]) -> bool:
    """Return whether the undefended training is shown to have raised accuracy."""
    return _exceeds(plain.accuracy_by_sample, dict(enumerate(untrained)), 0.0)


def _untaught_words(plain: Outcome, untrained: Sequence[float]) -> str:
    before = 100 * float(np.mean(untrained))
    return (
        f"Nothing is recommended: undefended training taught nothing that {len(untrained)} samples "
        f"show (accuracy {before:.1f} % before, {100 * plain.accuracy.mean:.1f} % after), so no "
        "price was measured. Train longer (--steps), at other rates (--learning_rate), or begin "
        "with a model that does not know the task."
    )


def _amount(outcome: Outcome, score: MainScore) -> str:
    shown = f"{score.format_estimate(shown_leak(outcome, score))} {score.amount}"
    return f"{shown} ({messages_of(outcome)})"


def messages_of(outcome: Outcome) -> str:
    """Return how many messages a leak was measured on, and the other stage's number if it differs.

    Example:
        >>> around, leaks = Estimate(0.1, 0.0, 0.2), dict.fromkeys(range(8), 0.1)
        >>> details = None, 0, {}, leaks, (), {0: 0.0, 1: 0.0}
        >>> messages_of(Outcome("a", 1e-3, around, around, around, "span", "end", *details))
        '8 messages at the end, 2 at the start'
    """
    count, elsewhere = len(outcome.leak_by_message), len(outcome.leak_elsewhere)
    if elsewhere in (0, count):
        return f"{count} messages"
    other = "start" if outcome.stage == "end" else "end"
    return f"{count} messages at the {outcome.stage}, {elsewhere} at the {other}"


def shown_leak(outcome: Outcome, score: MainScore) -> Estimate:
    """Return the leak with the interval that people read.

    An interval of fractions is within 0 to 1, and has room for what this many messages may not have
    shown.
    """
    leak = outcome.leak
    if leak.low is None or leak.high is None or score.axis_limit != 1.0:
        return leak
    low, _ = open_ends(leak.mean, leak.low, leak.high, max(1, len(outcome.leak_by_message)))
    return Estimate(leak.mean, low, highest_leak(outcome, score))


def highest_leak(outcome: Outcome, score: MainScore) -> float:
    """Return the upper end of the leak's interval, at the stage where it is higher.

    For fractions it is never below what this many messages without any success leave open: 1 -
    0.05^(1/n).
    """
    shown = outcome.leak.high if outcome.leak.high is not None else math.inf
    stages = outcome.leak_by_message, outcome.leak_elsewhere
    high = max([shown, *(_highest(list(leaks.values()), score) for leaks in stages if leaks)])
    return min(1.0, high) if score.axis_limit == 1.0 else high


def _highest(leaks: Sequence[float], score: MainScore) -> float:
    high = -math.inf
    if len(leaks) > 1:
        half = t.ppf(0.975, len(leaks) - 1) * np.std(leaks, ddof=1) / math.sqrt(len(leaks))
        high = float(np.mean(leaks) + half)
    if score.axis_limit == 1.0:  # a share
        high = max(high, 1 - 0.05 ** (1 / len(leaks)))
    return high


def is_shown_private(outcome: Outcome, chance: float, score: MainScore) -> bool:
    """Return whether an interval shows that the best attack recovers little."""
    return highest_leak(outcome, score) <= chance + score.clear_margin


def finalists(
    outcomes: Sequence[Outcome], budget: float, chance: float, score: MainScore, most: int = 3
) -> list[Outcome]:
    """Return the outcomes of first trials that are worth more seeds and messages, in order.

    None of them is shown to cost more than the budget, or to leak or cost more than another one.

    Example:
        >>> finalists([], budget=0.02, chance=0.1, score=MAIN_SCORES["text"])
        []
    """
    possible = [
        outcome
        for outcome in outcomes
        if outcome.defense != "none"
        and low_end(outcome.lost) <= budget
        and outcome.leak.mean <= chance + score.clear_margin
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
            outcome.lost.mean > budget + SAME_ACCURACY,
            not is_shown_private(outcome, chance, score),
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
    least = leaks[min(outcomes, key=lambda outcome: outcome.leak.mean).defense]
    margin = SAME_LEAK * score.clear_margin
    private = [o for o in outcomes if not _exceeds(leaks[o.defense], least, margin)]
    best = max(private, key=lambda outcome: outcome.accuracy.mean)
    return [o for o in private if not _is_less_accurate(o, best, same_accuracy)]


def _is_less_accurate(outcome: Outcome, best: Outcome, margin: float) -> bool:
    """Return whether an outcome is shown to be less accurate than the best.

    The samples have to show it, and each training of the same seed.
    """
    pairs = zip(best.trainings, outcome.trainings, strict=False)
    return all(high - low > margin for high, low in pairs) and _exceeds(
        best.accuracy_by_sample, outcome.accuracy_by_sample, margin
    )


def _membership_words(chosen: Outcome, score: MainScore) -> str:
    if chosen.membership is None:
        return ""
    words = (
        f"It recognizes {percent(chosen.membership)} of a message's {score.sample}s among "
        f"{chosen.candidates} candidates."
    )
    if low_end(chosen.membership) <= MANY_MEMBERS:
        return f"{_GAP}Which {score.sample}s a server was sent: {words[0].lower()}{words[1:]}"
    return (
        f"{_GAP}Which {score.sample}s a server was sent is not hidden. {words} If that matters, a "
        "classifier can share its linear head alone, under dp_sgd by samples: docs/head.md."
    )


def _exceeds(x: Mapping[int, float], y: Mapping[int, float], margin: float) -> bool:
    """Return whether x is shown to exceed y by a margin, by a paired, one-sided t-test at 5 %."""
    # Paired: messages differ more among themselves than defenses do on one message.
    differences = np.array([x[number] - y[number] - margin for number in x if number in y])
    if len(differences) < 2:
        return False
    if np.ptp(differences) == 0:  # without noise there is no test
        return bool(differences[0] > 0)
    return bool(ttest_1samp(differences, 0.0, alternative="greater").pvalue < 0.05)


def _none_words(
    plain: Outcome,
    affordable: list[Outcome],
    private: list[Outcome],
    budget: float,
    chance: float,
    score: MainScore,
) -> str:
    """Return why nothing is recommended, and which defenses come nearest."""
    limit = score.format(chance + score.clear_margin)
    words = (
        f"Nothing is recommended: no defense tried keeps accuracy within {100 * budget:g} points "
        f"of the undefended {percent(plain.accuracy)} and is shown to leave a server at most "
        f"{limit}."
    )
    if affordable:
        least = min(affordable, key=lambda outcome: outcome.leak.mean)
        words += (
            f"{_GAP}Within the budget {least.defense} leaks least: at the {least.stage} a server "
            f"{score.verb} {_amount(least, score)}."
        )
        if least.leak.mean <= chance + score.clear_margin:
            words += f" That is below {limit}, but so few messages do not show it."
    more = ""
    if private:
        best = min(private, key=lambda outcome: outcome.lost.mean)
        words += (
            f"{_GAP}{best.defense} costs least among those that leak less than that limit: "
            f"{_points(best.lost)}."
        )
        # The least one that this defense would keep.
        least_budget = math.ceil(100 * (best.lost.mean - SAME_ACCURACY)) / 100
        more = (
            f"To choose it, allow more (--budget {least_budget:g}; the same command then answers "
            "at once). "
        )
    return (
        f"{words}{_GAP}{more}Train longer (--steps), attack more samples (--attacked), try others "
        "(--defense), or give more time (--budget_minutes; the same command continues)."
    )


def _by_membership(
    outcomes: list[Outcome],
    affordable: list[Outcome],
    undefended: str,
    untrained: Sequence[float] | None,
) -> Choice:
    """Choose by membership inference, where no attack reconstructs even the undefended gradient."""
    plain = outcomes[0]
    words = (
        f"No attack that was tried reconstructs data of this model even undefended ({undefended}), "
        "so none says how private a defense is."
    )
    recognized = plain.membership or Estimate(0, 0, 0)
    limit = low_end(recognized)
    inferred = [(outcome.membership, outcome) for outcome in affordable if outcome.membership]
    fewer = [
        (fraction.mean, outcome) for fraction, outcome in inferred if (fraction.high or 0) < limit
    ]
    if not fewer:
        words += (
            " Nothing is recommended. Attack more samples (--attacked), with other attacks "
            "(--attack), or a model that was trained further: adapters leak little in their first "
            "step."
        )
        return Choice(outcomes, None, words)
    _, chosen = min(fewer, key=lambda pair: pair[0])
    assert chosen.membership is not None
    words += (
        f"{_GAP}Membership inference among {chosen.candidates} candidates recognizes "
        f"{percent(recognized)} of a message's members undefended, and least under "
        f"{chosen.defense}: {percent(chosen.membership)}.{_GAP}{_cost(chosen, plain, untrained)}"
    )
    return Choice(outcomes, chosen, words)


def _cost(chosen: Outcome, plain: Outcome, untrained: Sequence[float] | None) -> str:
    lost, count = chosen.lost, len(chosen.accuracy_by_sample)
    trainings = f"{len(chosen.trainings)} trainings"
    if len(chosen.trainings) < 2:
        trainings = "1 training, so that other seeds may differ by more"
    change = f"{100 * plain.accuracy.mean:.1f} to {100 * chosen.accuracy.mean:.1f} %"
    if untrained is not None:
        change += f"; {100 * float(np.mean(untrained)):.1f} % before training"
    return f"Cost: {_points(lost)} of accuracy ({change}; {count} samples, {trainings})."


def _points(lost: Estimate) -> str:
    mean, low, high = (f"{100 * (end or 0.0):.1f}" for end in (lost.mean, lost.low, lost.high))
    return f"{mean} points [{low}, {high}]"


def low_end(estimate: Estimate) -> float:
    assert estimate.low is not None  # outcomes of a single message are left out
    return estimate.low


def percent(fraction: Estimate, digits: int = 0) -> str:
    """Return a fraction with its interval as text, in percent.

    Example:
        >>> percent(Estimate(0.831, 0.81, 0.85))
        '83 % [81, 85]'
    """
    ends = fraction.mean, fraction.low, fraction.high
    mean, low, high = (f"{100 * end:.{digits}f}" for end in ends if end is not None)
    return f"{mean} % [{low}, {high}]"
