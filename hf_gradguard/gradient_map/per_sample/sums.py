"""Sums of what rows add, in which one row more changes only that row and a few last bits.

A sum of a thousand rows in float32 is rounded after each addition, by a fraction of all that was
added before. Kernels cut long sums into blocks by how many terms there are. So one row more than
fills a block changes how all others are rounded, and rows that are equal are all rounded in one
direction.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ROW_ROUNDING = 2.0**-17
"""How much of its clipping bound what a row adds may follow what stands beside it, by what float32
rounds: 128 roundings. docs/differential_privacy.md has what was measured.
"""
AT_ONCE = 64
"""Rows that are added up in their own precision. The sums of so many are added up in float64."""


def sum_of_rows(rows: int, sum_of: Callable[[slice], Tensor]) -> Tensor:
    """Sum what some rows add, `AT_ONCE` of them at a time.

    Args:
        rows: The number of rows.
        sum_of: A function that sums what the rows of a slice add.

    Example:
        >>> tenths = torch.full((2000,), 0.1)
        >>> total = sum_of_rows(2000, lambda chosen: tenths[chosen].sum())
        >>> torch.testing.assert_close(total, torch.tensor(200.0), rtol=1e-6, atol=0)
    """
    if rows <= AT_ONCE:
        return sum_of(slice(0, rows))
    first_rows = sum_of(slice(0, AT_ONCE))
    total = first_rows.double()
    for start in range(AT_ONCE, rows, AT_ONCE):
        total += sum_of(slice(start, start + AT_ONCE))
    return total.to(first_rows.dtype)
