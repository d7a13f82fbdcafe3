"""Adds up what rows add, so that one row more moves the sum by that row and few last bits.

A sum of a thousand rows in float32 is rounded after each addition, by a part of all that was added
before. Kernels cut long sums into blocks by how many terms there are. So one row more than fills a
block changes how all others are rounded, and rows that are alike are all rounded in one direction.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

AT_ONCE = 32
"""Rows that are added up in their own precision. The sums of so many are added up in float64."""


def sum_of_rows(rows: int, sum_of: Callable[[slice], Tensor]) -> Tensor:
    """Adds up what some rows add, `AT_ONCE` of them at a time.

    Args:
        rows: How many there are.
        sum_of: Adds up what the rows of a slice add.

    Example:
        >>> tenths = torch.full((100_000,), 0.1)
        >>> float(sum_of_rows(len(tenths), lambda chosen: tenths[chosen].cumsum(0)[-1]))
        10000.0
        >>> float(tenths.cumsum(0, dtype=torch.float32)[-1]) == 10000
        False
    """
    if rows <= AT_ONCE:
        return sum_of(slice(0, rows))
    first_rows = sum_of(slice(0, AT_ONCE))
    total = first_rows.double()
    for start in range(AT_ONCE, rows, AT_ONCE):
        total += sum_of(slice(start, start + AT_ONCE))
    return total.to(first_rows.dtype)
