"""Attacks, which reconstruct data from what the server sees.

Example:
    seen = Observation(model=model, gradient=shared, input_shape=(1, 12), tokenizer=tokenizer)
    result = make_attack("tag", steps=1500)(seen)
"""

from __future__ import annotations

from typing import Any

from ..registry import ATTACKS, make
from .base import Attack, Observation, Reconstruction
from .label_recovery import recover_labels, recover_labels_below
from .layer_inputs import observed_length
from .likelihood import Distinguishability
from .matching.matching_attacks import GradientMatching
from .uploads import average

__all__ = [
    "ATTACKS",
    "Attack",
    "Distinguishability",
    "GradientMatching",
    "Observation",
    "Reconstruction",
    "average",
    "make_attack",
    "observed_length",
    "recover_labels",
    "recover_labels_below",
]


def make_attack(name: str, **settings: Any) -> Attack:
    """Return the attack of this name with its settings.

    Args:
        name: One of `ATTACKS`.
        **settings: Settings of the attack; see its class.

    Raises:
        ValueError: If the name is unknown (the message lists the names), or a value is out of
            range.
        TypeError: If the attack does not have a setting; the message lists its settings.

    Example:
        >>> make_attack("inverting_gradients", steps=1000, restarts=4).steps
        1000
    """
    attack: Attack = make(ATTACKS, name, settings)
    return attack
