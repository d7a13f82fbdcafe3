"""Defenses, which turn a gradient map into what is shared.

Example:
    defense = make_defense("optimal_noise", scale=1e-3)
    shared = defense(GradientMap(model, batch))
"""

from __future__ import annotations

from typing import Any

from ..registry import DEFENSES, make
from .base import Defense, DefenseFacts, Message, Noise
from .chain import Chain, chain
from .sensitivity import SensitivityDefense

__all__ = [
    "DEFENSES",
    "Chain",
    "Defense",
    "DefenseFacts",
    "Message",
    "Noise",
    "SensitivityDefense",
    "chain",
    "make_defense",
]


def make_defense(name: str, **settings: Any) -> Defense:
    """Return the defense of this name with its settings.

    Args:
        name: One of `DEFENSES`.
        **settings: Settings of the defense; see its class.

    Raises:
        ValueError: If the name is unknown (the message lists the names), or a value is out of
            range.
        TypeError: If the defense does not have a setting; the message lists its settings.

    Example:
        >>> make_defense("optimal_pruning", ratio=0.8, refresh_every=10).ratio
        0.8
    """
    defense: Defense = make(DEFENSES, name, settings)
    return defense
