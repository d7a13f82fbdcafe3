"""Which of torch's operations look something up, in what and by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_INDEX_AT = {
    "embedding": 1,
    "_embedding_bag": 1,
    "_embedding_bag_forward_only": 1,
    "index_select": 2,
    "gather": 2,
    "take": 1,
    "masked_select": 1,
    "select": 2,
}
"""Operations that take a table first, and where their index stands."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "linear": 0}
"""Matrix products, and where their first factor stands."""


class Lookup(NamedTuple):
    """One lookup.

    Args:
        table: What is looked up in.
        at: Where: whole numbers, a mask, or the other factor of a product.
        dim: Of a factor, the dimension that is summed over; `None` if `at` is none.
    """

    table: Tensor
    at: Tensor | int
    dim: int | None = None

    @property
    def is_product(self) -> bool:
        """Whether this is a product with a factor that may be zero but at few places."""
        return self.dim is not None

    def places(self) -> Tensor:
        """Which places of the table are asked for: the index, or where the factor is not zero."""
        if isinstance(self.at, int):
            return torch.tensor(self.at)
        if self.dim is None:
            return self.at.detach().clone()
        used = self.at.detach() != 0
        return used.movedim(self.dim, 0).flatten(1).any(1) if used.dim() > 1 else used


def lookups(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Lookup]:
    """What an operation of torch's looks up.

    A matrix product may look up too: a vector of counts times a table asks for the rows of the
    words that are there.

    Args:
        name: As ATen calls it.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Example:
        >>> table, ids = torch.ones(5, 2), torch.tensor([3])
        >>> [lookup.places() for lookup in lookups("embedding", (table, ids), {})]
        [tensor([3])]
    """
    if name in _INDEX_AT:
        index = args[_INDEX_AT[name]] if len(args) > _INDEX_AT[name] else kwargs.get("index")
        if isinstance(index, Tensor | int):
            yield Lookup(args[0], index)
    elif name in ("index", "_unsafe_index"):
        yield from (Lookup(args[0], index) for index in args[1] if index is not None)
    elif name in _PRODUCTS:
        one, other = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        yield Lookup(other, one, -1)
        yield Lookup(one, other, -1 if name == "linear" or other.dim() == 1 else -2)
    elif name == "convolution":
        yield Lookup(args[1], args[0], 1)
