"""Trials and attacks, and the recommendation that follows from them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers.utils import logging

from ..audit.cells import Cells, write_json, write_text
from ..audit.command import check_specs, load
from ..audit.message_loop import FEWEST_MESSAGES
from ..audit.report.summary import Summary
from ..audit.report.verdicts import AttackScores, MainScore
from ..audit.run import Spec, make_defenses
from ..data.files import load_rows
from ..data.samples import Sample, has_class_labels
from ..defenses import Defense
from ..defenses.measured import recovered_behind
from ..flags import SourceSettings, fill
from ..gradient_map.domain import domain_of_model
from ..logs import errors_alone
from ..models import find_head, label_kind
from ..training.privacy.proofs import chained_defenses
from .choice import Choice, choose, finalists, promising_first
from .evidence import Outcome, shown_leak
from .explanation import percent
from .head_trials import HeadTrials, heads_to_try, public_for, why_no_head
from .intervals import accuracy_over_seeds
from .outcomes import Server, Stages, is_shown_to_reconstruct, outcome_of
from .pace import OutOfTime, Pace
from .rendering import (
    TRAIN_FILE,
    flags_of,
    html_report,
    markdown_table,
    train_command,
    train_file,
    whole_model_flags,
)
from .trial_settings import DEFAULT_DEFENSES, WARMUP, CommandSettings, TrialSettings
from .trials import MOST_RATES, Split, Trials

logger = logging.get_logger(__name__)

MIDDLE_RATES, FEWEST_RATES = 3, 2  # learning rates of a defense, where time is enough, and short

_TOKEN_ACCURACY = (
    " Accuracy is the fraction of tokens that are predicted correctly, a mean over texts."
)
_NO_FLAGS = (
    f"There is no {TRAIN_FILE}, since no flags name a chain or an object of your own: give the "
    "defense itself to GradGuardTrainer, with this learning rate and "
    f"warmup_steps={WARMUP}."
)
_NOTHING_CHOSEN = (
    f"There is no {TRAIN_FILE}, since nothing is recommended: change one of the settings named "
    "above, and run the same command again."
)


def recommend(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample],
    defenses: Spec | Sequence[Spec] | None = None,
    attacks: Spec | Sequence[Spec] | None = None,
    *,
    output: str | os.PathLike[str],
    encoders: Sequence[str] = (),
    public: str | Sequence[Any] | None = None,
    source: SourceSettings | None = None,
    **settings: Any,
) -> Choice:
    """Train a head by proof, and the whole model under measured defenses, and choose one.

    A linear head on the model's own encoder, and on each of `encoders`, trains behind correlated
    noise: its proof bounds every attack. The whole model trains under each defense, at the best
    learning rate for it, and is attacked at both ends of its training. Up to three finalists are
    judged on three more seeds. In `output`: `recommend.json`, `.md` and `.html`, the audits, and,
    if flags can name what is recommended, `train.yaml` for `gradguard train --config`. An
    interrupted run continues where it stopped. Trainings are short: audit the long one too.

    Args:
        model: A classifier of texts, words or images, or a language model, as its training starts.
            It is not changed. Where tokens have labels, accuracy is the fraction predicted
            correctly.
        processing_class: The model's tokenizer or image processor.
        samples: `(text or image, class id)` each, in random order: all the data that is used.
        defenses: Defenses, as for `audit`. Default: noise and pruning in several strengths.
        attacks: Attacks, as for `audit`, which know the noise's covariance. Default: strong quick
            ones.
        output: The folder to write to. It holds private data afterwards.
        encoders: Names of further encoders, for heads by proof.
        public: Texts or images that are nobody's secret, or their file or folder, for heads.
            Default: the sentences that come with this package; for images no head is tried.
        source: Names of the model and the data, for `train.yaml`.
        **settings: Fields of `TrialSettings`.

    Raises:
        ValueError: If there are too few samples, no attack works on `none`, public samples are too
            few or alike, or `audit` refuses the settings.
        FileNotFoundError: If there is no encoder of a name.

    Example:
        >>> few = {"steps": 1, "batch_size": 4, "attacked": 4, "output": "out"}
        >>> texts = [("a fine film", 1), ("the plot is long", 0)] * 20
        >>> choice = recommend(model, tokenizer, texts, "pruning:ratio=0.5", "span", **few)
        >>> [outcome.defense for outcome in choice.outcomes]
        ['none', 'head on the model', 'pruning:ratio=0.5']
    """
    trial_settings, folder = TrialSettings(**settings), Path(output)
    pace = Pace(trial_settings.budget_minutes)
    to_compare = _to_compare(model, defenses)
    for name in encoders:
        find_head(name)  # a misspelt one is refused before anything is trained
    flags = {label: flags_of(defense) for label, defense in to_compare.items()}
    split = Split.draw(samples, trial_settings.attacked, trial_settings.batch_size)
    server = Server(model, processing_class, split, trial_settings, attacks, folder / "audits")
    trials = Trials(model, processing_class, server.modality, split, trial_settings, folder, pace)
    calibrated = {label: trials.calibrated(defense) for label, defense in to_compare.items()}
    no_head = why_no_head(model, public, trial_settings)
    if len(to_compare) == 1 and no_head:
        raise ValueError(f"There is nothing to choose from: name a defense beside none. {no_head}")
    heads = HeadTrials(
        {} if no_head else heads_to_try(model, encoders, source), processing_class,
        int(getattr(model.config, "num_labels", 2)), [] if no_head else public_for(model, public),
        public if isinstance(public, str) else None, split, trial_settings, folder, pace,
    )  # fmt: skip
    comparison = _Comparison(calibrated, trials, server, heads, trial_settings, pace)
    screened, judged = comparison.run()
    guess, score, untrained = comparison.guess, comparison.score, comparison.untrained
    elsewhere = {label: _recovered_elsewhere(d, model) for label, d in to_compare.items()}
    choice = choose(judged, trial_settings.budget, guess, score, untrained, elsewhere)
    final = {outcome.defense: outcome for outcome in judged}
    outcomes = [final.get(outcome.defense, outcome) for outcome in screened]
    by_tokens = server.modality.labels in ("text", "token")
    answer, *explanations = choice.words.split("\n\n")
    is_asked_for = trial_settings.heads  # else it is no news that there is none
    missing = no_head if is_asked_for else ""
    missing = missing or comparison.missing_heads_words()
    paragraphs = [answer, *([missing] if missing else []), *explanations]
    choice = dataclasses.replace(
        choice, outcomes=outcomes, untrained=accuracy_over_seeds([untrained]),
        words="\n\n".join(paragraphs) + _TOKEN_ACCURACY * by_tokens,
        limits=f"{'' if is_asked_for else no_head} {comparison.limits_words()}".strip(),
    )  # fmt: skip
    return _write(choice, flags, heads, guess, trial_settings, folder, score, source)


def _to_compare(model: nn.Module, defenses: Spec | Sequence[Spec] | None) -> dict[str, Defense]:
    check_accuracies(model)
    if defenses is None:
        defenses = DEFAULT_DEFENSES[domain_of_model(model).name]
    return make_defenses("none") | make_defenses(defenses)


def check_accuracies(model: nn.Module) -> None:
    """Refuse a model that predicts numbers or several classes.

    Raises:
        ValueError: If it does; the message names the way out.
    """
    if label_kind(model) in ("number", "several"):
        raise ValueError(
            "recommend compares accuracies, so it takes classifiers and language models: train "
            "under a few defenses yourself, and audit each with --metrics."
        )


def _recovered_elsewhere(defense: Defense, model: nn.Module) -> str:
    """Return what slower attacks than there is time for recovered behind a defense, elsewhere."""
    kind = domain_of_model(model).name
    return "; ".join(
        filter(None, (recovered_behind(link, kind) for link in chained_defenses(defense)))
    )


class _Comparison:
    """The comparison: heads on all seeds, defenses on one, and finalists on others.

    It keeps to the budget of minutes.

    Args:
        defenses: Defenses by label, the undefended first, then in order of preference.
        trials: The trials, which train them.
        server: The server, which attacks them.
        heads: The trials of heads by proof.
        settings: The settings of all trials.
        pace: The pace, which knows the time that is left.
    """

    def __init__(
        self,
        defenses: dict[str, Defense],
        trials: Trials,
        server: Server,
        heads: HeadTrials,
        settings: TrialSettings,
        pace: Pace,
    ) -> None:
        self._defenses, self._trials, self._server = defenses, trials, server
        self._heads = heads
        self._settings, self._pace = settings, pace
        self._stages = dict[str, list[Stages]]()
        self._omitted, self._refused = dict[str, str](), dict[str, str]()  # with why
        self._head_accuracies = dict[str, list[list[float]]]()  # of each training
        self._leaky = dict[str, AttackScores]()
        self._not_judged = list[str]()
        self._messages = settings.attacked // (2 * settings.message_size)  # of a round
        self._attack_seconds = self._judging_seconds = 0.0

    def run(self) -> tuple[list[Outcome], list[Outcome]]:
        """Return all first outcomes, and those of the finalists, if there are any."""
        self.prepare()
        try:
            screened = self.screen()
        except OutOfTime:
            minutes = self._training_seconds(*self._defenses) / 60
            raise ValueError(
                f"budget_minutes={self._settings.budget_minutes:g} ended before one defense was "
                f"compared.{self._trained_so_far()} The same command continues where it stopped: "
                f"run it again, or allow more (a training takes about {minutes:.1f} minutes now; "
                "fewer --steps take less)."
            ) from None
        last = finalists(screened, self._settings.budget, self.guess, self.score)
        if not last and not self._head_accuracies:
            return screened, screened
        judged = self.judge(screened[0], last)
        if not last:  # what was measured explains why nothing of it is chosen
            judged += [outcome for outcome in screened[1:] if outcome.proof is None]
        return screened, judged

    def _trained_so_far(self) -> str:
        """Return a sentence on heads that have no price yet, or nothing."""
        heads = [
            f"{label} ({percent(accuracy_over_seeds(judged))})"
            for label, judged in self._head_accuracies.items()
        ]
        if not heads:
            return ""
        return f" Stored, with its accuracy, but without the undefended one: {', '.join(heads)}."

    def prepare(self) -> None:
        """Measure what is needed anyway and says how long things take.

        These are the untrained model's accuracy, a few training steps, and attacks on it.
        """
        began = time.monotonic()
        self.say("the model before training")
        self.untrained = self._trials.untrained()
        self._judging_seconds = time.monotonic() - began
        self.say("the speed of each defense, by a few steps")
        self._trials.measure_speed(self._defenses)
        # Both ends of two trainings, and of a finalist's on further messages.
        two_trained = 2 * FEWEST_RATES * self._training_seconds(*list(self._defenses)[:2])
        seconds, began = self._round_seconds(rounds=6, trainings=two_trained), time.monotonic()
        self.say("attacks on the undefended model")
        undefended = self._server.attack_undefended(self._defenses["none"], seconds)
        self.guess, self.score = undefended.guess, undefended.main_score
        self._measure_round(undefended, time.monotonic() - began)
        self.say_minutes()
        self._start = undefended

    def say(self, stage: str) -> None:
        """Log a stage that begins, with the time that is left."""
        logger.warning(f"[{max(self._pace.left, 0) / 60:.1f} minutes left] {stage}")

    def say_minutes(self) -> None:
        """Log how long all trials would take, if that is more than the budget."""
        trainings = MIDDLE_RATES * len(self._defenses) + 4 * self._settings.seeds
        seconds = trainings * self._training_seconds(*self._defenses)
        seconds += (len(self._defenses) + 6) * self._attack_seconds
        if seconds > self._pace.left:
            self.say(
                f"all trials of {len(self._defenses) - 1} defenses would take about "
                f"{seconds / 60:.0f} minutes: what does not fit is left out, and named"
            )

    def _training_seconds(self, *labels: str) -> float:
        """Return the seconds of a training and its evaluation, a mean over these defenses."""
        steps = [self._pace.step_of(label) for label in labels]
        return self._settings.steps * sum(steps) / len(steps) + self._judging_seconds

    def _round_seconds(self, rounds: int, trainings: float = 0.0) -> float:
        """Return the seconds for one of `rounds` rounds of attacks, after trainings' seconds."""
        return max(0.0, self._pace.left - trainings) / rounds

    @property
    def _shortest_round(self) -> float:
        """The seconds of a round with as few messages as have an interval."""
        return self._attack_seconds * FEWEST_MESSAGES / self._messages

    def _measure_round(self, attacked: Summary, seconds: float, defenses: int = 1) -> None:
        """Record how long a whole round takes at least: what an earlier run stored took no time."""
        whole = seconds / defenses * self._messages / len(attacked.audit.messages)
        self._attack_seconds = max(self._attack_seconds, whole)

    def _rates(self, *waiting: str) -> int:
        """Return how many learning rates of each of these defenses there is time for."""
        if not self._pace.reserved:  # not even for a comparison: first what the next run needs
            return 1
        count, training = len(waiting), self._training_seconds(*waiting)
        most = int(
            (self._pace.left - self._pace.reserved - count * self._attack_seconds)
            / (count * max(training, 1e-9))
        )
        if most > MIDDLE_RATES:
            return MOST_RATES
        return min(MIDDLE_RATES, max(most, FEWEST_RATES))

    def screen(self) -> list[Outcome]:
        """Return each row's outcome on one seed, and of half of the messages.

        Heads by proof are trained first: they take seconds, and a proof is worth more than another
        measured defense. A defense that leaks too much at the start is never recommended, so it
        waits until the others were tried.

        Raises:
            OutOfTime: If there is no time for one defense.
        """
        outcomes, plain, waiting = list[Outcome](), list[float](), list(self._defenses)
        starts = {"none": self._start}
        self._train_heads()
        while waiting:
            label = waiting.pop(0)
            defense = self._defenses[label]
            try:
                self._reserve(label, len(self._stages), label in starts)
                trainings = FEWEST_RATES * self._training_seconds(label)
                if label not in starts:
                    seconds = self._round_seconds(rounds=4, trainings=trainings)
                    starts[label] = self._attack({label: defense}, "start", seconds, label)
                    leaky = [
                        row for row in starts[label].reconstructions(label)
                        if is_shown_to_reconstruct(row, starts[label])
                    ]  # fmt: skip
                    if leaky and waiting:
                        self._leaky[label] = leaky[0]
                        waiting.append(label)
                        continue
                self.say(f"{label}: training at several learning rates, then attacks")
                rate = self._trials.best(label, defense, self._rates(label, *waiting))
                accuracies = self._trials.judging(label, defense, rate)
                seconds = (
                    self._round_seconds(3) if self._stages else self._round_seconds(5, trainings)
                )
                training = label, defense, rate, None
                end = self._attack({label: defense}, "end", seconds, label, training)
            except OutOfTime:
                if len(outcomes) < 2 and label not in self._leaky:
                    raise
                self._omitted[label] = self._why(label)
                continue
            plain = plain or accuracies
            self._stages[label] = [{"start": starts[label], "end": end}]
            found = self._outcome_of(label, rate, [accuracies], [plain])
            outcomes += found
            for outcome in found:
                self._say(outcome)
            if label == "none":
                outcomes += self._head_outcomes([plain])
        if len(outcomes) < 2:
            raise OutOfTime
        return outcomes

    def _outcome_of(
        self, label: str, rate: float, accuracies: list[list[float]], plain: list[list[float]]
    ) -> list[Outcome]:
        """Return the outcome of a defense of the whole model, or none if no attack was applied."""
        guarantee = self._trials.guarantee_of(self._defenses[label])
        return outcome_of(label, rate, accuracies, plain, self._stages[label], guarantee)

    def _train_heads(self) -> None:
        """Train heads by proof, each on as many seeds as there is time for.

        Time is left for an undefended training and its attack, unless an earlier run had it:
        without them no head has a price.
        """
        self._pace.reserved = self._training_seconds("none") + self._shortest_round
        if self._trials.is_trained("none", self._defenses["none"]):
            self._pace.reserved = self._shortest_round
        if not self._pace.fits(0.0):  # then the next run has time for it, and finds heads stored
            self._pace.reserved = 0.0
        for label in self._heads.encoders:
            self.say(f"{label}: features of all samples once, then trainings")
            judged = list[list[float]]()
            try:
                for seed in (self._settings.seed, *self._trials.final_seeds):
                    judged.append(self._heads.judging(label, seed))
            except OutOfTime:
                if not judged:
                    self._omitted[label] = ""
            except (ValueError, OSError) as error:  # of this encoder: others may do
                self._refused[label] = str(error)
                self.say(f"{label} cannot be tried: {error}")
            if judged:
                self._head_accuracies[label] = judged
                self._say(self._heads.outcome_of(label, judged, judged))

    def _head_outcomes(self, plain: list[list[float]]) -> list[Outcome]:
        """Return the outcomes of heads against undefended trainings."""
        return [
            self._heads.outcome_of(label, judged, plain)
            for label, judged in self._head_accuracies.items()
        ]

    def _reserve(self, label: str, tried: int, is_attacked: bool) -> None:
        """Reserve time for what comes after the trainings of one more defense.

        The first defenses are compared by short rounds if time is short, and as far as it reaches:
        the same command continues. For later ones, time is reserved for the attacks on a finalist,
        and for one more seed.

        Raises:
            OutOfTime: If there is no time for the defense.
        """
        training = self._training_seconds(label)
        attack = self._attack_seconds if tried > 1 else self._shortest_round
        after = attack
        if not tried:
            after += self._training_seconds(*list(self._defenses)[:2][-1:]) + 2 * attack
        elif tried > 1:
            judged = 3 * self._training_seconds(*self._stages)
            after += 4 * attack + judged + self._judging_seconds
        self._pace.reserved = after
        if not self._pace.fits(training + (0.0 if is_attacked else attack)):
            if tried > 1 or (tried and self._head_accuracies):  # heads are a comparison already
                raise OutOfTime
            self._pace.reserved = 0.0

    def _attack(
        self,
        defenses: dict[str, Defense],
        name: str,
        seconds: float,
        label: str = "",
        training: tuple[str, Defense, float, int | None] | None = None,
        half: Literal[0, 1] = 0,
    ) -> Summary:
        """Attack at the start, or after a training, for at most this many seconds.

        Raises:
            OutOfTime: If two messages do not fit.
        """
        if self._shortest_round * len(defenses) > self._pace.left:
            raise OutOfTime
        trained = None if training is None else self._trials.trained(*training)
        number = list(self._defenses).index(label) if label else ""
        began = time.monotonic()
        attacked = self._server.attack(defenses, f"{name}{number}", trained, half, seconds)
        self._measure_round(attacked, time.monotonic() - began, len(defenses))
        return attacked

    def _why(self, label: str) -> str:
        if label not in self._leaky:
            return ""
        leak = self.score.format_estimate(self._leaky[label].scores[self.score.name])
        return f" (before training {self._leaky[label].attack} {self.score.verb} {leak})"

    def _say(self, outcome: Outcome) -> None:
        fact = f"{outcome.defense}: accuracy {percent(outcome.accuracy)}"
        if outcome.proof is not None:
            self.say(f"{fact}, by proof (ε = {outcome.proof.epsilon:.2g})")
            return
        leak = self.score.format_estimate(shown_leak(outcome, self.score))
        self.say(f"{fact}, {outcome.attack} {self.score.verb} {leak}")

    def judge(self, plain: Outcome, last: list[Outcome]) -> list[Outcome]:
        """Judge the undefended training and finalists on as many seeds as time allows.

        Finalists are also attacked on the other half of the messages. Heads were trained before.
        """
        accuracies = dict[str, list[list[float]]]()
        possible, last = last, self._affordable(last)
        compared = [plain, *last]
        for number, seed in enumerate(self._trials.final_seeds):
            attacks = 2 * len(last) * self._attack_seconds if number == 0 else 0.0
            self._pace.reserved = attacks + self._judging_seconds
            to_train = [o.defense for o in compared if not self._has_judged(o, seed)]
            if to_train and not self._pace.fits(len(to_train) * self._training_seconds(*to_train)):
                break
            names = ", ".join(outcome.defense for outcome in compared)
            self.say(f"seed {seed}, to judge: {names}")
            try:  # a seed counts if all have it
                row = [self._judging(outcome, seed) for outcome in compared]
            except OutOfTime:
                break
            for outcome, by_sample in zip(compared, row, strict=True):
                accuracies.setdefault(outcome.defense, []).append(by_sample)
            if number == 0:
                self._attack_finalists(last, seed)
            else:
                for outcome in compared:
                    defense, rate = self._defenses[outcome.defense], outcome.learning_rate
                    self._trials.drop(outcome.defense, defense, rate, seed)
        if not accuracies:  # then the first trials judge, also those that are attacked no further
            self._attack_finalists(last, None)
            compared = [plain, *possible]
            accuracies = {outcome.defense: [self._judging(outcome, None)] for outcome in compared}
        self._not_judged = [o.defense for o in possible if o.defense not in accuracies]
        judged_plain, *judged = (
            judged
            for outcome in compared
            for judged in self._outcome_of(
                outcome.defense, outcome.learning_rate, accuracies[outcome.defense],
                accuracies["none"],
            )
        )  # fmt: skip
        return [judged_plain, *self._head_outcomes(accuracies["none"]), *judged]

    def _affordable(self, last: list[Outcome]) -> list[Outcome]:
        """Return as many finalists as time allows to train and attack again, promising first."""
        self._pace.reserved, kept = 0.0, last
        by_promise = promising_first(last, self._settings.budget, self.guess, self.score)
        for count in range(len(last), 0, -1):
            kept = [outcome for outcome in last if outcome in by_promise[:count]]
            labels = ["none", *(outcome.defense for outcome in kept)]
            seconds = len(labels) * self._training_seconds(*labels)
            if self._pace.fits(seconds + 2 * count * self._attack_seconds):
                break
        return kept

    def _judging(self, outcome: Outcome, seed: int | None) -> list[float]:
        defense = self._defenses[outcome.defense]
        return self._trials.judging(outcome.defense, defense, outcome.learning_rate, seed)

    def _has_judged(self, outcome: Outcome, seed: int) -> bool:
        defense = self._defenses[outcome.defense]
        return self._trials.has_judged(outcome.defense, defense, outcome.learning_rate, seed)

    def _attack_finalists(self, last: list[Outcome], seed: int | None) -> None:
        """Attack finalists on the other half of the messages, as far as there is time."""
        one = {outcome.defense: self._defenses[outcome.defense] for outcome in last}
        if not one:
            return
        with suppress(OutOfTime):
            start = self._attack(one, "final_start", self._round_seconds(rounds=2), half=1)
            for outcome in last:
                self._stages[outcome.defense].append({"start": start})
            for done, outcome in enumerate(last):
                label, rate = outcome.defense, outcome.learning_rate
                training, seconds = (
                    (label, one[label], rate, seed),
                    self._round_seconds(len(last) - done),
                )
                end = self._attack({label: one[label]}, "final_end", seconds, label, training, 1)
                self._stages[label][-1] = {"start": start, "end": end}

    def missing_heads_words(self) -> str:
        """Return which heads by proof there was no time for, or an empty string."""
        missing = [label for label in self._heads.encoders if label in self._omitted]
        if not missing:
            return ""
        return (
            f"There was no time for a {' and a '.join(missing)}, by proof: run the same command "
            "again, which tries it first, and takes the rest from what it stored."
        )

    def limits_words(self) -> str:
        """Return what there was no time for: defenses, and messages of those that were tried."""
        whole = self._messages
        fewer = [
            label for label, halves in self._stages.items()
            if any(len(s.audit.messages) < whole for stages in halves for s in stages.values())
        ]  # fmt: skip
        words = list[str]()
        refused = [f"Not tried: {label}. {why}" for label, why in self._refused.items()]
        if self._omitted:
            omitted = ", ".join(label + why for label, why in self._omitted.items())
            words.append(f"Not tried, for lack of time (--budget_minutes): {omitted}.")
        if self._not_judged:
            words.append(
                f"Trained on one seed alone, so not judged: {', '.join(self._not_judged)}."
            )
        if fewer:
            words.append(_FEWER.format(", ".join(fewer), whole))
        if words:
            words.append("The same command continues.")
            logger.warning(" ".join(words))
        return " ".join(refused + words)


