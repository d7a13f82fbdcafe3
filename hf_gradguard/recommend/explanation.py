"""A choice in words, for a person: short paragraphs, the answer in the first sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..audit.report.verdicts import Estimate, MainScore
from .evidence import (
    FALSE_ALARMS,
    SAME_ACCURACY,
    Evidence,
    Outcome,
    has_learned,
    leak_of,
    shown_leak,
)

_MORE_ROWS = "It learns most from more rows (--rows, --steps)."


def of_head(head: Outcome, shown: Evidence) -> list[str]:
    """Return paragraphs that recommend a head by proof, with its price and what is proved."""
    proof = head.proof
    assert proof is not None
    answer = (
        f"Train only a linear head on {proof.encoder}, {_proved(head)}: it {price(head.lost)} of "
        "accuracy against the whole model undefended."
    )
    meaning = (
        f"The proof holds against every attack, known or not, of whoever sees all messages: it "
        f"finds at most {100 * proof.members:.1f} % of the rows at {100 * FALSE_ALARMS:g} % false "
        f"alarms, and tells which of two {shown.score.sample}s a row holds in at most "
        f"{100 * proof.pairs:.0f} % of cases (half is chance)."
    )
    return [answer, meaning, *_recognized(head), _accuracies(head, shown)]


def _recognized(head: Outcome) -> list[str]:
    """Return a paragraph on what the best test found of a head's messages, if it was run."""
    if head.recognition is None:
        return []
    rows_found, told_apart = head.recognition.rows_found, head.recognition.told_apart
    return [
        f"Measured, and no promise: the best test, by somebody who knows all other rows, found "
        f"{percent(rows_found, 1)} of the rows, and told {percent(told_apart)} of them apart."
    ]


def beside_head(defense: Outcome | None, words: Sequence[str], shown: Evidence) -> list[str]:
    """Return paragraphs on what measured defenses offer beside a head that is recommended."""
    if not shown.measured:
        return [_unprotected(shown)]
    if defense is not None:
        return [
            f"For the whole model, {_proved(defense)}: {defense.defense} "
            f"{_measured(defense, shown)}.",
            _unprotected(shown),
        ]
    return [f"For the whole model nothing is recommended: {words[0]}", _unprotected(shown)]


def of_measured(chosen: Outcome, shown: Evidence) -> list[str]:
    """Return paragraphs that recommend a measured defense, and say what is found behind it."""
    return [
        f"Train the whole model with {chosen.defense}, {_proved(chosen)}: it "
        f"{_measured(chosen, shown)}.",
        _unprotected(shown),
        _accuracies(chosen, shown),
    ]


def of_nothing(words: Sequence[str], shown: Evidence) -> list[str]:
    """Return paragraphs that recommend nothing, and say why."""
    reason, *hints = words
    heads = of_nearest_head(shown)
    return [f"Nothing is recommended: {reason}", *heads, _unprotected(shown), *hints]


def of_nearest_head(shown: Evidence) -> list[str]:
    """Return a paragraph on the head by proof that costs least, which is no choice; or none."""
    if not shown.heads:
        return []
    nearest = min(shown.heads, key=lambda head: head.lost.mean)
    proof = nearest.proof
    assert proof is not None
    named = (
        f"A linear head on {proof.encoder}, by proof (ε = {proof.epsilon:.2g}), trained on "
        f"{proof.rows:,} rows,"
    )
    if not has_learned(nearest, shown.untrained):
        count = len(nearest.accuracy_by_sample)
        return [f"{named} learned nothing that {count} samples show. {_MORE_ROWS}"]
    return [f"{named} {price(nearest.lost)}. {_MORE_ROWS} {_allow(nearest)}"]


def untaught(shown: Evidence) -> str:
    """Return why nothing is chosen where the undefended training taught nothing."""
    assert shown.untrained is not None
    untrained = 100 * float(np.mean(shown.untrained))
    return (
        f"undefended training taught nothing that {len(shown.untrained)} samples show (accuracy "
        f"{untrained:.1f} % before, {100 * shown.plain.accuracy.mean:.1f} % after), so no price "
        "was measured. Train longer (--steps), at other rates (--learning_rate), or begin with a "
        "model that does not know the task."
    )


def of_none(affordable: list[Outcome], private: list[Outcome], shown: Evidence) -> list[str]:
    """Return why no measured defense is chosen, and which of them come nearest."""
    score, limit = shown.score, shown.score.format(shown.chance + shown.score.clear_margin)
    if not shown.measured:
        return ["no head by proof keeps the budget, and no measured defense was tried."]
    paragraphs = [
        f"no defense tried keeps accuracy within {100 * shown.budget:g} points of the undefended "
        f"{percent(shown.plain.accuracy)} and is shown to leave a server at most {limit}."
    ]
    if affordable:
        least = min(affordable, key=lambda outcome: leak_of(outcome).mean)
        paragraphs.append(
            f"Within the budget {least.defense} leaks least: at the {least.stage} a server "
            f"{score.verb} {_amount(least, score)}."
        )
        if leak_of(least).mean <= shown.chance + score.clear_margin:
            paragraphs[-1] += f" That is below {limit}, but so few messages do not show it."
    more = ""
    if private:
        best = min(private, key=lambda outcome: outcome.lost.mean)
        paragraphs.append(
            f"{best.defense} costs least among those that leak less than that limit: "
            f"{points(best.lost)}."
        )
        more = f"{_allow(best)} "
    paragraphs.append(
        f"{more}Train longer (--steps), attack more samples (--attacked), try others (--defense), "
        "or give more time (--budget_minutes; the same command continues)."
    )
    return paragraphs


