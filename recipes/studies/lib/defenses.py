"""Defenses as they were published."""

from collections.abc import Mapping
from typing import Any

from hf_gradguard import make_defense
from hf_gradguard.defenses import Defense


def with_own_strength(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with which noise is relative to the very gradient, as it was when figures were
    stored.
    """
    is_relative = settings.keys() & {"relative_scale", "utility_budget"}
    return {"strength": "own", **settings} if is_relative else dict(settings)


def as_published(name: str, settings: dict) -> dict:
    """Settings with which optimal defenses weigh by sensitivities of the very batch, and Refiner
    moves the batch's own data.

    `refresh_every` of stored figures is from a time when those of a batch served for several: every
    batch has its own now.
    """
    settings = with_own_strength(settings)
    if name == "refiner":
        return {"objective": "weighted", **settings}
    if not name.startswith("optimal_"):
        return settings
    settings_of_batch = {key: value for key, value in settings.items() if key != "refresh_every"}
    return {"shape": "own", **settings_of_batch}


def published(name: str, evaluation_network: Any = None, **settings: Any) -> Defense:
    """A defense by name, with settings `as_published`; Refiner has the evaluation network."""
    if name == "refiner":
        settings["evaluation_network"] = evaluation_network
    return make_defense(name, **as_published(name, settings))
