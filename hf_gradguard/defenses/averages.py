"""Running averages of s² and g², of which a matrix keeps the sums of rows and of columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..gradient_map.devices import devices
from ..gradient_map.marginals import Sums, sums_of
from .base import OnDemand, total

DECAY = 0.7
"""What an average keeps at every step: about the last three batches count."""
PRIOR = 1e-3
"""How much of all parameters' mean is added to each one's, so that none that happened to be still
takes all the noise, or none.
"""

_KINDS = ("squares", "powers")
PARTS = ("shape", *_KINDS)
"""What the names in an average's state begin with."""


class Averages:
    """Exponential averages of s² and g² over batches.

    A matrix is kept as its row and column sums r and c, and read as r cᵀ/Σr: s² of a layer's weight
    is very nearly that, and its probes' errors average out over a row.

    Example:
        >>> averages = Averages()
        >>> ones = {"weight": torch.ones(2, 3)}
        >>> averages.add(ones.items(), ones)
        >>> averages.ratio()["weight"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Sums]] = {kind: {} for kind in _KINDS}
        self._shapes: dict[str, torch.Size] = {}
        self._totals: dict[bool, float] = {}

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def knows(self, names: Iterable[str]) -> bool:
        """Whether it is of these parameters and no others."""
        return set(self._shapes) == set(names)

    def add(self, squares: Iterable[tuple[str, Tensor | Sums]], gradient: Tensors) -> None:
        """Take in a batch.

        Args:
            squares: Estimates of s_i², or their sums, one parameter at a time, of one probe or of
                several after each other.
            gradient: g.
        """
        if not self.knows(gradient):
            self.__init__()  # type: ignore[misc]
        self._shapes = {name: tensor.shape for name, tensor in gradient.items()}
        new: dict[str, dict[str, Sums]] = {kind: {} for kind in _KINDS}
        for name, found in squares:
            parts = found if isinstance(found, tuple) else sums_of(found)
            new["squares"][name] = added(new["squares"].get(name), devices().sums(name, parts))
        for name, g in gradient.items():
            new["powers"][name] = devices().sums(name, sums_of(g.float().square()))
        for kind, sums in new.items():
            size = _total(sums) or 1.0  # batches count alike, whatever their scale
            for name, parts in sums.items():
                old = self._sums[kind].get(name)
                fresh = tuple(part / size for part in parts)
                if old is not None:
                    fresh = tuple(f + DECAY * o for f, o in zip(fresh, old, strict=True))
                self._sums[kind][name] = fresh
        self._totals.clear()

    def ratio(
        self, by_tensor: bool = False, waiting: Mapping[str, Tensor] | None = None
    ) -> OnDemand:
        """√(s²/g²) up to a common factor, in the parameters' shapes: as of now, and made when asked
        for.

        Args:
            by_tensor: One ratio a tensor, of its sums.
            waiting: To be added to g², whose sum over all parameters counts as 1.
        """
        sizes = {name: torch.tensor(math.prod(shape)) for name, shape in self._shapes.items()}
        entries = int(devices().total(sizes))
        priors = {k: PRIOR * _total(sums) / entries or 1.0 for k, sums in self._sums.items()}
        unit, shapes = _total(self._sums["powers"]), dict(self._shapes)
        squares, powers = (dict(self._sums[kind]) for kind in _KINDS)
        mean = _mean if by_tensor else _matrix

        def make(name: str) -> Tensor:
            square = mean(squares[name], shapes[name], priors["squares"])
            power = mean(powers[name], shapes[name], priors["powers"])
            if waiting is not None:
                more = waiting[name].to(power)
                power = power + unit * (more.mean() if by_tensor else more)
            return square.div_(power).sqrt_().expand(shapes[name])

        if waiting is not None:
            return OnDemand(shapes, make)
        if by_tensor not in self._totals:
            self._totals[by_tensor] = float(total(OnDemand(sorted(shapes), make)))
        return OnDemand(shapes, make, self._totals[by_tensor])

    def state_dict(self) -> Tensors:
        """O(rows + columns) numbers. Private if the batches were."""
        return {
            f"{kind}.{part}.{name}": tensor
            for kind, sums in self._sums.items()
            for name, parts in sums.items()
            for part, tensor in enumerate(parts)
        } | {
            f"shape.{name}": torch.tensor(list(shape), dtype=torch.int64)
            for name, shape in self._shapes.items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        """What `state_dict` returned.

        Raises:
            ValueError: For anything else.
        """
        self.__init__()  # type: ignore[misc]
        for key, tensor in sorted(state.items()):
            kind, _, rest = key.partition(".")
            if kind not in PARTS:
                raise ValueError(f"{key!r} is nothing of running averages.")
            if kind == "shape":
                self._shapes[rest] = torch.Size(tensor.tolist())
                continue
            name = rest.partition(".")[2]
            self._sums[kind][name] = (*self._sums[kind].get(name, ()), tensor)
        if any(sums.keys() != self._shapes.keys() for sums in self._sums.values()):
            raise ValueError("These are not the sums and shapes of running averages.")


def added(one: Sums | None, other: Sums) -> Sums:
    """Sums of what is added up."""
    return other if one is None else tuple(a + b for a, b in zip(one, other, strict=True))


def _mean(parts: Sums, shape: torch.Size, prior: float) -> Tensor:
    return parts[0].sum() / math.prod(shape) + prior


def _matrix(parts: Sums, shape: torch.Size, prior: float) -> Tensor:
    if len(parts) == 1:
        return parts[0].view(shape) + prior
    rows, columns = parts
    size = columns.sum()  # all of it, where rows are on several devices
    scaled = rows * torch.where(size > 0, 1 / size, 0)
    return torch.outer(scaled, columns).add_(prior).view(shape)


def _total(sums: dict[str, Sums]) -> float:
    # In one order, whichever a loaded state has, so that a run that goes on has the same bits.
    return float(devices().total({name: sums[name][0].sum().double() for name in sorted(sums)}))
