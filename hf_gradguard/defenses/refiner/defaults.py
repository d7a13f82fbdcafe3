"""What Refiner's settings are where they are left out."""

from __future__ import annotations

from typing import Any, Literal

Objective = Literal["cosine", "weighted"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "cosine": {
        "beta": 0.0, "learning_rate": 0.2, "samples": 16, "error_feedback": True,
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


def _given(refiner: Any, objective: str) -> list[str]:
    """Settings that are set, of those that one objective alone has."""
    return [name for name in ONLY[objective] if getattr(refiner, name) != _UNSET.get(name)]
