"""Trials and attacks, and what is recommended of them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers.utils import logging

from ..audit.cells import values_of, write_json, write_text
from ..audit.client import modality_of
from ..audit.command import check_specs, load
from ..audit.report.summary import Summary, summarize
from ..audit.report.verdicts import AttackScores, Estimate, MainScore
from ..audit.run import Spec, audit, default_attacks, make_defenses
from ..audit.settings import AuditSettings
from ..data.samples import Sample
from ..defenses import Defense
from ..flags import SourceSettings, fill
from ..gradient_map.domain import domain_of_model
from ..models import label_kind
from .choice import (
    Choice,
    Outcome,
    accuracy_over_seeds,
    choose,
    finalists,
    mean_over_seeds,
)
from .page import (
    TRAIN_FILE,
    flags_of,
    html_report,
    markdown_table,
    train_command,
    train_flags,
)
from .settings import DEFAULT_ATTACKS, DEFAULT_DEFENSES, WARMUP, CommandSettings, TrialSettings
from .trials import Split, Trials

logger = logging.get_logger(__name__)

Stages = Mapping[str, Summary]  # what attacks recovered, by stage of a training

_TOKEN_ACCURACY = " Accuracy is the share of tokens that are predicted right, a mean over texts."
_NO_FLAGS = (
    " No flags name a chain or an object of your own, so there is no train.yaml: give the "
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
    source: SourceSettings | None = None,
    **settings: Any,
) -> Choice:
    """Train a model for a few steps under each defense, attack each, and say which to train with.

    Each defense trains at its own best learning rate, and is attacked at both ends of its training.
    Up to three finalists are judged on three more seeds. In `output`: `recommend.json`, `.md` and
    `.html`, the audits, and, if flags can name what is recommended, `train.yaml` for `gradguard
    train --config`. An interrupted run goes on. Trainings are short: audit the long one too.

    Args:
        model: A classifier of texts, words or images, or a language model, as its training starts.
            Left as it was. Where tokens have labels, accuracy is the share predicted right.
        processing_class: Its tokenizer or image processor.
        samples: `(text or image, class id)` each, in random order: all the data that is used.
        defenses: As for `audit`. Default: noise and pruning in several strengths.
        attacks: As for `audit`, knowing the noise's covariance. Default: strong quick ones.
        output: Folder to write to. Holds private data afterwards.
        source: Names of the model and the data, for `train.yaml`.
        **settings: Fields of `TrialSettings`.

    Raises:
        ValueError: If samples are too few, no attack works on `none`, or as `audit` says.

    Example:
        >>> few = {"steps": 1, "batch_size": 4, "attacked": 4, "output": "out"}
        >>> texts = [("a fine film", 1), ("the plot is long", 0)] * 20
        >>> choice = recommend(model, tokenizer, texts, "pruning:ratio=0.5", "span", **few)
        >>> [outcome.defense for outcome in choice.outcomes]
        ['none', 'pruning:ratio=0.5']
    """
    trial_settings, folder = TrialSettings(**settings), Path(output)
    to_compare = _to_compare(model, defenses)
    flags = {label: flags_of(defense) for label, defense in to_compare.items()}
    split = Split.draw(samples, trial_settings.attacked, trial_settings.batch_size)
    server = _Server(model, processing_class, split, trial_settings, attacks, folder / "audits")
    trials = Trials(model, processing_class, server.modality, split, trial_settings, folder)
    calibrated = {label: trials.calibrated(defense) for label, defense in to_compare.items()}
    comparison = _Comparison(calibrated, trials, server, trial_settings)
    screened, judged = comparison.run()
    guess, score = comparison.guess, comparison.score
    untrained = trials.untrained()
    choice = choose(judged, trial_settings.budget, guess, score, untrained)
    final = {outcome.defense: outcome for outcome in judged}
    outcomes = [final.get(outcome.defense, outcome) for outcome in screened]
    words = choice.words + comparison.omitted_words()
    if server.modality.labels in ("text", "token"):
        words += _TOKEN_ACCURACY
    choice = dataclasses.replace(
        choice, outcomes=outcomes, words=words, untrained=accuracy_over_seeds([untrained])
    )
    return _write(choice, flags, guess, trial_settings, folder, score, source)


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


class _Comparison:
    """First trials of all defenses on one seed, then of finalists on others.

    Args:
        defenses: By label, the undefended first, then in order of preference.
        trials: Trains them.
        server: Attacks them.
        settings: Of all.
    """

    def __init__(
        self, defenses: dict[str, Defense], trials: Trials, server: _Server, settings: TrialSettings
    ) -> None:
        self._defenses, self._trials, self._server = defenses, trials, server
        self._settings, self._began = settings, time.monotonic()
        self._stages = dict[str, list[Stages]]()
        self._omitted = list[str]()
        self._attack_seconds = self._step_seconds = 0.0

    def run(self) -> tuple[list[Outcome], list[Outcome]]:
        """All of the first trials, and what judges the finalists, where there are any."""
        self.say_minutes()
        screened = self.screen()
        last = finalists(screened, self._settings.budget, self.guess, self.score)
        return screened, self.judge(screened[0], last) if last else screened

    def say_minutes(self) -> None:
        """How long it will take, by a few steps and by attacks on the undefended model, which are
        needed anyway.
        """
        began = time.monotonic()
        self._start = self._server.attack({"none": self._defenses["none"]}, "undefended")
        self._attack_seconds = time.monotonic() - began
        self._step_seconds = self._trials.step_seconds()
        self.guess, self.score = self._start.guess, self._start.main_score
        minutes = (len(self._defenses) * self._one_seconds() + self._final_seconds()) / 60
        limit = self._settings.budget_minutes
        logger.warning(
            f"recommend takes about {minutes:.0f} minutes for {len(self._defenses) - 1} defenses, "
            f"and at most about {limit:g} (budget_minutes); what does not fit is left out. Stop it "
            "when you like: the same command goes on."
        )

    def _one_seconds(self) -> float:
        """Of a defense: a training for each rate, with one beyond an end, and attacks at both."""
        return 4 * self._settings.steps * self._step_seconds + 2 * self._attack_seconds

    def _final_seconds(self) -> float:
        """Of three finalists and the undefended one."""
        trainings = 4 * self._settings.seeds * self._settings.steps * self._step_seconds
        return trainings + 3 * 2 * self._attack_seconds

    def _fits(self) -> bool:
        """Whether there is time for one more defense, and for finalists after it."""
        seconds = time.monotonic() - self._began + self._one_seconds() + self._final_seconds()
        return seconds <= 60 * self._settings.budget_minutes

    def screen(self) -> list[Outcome]:
        """Each defense at the best of its rates, on one seed and half of the messages. The first
        one is always tried.
        """
        outcomes, plain = list[Outcome](), list[float]()
        for number, (label, defense) in enumerate(self._defenses.items()):
            if number > 1 and not self._fits():
                self._omitted.append(label)
                continue
            one = {label: defense}
            start = self._start if label == "none" else self._server.attack(one, f"start{number}")
            rate, cell = self._trials.best(label, defense)
            plain = plain or cell["judging"]
            trained = self._trials.trained(label, defense, rate)
            end = self._server.attack(one, f"end{number}", trained)
            self._stages[label] = [{"start": start, "end": end}]
            outcomes += outcome_of(label, rate, [cell["judging"]], [plain], self._stages[label])
        return outcomes

    def judge(self, plain: Outcome, last: list[Outcome]) -> list[Outcome]:
        """The undefended training and the finalists, on seeds that chose nothing; finalists on the
        other half of the messages too.
        """
        trials, outcomes, plain_right = self._trials, list[Outcome](), list[list[float]]()
        for number, outcome in enumerate([plain, *last]):
            label, rate = outcome.defense, outcome.learning_rate
            defense, stages = self._defenses[label], self._stages[label]
            right = trials.again(label, defense, rate)
            plain_right = plain_right or right
            if label != "none":
                one, seed = {label: defense}, trials.final_seeds[0]
                trained = trials.trained(label, defense, rate, seed)
                start = self._server.attack(one, f"final_start{number}", half=1)
                end = self._server.attack(one, f"final_end{number}", trained, half=1)
                stages = [*stages, {"start": start, "end": end}]
            outcomes += outcome_of(label, rate, right, plain_right, stages)
        return outcomes

    def omitted_words(self) -> str:
        """Which defenses there was no time for."""
        if not self._omitted:
            return ""
        logger.warning(_OMITTED.format(", ".join(self._omitted)))
        return " " + _OMITTED.format(", ".join(self._omitted))


_OMITTED = "Not tried, for lack of time (--budget_minutes): {}."


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
            noise_known=True, reference=False, word_pairs=0, estimators="none",
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
        self._model = model

    def attack(
        self,
        defenses: dict[str, Defense],
        name: str,
        model: nn.Module | None = None,
        half: Literal[0, 1] = 0,
    ) -> Summary:
        """Attack half of the messages, at the start of training or at a trained model."""
        specs = [{label: defense} for label, defense in defenses.items()]
        middle = len(self._split.attacked) // 2
        samples = self._split.attacked[half * middle : (half + 1) * middle]
        result = audit(
            model or self._model, self._processing_class, samples, specs, self._attacks,
            candidates=self._candidates, output=self._folder / name,
            **dataclasses.asdict(self._settings),
        )  # fmt: skip
        return summarize(result)


def outcome_of(
    label: str,
    rate: float,
    right: list[list[float]],
    plain_right: list[list[float]],
    halves: list[Stages],
) -> list[Outcome]:
    """One. Or none, with a warning, if no attack could be applied to two messages: then it is
    unknown how private the defense is, and it is not recommended.

    Args:
        label: Of the defense.
        rate: Its learning rate.
        right: Of each training, which judging samples are right.
        plain_right: The same undefended.
        halves: Of the messages: what attacks recovered at each stage.
    """
    leaks = dict[tuple[str, str], dict[int, float]]()
    for stages in halves:
        for stage, summary in stages.items():
            for row in summary.reconstructions(label):
                if row.has_interval:
                    by_message = leaks.setdefault((row.attack, stage), {})
                    first = len(by_message)
                    recovered = _by_message(summary, row)
                    by_message |= {first + number: leak for number, leak in recovered.items()}
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
    attack, stage = max(leaks, key=lambda place: float(np.mean(list(leaks[place].values()))))
    by_message = leaks[attack, stage]
    lost = np.array(plain_right) - np.array(right)
    membership, candidates = _membership(label, halves)
    return [
        Outcome(
            label, rate, accuracy_over_seeds(right), mean_over_seeds(lost, are_shares=True),
            mean_over_seeds([list(by_message.values())]), attack, stage, membership, candidates,
            dict(enumerate(np.mean(right, axis=0).tolist())), by_message,
            np.mean(right, axis=1).tolist(),
        )
    ]  # fmt: skip


def _by_message(summary: Summary, row: AttackScores) -> dict[int, float]:
    """The mean of each message's main scores."""
    pair, score = (row.defense, row.attack), summary.main_score.name
    cells = [cell for cell in summary.audit.cells if (cell["defense"], cell["attack"]) == pair]
    return {number: float(np.mean(values[score])) for number, values in values_of(cells).items()}


