"""Defenses and attacks as users name them: `"optimal_noise:relative_scale=1"`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from os import PathLike
from typing import Any

import yaml

from ..attacks import Attack, make_attack
from ..defenses import Chain, Defense, chain, make_defense

Spec = str | Defense | Attack | Mapping[str, Any]
"""`"name"`, `"name:key=value,key=value"`, an object, or a mapping: `{"name": {"key": value}}`,
where a list of settings means several, or `{"label": object}`.
"""

Links = list[tuple[str, dict[str, Any]]]
"""Names with their settings: one pair, or for a chain its links in order."""


def parse_specs(specs: Spec | Sequence[Spec]) -> dict[str, Links | Defense | Attack]:
    """Named settings and objects in all the ways they may be written.

    Args:
        specs: One or several of: `"tag:steps=500,restarts=2,span"` (a part without `=`, or with a
            `:`, begins the next one; `+` chains: `"pruning:ratio=0.9+gaussian_noise:scale=0.1"`),
            a `Defense` or `Attack`, or a mapping of names to their settings or to a list of
            settings, one for each strength, or of labels to objects. Values are YAML.

    Returns:
        `{label: [(name, settings), ...]}` or `{label: object}`. A label says the settings that were
        given, or in which an object differs from its class's defaults. What is said twice counts
        once.

    Raises:
        ValueError: If it cannot be read as that, or two objects would be called the same.

    Example:
        >>> list(parse_specs(["none", {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}]}]))
        ['none', 'pruning:ratio=0.5', 'pruning:ratio=0.9']
    """
    found: dict[str, Links | Defense | Attack] = {}
    for spec in [specs] if isinstance(specs, str | Mapping | Defense | Attack) else specs:
        for label, one in _entries(spec):
            earlier = found.get(label, one)
            if earlier is not one and not (isinstance(one, list) and isinstance(earlier, list)):
                raise ValueError(
                    f"Two are called {label!r}, and nothing would tell their results apart. Give "
                    "objects labels of their own: {'one': ..., 'other': ...}."
                )
            found[label] = one
    return found


def make_defenses(specs: Spec | Sequence[Spec]) -> dict[str, Defense]:
    """`{label: defense}`; see `parse_specs` and `make_defense`."""
    made = {}
    for label, one in parse_specs(specs).items():
        if isinstance(one, Attack):
            raise ValueError(f"{label} is an attack, where a defense was to be.")
        made[label] = one if isinstance(one, Defense) else _chained(one)
    return made


def make_attacks(specs: Spec | Sequence[Spec]) -> dict[str, Attack]:
    """`{label: attack}`; see `parse_specs` and `make_attack`."""
    made = {}
    for label, one in parse_specs(specs).items():
        if isinstance(one, Defense):
            raise ValueError(f"{label} is a defense, where an attack was to be.")
        made[label] = one if isinstance(one, Attack) else _single(one)
    return made


def check_specs(
    defenses: Spec | Sequence[Spec] | None, attacks: Spec | Sequence[Spec] | None
) -> None:
    """Refuse names and settings that there are not, before anything is loaded. `None` passes."""
    if defenses is not None:
        make_defenses(defenses)
    if attacks is not None:
        make_attacks(attacks)


def _chained(links: Links) -> Defense:
    return chain(*(make_defense(name, **settings) for name, settings in links))


def _single(links: Links) -> Attack:
    if len(links) > 1:
        raise ValueError(f"Attacks cannot be chained: {' + '.join(name for name, _ in links)}.")
    ((name, settings),) = links
    return make_attack(name, **settings)


def _entries(spec: Spec) -> Iterator[tuple[str, Links | Defense | Attack]]:
    """What one spec names, with labels."""
    if isinstance(spec, str):
        for one in _separate(spec):
            links = [_link(link) for link in re.split(r"\+(?=[A-Za-z])", one)]
            yield "+".join(map(_label, links)), links
    elif isinstance(spec, Defense | Attack):
        yield _label_of(spec), spec
    elif isinstance(spec, Mapping):
        for name, settings in spec.items():
            for one in settings if isinstance(settings, list) else [settings]:
                if isinstance(one, Defense | Attack):
                    yield str(name), one
                elif one is None or isinstance(one, Mapping):
                    link = str(name), {key: _number(value) for key, value in (one or {}).items()}
                    yield _label(link), [link]
                else:
                    raise ValueError(f"The settings of {name} must be a mapping, but are {one!r}.")
    else:
        raise ValueError(
            f"{spec!r} is neither a name, nor a defense or an attack, nor a mapping of names to "
            "settings."
        )


def _label_of(made: Defense | Attack) -> str:
    """The name of an object with the settings in which it differs from its class's defaults."""
    if isinstance(made, Chain):
        return f"{_label_of(made.first)}+{_label_of(made.second)}"
    given = {}
    for field in fields(made):  # type: ignore[arg-type]
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(made, field.name)
        if field.init and field.repr and not _same(value, default):
            given[field.name] = value
    return _label((made.name, given))


def _same(value: Any, default: Any) -> bool:
    same = value is default or value == default
    return same if isinstance(same, bool) else False  # tensors and arrays compare entry by entry


def _separate(text: str) -> list[str]:
    """`"a:x=1,y=2,b"` as `["a:x=1,y=2", "b"]`. Commas in brackets separate nothing."""
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if found and "=" in part and ":" not in part.split("=")[0]:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _link(text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = (part.strip() for part in text.partition(":"))
    settings = {}
    for part in re.split(r",(?![^\[]*\])", rest) if rest else []:
        key, equals, value = (side.strip() for side in part.partition("="))
        if not (key and equals and value):
            raise ValueError(
                f"{text!r} cannot be read. Settings are written name:key=value,key=value."
            )
        settings[key] = _number(yaml.safe_load(value))
    if not name or (colon and not settings):
        raise ValueError(f"{text!r} cannot be read. Write a name, or name:key=value,key=value.")
    return name, settings


def _number(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML 1.1 takes 1e-3 for a word
    return value


def _label(link: tuple[str, dict[str, Any]]) -> str:
    name, settings = link
    shown = ",".join(f"{key}={_shown(value)}" for key, value in settings.items())
    return f"{name}:{shown}" if shown else name


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if value is None or isinstance(value, int | str | list | tuple | Mapping | PathLike):
        return str(value)
    return type(value).__name__
