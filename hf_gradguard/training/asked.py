"""What a Trainer was asked for, which may change between trainings: the defense and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from ..defenses import Defense
from .config import GradGuardConfig, resolve_defense

_ARGUMENTS = [name for name in GradGuardConfig.__annotations__ if name != "model_name_or_path"]


class Asked:
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
        >>> asked = Asked(args, None)
        >>> args.defense_kwargs = {"ratio": 0.9}
        >>> asked.resolve()
        >>> asked.defense.ratio
        0.9
    """

    def __init__(self, args: TrainingArguments, keyword: str | Defense | None) -> None:
        self._args, self._keyword = args, keyword
        self.resolve()

    def resolve(self) -> None:
        """Make the defense anew if its name or its settings in the arguments are others now."""
        named = self._named()
        if not hasattr(self, "defense") or named != self._resolved:
            self.defense = resolve_defense(self._keyword, self._args)
            self._resolved = named

    def settings(self) -> dict[str, Any]:
        """All that was asked for, as it is now: to be compared by `changes`."""
        named = {f"args.{name}": _frozen(getattr(self._args, name, None)) for name in _ARGUMENTS}
        return named | {"the defense": _frozen(self.defense)}

    def _named(self) -> tuple[Any, ...]:
        return tuple(
            _frozen(getattr(self._args, name, None)) for name in ("defense", "defense_kwargs")
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of what is another now: objects count by identity, plain values by value.

    Example:
        >>> changes({"a": 1, "b": 2}, {"a": 1, "b": 3})
        ['b']
    """
    return [
        name
        for name, value in now.items()
        if name not in before
        or not (before[name] is value or (_is_plain(value) and before[name] == value))
    ]


def _frozen(value: Any) -> Any:
    """A value that does not follow what is later written into it: a defense by its settings, also
    those of its parts, a collection by its entries, anything else by its identity.
    """
    if isinstance(value, Defense) and dataclasses.is_dataclass(value):
        named = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, tuple, _Same))


_PLAIN = (str, int, float, bool, type(None))
