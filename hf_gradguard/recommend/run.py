"""Trials and attacks, and what is recommended of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers.utils import logging

from ..audit.cells import write_json, write_text
from ..audit.client import modality_of
from ..audit.command import check_specs, load
from ..audit.report.summary import Summary, summarize, values_of
from ..audit.report.verdicts import AttackScores, Estimate, MainScore
from ..audit.run import Spec, audit, default_attacks, make_defenses
from ..audit.settings import AuditSettings, check_required
from ..data.samples import Sample
from ..defenses import Defense
from ..gradient_map.domain import domain_of_model
from ..models import label_kind
from .choice import Choice, Outcome, choose, configuration, flags_of, html_report, markdown_table
from .settings import DEFAULT_ATTACKS, DEFAULT_DEFENSES, WARMUP, CommandSettings, TrialSettings
from .trials import Split, Trials

logger = logging.get_logger(__name__)

_TOKEN_ACCURACY = " Accuracy is the share of tokens that are predicted right, a mean over texts."
_NO_FLAGS = (
    " No flags name a chain or an object of your own, so there is no recommended.yaml: give the "
    "defense itself to GradGuardTrainer, with this learning rate and "
    f"warmup_steps={WARMUP}."
)


def recommend(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample],
    defenses: Spec | Sequence[Spec] | None = None,
    attacks: Spec | Sequence[Spec] | None = None,
    *,
    output: str | os.PathLike[str],
    **settings: Any,
) -> Choice:
    """Train a model for a few steps under each defense, attack each, and say which to train with.

    Each defense trains at its own best learning rate, and is attacked at both ends of its training.
    In `output`: `recommend.json`, `.md` and `.html`, the audits, and, if flags can name what is
    recommended, `recommended.yaml` for the recipes' `--config`. An interrupted run goes on.

    It measures short trainings: audit the long one too. Membership inference decides only where
    nothing can be reconstructed.

    Args:
        model: A classifier of texts, words or images, or a language model, as its training starts.
            Left as it was. Where tokens have labels, accuracy is the share predicted right.
        processing_class: Its tokenizer or image processor.
        samples: `(text or image, class id)` each, in random order: all the data that is used.
        defenses: As for `audit`. Default: noise and pruning in several strengths.
        attacks: As for `audit`, knowing the noise's covariance. Default: strong quick ones.
        output: Folder to write to. Holds private data afterwards.
        **settings: Fields of `TrialSettings`.

    Raises:
        ValueError: If samples are too few, no attack works on `none`, or as `audit` says.

    Example:
        >>> few = {"steps": 1, "batch_size": 4, "attacked": 2, "output": "out"}
        >>> texts = [("a fine film", 1), ("the plot is long", 0)] * 20
        >>> choice = recommend(model, tokenizer, texts, "pruning", "span", **few)
        >>> [outcome.defense for outcome in choice.outcomes]
        ['none', 'pruning']
    """
    trial_settings, folder = TrialSettings(**settings), Path(output)
    to_compare = _to_compare(model, defenses)
    flags = {label: flags_of(defense) for label, defense in to_compare.items()}
    split = Split.draw(samples, trial_settings.attacked, trial_settings.batch_size)
    server = _Server(model, processing_class, split, trial_settings, attacks, folder / "audits")
    trials = Trials(model, processing_class, server.modality, split, trial_settings, folder)
    # Attacks meet the noise that the training of this length would add.
    to_compare = {label: trials.calibrated(defense) for label, defense in to_compare.items()}
    # At the start all defenses share one model, so one audit serves all.
    start = server.attack(model, to_compare, "start")
    outcomes, plain = list[Outcome](), list[float]()
    for number, (label, defense) in enumerate(logging.tqdm(to_compare.items(), desc="defenses")):
        rate, cell = trials.best(label, defense)
        plain = plain or cell["judging"]
        trained_model = trials.trained(label, defense, rate)
        end = server.attack(trained_model, {label: defense}, f"end{number}")
        outcomes += _outcome(label, rate, cell["judging"], plain, {"start": start, "end": end})
    choice = choose(outcomes, trial_settings.budget, start.guess, start.main_score)
    if server.modality.labels in ("text", "token"):
        choice = dataclasses.replace(choice, words=choice.words + _TOKEN_ACCURACY)
    return _write(choice, flags, start.guess, trial_settings, folder, start.main_score)


def _to_compare(model: nn.Module, defenses: Spec | Sequence[Spec] | None) -> dict[str, Defense]:
    if label_kind(model) in ("number", "several"):
        raise ValueError(
            "recommend compares accuracies, so it takes classifiers and language models: train "
            "under a few defenses yourself, and audit each with --metrics."
        )
    if defenses is None:
        defenses = DEFAULT_DEFENSES[domain_of_model(model).name]
    to_compare = make_defenses("none") | make_defenses(defenses)
    if len(to_compare) == 1:
        raise ValueError("There is nothing to choose from: name a defense beside none.")
    return to_compare


class _Server:
    """Attacks the same samples at every model, knowing the noise's covariance."""

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
            noise_known=True, reference=False,
        )  # fmt: skip
        self.modality = modality_of(model, processing_class, self._settings)
        if attacks is None:
            batch = self.modality.batch(split.attacked[: settings.message_size])
            attacks = default_attacks(model, batch, DEFAULT_ATTACKS)
        self._processing_class, self._split = processing_class, split
        self._attacks, self._folder = attacks, folder
        # Nothing is trained on them: a trained sample would fit too well to be a decoy.
        decoys = split.choosing[: settings.decoys]
        self._candidates = [*split.attacked, *decoys] if decoys else None

    def attack(self, model: nn.Module, defenses: dict[str, Defense], name: str) -> Summary:
        specs = [{label: defense} for label, defense in defenses.items()]
        result = audit(
            model, self._processing_class, self._split.attacked, specs, self._attacks,
            candidates=self._candidates, output=self._folder / name,
            **dataclasses.asdict(self._settings),
        )  # fmt: skip
        return summarize(result)


