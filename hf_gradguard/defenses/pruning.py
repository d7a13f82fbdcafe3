"""Pruning: share g with a set A of coordinates zeroed.

U₁ = Σ_{i∉A} g_i² is the first-order utility and Σ_{i∉A} s_i² what leaks. At fixed U₁ the least leaks when the largest
k_i = s_i/|g_i| are pruned.

Reference: Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2024, 2025). Their first version
says "smallest"; the second, its Eq. 13 and the proof say largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from .base import Defense, SensitivityDefense, cast_like, true_gradient


@dataclass
class PruningDefense(Defense):
    """Zeroes a share of all coordinates, ranked over all tensors together. At most one of the two.

    Args:
        ratio: p in [0, 1): exactly floor(p·d) coordinates are zeroed, ties broken by position. Default 0.9.
        utility: u in (0, 1]: coordinates are kept in order of rank until Σ g_i² ≥ u‖g‖².
    """

    withholds: ClassVar[bool] = True
    ratio: float | None = None
    utility: float | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.utility is not None:
            raise ValueError("Give ratio or utility, not both.")
        if self.utility is None and self.ratio is None:
            self.ratio = 0.9
        if self.ratio is not None and not (_is_number(self.ratio) and 0 <= self.ratio < 1):
            raise ValueError(f"ratio must be at least 0 and below 1 (1 would share nothing), but is {self.ratio!r}.")
        if self.utility is not None and not (_is_number(self.utility) and 0 < self.utility <= 1):
            raise ValueError(f"utility must be above 0 and at most 1, but is {self.utility!r}.")

    def priority(self, gmap: GradientMap, gradient: Tensors, generator: torch.Generator) -> Tensors:
        """What is pruned first: the largest values."""
        raise NotImplementedError

    def protect(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        gradient = true_gradient(gmap)
        priority = _flatten(self.priority(gmap, gradient, generator))
        flat = _flatten(gradient)
        if self.utility is not None:
            pruned = _pruned_at_utility(priority, flat, self.utility)
        else:
            assert self.ratio is not None  # __post_init__ leaves exactly one of the two set
            # Through the decimal that was written: 0.29 * 100 is 28.999… in binary.
            pruned = _largest(priority, int(Decimal(str(self.ratio)) * len(flat)))
        masks = pruned.split([g.numel() for g in gradient.values()])
        return cast_like(
            {
                name: g.masked_fill(mask.view_as(g), 0.0)
                for (name, g), mask in zip(gradient.items(), masks, strict=True)
            },
            gmap,
        )


@dataclass
class Pruning(PruningDefense):
    """The smallest |g_i| over all tensors together are zeroed."""

    name: ClassVar[str] = "pruning"

    def priority(self, gmap: GradientMap, gradient: Tensors, generator: torch.Generator) -> Tensors:
        return {name: -g.abs() for name, g in gradient.items()}


@dataclass
class OptimalPruning(SensitivityDefense, PruningDefense):
    """The largest s_i/|g_i| over all tensors together are zeroed: the least leakage at a given utility.

    Coordinates with g_i = 0 go first, because pruning them changes nothing. With granularity "layer" all coordinates of
    a tensor rank alike, and go by position within it.
    """

    name: ClassVar[str] = "optimal_pruning"

    def __post_init__(self) -> None:
        PruningDefense.__post_init__(self)
        SensitivityDefense.__post_init__(self)

    def priority(self, gmap: GradientMap, gradient: Tensors, generator: torch.Generator) -> Tensors:
        magnitude = self.at_granularity(gradient)
        sensitivity = self.at_granularity(self.sensitivity(gmap, generator))
        return {
            name: (s / magnitude[name]).masked_fill(gradient[name] == 0, torch.inf) for name, s in sensitivity.items()
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flatten(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def _largest(priority: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest entries; among equals the first ones. Linear time, unlike a sort."""
    if count == 0:
        return torch.zeros_like(priority, dtype=torch.bool)
    threshold = priority.kthvalue(len(priority) - count + 1).values
    pruned = priority > threshold
    pruned[(priority == threshold).nonzero().flatten()[: count - int(pruned.sum())]] = True
    return pruned


def _pruned_at_utility(priority: Tensor, gradient: Tensor, utility: float) -> Tensor:
    """Mask of what is left after keeping, smallest priority first, until the kept Σ g² reaches the share `utility`."""
    order = priority.argsort(stable=True)
    squares = gradient[order].double().square()
    before = squares.cumsum(0) - squares
    pruned = torch.empty_like(priority, dtype=torch.bool)
    pruned[order] = (before >= utility * squares.sum()) | (squares == 0)
    return pruned
