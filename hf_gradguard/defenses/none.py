"""No defense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..gradient_map import GradientMap, Tensors
from .base import Defense, cast_like, true_gradient


@dataclass
class NoDefense(Defense):
    """Shares the true gradient. Has to be asked for by name."""

    name: ClassVar[str] = "none"
    keeps_values: ClassVar[bool] = True

    def protect(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        return cast_like(true_gradient(gmap), gmap)
