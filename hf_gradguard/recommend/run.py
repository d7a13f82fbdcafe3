"""Trials and attacks, and what is recommended of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from transformers.utils import logging

from ..audit.cells import write_json, write_text
from ..audit.client import modality_of
from ..audit.command import load
from ..audit.report.summary import Summary, summarize, values_of
from ..audit.report.verdicts import TERMS, Row
from ..audit.run import Spec, audit, check_specs, make_defenses, usual_attacks
from ..audit.settings import AuditSettings
from ..data.samples import Sample
from ..defenses import Defense
from ..gradient_map.domain import domain_of_model
from ..models import label_kind
from .choice import (
    Choice,
    Estimate,
    Outcome,
    choose,
    configuration,
    flags_of,
    html_report,
    markdown_table,
)
from .settings import DEFAULT_ATTACKS, DEFAULT_DEFENSES, WARMUP, CommandSettings, TrialSettings
from .trials import Split, Trials

logger = logging.get_logger(__name__)


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
    """Train a model for a few steps under each defense, each at its own best learning rate, attack
    each at the start and at the end of its own training, and say which one to train with.

    In `output`: `recommend.json`, `recommend.md`, `recommend.html`, the audits, and, if one is
    recommended that flags can name, `recommended.yaml`, for `--config` of `recipes/sst2.py` or
    `image_classification.py`. Trainings and attacks are kept: an interrupted run goes on.

    It measures short trainings: audit the long one as well. What an attacker who has a list of
    candidates names is said beside it; he decides only where no search reads anything.

    Args:
        model: A classifier of texts, words or images, or a language model, as its training starts.
            Left as it was. Where tokens have labels, accuracy is the share predicted right.
        processing_class: Its tokenizer or image processor.
        samples: `(text or image, class id)` each, in random order: all the data that is used.
        defenses: As for `audit`. Default: noise and pruning in several strengths.
        attacks: As for `audit`, by who knows the noise's covariance. Default: strong quick ones.
        output: Folder to write to. Holds private data afterwards.
        **settings: Fields of `TrialSettings`.

    Raises:
        ValueError: If samples are too few, no attack reads `none`, or as `audit` says.

    Example:
        >>> texts = [("a fine film", 1), ("the plot is long", 0)] * 20
        >>> few = {"steps": 1, "batch_size": 4, "attacked": 2}
        >>> found = recommend(model, tokenizer, texts, "pruning", "span", output="out", **few)
        >>> [outcome.defense for outcome in found.outcomes]
        ['none', 'pruning']
    """
    _check_head(model)
    terms, folder, kind = TrialSettings(**settings), Path(output), domain_of_model(model).name
    made = _to_compare(list(DEFAULT_DEFENSES[kind]) if defenses is None else defenses)
    flags = {label: flags_of(one) for label, one in made.items()}  # before models prepare them
    split = Split.of(samples, terms.attacked, terms.batch_size)
    server = _Server(model, processing_class, split, terms, attacks, folder / "audits")
    trials = Trials(model, processing_class, server.modality, split, terms, folder)
    made = {label: trials.calibrated(one) for label, one in made.items()}
    start = server.reads(model, made, "start")
    outcomes: list[Outcome] = []
    plain: list[float] | None = None
    for number, (label, defense) in enumerate(logging.tqdm(made.items(), desc="defenses")):
        rate, cell = trials.best(label, defense)
        plain = plain or cell["judging"]
        end = server.reads(trials.trained(label, defense, rate), {label: defense}, f"end{number}")
        outcomes += _outcome(label, rate, cell["judging"], plain, {"start": start, "end": end})
    said, chance = TERMS[kind], start.chance.scores[start.terms.score].mean
    choice = choose(outcomes, terms.budget, chance, said.scale, f" {said.unit}")
    return _write(_measured(choice, server.modality.labels), flags, chance, terms, folder, kind)


def _to_compare(asked: Spec | Sequence[Spec]) -> dict[str, Defense]:
    made = make_defenses("none") | make_defenses(asked)
    if len(made) == 1:
        raise ValueError("There is nothing to choose from: name a defense beside none.")
    return made


def _check_head(model: nn.Module) -> None:
    if label_kind(model) in ("number", "several"):
        raise ValueError(
            "recommend compares accuracies, so it takes classifiers and language models: train "
            "under a few defenses yourself, and audit each with --metrics."
        )


def _measured(choice: Choice, labels: str) -> Choice:
    """Says what accuracy is, where a sample has many labels."""
    if labels not in ("text", "token"):
        return choice
    words = " Accuracy is the share of tokens that are predicted right, a mean over texts."
    return dataclasses.replace(choice, words=choice.words + words)


class _Server:
    """Attacks the same samples at every model, knowing the noise's covariance."""

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any,
        split: Split,
        trial: TrialSettings,
        attacks: Spec | Sequence[Spec] | None,
        folder: Path,
    ) -> None:
        self._terms = AuditSettings(
            batch_size=trial.message_size, seed=trial.seed, max_length=trial.max_length,
            noise_known=True, reference=False,
        )  # fmt: skip
        self.modality = modality_of(model, processing_class, self._terms)
        if attacks is None:
            batch = self.modality.batch(split.attacked[: trial.message_size])
            attacks = usual_attacks(model, batch, DEFAULT_ATTACKS)
        self._processing_class, self._split = processing_class, split
        self._attacks, self._folder = attacks, folder
        others = split.choosing[: trial.decoys]
        self._listed = [*split.attacked, *others] if others else None

    def reads(self, model: nn.Module, defenses: dict[str, Defense], name: str) -> Summary:
        specs = [{label: defense} for label, defense in defenses.items()]
        found = audit(
            model, self._processing_class, self._split.attacked, specs, self._attacks,
            candidates=self._listed, output=self._folder / name,
            **dataclasses.asdict(self._terms),
        )  # fmt: skip
        return summarize(found)


