"""Which rows of a tensor training left alone, where weight decay changed all of them."""

from __future__ import annotations

import torch
from torch import Tensor

_ULP = torch.finfo(torch.float32).eps  # a weight's last digit, as a share of the weight
_ROUNDING = 2048 * _ULP  # of 4,096 steps of decay at most
_WIDTH = 8  # of rows whose signs all agree with something, other than by chance
_WIDE = 32  # likewise, where most rows' signs do not
_FEW = 3  # narrow rows that stay as they are by chance


def idle_rows(start: Tensor, change: Tensor, dim: int) -> Tensor:
    """Which rows along a dimension changed by no more than weight decay and its rounding, `(rows,)`
    of booleans.

    None where as many hardly did: then all rows were trained, by so little that it is chance which
    of them show it. Rows that were not looked up stand out. None as well where those are rows of
    padding alone, which start at zero where most do not.

    Args:
        start: The weights before, in at least float32.
        change: Their change.
        dim: Where the rows are counted.

    Example:
        >>> start = torch.ones(4, 3)
        >>> change = -0.001 * start
        >>> change[2] += 0.1
        >>> idle_rows(start, change, 0)
        tensor([ True,  True, False,  True])
    """
    idle, hardly, tiny = _left_alone(start, change, dim, _WIDE)
    width = change.numel() // max(1, len(idle))
    zero = ~start.movedim(dim, 0).reshape(len(idle), -1).ne(0).any(1)
    left, little = int(idle.sum()), int((hardly & ~idle).sum())
    padding = 2 * int(zero.sum()) <= len(zero) and not bool((idle & ~zero).any())
    chance = int((~hardly).sum()) < little or left <= int((tiny & ~idle).sum())
    if padding or chance or (width < _WIDTH and left < _FEW):
        return torch.zeros_like(idle)
    return idle


def quiet_rows(start: Tensor, change: Tensor, dim: int) -> Tensor:
    """Which rows hardly changed, by chance or not, `(rows,)` of booleans.

    Example:
        >>> start, change = torch.ones(4, 9), torch.zeros(4, 9)
        >>> change[2] = 0.1
        >>> quiet_rows(start, change, 0)
        tensor([ True,  True, False,  True])
    """
    _, hardly, tiny = _left_alone(start, change, dim, _WIDTH)
    return hardly | tiny


def _left_alone(
    start: Tensor, change: Tensor, dim: int, wide: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that decay alone changed; whose entries all changed hardly more; and all in all. Signs
    count from some width on.
    """
    if start.dim() == 1:
        start, change = start[:, None], change[:, None]
    others = tuple(k for k in range(change.dim()) if k != dim)
    width = change.numel() // max(1, change.shape[dim])
    idle, hardly, tiny = _by_decay(start, change, others, width)
    shrunk = _by_signs(start, change, others)
    if width >= wide or (width >= _WIDTH and 2 * int((shrunk > 0.95).sum()) > len(shrunk)):
        idle, hardly, tiny = idle | (shrunk > 0.95), hardly | (shrunk > 0.8), tiny | (shrunk > 0.5)
    return idle, hardly, tiny


def _by_decay(
    start: Tensor, change: Tensor, others: tuple[int, ...], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_left_alone`.

    A step's decay changes an entry by half of its last digit or more, or not at all, and its
    rounding is half of one at most: an entry is off by no more than the decay, and one digit.
    """
    factor = _decay(start, change, others, width)
    slack = torch.where(factor == 0, 0.0, (_ULP - factor).clamp(max=_ROUNDING))
    rest, sizes = (change - factor * start).abs_(), start.abs()
    idle = ~(rest > slack * sizes).any(others)
    shared = slack.flatten()[idle]
    common = max(_ULP, float(shared.median())) if len(shared) else _ULP
    many = 8 if width >= _WIDTH else 64  # times what rounding does
    hardly = ~(rest > many * common * sizes).any(others)
    tiny = rest.square().sum(others) <= (many * _ULP) ** 2 * sizes.square().sum(others)
    return idle, idle | hardly, idle | tiny


def _decay(start: Tensor, change: Tensor, others: tuple[int, ...], width: int) -> Tensor:
    """What decay added to rows, as a multiple of themselves: each row's own, since no other row of
    some width is one; of narrow rows the median's, if most agree. 0 if that is no decay.
    """
    factor = (change * start).sum(others, keepdim=True)
    factor /= start.square().sum(others, keepdim=True)
    if width < _WIDTH:
        known = factor[factor.isfinite()]  # a row of zeros has none
        found = float(known.median()) if len(known) else 0.0
        agree = int(((known - found).abs() <= min(_ULP + abs(found), _ROUNDING)).sum())
        factor = torch.full_like(factor, found if 2 * agree > len(known) else 0.0)
    return torch.where((factor > -0.25) & (factor < 0), factor, 0.0)


def _by_signs(start: Tensor, change: Tensor, others: tuple[int, ...]) -> Tensor:
    """The cosine of rows' changes with shrinking by the same in all entries, as Adam moves them
    whose decay is a part of the gradient (AdamW's is not). 1 for what did not change.
    """
    along = -(change * start.sign()).sum(others)
    sizes = (change.square().sum(others) * start.ne(0).sum(others)).sqrt()
    return torch.where(change.ne(0).any(others), along / sizes, 1.0)
