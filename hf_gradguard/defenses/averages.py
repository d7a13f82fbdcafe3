"""Running averages of s² and g², of which a matrix keeps the sums of rows and of columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..gradient_map.marginals import Sums, power_sums, sums_of
from .message import OnDemand, add_up, of_whole

if TYPE_CHECKING:
    from ..sharded.shards import Shards

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
        self._ratios: dict[bool, OnDemand] = {}

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def knows(self, names: Iterable[str]) -> bool:
        """Whether it is of these parameters and no others."""
        return set(self._shapes) == set(names)

    def add(
        self,
        squares: Iterable[tuple[str, Tensor | Sums]],
        gradient: Tensors,
        powers: Iterable[tuple[str, Sums]] | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Take in a batch.

        Args:
            squares: Estimates of s_i², or their sums, one parameter at a time, of one probe or of
                several after each other.
            gradient: g.
            powers: Sums of an estimate of E g_i². Default: those of g_i².
            shards: Of the map.
        """
        if not self.knows(gradient):
            self.__init__()  # type: ignore[misc]
        self._shapes = {name: tensor.shape for name, tensor in gradient.items()}
        new: dict[str, dict[str, Sums]] = {kind: {} for kind in _KINDS}
        for name, found in squares:
            parts = found if isinstance(found, tuple) else sums_of(found)
            parts = parts if shards is None else shards.sums(name, parts)
            new["squares"][name] = added(new["squares"].get(name), parts)
        for name, parts in power_sums(gradient) if powers is None else powers:
            new["powers"][name] = parts if shards is None else shards.sums(name, parts)
        for kind, sums in new.items():
            size = _total(sums, shards) or 1.0  # batches count alike, whatever their scale
            for name, parts in sums.items():
                old = self._sums[kind].get(name)
                fresh = tuple(part / size for part in parts)
                if old is not None:
                    fresh = tuple(f + DECAY * o for f, o in zip(fresh, old, strict=True))
                self._sums[kind][name] = fresh
        self._ratios.clear()

    def ratio(
        self,
        by_tensor: bool = False,
        waiting: Mapping[str, Tensor] | None = None,
        shards: Shards | None = None,
    ) -> OnDemand:
        """√(s²/g²) up to a common factor, in the parameters' shapes: as of now, and made when asked
        for.

        Args:
            by_tensor: One ratio a tensor, of its sums.
            waiting: To be added to g², whose sum over all parameters counts as 1.
            shards: Of the map.
        """
        if waiting is not None:
            return self._ratio(by_tensor, waiting, shards)
        if by_tensor not in self._ratios:
            self._ratios[by_tensor] = self._ratio(by_tensor, None, shards)
        return self._ratios[by_tensor]

    def _ratio(
        self, by_tensor: bool, waiting: Mapping[str, Tensor] | None, shards: Shards | None
    ) -> OnDemand:
        squares, powers = (self._lifted(kind, by_tensor, shards) for kind in _KINDS)
        shapes, unit = dict(self._shapes), _total(self._sums["powers"], shards)
        if waiting is not None:

            def with_waiting(name: str) -> Tensor:
                square, power = (_product(kind[name], shapes[name]) for kind in (squares, powers))
                more = waiting[name].to(power)
                power = power + unit * (more.mean() if by_tensor else more)
                return square.div(power).sqrt_()

            return OnDemand(shapes, with_waiting)
        # The root of a quotient of products is one of roots of quotients.
        roots = {
            name: tuple(s.div(g).sqrt_() for s, g in zip(found, powers[name], strict=True))
            for name, found in squares.items()
        }
        each = {name: _product_sum(roots[name], shapes[name]) for name in sorted(roots)}
        return OnDemand(
            shapes, lambda name: _product(roots[name], shapes[name]), float(add_up(each, shards))
        )

    def _lifted(self, kind: str, by_tensor: bool, shards: Shards | None) -> dict[str, Sums]:
        """Averages with a share of their mean added to every entry; of matrices as factors of a
        product, rows and columns.
        """
        sizes = {name: torch.tensor(math.prod(shape)) for name, shape in self._shapes.items()}
        wholes, sums = of_whole(sizes, shards), self._sums[kind]
        prior = PRIOR * _total(sums, shards) / float(add_up(sizes, shards)) or 1.0
        found: dict[str, Sums] = {}
        for name, parts in sums.items():
            size = int(wholes[name])
            if by_tensor:
                found[name] = (parts[-1].sum() / size + prior,)
            elif len(parts) == 1:
                found[name] = (parts[0] + prior,)
            else:
                rows, columns = parts[0], parts[1] + prior * max(size // len(parts[1]), 1)
                found[name] = ((rows + prior * len(columns)) / columns.sum(), columns)
        return found

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


def _product(factors: Sums, shape: torch.Size) -> Tensor:
    """In a parameter's shape: of rows and columns, of all entries, or of one number for all."""
    if len(factors) == 2:
        return torch.outer(*factors).view(shape)
    return factors[0].expand(shape) if factors[0].dim() < len(shape) else factors[0].clone()


def _product_sum(factors: Sums, shape: torch.Size) -> Tensor:
    """The sum of its entries."""
    sums = [factor.sum().double() for factor in factors]
    if len(factors) == 2:
        return sums[0] * sums[1]
    return sums[0] * math.prod(shape) if factors[0].dim() < len(shape) else sums[0]


def _total(sums: dict[str, Sums], shards: Shards | None) -> float:
    # In one order, whichever a loaded state has, so that a run that goes on has the same bits.
    return float(add_up({name: sums[name][0].sum().double() for name in sorted(sums)}, shards))
