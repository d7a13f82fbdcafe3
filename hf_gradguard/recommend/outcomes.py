"""Attacks on samples at the models of trials, and the outcomes of defenses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers.utils import logging

from ..audit.cells import values_of
from ..audit.client import modality_of
from ..audit.message_loop import FEWEST_MESSAGES
from ..audit.report.summary import Summary, summarize
from ..audit.report.verdicts import AttackScores, Estimate
from ..audit.run import Spec, audit, default_attacks
from ..audit.settings import AuditSettings
from ..defenses import Defense
from ..gradient_map.domain import domain_of_model
from .evidence import Outcome
from .intervals import accuracy_over_seeds, mean_over_seeds
from .trial_settings import DEFAULT_ATTACKS, FALLBACK_ATTACKS, TrialSettings
from .trials import Split

logger = logging.get_logger(__name__)

Stages = Mapping[str, Summary]  # what attacks recovered, by stage of a training


class Server:
    """A server that attacks the same samples at every model, knowing the noise's covariance."""

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any,
        split: Split,
        settings: TrialSettings,
        attacks: Spec | Sequence[Spec] | None,
        folder: Path,
    ) -> None:
        self._settings = AuditSettings(
            batch_size=settings.message_size, seed=settings.seed, max_length=settings.max_length,
            noise_known=True, reference=False, word_pairs=0, estimators="none",
        )  # fmt: skip
        self.modality = modality_of(model, processing_class, self._settings)
        self._fallback = "" if attacks else FALLBACK_ATTACKS[domain_of_model(model).name]
        if attacks is None:
            batch = self.modality.batch(split.attacked[: settings.message_size])
            attacks = default_attacks(model, batch, DEFAULT_ATTACKS)
        self._processing_class, self._split = processing_class, split
        self._attacks, self._folder = attacks, folder
        # Nothing is trained on them: a trained sample would fit too well to be a decoy.
        decoys = split.choosing[: settings.decoys]
        self._candidates = [*split.attacked, *decoys] if decoys else None
        self._model, self._reconstructs = model, False

    def attack_undefended(self, undefended: Defense, seconds: float = math.inf) -> Summary:
        """Attack the model as it starts, and choose the attacks of later rounds.

        Slower attacks are added if the quick ones reconstruct little. Each round stops between two
        messages before it takes longer than `seconds`.
        """
        summary = self.attack({"none": undefended}, "undefended", seconds=seconds)
        rows = summary.reconstructions("none")
        if self._fallback and not any(_is_likely_to_reconstruct(row, summary) for row in rows):
            self._attacks = f"{self._attacks},{self._fallback}"
            summary = self.attack({"none": undefended}, "undefended", seconds=seconds)
            rows = summary.reconstructions("none")
        self._reconstructs = any(_is_likely_to_reconstruct(row, summary) for row in rows)
        return summary

    def attack(
        self,
        defenses: dict[str, Defense],
        name: str,
        model: nn.Module | None = None,
        half: Literal[0, 1] = 0,
        seconds: float = math.inf,
    ) -> Summary:
        """Attack half of the messages, at the start of training or at a trained model.

        It stops between two messages before it takes longer than `seconds`, but not before the
        second message.
        """
        specs = [{label: defense} for label, defense in defenses.items()]
        middle = len(self._split.attacked) // 2
        samples = self._split.attacked[half * middle : (half + 1) * middle]
        # Ranking them takes as long as a reconstruction, and decides nothing where that works.
        is_needed = half or "none" in defenses or not self._reconstructs
        candidates = self._candidates if is_needed else None
        minutes = None if math.isinf(seconds) else max(seconds, 1e-3) / 60
        settings = dataclasses.replace(self._settings, budget_minutes=minutes)
        result = audit(
            model or self._model, self._processing_class, samples, specs, self._attacks,
            candidates=candidates, output=self._folder / name, **dataclasses.asdict(settings),
        )  # fmt: skip
        return summarize(result)


def is_shown_to_reconstruct(row: AttackScores, summary: Summary) -> bool:
    """Return whether an interval shows that an attack recovers clearly more than a guess."""
    low = row.scores[summary.main_score.name].low
    return low is not None and low > summary.guess + summary.main_score.clear_margin


