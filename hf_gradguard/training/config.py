"""Training arguments with a defense, and the settings that a Trainer was asked for.

The latter may change between trainings.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from ..defenses import Defense, make_defense
from ..registry import DEFENSES

NOISE_FOR = ("message", "sum")
BATCH_STATISTICS = ("local", "shared", "frozen")
_CHOICES = {
    "batch_statistics": BATCH_STATISTICS,
    "partition": ("iid", "dirichlet"),
    "leakage_action": ("skip", "stop"),
    "protect_labels": (None, "randomized_response"),
    "noise_for": NOISE_FOR,
    "private_metrics": ("console", "log"),
}
_ABOVE_ZERO = ("dirichlet_alpha", "leakage_limit", "label_epsilon", "secure_aggregation_range")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
}
_LEAST = {
    "clients_per_process": 1,
    "noise_seed": 0,
    "leakage_logging_steps": 0,
    "leakage_num_probes": 1,
}


@dataclass
class GradGuardConfig(TrainingArguments):
    """Training arguments with settings of protection.

    All settings of `TrainingArguments` keep their meaning.

    Args:
        defense: The name of a defense, one of `DEFENSES`. It must be given here or to the Trainer.
            `"none"` asks for no protection.
        defense_kwargs: The settings of the defense; JSON on the command line.
        share_input_embeddings: Whether to share the gradient of the token embeddings, and of other
            tables that the input indexes. It names the batch's tokens.
        withhold: Patterns of names of further parameters that are neither shared nor trained, such
            as `"*.experts.*"`.
        protect_labels: `"randomized_response"` randomizes the labels of the training data before
            anything is computed from them.
        label_epsilon: The ε of randomized labels: ε-label differential privacy for each row. A
            smaller ε protects more. A text that is in the data k times has k times the ε.
        batch_statistics: The handling of batch normalization's running statistics. With `"local"`
            each rank has its own, and rank 0's are saved. With `"shared"` they are averaged over
            ranks at every optimizer step, unprotected. With `"frozen"` they stay as the model came,
            and anything else that modules keep of a batch is put back after each message.
        clients_per_process: The number of clients that each rank's batch is cut into. Each is
            protected by itself. With `num_clients`, it is the number of clients that a rank draws
            for each step.
        num_clients: The number of clients of a simulated federation. The training data are divided
            among them, and they live on the ranks in turn. Each step draws some of them, and weighs
            them by their numbers of rows.
        partition: The division of the data among `num_clients`: `"iid"`, or `"dirichlet"` by class.
        dirichlet_alpha: The concentration of a Dirichlet partition. The smaller it is, the less
            alike are clients.
        secure_aggregation: Whether ranks, and whoever carries their messages, see nothing but
            means. Each rank's gradient, loss and counts are masked, and masks cancel in the sum. It
            needs three ranks or more.
        secure_aggregation_range: The largest size of an entry of a gradient, the same on all ranks.
            A larger entry stops all ranks. Entries are rounded to a unit of about n·range/2³¹ on n
            ranks.
        secure_aggregation_keys: The folder with this rank's Ed25519 key, `rankR.pem`, and every
            rank's public one, `rankR.pub`. Without it ranks trust whoever answers, with a warning.
        noise_for: The message or sum whose noise a defense's `scale` states. With `"message"` it is
            each message's. With `"sum"`, which needs `secure_aggregation`, it is that of the sum of
            the n messages that are exchanged at a time. Each message then has 1/√n of it.
        scale_learning_rate: Whether to multiply `learning_rate` by √(1 + r²), where r is how large
            noise is beside the gradient in the mean of a step's messages. By default it is off,
            since no factor suits all tasks (docs/findings/rates.md).
        private_dropout: Whether each message's dropout is drawn from a stream of its own. Otherwise
            ranks, which share `seed`, know each other's masks.
        noise_seed: A seed that makes all noise reproducible by anybody, so no ε is stated. It is
            for tests only.
        leakage_logging_steps: The number of optimizer steps between two logs of leakage figures; 0
            for none.
        leakage_num_probes: The number of random probes for dFIL. By default it is 2 by differences,
            or 10 exact ones where differences are not available.
        leakage_limit: The least bound on the MSE of an unbiased attacker, per coordinate and in the
            input's unit squared. A message with a lower bound for any of its samples is not shared.
            Every message is measured then.
        leakage_action: What happens below `leakage_limit`. `"skip"` shares zeros in the message's
            place and goes on. `"stop"` also ends training on all ranks.
        private_metrics: Where metrics of true gradients go, such as `defense/relative_error` and
            `leakage/*`. With `"console"` each rank prints its own, to two digits, and
            `trainer.state.log_history` has all of them, in memory and in checkpoints. With `"log"`
            means over at least 50 messages, to two digits, also go to trackers and to files that
            are pushed. Two figures of one message would identify a sentence among hundreds.
        check_received: Whether ranks above 0 warn if rank 0's weights make gradients leak.
        model_name_or_path: The model that `GradGuardTrainer(args)` loads if it is given none: a
            folder or a Hub name.

    Raises:
        ValueError: If the defense is unknown, or a value is out of range.

    Example:
        >>> args = GradGuardConfig("out", defense="pruning", defense_kwargs={"ratio": 0.9})
        >>> args.share_input_embeddings
        False

    Example:
        >>> GradGuardConfig("out", defense="pruning", defense_kwargs={"ratio": 0.5}).defense
        'pruning'
        >>> GradGuardConfig("out", defense="prunning")
        Traceback (most recent call last):
        ...
        hf_gradguard.registry.UnknownNameError: There is no defense 'prunning'. Did you mean ...
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "defense_kwargs"]

    defense: str | None = field(
        default=None,
        metadata={
            "help": "The defense, by name. Required here or in the Trainer; 'none' must be said."
        },
    )
    defense_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": """Settings of the defense, as JSON: '{"relative_scale": 0.5}'."""},
    )
    share_input_embeddings: bool = field(
        default=False,
        metadata={"help": "Share the token embeddings' gradient too. It names the batch's tokens."},
    )
    withhold: list[str] | None = field(
        default=None,
        metadata={"help": "Patterns of parameters' names, neither shared nor trained."},
    )
    protect_labels: str | None = field(
        default=None,
        metadata={"help": "randomized_response: randomize labels of the training data."},
    )
    label_epsilon: float | None = field(
        default=None, metadata={"help": "Of randomized labels: the smaller, the more protection."}
    )
    batch_statistics: str = field(
        default="local",
        metadata={
            "help": "Of batch norm: local (each rank's), shared (averaged, unprotected) or frozen."
        },
    )
    clients_per_process: int = field(
        default=1,
        metadata={
            "help": "Cut each rank's batch into that many clients, each protected by itself."
        },
    )
    num_clients: int | None = field(
        default=None,
        metadata={"help": "Divide the data among so many clients; some are drawn each step."},
    )
    partition: str = field(
        default="iid",
        metadata={"help": "Of the data among num_clients: iid, or dirichlet by class."},
    )
    dirichlet_alpha: float = field(
        default=1.0, metadata={"help": "The smaller, the less alike are clients."}
    )
    secure_aggregation: bool = field(
        default=False,
        metadata={"help": "Show ranks nothing but means over ranks. For three ranks and more."},
    )
    secure_aggregation_range: float = field(
        default=16.0,
        metadata={"help": "Largest size of an entry of a gradient, the same on all ranks."},
    )
    secure_aggregation_keys: str | None = field(
        default=None,
        metadata={"help": "Folder with this rank's rankR.pem and every rank's rankR.pub."},
    )
    noise_for: str = field(
        default="message",
        metadata={
            "help": "Whose noise a scale is: a message's, or the sum's (secure_aggregation).",
            "choices": list(NOISE_FOR),
        },
    )
    scale_learning_rate: bool = field(
        default=False,
        metadata={"help": "Under noise of r times the gradient, raise the rate √(1 + r²) times."},
    )
    private_dropout: bool = field(
        default=True,
        metadata={"help": "Under a defense, dropout that other ranks cannot repeat from the seed."},
    )
    noise_seed: int | None = field(
        default=None,
        metadata={
            "help": "Unsafe, for tests: makes the noise reproducible by anybody who knows it."
        },
    )
    leakage_logging_steps: int = field(
        default=0,
        metadata={
            "help": "Log leakage of what is about to be shared at every so many steps; 0 never."
        },
    )
    leakage_num_probes: int | None = field(
        default=None,
        metadata={
            "help": "Probes for dFIL. Default: 2 by differences, or 10 exact ones without those."
        },
    )
    leakage_limit: float | None = field(
        default=None,
        metadata={
            "help": "Do not share a message whose bound on an unbiased attacker's MSE is less."
        },
    )
    leakage_action: str = field(
        default="skip",
        metadata={"help": "What to do below leakage_limit.", "choices": ["skip", "stop"]},
    )
    private_metrics: str = field(
        default="console",
        metadata={"help": "Where metrics of true gradients go: console, or log, for others too."},
    )
    check_received: bool = field(
        default=True,
        metadata={"help": "Ranks above 0 warn of weights made to make gradients leak."},
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Model to load when the Trainer is given none: a folder or a Hub name."},
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        for base in order[order.index(GradGuardConfig) + 1 : order.index(TrainingArguments)]:
            raise TypeError(
                f"{cls.__name__}: {base.__name__} has to stand before GradGuardConfig, or its "
                f"defaults would be lost. Write class {cls.__name__}({base.__name__}, "
                "GradGuardConfig)."
            )
        fields_of_bases = [
            name for base in order for name in vars(base).get("_VALID_DICT_FIELDS", ())
        ]
        cls._VALID_DICT_FIELDS = list(dict.fromkeys(fields_of_bases))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def to_dict(self) -> dict[str, Any]:
        """Return all settings without `noise_seed`, since trackers log them and cards show them."""
        return super().to_dict() | {"noise_seed": None}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled, as `training_args.bin` is, without `noise_seed`."""
        return vars(self) | {"noise_seed": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, which has all settings in this process."""
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__ = dict(self.__dict__)
        return copied

    def check(self) -> None:
        """Refuse what cannot be meant.

        It runs again when training begins, so that a later change is checked like an argument.

        Raises:
            ValueError: If an argument cannot be meant. The message has its name.

        Example:
            >>> args = GradGuardConfig("out", share_input_embeddings="false")
            >>> args.share_input_embeddings
            False
            >>> args.clients_per_process = 0
            >>> args.check()
            Traceback (most recent call last):
            ValueError: clients_per_process must be at least 1, but is 0.
        """
        self._check_types()
        if not isinstance(self.defense_kwargs, dict | None):
            raise ValueError(
                f"defense_kwargs must be a dict, or JSON that starts with '{{', but is "
                f"{self.defense_kwargs!r}."
            )
        if not isinstance(self.defense, str | None):
            raise ValueError(
                f"defense must be a name here, but is {self.defense!r}: arguments are saved as "
                "JSON. Pass the object to the Trainer, as its defense=."
            )
        if isinstance(self.withhold, str):
            raise ValueError(f"withhold is a list of patterns: write [{self.withhold!r}].")
        if (self.protect_labels is None) != (self.label_epsilon is None):
            raise ValueError("protect_labels and label_epsilon belong together: set both.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, choices))}, but is "
                    f"{getattr(self, name)!r}."
                )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, but is {value}.")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, but is {value!r}.")
        if not self.secure_aggregation and (
            self.noise_for == "sum" or self.secure_aggregation_keys
        ):
            raise ValueError(
                "noise_for='sum' and secure_aggregation_keys need secure_aggregation=True: without "
                "it others see each message, with its own noise alone."
            )
        if self.num_clients is not None:
            self._check_clients(self.num_clients)
        elif self.partition != "iid":
            raise ValueError(
                f"partition={self.partition!r} divides the data among num_clients: set that too."
            )
        if self.defense is not None:
            make_defense(self.defense, **(self.defense_kwargs or {}))

    def _check_types(self) -> None:
        for name, annotation in GradGuardConfig.__annotations__.items():
            kind, _, optional = annotation.partition(" | ")
            value = getattr(self, name, None)
            if kind not in _KINDS or name.startswith("defense") or (optional and value is None):
                continue
            if kind == "bool" and isinstance(value, str):
                with contextlib.suppress(argparse.ArgumentTypeError):  # refused below
                    value = string_to_bool(value)  # as on the command line
                    setattr(self, name, value)
            types, called = _KINDS[kind]
            if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
                raise ValueError(f"{name} must be {called}, but is {value!r}.")

    def _check_clients(self, num_clients: int) -> None:
        if num_clients < self.clients_per_process:
            raise ValueError(
                f"num_clients is {num_clients}, fewer than "
                f"clients_per_process={self.clients_per_process} to draw each step."
            )
        if self.per_device_train_batch_size % self.clients_per_process:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} rows cannot be "
                f"shared equally by clients_per_process={self.clients_per_process} clients. Take a "
                "multiple."
            )
        if self.train_sampling_strategy != "random" or self.accelerator_config.split_batches:
            raise ValueError(
                "num_clients draws clients, and clients draw their rows, at random and per rank: "
                "leave train_sampling_strategy and split_batches at their defaults."
            )


def setting(args: TrainingArguments, name: str) -> Any:
    """Return what arguments of any kind say of a field of `GradGuardConfig`.

    It is the default where they have no such field, so that `TrainingArguments`, `SFTConfig` and
    others protect alike.

    Example:
        >>> setting(TrainingArguments("out"), "private_dropout")
        True
    """
    return getattr(args, name, getattr(GradGuardConfig, name))


_ARGUMENTS = [name for name in GradGuardConfig.__annotations__ if name != "model_name_or_path"]
_ARGUMENTS.append("per_device_train_batch_size")  # dp_sgd draws and divides by it
_ARGUMENTS.append("train_sampling_strategy")  # num_clients draws in its own way


class RequestedSettings:
    """The defense that a Trainer was asked for, by its own keyword or in its arguments.

    Args:
        args: The training arguments. `defense` and `defense_kwargs` count if they have them.
        keyword: The Trainer's keyword `defense`: a name, an object, or nothing.

    Attributes:
        defense: The defense that was meant when it was resolved last.

    Raises:
        ValueError: If `resolve_defense` raises it.

    Example:
        >>> args = GradGuardConfig("out", defense="pruning", defense_kwargs={"ratio": 0.5})
        >>> requested = RequestedSettings(args, None)
        >>> args.defense_kwargs = {"ratio": 0.9}
        >>> requested.resolve(args)
        >>> requested.defense.ratio
        0.9
    """

    def __init__(self, args: TrainingArguments, keyword: str | Defense | None) -> None:
        self._bound: dict[str, Any] = {}
        self.request(args, keyword)

    def request(self, args: TrainingArguments, keyword: str | Defense | None) -> None:
        """Change the Trainer's keyword."""
        self.defense = resolve_defense(keyword, args)
        self._keyword, self._named = keyword, _named(args)

    def resolve(self, args: TrainingArguments) -> None:
        """Make the defense anew if its name or its settings in the arguments are others now."""
        if self._named != _named(args):
            self.request(args, self._keyword)

    def changed(
        self, args: TrainingArguments, objects: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return the names of what is another than when it was bound.

        These are arguments, settings of the defense, and `objects`, which count by identity.
        """
        return [
            name
            for name, value in self._settings(args, objects or {}).items()
            if name not in self._bound or self._bound[name] != value
        ]

    def bind(self, args: TrainingArguments, objects: Mapping[str, Any]) -> None:
        """Remember all settings as they are now, for `changed`."""
        self._bound = self._settings(args, objects)

    def check_unchanged(self, args: TrainingArguments) -> None:
        """Refuse changes within a training.

        Raises:
            RuntimeError: If something changed, with its name and the way out.
        """
        if changed := self.changed(args):
            raise RuntimeError(
                f"{', '.join(changed)} changed while training, where it would not be followed. "
                "Change settings between trainings; for a schedule within one, write a Defense "
                "that counts its calls."
            )

    def _settings(self, args: TrainingArguments, objects: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{f"args.{name}": _frozen(getattr(args, name, None)) for name in _ARGUMENTS},
            "the defense": _frozen(self.defense),
            **{name: _Same(value) for name, value in objects.items()},
        }


def resolve_defense(defense: str | Defense | None, args: TrainingArguments) -> Defense:
    """Return the defense that a Trainer was asked for, by its own keyword or in its arguments.

    Args:
        defense: A name, an object, or nothing.
        args: The training arguments; `defense` and `defense_kwargs` count if they have them.

    Raises:
        ValueError: If there is none, if there are two, or an object comes with `defense_kwargs`.

    Example:
        >>> resolve_defense("pruning", GradGuardConfig("out", defense_kwargs={"ratio": 0.5})).ratio
        0.5
    """
    named, settings = setting(args, "defense"), setting(args, "defense_kwargs") or {}
    if defense is not None and named is not None and defense != named:
        raise ValueError(
            f"Two defenses are named: {defense!r} to the Trainer and {named!r} in its arguments. "
            "Give one: to set trainer.defense, set args.defense to None."
        )
    if isinstance(defense, Defense):
        if settings:
            raise ValueError(
                "A Defense object brings its own settings: leave defense_kwargs empty, or pass the "
                "name."
            )
        return defense
    name = defense if defense is not None else named
    if name is None:
        raise ValueError(
            f"No defense is named. Pass defense=, one of: {', '.join(DEFENSES)}. To train "
            "unprotected, say 'none'."
        )
    return make_defense(name, **settings)


def _named(args: TrainingArguments) -> tuple[Any, ...]:
    return tuple(_frozen(getattr(args, name, None)) for name in ("defense", "defense_kwargs"))


def _frozen(value: Any) -> Any:
    """Return a value that stays equal to itself if its argument is written to later.

    A defense counts by its settings and those of its parts, a collection by its entries, and
    anything else by its identity.
    """
    if isinstance(value, Defense):
        named = ((f.name, getattr(value, f.name)) for f in fields(value))  # type: ignore[arg-type]
        return (type(value), *((name, _frozen(entry)) for name, entry in named))
    if isinstance(value, dict):
        return ("a dict", *((_frozen(key), _frozen(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple | set):
        return (type(value), *map(_frozen, value))
    return value if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal only to what holds the very same object, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, candidate: object) -> bool:
        return isinstance(candidate, _Same) and candidate._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


_PLAIN = (str, int, float, bool, type(None))
