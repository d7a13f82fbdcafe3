"""No defense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..gradient_map import GradientMap
from ..randomness import Stream
from .base import Defense, DefenseFacts
from .message import Message
from .tensors import cast_like, true_gradient


@dataclass
class NoDefense(Defense):
    """Shares the true gradient. Has to be asked for by name."""

    name: ClassVar[str] = "none"
    facts = DefenseFacts(
        needs_input=False, post_processes=True, sharded_refusal=None, is_exact=True
    )

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        return Message(cast_like(true_gradient(gmap), gmap), exact=True)