_FEWER = "Time ended some attacks on {} before all {} messages: their intervals are wider."


def _write(
    choice: Choice, flags: Mapping[str, dict[str, Any] | None], heads: HeadTrials, chance: float,
    settings: TrialSettings, folder: Path, score: MainScore, source: SourceSettings | None,
) -> Choice:  # fmt: skip
    chosen, chosen_flags, command = choice.chosen, None, _NOTHING_CHOSEN
    if chosen is not None and chosen.proof is not None:
        chosen_flags = heads.flags_of(chosen.defense)
    elif chosen is not None:
        defense_flags = flags[chosen.defense]
        chosen_flags = defense_flags and {**defense_flags, **whole_model_flags(chosen, settings)}
        command = _NO_FLAGS
    path = folder / TRAIN_FILE
    path.unlink(missing_ok=True)
    if chosen is not None and chosen_flags is not None:
        write_text(path, train_file(choice, chosen_flags, settings, source, folder))
        command = train_command(folder, source, chosen)
    stored = dataclasses.asdict(choice)
    for outcome in filter(None, [stored["chosen"], *stored["outcomes"]]):
        # Long lists that only the tests between defenses need.
        for name in ("accuracy_by_sample", "leak_by_message", "leak_elsewhere"):
            del outcome[name]
    record = {"settings": dataclasses.asdict(settings), "chance": chance, **stored}
    write_json(folder / "recommend.json", record)
    write_text(folder / "recommend.md", markdown_table(choice, score, command))
    write_text(folder / "recommend.html", html_report(choice, chance, settings, score, command))
    return choice


