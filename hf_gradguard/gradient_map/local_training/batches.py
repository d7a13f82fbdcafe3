"""Joining of several batches to one, and splitting: a round of local training has several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..domain import count_rows, domain_of_batch
from ..types import Batch


def first_rows(batch: Batch, count: int) -> Batch:
    """Return at most `count` first samples of a batch.

    The batch itself is returned if it has a tensor without one row for each sample.

    Args:
        batch: A batch, as a collator returns it.
        count: The most samples, at least 1.

    Example:
        >>> len(first_rows(batch, 1)["labels"]), first_rows(batch, 2) is batch
        (1, True)
    """
    rows = count_rows(batch)
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if rows <= count or any(len(value) != rows for value in tensors):
        return batch
    return {
        key: value[:count] if isinstance(value, Tensor) and value.dim() else value
        for key, value in batch.items()
    }


class Pieces:
    """Batches end to end, padded to the longest, and cut apart again.

    Args:
        batches: Batches with the same entries. A tensor with a first dimension of samples is
            joined; all else must be the same in every batch.
        needs_input: Whether anything asks for the continuous input. If not, batches may be
            anything, and are not joined.

    Raises:
        ValueError: If there are none, entries differ, or lengths differ and nothing says where
            padding is.

    Example:
        >>> pieces = Pieces([batch, {name: entry[:1] for name, entry in batch.items()}])
        >>> whole = pieces.joined()
        >>> len(whole["labels"]), [len(piece["labels"]) for piece in pieces.split(whole)]
        (3, [2, 1])
    """

    def __init__(self, batches: Sequence[Batch], needs_input: bool = True) -> None:
        if not batches:
            raise ValueError("Local training needs at least one batch.")
        self.batches = list(batches)
        self.rows = [count_rows(batch) for batch in batches]
        if not needs_input:
            return
        domain = domain_of_batch(batches[0])
        inputs = [domain.main_input(batch) for batch in batches]
        for batch in batches[1:]:
            if odd := set(batch) ^ set(batches[0]):
                raise ValueError(f"{min(odd)!r} is in some of the batches, but not in all of them.")
        ragged = len({tuple(values.shape[1:]) for values in inputs}) > 1
        if ragged and domain.present(batches[0]) is None:
            raise ValueError(
                "The batches' inputs differ in shape, and there is no attention_mask to say what "
                "is padding. Add one, or pad all batches alike."
            )
        self._shapes = {key: self._shapes_of(key) for key in batches[0]}

    def joined(self) -> dict[str, Any]:
        """Return one batch of all samples."""
        joined: dict[str, Any] = {}
        for key, value in self.batches[0].items():
            tensors = [batch[key] for batch in self.batches]
            fill = -100 if key in ("label", "labels") else 0
            joined[key] = value if self._shapes[key] is None else join(tensors, fill)
        return joined

    def split(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return batches in the shapes of the given ones, from one like `joined()` made.

        Entries of other shapes are cut by samples alone.
        """
        pieces: list[dict[str, Any]] = [{} for _ in self.rows]
        for key, value in batch.items():
            shapes = self._shapes.get(key)
            is_joined = isinstance(value, Tensor) and value.dim() and len(value) == sum(self.rows)
            tensors = cut(value, self.rows, shapes) if is_joined else [value] * len(self.rows)
            for piece, tensor in zip(pieces, tensors, strict=True):
                piece[key] = tensor
        return pieces

    def _shapes_of(self, key: str) -> list[torch.Size] | None:
        values = [batch[key] for batch in self.batches]
        if all(
            isinstance(value, Tensor) and value.dim() and len(value) == rows
            for value, rows in zip(values, self.rows, strict=True)
        ):
            return [value.shape for value in values]
        reference = values[0]
        for value in values[1:]:
            same = (
                torch.equal(value, reference)
                if isinstance(reference, Tensor)
                else value == reference
            )
            if not same:
                raise ValueError(f"{key!r} is not of samples, and differs from batch to batch.")
        return None


def join(tensors: Sequence[Tensor], fill: float = 0) -> Tensor:
    """Return tensors under each other, each padded at the ends of its other dimensions.

    Example:
        >>> join([torch.ones(1, 2), torch.ones(1, 3)], fill=7)
        tensor([[1., 1., 7.],
                [1., 1., 1.]])
    """
    sizes = [max(size) for size in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_full((sum(len(tensor) for tensor in tensors), *sizes), fill)
    for tensor, room in zip(
        tensors, joined.split([len(tensor) for tensor in tensors]), strict=True
    ):
        room[tuple(slice(size) for size in tensor.shape)] = tensor
    return joined


def cut(joined: Tensor, rows: Sequence[int], shapes: Sequence[torch.Size] | None) -> list[Tensor]:
    """Cut joined tensors apart, as views: the inverse of `join`.

    Args:
        joined: The joined tensor, `(Σ rows, ...)`.
        rows: The number of rows of each part.
        shapes: The shape of each part; `None`, or others than `whole` has room for, cut no padding
            off.
    """
    tensors = list(joined.split(list(rows)))
    if shapes is None:
        return tensors
    sizes = tuple(max(size) for size in zip(*(shape[1:] for shape in shapes), strict=True))
    if sizes != tuple(joined.shape[1:]):
        return tensors
    return [
        tensor[tuple(slice(size) for size in shape)]
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def pieces_of(batch: Batch, size: int | None) -> list[Batch]:
    """Return a batch cut into batches of `size` samples; the last one may be smaller.

    Entries that are not of samples are in every one.

    Args:
        batch: The batch.
        size: The number of samples, at least 1; `None` for all samples.

    Raises:
        ValueError: If `size` is below 1.

    Example:
        >>> [len(piece["labels"]) for piece in pieces_of(batch, 1)]
        [1, 1]
    """
    count = count_rows(batch)
    if size is not None and size < 1:
        raise ValueError(f"A local batch has at least one sample, not {size}.")
    if size is None or size >= count:
        return [batch]
    return [
        {
            key: value[start : start + size]
            if isinstance(value, Tensor) and value.dim() and len(value) == count
            else value
            for key, value in batch.items()
        }
        for start in range(0, count, size)
    ]
