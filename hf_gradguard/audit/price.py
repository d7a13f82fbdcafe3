"""What training under each defense reaches: from the user's own runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..defenses import Defense
from .facts import plain_settings

logger = logging.get_logger(__name__)

File = str | os.PathLike[str]
Metrics = File | Sequence[File] | Mapping[str, float]


def read_metrics(
    metrics: Metrics | None, defenses: Mapping[str, Defense] | None = None
) -> dict[str, float]:
    """What a model reaches under each defense, by label.

    Args:
        metrics: That itself, `{label: accuracy}`; or JSON files of it, or the `metrics.json` of
            runs of the recipes, each of which belongs to the defense that has all its settings.
        defenses: Those that are audited, by label.

    Raises:
        ValueError: If they are no numbers, or two runs are of one defense.
        OSError: If a file cannot be read.

    Example:
        >>> read_metrics({"none": 0.9, "pruning": 0.88})
        {'none': 0.9, 'pruning': 0.88}
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return _numbers(metrics)
    found: dict[str, float] = {}
    for file in [metrics] if isinstance(metrics, str | os.PathLike) else metrics:
        read = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(read, Mapping) and {"defense", "settings", "accuracy"} <= read.keys():
            read = _of_run(file, read, defenses or {})
        numbers = _numbers(read)
        if twice := found.keys() & numbers.keys():
            raise ValueError(f"{file} is the second to say what {sorted(twice)[0]} reaches.")
        found |= numbers
    return found


def _of_run(file: File, run: Mapping[str, Any], defenses: Mapping[str, Defense]) -> dict:
    """Of a run's defense, if it is audited with the same settings."""
    near = []
    for label, defense in defenses.items():
        if defense.name != run["defense"]:
            continue
        own, those = plain_settings(defense.settings()), run["settings"]
        other = [key for key in own.keys() | those.keys() if own.get(key) != those.get(key)]
        if not other:
            return {label: run["accuracy"]}
        near.append(f"{label} differs in {', '.join(sorted(other))}")
    why = "; ".join(near) or f"{run['defense']} is not among them"
    logger.warning(f"{file} is of none of the audited defenses: {why}. Its accuracy is left out.")
    return {}


def _numbers(found: Any) -> dict[str, float]:
    values: Iterable[Any] = found.values() if isinstance(found, Mapping) else [found]
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(
            "Metrics must be one number for each defense, as {defense: accuracy}, or the "
            f"metrics.json of a recipe's run, but are {found!r}."
        )
    return {str(label): float(value) for label, value in found.items()}
