"""What was found out about a model and its loss by trial. Another loss makes it untrue."""

from __future__ import annotations

from torch import nn

from .batch import tables
from .differences import plan as differences
from .per_sample import plan as samples


def forget(model: nn.Module) -> None:
    """Let everything be tried out anew: tables, differences, and how samples are told apart.

    Example:
        >>> forget(model)
    """
    for room in (tables, differences, samples):
        room.forget(model)
