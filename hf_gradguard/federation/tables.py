"""Tables that the data looks up: which of their rows changed names what was in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .rows import idle_rows, quiet_rows

_FEW = 3  # which of two rows changed says little: whether a text has a second segment
_UNITS = 64  # a hidden layer of fewer units is no table, whichever of them fired
_MAPS = 4  # dimensions of a convolution's weights; its kernel's come last

Tensors = Mapping[str, Tensor]


def check_tables(before: Tensors, change: Tensors, remedy: str) -> None:
    """Refuse a change that left some rows of a table alone.

    Units that never fired leave rows alone as well, in a layer's weights, its bias, and the columns
    of a layer that comes later. Those may be up to half of the units. A bias is judged with its
    weights, a dimension after the second by that half alone.

    Args:
        before: The weights before, in at least float32.
        change: Their change, in the order of the model's layers.
        remedy: What to do about a table.

    Raises:
        ValueError: With the table's name, and how many of its rows changed.

    Example:
        >>> before, change = {"words": torch.ones(5, 8)}, {"words": torch.zeros(5, 8)}
        >>> change["words"][:3] = 0.1
        >>> check_tables(before, change, "Withhold it.")
        Traceback (most recent call last):
        ValueError: Nothing was sent: 'words' changed in 3 of 5 rows. ... Withhold it.
    """
    for name, tensor in change.items():
        for dim, count in enumerate(tensor.shape):
            if count < (_FEW if dim < 2 else _UNITS):
                continue
            idle = idle_rows(before[name], tensor, dim)
            trained = int((~idle).sum())
            if trained in (0, count) or _Layers(before, change).explain(name, dim, idle):
                continue
            where = f" along dimension {dim}" if dim else ""
            raise ValueError(
                f"Nothing was sent: {name!r} changed in {trained} of {count} rows{where}. It is a "
                "table that the data looks up, and which rows changed names the words whatever is "
                f"done to the others. {remedy}"
            )


@dataclass(frozen=True)
class _Layers:
    """A model's tensors in the order of its layers, to find what rows are of."""

    before: Tensors
    change: Tensors

    def explain(self, name: str, dim: int, idle: Tensor) -> bool:
        """Whether rows are no table's: those of a bias, or of units."""
        if self.change[name].dim() == 1:
            return self._is_judged(name, idle)
        few = len(idle) < _UNITS or 2 * int(idle.sum()) <= len(idle)
        return few and (dim > 1 or self._are_units(name, dim, idle))

    def _are_units(self, name: str, dim: int, idle: Tensor) -> bool:
        """Whether rows are of a layer's units, or columns of an earlier one's."""
        if self._share_units(name, idle):
            return True
        names, count = list(self.change), len(idle)
        earlier, later = names[: names.index(name)], names[names.index(name) + 1 :]
        if dim:
            return any(
                _feeds(self.change[other], count) or self._left(other, 0, idle) for other in earlier
            )
        biased = any(self._is_bias(other, name, count) for other in later)
        return (biased and any(_reads(self.change[other], count) for other in later)) or any(
            self._left(other, 1, idle) for other in later
        )

    def _is_bias(self, other: str, name: str, count: int) -> bool:
        """Whether a tensor is a layer's bias, or of the norm that comes right after a convolution,
        which no table has.
        """
        names = list(self.change)
        after = self.change[name].dim() >= _MAPS and names.index(other) == names.index(name) + 1
        return self.change[other].shape == (count,) and (after or _layer(other) == _layer(name))

    def _is_judged(self, name: str, idle: Tensor) -> bool:
        """Whether what a bias or a norm says is said by another tensor of its own layer, or by a
        matrix that left the same rows alone: those are looked at themselves.
        """
        own = [
            other
            for other, tensor in self.change.items()
            if other != name and _layer(other) == _layer(name)
            if "bias" in name + other and len(idle) in tensor.shape and bool(tensor.any())
        ]
        return bool(own) or any(
            self._left(other, dim, idle) for other in self.change for dim in (0, 1)
        )

    def _share_units(self, name: str, idle: Tensor) -> bool:
        """Transposed and depthwise convolutions have their units along either dimension."""
        return self.change[name].dim() >= _MAPS and any(
            self._left(other, dim, idle)
            for other, tensor in self.change.items()
            if other != name and tensor.dim() >= _MAPS
            for dim in (0, 1)
        )

    def _left(self, other: str, dim: int, idle: Tensor) -> bool:
        """Whether a matrix that was trained left these units alone, too."""
        change = self.change[other]
        if change.dim() < 2 or not _fit(change.shape[dim], len(idle)):
            return False
        quiet = quiet_rows(self.before[other], change, dim)
        return not bool(quiet.all()) and any(
            10 * int((idle & found).sum()) >= 9 * int(idle.sum())
            for found in _folded(quiet, len(idle))
        )


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _feeds(earlier: Tensor, columns: int) -> bool:
    """Whether a layer's units, or the places of a convolution's maps, can be so many columns."""
    if earlier.dim() >= _MAPS:
        return columns % earlier.shape[0] == 0
    return earlier.dim() > 1 and earlier.shape[0] == columns


def _reads(later: Tensor, units: int) -> bool:
    """Whether a layer can read so many units, or maps that are laid out."""
    return later.dim() > 1 and later.shape[1] % units == 0


def _fit(one: int, other: int) -> bool:
    return max(one, other) % max(1, min(one, other)) == 0


def _folded(rows: Tensor, units: int) -> list[Tensor]:
    """Which of so many units have all of these rows: one each, the places of a map, or, of gates
    that have theirs twice, half a one.
    """
    if len(rows) >= units:
        return [rows.view(units, -1).all(1), rows.view(-1, units).all(0)]
    return [rows.repeat(units // len(rows))]