class _Told(NamedTuple):
    """What an attack read of a defense."""

    leak: Any
    attack: str
    stage: str
    messages: dict[int, float]


def _told(label: str, stages: dict[str, Summary]) -> list[_Told]:
    """What attackers who have no list read of a defense; nothing, with a warning, if none could be
    applied to two messages: then nobody knows what it hides, and it is not recommended.
    """
    told = [
        _Told(row.scores[summary.terms.score], row.attack, stage, _messages(summary, row))
        for stage, summary in stages.items()
        for row in summary.rows
        if row.defense == label
        and row.scores
        and not _ranks(summary, row.attack)
        and row.scores[summary.terms.score].low is not None
    ]
    if not told and label == "none":
        raise ValueError("No attack reads this model's undefended gradient: give others (--attack)")
    if not told:
        rows = [row for one in stages.values() for row in one.rows if row.defense == label]
        why = dict.fromkeys(said for row in rows for said in (*row.reasons, *row.crashes))
        logger.warning(
            f"{label} is left out: no attack could be applied to two messages. "
            f"{' '.join(why) or 'Give others (--attack).'}"
        )
    return told


def _messages(summary: Summary, row: Row) -> dict[int, float]:
    """The mean of each message's main scores."""
    place = (row.defense, row.attack)
    own = [cell for cell in summary.audit.cells if (cell["defense"], cell["attack"]) == place]
    score = summary.terms.score
    return {number: float(np.mean(found[score])) for number, found in values_of(own).items()}


def _ranks(summary: Summary, attack: str) -> bool:
    return any(attack == one.attack for one in summary.ranked)


def _named(label: str, stages: Iterable[Summary]) -> tuple[Estimate | None, int]:
    """The share of samples that who has a list names at the worse stage, and its length."""
    found = [
        one
        for summary in stages
        for one in summary.ranked
        if one.defense == label and one.scores["top1"].low is not None
    ]
    if not found:
        return None, 0
    worst = max(found, key=lambda one: one.scores["top1"].mean)
    return _estimate(worst.scores["top1"]), worst.candidates


def _outcome(
    label: str, rate: float, right: list[float], plain: list[float], stages: dict[str, Summary]
) -> list[Outcome]:
    """One, or none if no attack could be applied."""
    told = _told(label, stages)
    if not told:
        return []
    most = max(told, key=lambda one: one.leak.mean)
    lost = np.array(plain) - np.array(right)
    figures = (_mean(right), _mean(lost), _estimate(most.leak), most.attack, most.stage)
    named = _named(label, stages.values())
    return [Outcome(label, rate, *figures, *named, dict(enumerate(right)), most.messages)]


def _estimate(audited: Any) -> Estimate:
    return Estimate(audited.mean, audited.low, audited.high)


def _mean(values: Any) -> Estimate:
    """Of samples, with the normal 95 % interval."""
    found = np.asarray(values, dtype=float)
    half = 1.96 * found.std(ddof=1) / np.sqrt(len(found))
    return Estimate(float(found.mean()), float(found.mean() - half), float(found.mean() + half))


def _write(
    choice: Choice, flags: Mapping[str, dict[str, Any] | None], chance: float,
    terms: TrialSettings, folder: Path, kind: str,
) -> Choice:  # fmt: skip
    named = None if choice.chosen is None else flags[choice.chosen.defense]
    if choice.chosen is not None and named is None:
        choice = dataclasses.replace(choice, words=choice.words + _NO_FLAGS)
    stored = dataclasses.asdict(choice)
    for outcome in filter(None, [stored["chosen"], *stored["outcomes"]]):
        del outcome["right"], outcome["read"]  # sample by sample
    settings = dataclasses.asdict(terms)
    write_json(folder / "recommend.json", {"settings": settings, "chance": chance, **stored})
    write_text(folder / "recommend.md", markdown_table(choice, TERMS[kind]))
    write_text(folder / "recommend.html", html_report(choice, chance, terms, TERMS[kind]))
    path = folder / "recommended.yaml"
    path.unlink(missing_ok=True)
    if named is not None:
        write_text(path, configuration(choice, named, terms))
    return choice


_NO_FLAGS = (
    " No flags name a chain or an object of your own, so there is no recommended.yaml: give the "
    "defense itself to GradGuardTrainer, with this learning rate, scale_learning_rate=False and "
    f"warmup_steps={WARMUP}."
)


def run_recommend(given: Mapping[str, Any]) -> None:
    """Recommend a defense for a model and data, and print the words and the table.

    Args:
        given: Flags that were given, by name.

    Raises:
        ValueError: For settings that are missing or wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    settings = CommandSettings(**given)
    required = ("model", "dataset", "output")
    if missing := [f"--{name}" for name in required if not getattr(settings, name)]:
        raise ValueError(f"{', '.join(missing)} must be given.")
    check_specs(settings.defense, settings.attack)  # a misspelt name is said before a download
    loaded = load(settings, count=1, spare=settings.rows - 1, seed=settings.seed)
    recommend(
        loaded.model,
        loaded.processing_class,
        loaded.samples,
        settings.defense,
        settings.attack,
        output=settings.output,
        **{field.name: getattr(settings, field.name) for field in fields(TrialSettings)},
    )
    folder = Path(settings.output)
    print((folder / "recommend.md").read_text(encoding="utf-8"))
    print(f"{folder / 'recommend.html'} (the audits beside it hold private samples)")
    if (folder / "recommended.yaml").exists():
        print(f"Train with it: --config {folder / 'recommended.yaml'}")
