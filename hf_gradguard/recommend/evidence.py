"""The outcomes of trials: a row's accuracy, and what was proved, recovered or recognized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from scipy.stats import t, ttest_1samp

from ..audit.report.verdicts import Estimate, MainScore
from ..leakage.differential_privacy import membership_power, of_rounded_sums
from ..metrics.scores import open_ends

SAME_ACCURACY = 0.01
"""Accuracies that differ by no more than this count as equal."""
FALSE_ALARMS = 0.01
"""The fraction of non-members that an attacker takes for members, where members are bounded."""


@dataclass(frozen=True)
class Proof:
    """A proof for one row of the data, against whoever sees all messages.

    Args:
        noise_multiplier: σ of all messages together, relative to what a row adds to them.
        epsilon: ε at `delta`.
        delta: δ.
        encoder: The name of the frozen encoder below the head.
        rows: The number of rows that the head was trained on.

    Example:
        >>> proof = Proof(1.5, epsilon=2.6, delta=1e-5, encoder="my-model", rows=1600)
        >>> round(proof.members, 3), round(proof.pairs, 2)
        (0.048, 0.75)
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    encoder: str
    rows: int

    @property
    def members(self) -> float:
        """The largest fraction of members that anybody finds at `FALSE_ALARMS`."""
        return membership_power(self.noise_multiplier, FALSE_ALARMS)

    @property
    def pairs(self) -> float:
        """The largest rate at which anybody tells which of two samples a row is; 0.5 is chance."""
        return pairs_bound(self.noise_multiplier)


def pairs_bound(noise_multiplier: float) -> float:
    """Return the largest rate at which anybody tells which of two samples a row is.

    Another sample in a row's place moves the sum by 2C at most. Chance is 0.5.

    Args:
        noise_multiplier: σ of all messages together, relative to what a row adds to them.

    Example:
        >>> round(pairs_bound(1.5), 2)
        0.75
    """
    return NormalDist().cdf(1 / of_rounded_sums(noise_multiplier))


@dataclass(frozen=True)
class Recognition:
    """The findings of the best test of all messages of a head's trainings: they promise nothing.

    Args:
        rows_found: The fraction of rows that it found, at `FALSE_ALARMS`.
        told_apart: The fraction of rows that it told from another sample; half is chance.

    Example:
        >>> recognition = Recognition(Estimate(0.03, 0.02, 0.04), Estimate(0.6, 0.57, 0.63))
        >>> recognition.rows_found.mean < Proof(1.5, 2.6, 1e-5, "my-model", 1600).members
        True
    """

    rows_found: Estimate
    told_apart: Estimate


@dataclass(frozen=True)
class Outcome:
    """The privacy and utility of one row: a defense of the whole model, or a head by proof.

    Args:
        defense: The defense's label, as `gradguard audit` writes it, or the head's.
        learning_rate: The best of those tried; the default one of a head.
        accuracy: The accuracy on samples that chose no rate.
        lost: The accuracy of the undefended whole model less this one's, on the same samples.
        leak: The main score of the attack that recovered most, at the stage where it did; `None`
            for a head, where the proof bounds every attack.
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
        proof: What is proved of a head; `None` for a defense of the whole model.
        guarantee: ε and δ for each row, of a defense of the whole model that has a proof as well.
        recognition: What an attack found of a head, beside what is proved of it.

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
    leak: Estimate | None
    attack: str = ""
    stage: str = ""
    membership: Estimate | None = None
    candidates: int = 0
    accuracy_by_sample: Mapping[int, float] = field(default_factory=dict, repr=False)
    leak_by_message: Mapping[int, float] = field(default_factory=dict, repr=False)
    trainings: Sequence[float] = ()
    leak_elsewhere: Mapping[int, float] = field(default_factory=dict, repr=False)
    proof: Proof | None = None
    recognition: Recognition | None = None
    guarantee: tuple[float, float] | None = None


@dataclass(frozen=True)
class Evidence:
    """The outcomes of all trials, and the measures that judge them.

    Args:
        plain: The outcome of the undefended whole model.
        heads: Outcomes of heads by proof, in order of preference.
        measured: Outcomes of defenses of the whole model, in order of preference.
        budget: The accuracy that may be lost, as a fraction.
        chance: The main score of a guess.
        score: The score, with its margins and how it is shown.
        untrained: The accuracy by sample before any training, of the samples that judge.
        elsewhere: What attacks recovered elsewhere behind a defense, by its label.
    """

    plain: Outcome
    heads: list[Outcome]
    measured: list[Outcome]
    budget: float
    chance: float
    score: MainScore
    untrained: Sequence[float] | None
    elsewhere: Mapping[str, str]


def leak_of(outcome: Outcome) -> Estimate:
    """Return what attacks recovered behind a defense that was attacked."""
    assert outcome.leak is not None  # of heads alone, which are never asked for it
    return outcome.leak


def shown_leak(outcome: Outcome, score: MainScore) -> Estimate:
    """Return the leak with the interval that people read.

    An interval of fractions is within 0 to 1, and has room for what this many messages may not have
    shown.
    """
    leak = leak_of(outcome)
    if leak.low is None or leak.high is None or score.axis_limit != 1.0:
        return leak
    low, _ = open_ends(leak.mean, leak.low, leak.high, max(1, len(outcome.leak_by_message)))
    return Estimate(leak.mean, low, highest_leak(outcome, score))


def highest_leak(outcome: Outcome, score: MainScore) -> float:
    """Return the upper end of the leak's interval, at the stage where it is higher.

    For fractions it is never below what this many messages without any success leave open: 1 -
    0.05^(1/n).
    """
    high_end = leak_of(outcome).high
    shown = high_end if high_end is not None else math.inf
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


def exceeds(x: Mapping[int, float], y: Mapping[int, float], margin: float) -> bool:
    """Return whether x is shown to exceed y by a margin, by a paired, one-sided t-test at 5 %."""
    # Paired: messages differ more among themselves than defenses do on one message.
    differences = np.array([x[number] - y[number] - margin for number in x if number in y])
    if len(differences) < 2:
        return False
    if np.ptp(differences) == 0:  # without noise there is no test
        return bool(differences[0] > 0)
    return bool(ttest_1samp(differences, 0.0, alternative="greater").pvalue < 0.05)


def has_learned(outcome: Outcome, untrained: Sequence[float] | None) -> bool:
    """Return whether a training is shown to have raised accuracy; `None` asks for no test."""
    if untrained is None:
        return True
    return exceeds(outcome.accuracy_by_sample, dict(enumerate(untrained)), 0.0)


def low_end(estimate: Estimate) -> float:
    assert estimate.low is not None  # outcomes of a single message are left out
    return estimate.low
