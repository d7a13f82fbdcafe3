"""Soteria: share g without what the last dense layer says about those neurons that give the input
away.

For the representation r that enters the last dense layer, neuron j is scored by |r_j| / ‖∂r_j/∂x‖,
and that layer's gradient columns of the largest scores are zeroed.

Reference: Sun, Li, Wang, Yang, Li, Chen, "Soteria: Provable Defense Against Privacy Leakage in
Federated Learning from Representation Perspective" (CVPR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..gradient_map import GradientMap, Tensors
from .base import Defense, cast_like, check_whole, floor_share, is_number, true_gradient


@dataclass
class Soteria(Defense):
    """Zeroes columns of the last dense layer's weight gradient; all else is shared as it is.

    An attacker who leaves that layer out of the matching (`leave_out`) undoes it: audit with such
    an attack.

    Args:
        ratio: p in [0, 1): floor(p·n) of the layer's n columns are zeroed, ties broken by position.
        neuron_chunk: Neurons differentiated at once; bounds memory, see
            `GradientMap.representation`.
    """

    name: ClassVar[str] = "soteria"
    withholds: ClassVar[bool] = True
    ratio: float = 0.9
    neuron_chunk: int = 1

    def __post_init__(self) -> None:
        if not (is_number(self.ratio) and 0 <= self.ratio < 1):
            raise ValueError(
                "ratio must be at least 0 and below 1 (1 would share nothing of the layer), but is "
                f"{self.ratio!r}."
            )
        check_whole("neuron_chunk", self.neuron_chunk, 1)

    def protect(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        gradient = true_gradient(gmap)
        name, representation, sensitivity = gmap.representation(generator, self.neuron_chunk)
        size = representation.norm(dim=0)
        score = torch.where(
            size > 0, size / sensitivity, 0.0
        )  # a neuron that is off shares nothing: it stays
        zeroed = score.argsort(descending=True, stable=True)[: floor_share(self.ratio, len(score))]
        return cast_like(gradient | {name: gradient[name].index_fill(1, zeroed, 0.0)}, gmap)
