"""From a name and settings to a defence or an attack."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def make(classes: Mapping[str, type[T]], kind: str, name: str, settings: Mapping[str, Any]) -> T:
    """`classes[name](**settings)`, with errors that list what there is.

    Args:
        classes: Dataclasses by name.
        kind: What they are, for errors: "defence" or "attack".
        name: One of `classes`.
        settings: Its fields.

    Raises:
        ValueError: For an unknown name.
        TypeError: For an unknown setting.
    """
    if name not in classes:
        near = difflib.get_close_matches(str(name), classes, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no {kind} {name!r}.{hint} The names are: {', '.join(classes)}.")
    known = [field.name for field in fields(classes[name]) if field.init]  # type: ignore[arg-type]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        has = f"It has: {', '.join(known)}." if known else "It has none."
        raise TypeError(f"{name} has no setting {', '.join(unknown)}. {has}")
    return classes[name](**settings)