def _outcome(
    label: str, rate: float, accuracies: list[float], plain: list[float], stages: dict[str, Summary]
) -> list[Outcome]:
    """One. Or none, with a warning, if no attack could be applied to two messages: then it is
    unknown how private the defense is, and it is not recommended.
    """
    leaks = [
        (row.scores[summary.main_score.name], row, stage)
        for stage, summary in stages.items()
        for row in summary.reconstructions(label)
        if row.has_interval
    ]
    if not leaks and label == "none":
        raise ValueError(
            "No attack works on this model's undefended gradient: give others (--attack)"
        )
    if not leaks:
        rows = [row for summary in stages.values() for row in summary.rows if row.defense == label]
        why = dict.fromkeys(text for row in rows for text in (*row.reasons, *row.crashes))
        logger.warning(
            f"{label} is left out: no attack could be applied to two messages. "
            f"{' '.join(why) or 'Give others (--attack).'}"
        )
        return []
    # The worse stage counts: a server keeps every message.
    leak, row, stage = max(leaks, key=lambda leak: leak[0].mean)
    lost = np.array(plain) - np.array(accuracies)
    membership, candidates = _membership(label, stages)
    return [
        Outcome(
            label, rate, _mean(accuracies), _mean(lost), leak, row.attack, stage, membership,
            candidates, dict(enumerate(accuracies)), _by_message(stages[stage], row),
        )
    ]  # fmt: skip


def _by_message(summary: Summary, row: AttackScores) -> dict[int, float]:
    """The mean of each message's main scores."""
    pair, score = (row.defense, row.attack), summary.main_score.name
    cells = [cell for cell in summary.audit.cells if (cell["defense"], cell["attack"]) == pair]
    return {number: float(np.mean(values[score])) for number, values in values_of(cells).items()}


def _membership(label: str, stages: Mapping[str, Summary]) -> tuple[Estimate | None, int]:
    """The share of members identified at the worse stage, and the number of candidates."""
    rows = [item for summary in stages.values() for item in summary.membership]
    rows = [item for item in rows if item.defense == label]
    shares = [(row.scores["top1"], row.candidates) for row in rows]
    inferred = [share for share in shares if share[0].low is not None]
    return max(inferred, key=lambda pair: pair[0].mean, default=(None, 0))


def _mean(values: Any) -> Estimate:
    """Of samples, with the normal 95 % interval."""
    values = np.asarray(values, dtype=float)
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    mean = values.mean()
    return Estimate(float(mean), float(mean - half), float(mean + half))


def _write(
    choice: Choice, flags: Mapping[str, dict[str, Any] | None], chance: float,
    settings: TrialSettings, folder: Path, score: MainScore,
) -> Choice:  # fmt: skip
    chosen_flags = None if choice.chosen is None else flags[choice.chosen.defense]
    if choice.chosen is not None and chosen_flags is None:
        choice = dataclasses.replace(choice, words=choice.words + _NO_FLAGS)
    stored = dataclasses.asdict(choice)
    for outcome in filter(None, [stored["chosen"], *stored["outcomes"]]):
        # Long lists that only the tests between defenses need.
        del outcome["accuracy_by_sample"], outcome["leak_by_message"]
    record = {"settings": dataclasses.asdict(settings), "chance": chance, **stored}
    write_json(folder / "recommend.json", record)
    write_text(folder / "recommend.md", markdown_table(choice, score))
    write_text(folder / "recommend.html", html_report(choice, chance, settings, score))
    path = folder / "recommended.yaml"
    path.unlink(missing_ok=True)
    if chosen_flags is not None:
        write_text(path, configuration(choice, chosen_flags, settings))
    return choice


def run_recommend(flags: Mapping[str, Any]) -> None:
    """`gradguard recommend`: print the words and the table of a recommendation on disk.

    Args:
        flags: Those that were used, by name.

    Raises:
        ValueError: For settings that are missing or wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    settings = CommandSettings(**flags)
    check_required(settings)
    check_specs(settings.defense, settings.attack)  # a misspelt name is refused before a download
    model, processing_class, samples = load(settings, 1, settings.rows - 1, settings.seed)
    recommend(
        model,
        processing_class,
        samples,
        settings.defense,
        settings.attack,
        output=settings.output,
        **{f.name: getattr(settings, f.name) for f in dataclasses.fields(TrialSettings)},
    )
    folder = Path(settings.output)
    print((folder / "recommend.md").read_text(encoding="utf-8"))
    print(f"{folder / 'recommend.html'} (the audits beside it hold private samples)")
    if (folder / "recommended.yaml").exists():
        print(f"Train with it: --config {folder / 'recommended.yaml'}")
