"""Defenses: from a gradient map to what is shared.

defense = make_defense("optimal_noise", scale=1e-3)
shared = defense(GradientMap(model, batch))
"""

from __future__ import annotations

from typing import Any

from ..registry import DEFENSES, make
from .base import Defense, DefenseFacts
from .chain import Chain, chain
from .message import Message, Noise
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
    """The defense of that name.

    Args:
        name: One of `DEFENSES`.
        **settings: The defense's own; see its class.

    Raises:
        ValueError: For an unknown name, listing the right ones, or a value out of range, saying the
            range.
        TypeError: For a setting that the defense does not have, listing those it has.

    Example:
        >>> make_defense("optimal_pruning", ratio=0.8, refresh_every=10).ratio
        0.8
    """
    defense: Defense = make(DEFENSES, name, settings)
    return defense
