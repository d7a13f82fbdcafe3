"""Settings of an audit, with defaults and help, for Python, files and flags.

Nothing heavy is imported here, so that `gradguard audit --help` answers at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, Self

from ..flags import SourceSettings, fill, option, read_mapping
from ..registry import ESTIMATORS

_MINIMUM = {
    "batch_size": 1, "accumulation": 1, "repeats": 1, "seed": 0, "max_length": 1,
    "local_steps": 0, "local_epochs": 1, "word_pairs": 0,
}  # fmt: skip


@dataclass(kw_only=True)
class AuditSettings:
    """The settings of an audit, equal for all defenses and attacks: the keywords of `audit`.

    Args:
        batch_size: Samples in a batch. Each batch is protected by itself.
        repeats: How many times each message is protected and attacked, with new seeds.
        seed: The seed of all randomness. An audit's noise is reproducible, and protects nothing.
        max_length: The most tokens of a text; longer ones are cut.
        labels_known: Grant the labels to the attacker.
        lengths_known: Grant the texts' lengths. Without it texts are padded to `max_length` and the
            mask is withheld.
        noise_known: Grant the covariance of the Gaussian noise in a message to every attacker.
        adaptive: Run attackers that know the defense too, with the settings and grants that the
            defense names (`Defense.informed`, `Defense.mechanism`).
        share_input_embeddings: Share the token embeddings' gradient, which names the words.
        reference: Add the row `none`: it shows whether the attacks work at all.
        accumulation: The number of batches whose protected gradients a client averages by itself
            before it sends a message.
        local_steps: K, the steps that a client trains before it sends, each on a batch. A message
            is then the protected change of its weights, and a defense's settings are in its unit.
            0: it sends gradients.
        local_epochs: How often the client goes over its batches in these steps, in one order that
            the attacker knows. A message is of `local_steps / local_epochs` batches.
        learning_rate: The learning rate of the local steps, which require one.
        optimizer: The optimizer of the local steps: `"sgd"` or `"adamw"`, without weight decay.
        word_pairs: Pairs per message that differ in one word (one patch of an image). The attacker
            decides which of the two a message is of. 0 leaves that out.
        estimators: Leakage estimators that are asked of each message: `"all"`, `"none"`, or names
            with commas between them. No attack needs them.
        attack_seconds: Each attack stops after this many seconds a message, with the best so far;
            one that has `seconds` of its own keeps those. Default: as attacks' settings say.
        budget_minutes: The audit stops between two messages before it takes longer, judged by the
            longest message so far. It attacks two at least: one has no interval. Called again, it
            continues. Default: all messages.

    Raises:
        ValueError: If a number is out of range, an estimator is unknown, or local steps have no
            learning rate.

    Example:
        >>> AuditSettings(labels_known=False).batch_size
        1
    """

    _argument_group_name: ClassVar[str] = "messages, and what the attacker knows"

    batch_size: int = option(1, "samples in a batch, which is protected by itself")
    repeats: int = option(1, "times that each message is protected and attacked")
    seed: int = option(0, "seed of the draw, the defenses and the attacks")
    max_length: int = option(64, "most tokens of a text; longer ones are cut")
    labels_known: bool = option(True, "the attacker knows the labels")
    lengths_known: bool = option(True, "the attacker knows the texts' lengths")
    noise_known: bool = option(False, "the attacker knows the noise's covariance")
    adaptive: bool = option(True, "run attackers that know the defense, too")
    share_input_embeddings: bool = option(False, "share the token embeddings' gradient")
    reference: bool = option(True, "add the row without a defense")
    accumulation: int = option(1, "batches whose protected gradients make one message")
    local_steps: int = option(
        0, "steps that a client trains before it sends the change of its weights; 0: gradients"
    )
    local_epochs: int = option(1, "times that a client goes over its batches in its local steps")
    learning_rate: float | None = option(None, "learning rate of the local steps")
    optimizer: str = option("sgd", "optimizer of the local steps: sgd or adamw")
    word_pairs: int = option(
        8, "pairs per message that differ in one word or patch, to be distinguished; 0: none"
    )
    estimators: str = option(
        "all", "leakage estimators of each message: all, none, or names with commas between them"
    )
    attack_seconds: float | None = option(
        None, "each attack stops after so many seconds a message, with the best so far"
    )
    budget_minutes: float | None = option(
        None, "minutes to take at most: stops between two messages, and continues when called again"
    )

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
                raise ValueError(
                    f"{name} must be a whole number of at least {minimum}, but is {value!r}."
                )
        for name in ("attack_seconds", "budget_minutes"):
            time = getattr(self, name)
            if time is not None and (isinstance(time, bool) or not 0 < time < math.inf):
                raise ValueError(f"{name} must be above 0, but is {time!r}.")
        self._check_local()
        if self.estimators != "all":
            self.chosen_estimators()  # a misspelt name is refused before any work

    def _check_local(self) -> None:
        if not self.local_steps:
            if self.learning_rate is not None or self.local_epochs > 1:
                raise ValueError(
                    "learning_rate and local_epochs are of local training: give local_steps, or "
                    "leave them out."
                )
            return
        rate = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise ValueError(
                f"{self.local_steps} local steps need a learning_rate above 0, not {rate!r}."
            )
        if self.local_steps % self.local_epochs:
            raise ValueError(
                f"{self.local_steps} local steps are no whole number for each of "
                f"{self.local_epochs} epochs: give local_epochs times the client's batches."
            )
        if self.accumulation > 1:
            raise ValueError(
                "A client sends an update or accumulates gradients, not both: leave out "
                "accumulation, and give a batch_size as large as an accumulated step's."
            )

    @property
    def rows(self) -> int:
        """The number of samples behind one message."""
        return self.batch_size * self.accumulation * max(1, self.local_steps // self.local_epochs)

    def chosen_estimators(self) -> dict[str, Any]:
        """Return by name the estimators that are asked of each message.

        Raises:
            ValueError: If a name is unknown; the message lists the names.

        Example:
            >>> list(AuditSettings(estimators="dfil_bound").chosen_estimators())
            ['dfil_bound']
        """
        if not isinstance(self.estimators, str):
            raise ValueError(
                'estimators must be "all", "none", or names with commas between them, but is '
                f"{self.estimators!r}."
            )
        if self.estimators == "all":
            return dict(ESTIMATORS)
        names = [] if self.estimators == "none" else self.estimators.split(",")
        return {name.strip(): ESTIMATORS[name.strip()] for name in names}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return settings made of a mapping.

        Raises:
            TypeError: If a name is unknown; the message lists the names.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(names)):
            raise TypeError(
                f"An audit has no setting {', '.join(unknown)}. It has: {', '.join(names)}."
            )
        return cls(**values)


@dataclass(kw_only=True)
class AttackedSettings(SourceSettings):
    """The settings of a command that attacks, beside a model and data."""

    _argument_group_name: ClassVar[str] = "output"

    output: str = option(
        "", "folder to write to; an interrupted run in it continues", required=True
    )
    device: str | None = option(None, "device to run on. Default: cuda if there is one")


@dataclass(kw_only=True)
class CommandSettings(AttackedSettings, AuditSettings):
    """The settings of `gradguard audit`: those of the audit, and what is audited with what."""

    _argument_group_name: ClassVar[str] = "defenses and attacks"

    # A mapping in a file, so neither has a type that says more.
    defense: Any = option(  # noqa: RUF009
        "none",
        "NAME or NAME:key=value,key=value; repeat for more rows, A+B to chain. See `gradguard "
        "defenses`",
    )
    attack: Any = option(  # noqa: RUF009
        None,
        "NAME or NAME:key=value,key=value; repeat for more, or several at once: "
        "tag:steps=500,span. Default: span for texts; for images inverting_gradients, and analytic "
        "where the model has something for it to read",
    )
    training: str | None = option(
        None,
        "YAML or JSON file of training arguments: takes its batch size, its accumulation and its "
        "defense where they are not given. A checkpoint's batch size is taken without it",
    )
    dropout: bool = option(False, "run the model as it is trained, with its dropout")
    metrics: list[str] | None = option(  # noqa: RUF009
        None,
        "the metrics.json of your training runs, or a JSON file {defense: accuracy}: what each "
        "defense costs, for the report's first sentence",
    )
    samples: int = option(8, "samples to audit, drawn at random from the data")
    decoys: int = option(
        100, "further samples as candidates for membership inference; 0 leaves that out"
    )
    candidates: str | None = option(
        None, "file of candidates for membership inference, read like --dataset, in place of decoys"
    )


def read_settings(flags: Mapping[str, Any]) -> CommandSettings:
    """Return settings: flags take precedence over the training's settings, and those over defaults.

    Args:
        flags: The flags that were used, by name.

    Raises:
        ValueError: If a setting is out of range.
        OSError: If a file cannot be read.
    """
    return fill(CommandSettings, _training_settings(flags) | dict(flags))


_TRAINING_ARGUMENTS = {
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulation",
}


def _training_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from the training's arguments, or from the state in a checkpoint."""
    settings: dict[str, Any] = {}
    state = os.path.join(str(values.get("model") or ""), "trainer_state.json")
    if os.path.exists(state) and (size := read_mapping(state).get("train_batch_size")):
        settings["batch_size"] = size
    if values.get("training"):
        arguments = read_mapping(values["training"])
        pairs = _TRAINING_ARGUMENTS.items()
        settings |= {name: arguments[key] for key, name in pairs if key in arguments}
        if arguments.get("defense"):
            settings["defense"] = {arguments["defense"]: arguments.get("defense_kwargs") or None}
    return settings
