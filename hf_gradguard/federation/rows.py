"""Which rows of a tensor were trained, where weight decay changed all of them."""

from __future__ import annotations

import torch
from torch import Tensor

_ULP = torch.finfo(torch.float32).eps  # a weight's last digit, as a share of the weight
_ROUNDING = 2048 * _ULP  # of 4,096 steps of decay at most
_WIDTH = 8  # of rows whose signs all agree with something, other than by chance


def trained_rows(start: Tensor, change: Tensor, dim: int) -> int:
    """How many rows along a dimension changed by more than weight decay and its rounding.

    None where most of those hardly did: then all rows were trained, by so little that it is chance
    which of them show it. Rows that alone were looked up stand out.

    Args:
        start: The weights before, in at least float32.
        change: Their change.
        dim: Where the rows are counted.

    Example:
        >>> start = torch.ones(4, 3)
        >>> change = -0.001 * start
        >>> change[2] += 0.1
        >>> trained_rows(start, change, 0)
        1
    """
    others = tuple(k for k in range(change.dim()) if k != dim)
    shrunk = _by_signs(start, change, others)
    if change.numel() >= _WIDTH * len(shrunk) and 2 * int((shrunk > 0.95).sum()) > len(shrunk):
        found = [shrunk < share for share in (0.95, 0.8)]
    else:
        factor = _decay(start, change, others)
        slack = min(_ULP - factor, _ROUNDING) if factor else 0.0
        rest, sizes = change.sub(start, alpha=factor).abs_(), start.abs()
        found = [(rest > s * sizes).any(others) for s in (slack, 8 * max(slack, _ULP))]
    more, much = (int(rows.sum()) for rows in found)
    return more if much >= more / 2 else 0


def _by_signs(start: Tensor, change: Tensor, others: tuple[int, ...]) -> Tensor:
    """The cosine of rows' changes with shrinking by the same in all entries, as Adam moves them
    whose decay is a part of the gradient (AdamW's is not). 1 for what did not change.
    """
    along = -(change * start.sign()).sum(others)
    sizes = (change.square().sum(others) * start.ne(0).sum(others)).sqrt()
    return torch.where(change.ne(0).any(others), along / sizes, 1.0)


def _decay(start: Tensor, change: Tensor, others: tuple[int, ...]) -> float:
    """What weight decay added to all rows, as a multiple of themselves: the median's, or 0 if that
    is no decay. Others are the dimensions within a row.

    A step's decay changes an entry by half of its last digit or more, or not at all, and its
    rounding is half of one at most: an entry is off by no more than the decay, and one digit.
    """
    factors = (change * start).sum(others) / start.square().sum(others)
    factors = factors[factors.isfinite()]  # a row of zeros has none
    factor = float(factors.median()) if len(factors) else 0.0
    return factor if -0.25 < factor < 0 else 0.0
