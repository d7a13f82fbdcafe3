"""Defenses and attacks as users name them: `"optimal_noise:relative_scale=1"`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from ..defenses import Defense, chain, make_defense

Spec = str | Mapping[str, Any]
"""`"name"`, `"name:key=value,key=value"`, or `{"name": {"key": value}}`, where a list of settings
means several.
"""


def parse_specs(specs: Spec | Sequence[Spec]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Named settings in all the ways they may be written.

    Args:
        specs: One or several of: `"tag:steps=500,restarts=2,span"` (a part without `=`, or with a
            `:`, begins the next one; `+` chains: `"pruning:ratio=0.9+gaussian_noise:scale=0.1"`),
            or a mapping of names to their settings or to a list of settings, one for each strength.
            Values are YAML.

    Returns:
        `{label: [(name, settings), ...]}`: one pair, or for a chain its links in order. A label
        says the settings that were given. What is said twice counts once.

    Raises:
        ValueError: If it cannot be read as that.

    Example:
        >>> list(parse_specs(["none", {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}]}]))
        ['none', 'pruning:ratio=0.5', 'pruning:ratio=0.9']
    """
    parsed = []
    for spec in [specs] if isinstance(specs, str | Mapping) else specs:
        if isinstance(spec, str):
            parsed += [
                [_link(link) for link in re.split(r"\+(?=[A-Za-z])", one)]
                for one in _separate(spec)
            ]
        elif isinstance(spec, Mapping):
            for name, settings in spec.items():
                for one in settings if isinstance(settings, list) else [settings]:
                    if one is not None and not isinstance(one, Mapping):
                        raise ValueError(
                            f"The settings of {name} must be a mapping, but are {one!r}."
                        )
                    parsed.append(
                        [(str(name), {key: _number(value) for key, value in (one or {}).items()})]
                    )
        else:
            raise ValueError(f"{spec!r} is neither a name nor a mapping of names to settings.")
    return {"+".join(map(_label, links)): links for links in parsed}


def make_defenses(specs: Spec | Sequence[Spec]) -> dict[str, Defense]:
    """`{label: defense}`; see `parse_specs` and `make_defense`."""
    return {
        label: chain(*(make_defense(name, **settings) for name, settings in links))
        for label, links in parse_specs(specs).items()
    }


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
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
