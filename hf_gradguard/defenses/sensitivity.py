"""What defenses that weigh parameters by sensitivity share: estimating it, and reusing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream
from .base import Defense, check_finite, check_whole, total

Granularity = Literal["parameter", "layer"]


class Sensitivity(NamedTuple):
    """s_i = ‖∂g_i/∂x‖ of every shared parameter.

    Args:
        roots: s_i.
        squares: The estimates of s_i² that they are from, if those are of this very batch.
    """

    roots: Tensors
    squares: Tensors | None


@dataclass
class SensitivityDefense(Defense):
    """A defense that weighs every parameter by its sensitivity s_i = ‖∂g_i/∂x‖.

    Args:
        num_probes: Random directions to estimate s_i² from; relative variance 2/num_probes.
        granularity: `"parameter"`, or `"layer"`: one s and one |g| a tensor, their norms over it.
        refresh_every: Estimate anew at every n-th call and reuse in between. The reused values
            belong to an earlier batch: protection is then optimal for that one, and cheaper by
            nearly n.
        probe_chunk: Probes that run at once; bounds memory, see `GradientMap.squared_sensitivity`.

    Example:
        >>> defense = make_defense("optimal_pruning", refresh_every=2)
        >>> [(defense(gmap), defense.needs_jacobian)[1] for _ in range(3)]
        [False, True, False]
    """

    num_probes: int = 10
    granularity: Granularity = "parameter"
    refresh_every: int = 1
    probe_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("num_probes", "refresh_every", "probe_chunk"):
            check_whole(name, getattr(self, name), 1)
        if self.granularity not in ("parameter", "layer"):
            raise ValueError(
                f"granularity must be 'parameter' or 'layer', but is {self.granularity!r}."
            )
        self._squares: Tensors = {}
        self._calls_left = 0

    @property
    def needs_jacobian(self) -> bool:
        return self._calls_left == 0

    def sensitivity(self, gmap: GradientMap, generator: Stream) -> Sensitivity:
        """s_i for every shared parameter, estimated now or at most `refresh_every - 1` calls ago.

        Coordinates of the gradient that are not zero never count as insensitive by accident: where
        an estimate on this very batch underflowed they have the smallest s there is, and where an
        earlier batch did not reach them (other positions, another dropout mask) the root mean
        square of their tensor's, or of all.
        """
        if self._calls_left == 0 or self._squares.keys() != gmap.parameters.keys():
            self._calls_left = 0
            squares = gmap.squared_sensitivity(self.num_probes, generator, self.probe_chunk)
            check_finite(
                squares,
                "The sensitivity of {} is not finite: the loss has no second derivative there.",
            )
            self._squares, self._calls_left = squares, self.refresh_every
        fresh = self._calls_left == self.refresh_every
        self._calls_left -= 1
        squares = gmap.restrict(self._squares)
        if not self._calls_left:
            self._squares = {}
        # A loaded state has an order of its own.
        squares = {name: squares[name] for name in gmap.parameters}
        filled = _filled(squares, gmap.gradient(), fresh)
        roots = {name: square.sqrt() for name, square in filled.items()}
        return Sensitivity(roots, squares if fresh else None)

    def at_granularity(self, tensors: Tensors) -> Tensors:
        """Magnitudes entry by entry, or with granularity "layer" each tensor's norm in all its
        entries.
        """
        if self.granularity == "layer":
            return {name: tensor.norm().expand_as(tensor) for name, tensor in tensors.items()}
        return {name: tensor.abs() for name, tensor in tensors.items()}

    def state_dict(self) -> Tensors:
        if not self._squares:
            return {}
        return {"calls_left": torch.tensor(self._calls_left)} | {
            f"squares.{n}": t for n, t in self._squares.items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        state = dict(state)
        self._calls_left = int(state.pop("calls_left", torch.tensor(0)))
        self._squares = {name.removeprefix("squares."): tensor for name, tensor in state.items()}


def _filled(squares: Tensors, gradient: Tensors, fresh: bool) -> Tensors:
    overall = total(squares) / sum(square.numel() for square in squares.values())
    if not overall:
        return squares
    filled = {}
    for name, square in squares.items():
        least = (
            torch.finfo(square.dtype).tiny
            if fresh
            else square.mean()
            if square.any()
            else overall.to(square.dtype)
        )
        filled[name] = torch.where((square == 0) & (gradient[name] != 0), least, square)
    return filled
