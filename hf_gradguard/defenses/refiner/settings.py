"""Refiner's settings: what they are where they are left out, and what is refused."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from ...gradient_map.per_sample.span import Granularity
from ..base import check_range, check_whole
from ..feedback import check_min_batches

Objective = Literal["cosine", "weighted"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "cosine": {
        "beta": 0.0, "learning_rate": 0.2, "error_feedback": True,
    },
    "weighted": {
        "alpha": 0.6, "beta": 1.0, "tau": 0.95, "iterations": 10, "learning_rate": 0.01,
        "normalize": True, "element_wise": True, "error_feedback": False,
    },
}  # fmt: skip
"""By objective."""
ONLY = {
    "cosine": ("samples", "factors"),
    "weighted": (
        "alpha", "tau", "normalize", "element_wise", "epsilon", "relative_epsilon", "warm_start",
    ),
}  # fmt: skip
"""Settings that one objective alone has."""
_UNSET = {"warm_start": 0}


def take_defaults(refiner: Any) -> None:
    """Fill in what was left out. Without an objective it is "cosine", or "weighted" where something
    is set that only this form has or needs.

    Raises:
        ValueError: For an unknown objective, or a setting of the other one.

    Example:
        >>> make_defense("refiner").objective, make_defense("refiner", alpha=0.5).objective
        ('cosine', 'weighted')
    """
    if refiner.objective is None:
        named = refiner.evaluation_network is not None and not _given(refiner, "cosine")
        refiner.objective = "weighted" if named or _given(refiner, "weighted") else "cosine"
    objective = refiner.objective
    if objective not in DEFAULTS:
        names = " or ".join(map(repr, DEFAULTS))
        raise ValueError(f"objective must be {names}, but is {objective!r}.")
    (other,) = DEFAULTS.keys() - {objective}
    if foreign := _given(refiner, other):
        raise ValueError(
            f"{foreign[0]} is a setting of objective={other!r}, and objective is {objective!r}. "
            f"Leave it out, or give objective={other!r}."
        )
    if objective == "cosine":  # samples move where that is asked for
        if refiner.iterations is None:
            refiner.iterations = 2 if refiner.beta else 0
        if refiner.factors is None:
            refiner.factors = "sample" if refiner.iterations else "token"
    for name, value in DEFAULTS[objective].items():
        if getattr(refiner, name) is None:
            setattr(refiner, name, value)


def check_settings(refiner: Any) -> None:
    """Refuse what is out of range, or does not go together.

    Raises:
        ValueError: With the setting's name.
    """
    weighted, still = refiner.objective == "weighted", refiner.factors in ("parameter", "token")
    if weighted:
        check_range("alpha", refiner.alpha, 0, 1)
        check_range("tau", refiner.tau, 0, math.inf, above=True)
    else:
        if refiner.samples is not None:
            check_whole("samples", refiner.samples, 1)
        if refiner.factors not in get_args(Granularity):
            names = " or ".join(map(repr, get_args(Granularity)))
            raise ValueError(f"factors must be {names}, but is {refiner.factors!r}.")
        if still and refiner.iterations:
            raise ValueError(f"factors={refiner.factors!r} has no iterations: leave them out.")
    check_range("beta", refiner.beta, 0, math.inf)
    check_min_batches(refiner.min_batches)
    check_range("learning_rate", refiner.learning_rate, 0, math.inf, above=True)
    if still and refiner.beta:
        raise ValueError(
            f"factors={refiner.factors!r} has no iterations for beta to count in: leave beta out, "
            "or take factors='sample'."
        )
    for name, least in (("iterations", int(weighted or refiner.beta != 0)), ("warm_start", 0)):
        check_whole(name, getattr(refiner, name), least)
    if refiner.epsilon is not None and refiner.relative_epsilon is not None:
        raise ValueError("Give epsilon or relative_epsilon, not both.")
    for name in ("epsilon", "relative_epsilon"):
        if getattr(refiner, name) is not None:  # at 0 it would share the true gradient
            check_range(name, getattr(refiner, name), 0, math.inf, above=True)
    if (refiner.image_mean is None) != (refiner.image_std is None):
        raise ValueError("Give image_mean and image_std together, or neither.")
    given = refiner.evaluation_network
    if given is not None and not isinstance(given, str) and not hasattr(given, "noise_ratio"):
        raise ValueError(
            "evaluation_network must be a network of hf_gradguard.networks or where to load it "
            f"from, but is a {type(given).__name__}."
        )
    if refiner.revision is not None and not isinstance(given, str):
        raise ValueError("revision is of a Hub repository: give its name in evaluation_network")


def _given(refiner: Any, objective: str) -> list[str]:
    """Settings that are set, of those that one objective alone has."""
    return [name for name in ONLY[objective] if getattr(refiner, name) != _UNSET.get(name)]
