"""What a Trainer was asked for, which may change between trainings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from ..defenses import Defense, make_defense
from ..registry import DEFENSES
from .config import GradGuardConfig, setting

_ARGUMENTS = [name for name in GradGuardConfig.__annotations__ if name != "model_name_or_path"]
_ARGUMENTS.append("per_device_train_batch_size")  # dp_sgd draws and divides by it


class RequestedSettings:
    """The defense that a Trainer was asked for, by its own keyword or in its arguments.

    Args:
        args: Training arguments. `defense` and `defense_kwargs` count if they have them.
        keyword: A name, an object, or nothing.

    Attributes:
        defense: The one that was meant when it was resolved last.

    Raises:
        ValueError: As `resolve_defense` does.

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
        """The Trainer's keyword is another now."""
        self.defense = resolve_defense(keyword, args)
        self._keyword, self._named = keyword, _named(args)

    def resolve(self, args: TrainingArguments) -> None:
        """Make the defense anew if its name or its settings in the arguments are others now."""
        if self._named != _named(args):
            self.request(args, self._keyword)

    def changed(
        self, args: TrainingArguments, objects: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The names of what is another than when it was bound: arguments, settings of the defense,
        and `objects`, which count by identity.
        """
        return [
            name
            for name, value in self._settings(args, objects or {}).items()
            if name not in self._bound or self._bound[name] != value
        ]

    def bind(self, args: TrainingArguments, objects: Mapping[str, Any]) -> None:
        """All this holds until it is bound again."""
        self._bound = self._settings(args, objects)

    def check_unchanged(self, args: TrainingArguments) -> None:
        """Refuse changes within a training.

        Raises:
            RuntimeError: With what changed, and the way out.
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
    """The defense that a Trainer was asked for, by its own keyword or in its arguments.

    Args:
        defense: A name, an object, or nothing.
        args: Training arguments; `defense` and `defense_kwargs` count if they have them.

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
    """A value that does not follow what is later written into it: a defense by its settings, also
    those of its parts, a collection by its entries, anything else by its identity.
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