def _is_likely_to_reconstruct(row: AttackScores, summary: Summary) -> bool:
    """Return whether an attack is shown to reconstruct, or its mean says so where time ran out.

    No interval shows it of two messages, and slower attacks would not make up for that.
    """
    mean, enough = row.scores[summary.main_score.name].mean, summary.main_score.clear_margin
    is_clear = bool(summary.unfinished) and mean > summary.guess + enough
    return is_clear or is_shown_to_reconstruct(row, summary)


def outcome_of(
    label: str,
    rate: float,
    accuracies: list[list[float]],
    plain_accuracies: list[list[float]],
    halves: list[Stages],
    guarantee: tuple[float, float] | None = None,
) -> list[Outcome]:
    """Return one outcome, or none with a warning if no attack could be applied to two messages.

    Without an attack it is unknown how private the defense is, and it is not recommended.

    Args:
        label: The label of the defense.
        rate: The learning rate of the training.
        accuracies: The accuracy of each judging sample, for each training.
        plain_accuracies: The accuracy of each judging sample, for each undefended training.
        halves: For each half of the messages, what attacks recovered at each stage.
        guarantee: ε and δ of each row, if the defense has a proof.

    Raises:
        ValueError: If no attack works on the undefended gradient.
    """
    leaks = _leaks(label, halves)
    if not leaks and label == "none":
        raise ValueError(
            "No attack works on this model's undefended gradient: give others (--attack)"
        )
    if not leaks:
        summaries = [summary for stages in halves for summary in stages.values()]
        rows = [row for summary in summaries for row in summary.rows if row.defense == label]
        why = dict.fromkeys(text for row in rows for text in (*row.reasons, *row.crashes))
        logger.warning(
            f"{label} is left out: no attack could be applied to two messages. "
            f"{' '.join(why) or 'Give others (--attack).'}"
        )
        return []
    # The worse stage counts: a server keeps every message.
    stage = max(leaks, key=lambda stage: (leaks[stage].mean, len(leaks[stage].by_message)))
    by_message = leaks[stage].by_message
    elsewhere = next((leak.by_message for other, leak in leaks.items() if other != stage), {})
    lost = np.array(plain_accuracies) - np.array(accuracies)
    membership, candidates = _membership(label, halves)
    return [
        Outcome(
            label, rate, accuracy_over_seeds(accuracies), mean_over_seeds(lost, are_fractions=True),
            mean_over_seeds([list(by_message.values())]), leaks[stage].attack, stage, membership,
            candidates, dict(enumerate(np.mean(accuracies, axis=0).tolist())), by_message,
            np.mean(accuracies, axis=1).tolist(), elsewhere, guarantee=guarantee,
        )
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Leak:
    """The leak by the attack that recovered most at a stage."""

    attack: str
    by_message: Mapping[int, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.by_message.values())))


def _leaks(label: str, halves: list[Stages]) -> dict[str, _Leak]:
    """Return leaks by stage, of attacks that were applied to two messages or more."""
    found = dict[tuple[str, str], dict[int, float]]()
    for half, stages in enumerate(halves):
        for stage, summary in stages.items():
            # By their places among all: a round that time ended has fewer.
            first = half * summary.audit.settings["messages"]
            for row in summary.reconstructions(label):
                by_message = found.setdefault((stage, row.attack), {})
                recovered = _by_message(summary, row)
                by_message |= {first + number: leak for number, leak in recovered.items()}
    leaks = dict[str, _Leak]()
    for (stage, attack), by_message in found.items():
        leak = _Leak(attack, by_message)
        if len(by_message) >= FEWEST_MESSAGES:
            leaks[stage] = max(leaks.get(stage, leak), leak, key=lambda one: one.mean)
    return leaks


def _by_message(summary: Summary, row: AttackScores) -> dict[int, float]:
    """Return the mean of each message's main scores."""
    pair, score = (row.defense, row.attack), summary.main_score.name
    cells = [cell for cell in summary.audit.cells if (cell["defense"], cell["attack"]) == pair]
    return {number: float(np.mean(values[score])) for number, values in values_of(cells).items()}


def _membership(label: str, halves: list[Stages]) -> tuple[Estimate | None, int]:
    """Return the largest fraction of members that was identified, and the number of candidates."""
    summaries = [summary for stages in halves for summary in stages.values()]
    rows = [row for summary in summaries for row in summary.membership if row.defense == label]
    fractions = [(row.scores["top1"], row.candidates) for row in rows]
    inferred = [fraction for fraction in fractions if fraction[0].low is not None]
    return max(inferred, key=lambda pair: pair[0].mean, default=(None, 0))