def _task_for(source: SourceSettings) -> str | None:
    """Return the task that was asked for, or a classifier's where labels need one.

    Most pretrained encoders were saved as masked language models, as `train --head` takes them.
    """
    if source.task is not None or find_head(source.model).task.name != "fill-mask":
        return source.task
    rows = load_rows(source.dataset, source.split, source.dataset_config)
    if source.label_column is None and not has_class_labels(rows):
        return None
    logger.warning(
        f"{source.model} was saved as a masked language model, and the data have labels: its "
        "encoder gets a new classifier. --task fill-mask predicts words instead."
    )
    return "text-classification"


def run_recommend(flags: Mapping[str, Any]) -> None:
    """Run `gradguard recommend`: print the explanation and the table of a recommendation.

    Args:
        flags: The flags that were used, by name.

    Raises:
        ValueError: If settings are wrong.
        OSError: If a file cannot be read, or the output folder cannot be written to.
    """
    settings = fill(CommandSettings, flags)
    # Refused before a download: an output that cannot be written to, or a misspelt name.
    Cells(Path(settings.output) / "cells")
    check_specs(settings.defense, settings.attack)
    settings.task = _task_for(settings)
    model, processing_class, samples = load(settings, 1, settings.rows - 1, settings.seed)
    # A Trainer's notices are for who trains: of the chosen defense the page has them.
    with errors_alone(*(f"hf_gradguard.{room}" for room in ("training", "gradient_map"))):
        recommend(
            model, processing_class, samples, settings.defense, settings.attack,
            output=settings.output, encoders=settings.encoder or (), public=settings.public,
            source=settings,
            **{f.name: getattr(settings, f.name) for f in dataclasses.fields(TrialSettings)},
        )  # fmt: skip
    folder = Path(settings.output)
    print((folder / "recommend.md").read_text(encoding="utf-8"))
    print(f"{folder / 'recommend.html'} (the audits beside it hold private samples)")