def of_blind_attacks(shown: Evidence) -> str:
    """Return why nothing is chosen where neither attacks nor membership inference can tell."""
    return (
        f"no attack that was tried reconstructs data of this model even undefended "
        f"({_undefended(shown)}), so none says how private a defense is. Attack more samples "
        "(--attacked), with other attacks (--attack), or a model that was trained further: "
        "adapters leak little in their first step."
    )


def of_fewest_members(chosen: Outcome, shown: Evidence) -> list[str]:
    """Return paragraphs on a defense behind which membership inference recognizes fewest."""
    plain = shown.plain.membership
    assert plain is not None
    assert chosen.membership is not None
    return [
        f"Train the whole model with {chosen.defense}, {_proved(chosen)}: it "
        f"{_measured(chosen, shown)}.",
        f"No attack that was tried reconstructs data of this model even undefended "
        f"({_undefended(shown)}), so members decide. Membership inference among "
        f"{chosen.candidates} candidates recognizes {percent(plain)} of a message's members "
        f"undefended, and least under {chosen.defense}: {percent(chosen.membership)}.",
        _accuracies(chosen, shown),
    ]


def promise(outcome: Outcome) -> str:
    """Return ε and δ of a row's proof, or an empty string without one.

    Example:
        >>> around = Estimate(0.1, 0.0, 0.2)
        >>> promise(Outcome("a", 1e-3, around, around, around, guarantee=(7.96, 1e-5)))
        'ε = 8 at δ = 1e-05'
    """
    proof = outcome.proof
    epsilon_and_delta = outcome.guarantee if proof is None else (proof.epsilon, proof.delta)
    if epsilon_and_delta is None:
        return ""
    epsilon, delta = epsilon_and_delta
    return f"ε = {epsilon:.2g} at δ = {delta:g}"


def _proved(outcome: Outcome) -> str:
    return f"by proof ({promise(outcome)})" if promise(outcome) else "without a proof"


def _measured(outcome: Outcome, shown: Evidence) -> str:
    """Return what a defense costs and what is found behind it, in one sentence behind its name."""
    score = shown.score
    leak = f"{score.format_estimate(shown_leak(outcome, score))} {score.amount}"
    sentence = (
        f"{price(outcome.lost)}, and a server {score.verb} {leak} ({messages_of(outcome)}; "
        f"a guess has {score.format(shown.chance)})"
    )
    if outcome.membership is not None:
        sentence += (
            f" and recognizes {percent(outcome.membership)} of a message's {score.sample}s among "
            f"{outcome.candidates} candidates"
        )
    elsewhere = shown.elsewhere.get(outcome.defense)
    return sentence + (f"; elsewhere, {elsewhere}" if elsewhere else "")


def _allow(outcome: Outcome) -> str:
    # The least budget that this row keeps.
    least = math.ceil(100 * max(0.0, outcome.lost.mean - SAME_ACCURACY)) / 100
    return f"To choose it, allow more (--budget {least:g}; the same command then answers at once)."


def _unprotected(shown: Evidence) -> str:
    return f"Unprotected: a server {shown.score.verb} {_amount(shown.plain, shown.score)}."


def _undefended(shown: Evidence) -> str:
    score = shown.score
    return (
        f"a server {score.verb} {_amount(shown.plain, score)} undefended, and a guess "
        f"{score.format(shown.chance)}"
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


def _accuracies(chosen: Outcome, shown: Evidence) -> str:
    count = len(chosen.accuracy_by_sample)
    change = f"{100 * shown.plain.accuracy.mean:.1f} to {100 * chosen.accuracy.mean:.1f} %"
    if shown.untrained is not None:
        change += f"; {100 * float(np.mean(shown.untrained)):.1f} % before training"
    return f"Accuracy: {change} ({count} samples, {_trainings(chosen, shown.plain)})."


def _trainings(chosen: Outcome, plain: Outcome) -> str:
    """Return how many trainings an accuracy is a mean of, and what one of them does not show."""
    undefended, trainings = max(1, len(plain.trainings)), max(1, len(chosen.trainings))
    unknown = ", so that other seeds may differ by more"
    if undefended == trainings:
        return f"1 training{unknown}" if trainings == 1 else f"{trainings} trainings"
    if undefended == 1:
        return f"{trainings} trainings of the head, and 1 undefended{unknown}"
    return f"{trainings} trainings of the head, and {undefended} undefended"


def price(lost: Estimate) -> str:
    """Return what a row loses or gains in accuracy, as the predicate of a sentence.

    Example:
        >>> price(Estimate(0.012, -0.003, 0.027)), price(Estimate(-0.012, -0.027, 0.003))
        ('loses 1.2 points [-0.3, 2.7]', 'gains 1.2 points [-0.3, 2.7]')
    """
    if lost.mean >= 0:
        return f"loses {points(lost)}"
    gained = [-end for end in (lost.mean, lost.high or 0.0, lost.low or 0.0)]
    return f"gains {points(Estimate(*gained))}"


def points(lost: Estimate) -> str:
    """Return a loss of accuracy with its interval as text, in points.

    Example:
        >>> points(Estimate(0.012, -0.003, 0.027))
        '1.2 points [-0.3, 2.7]'
    """
    mean, low, high = (f"{100 * (end or 0.0):.1f}" for end in (lost.mean, lost.low, lost.high))
    return f"{mean} points [{low}, {high}]"


def percent(fraction: Estimate, digits: int = 0) -> str:
    """Return a fraction with its interval as text, in percent.

    Example:
        >>> percent(Estimate(0.831, 0.81, 0.85))
        '83 % [81, 85]'
    """
    ends = fraction.mean, fraction.low, fraction.high
    mean, low, high = (f"{100 * end:.{digits}f}" for end in ends if end is not None)
    return f"{mean} % [{low}, {high}]"