def _membership(label: str, halves: list[Stages]) -> tuple[Estimate | None, int]:
    """The share of members identified where it is most, and the number of candidates."""
    summaries = [summary for stages in halves for summary in stages.values()]
    rows = [row for summary in summaries for row in summary.membership if row.defense == label]
    shares = [(row.scores["top1"], row.candidates) for row in rows]
    inferred = [share for share in shares if share[0].low is not None]
    return max(inferred, key=lambda pair: pair[0].mean, default=(None, 0))


def _write(
    choice: Choice, flags: Mapping[str, dict[str, Any] | None], chance: float,
    settings: TrialSettings, folder: Path, score: MainScore, source: SourceSettings | None,
) -> Choice:  # fmt: skip
    chosen_flags = None if choice.chosen is None else flags[choice.chosen.defense]
    if choice.chosen is not None and chosen_flags is None:
        choice = dataclasses.replace(choice, words=choice.words + _NO_FLAGS)
    stored = dataclasses.asdict(choice)
    for outcome in filter(None, [stored["chosen"], *stored["outcomes"]]):
        # Long lists that only the tests between defenses need.
        del outcome["accuracy_by_sample"], outcome["leak_by_message"]
    record = {"settings": dataclasses.asdict(settings), "chance": chance, **stored}
    path, command = folder / TRAIN_FILE, ""
    path.unlink(missing_ok=True)
    if chosen_flags is not None:
        write_text(path, train_flags(choice, chosen_flags, settings, source, folder))
        command = train_command(folder, source)
    write_json(folder / "recommend.json", record)
    write_text(folder / "recommend.md", markdown_table(choice, score, command))
    write_text(folder / "recommend.html", html_report(choice, chance, settings, score, command))
    return choice


def run_recommend(flags: Mapping[str, Any]) -> None:
    """`gradguard recommend`: print the words and the table of a recommendation on disk.

    Args:
        flags: Those that were used, by name.

    Raises:
        ValueError: For settings that are wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    settings = fill(CommandSettings, flags)
    check_specs(settings.defense, settings.attack)  # a misspelt name is refused before a download
    model, processing_class, samples = load(settings, 1, settings.rows - 1, settings.seed)
    recommend(
        model,
        processing_class,
        samples,
        settings.defense,
        settings.attack,
        output=settings.output,
        source=settings,
        **{f.name: getattr(settings, f.name) for f in dataclasses.fields(TrialSettings)},
    )
    folder = Path(settings.output)
    print((folder / "recommend.md").read_text(encoding="utf-8"))
    print(f"{folder / 'recommend.html'} (the audits beside it hold private samples)")
