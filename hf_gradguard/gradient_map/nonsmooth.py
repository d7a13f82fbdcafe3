"""Passes that keep the activation pattern of non-smooth operations.

A derivative that jumps, as ReLU's at zero, is constant on either side, and the exact product with J
keeps each unit on the side where it is. A difference of two passes does not: a unit that crosses
between them adds the jump over the step. So a first pass notes the activation pattern, and in the
others each operation is that of the noted side: there is nothing left to cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class OtherOperations(RuntimeError):
    """A pass has other operations with kinks than the one whose sides are to be kept."""


class Operation(NamedTuple):
    """An operation whose derivative jumps.

    Args:
        side: The function of the operation's arguments that says on which side of a jump they are.
            It returns regions by number, or indices of the selected entries.
        on_side: The function of the side and the same arguments that returns the operation's result
            on that side.
        returns_both: Whether `side` gives a pair, the side and what the operation returns, so that
            it need not be computed once more.
    """

    side: Callable[..., Any]
    on_side: Callable[..., Any]
    returns_both: bool = False


class ActivationPattern:
    """The sides of one pass: noted in the first `with`, kept in all later ones.

    Example:
        >>> pattern, x = ActivationPattern(), torch.tensor([-1.0, 2.0])
        >>> with pattern.kept():
        ...     _ = torch.relu(x)
        >>> with pattern.kept():
        ...     torch.relu(-x)
        tensor([ 0., -2.])
    """

    def __init__(self) -> None:
        self.noted: list[tuple[Any, Tensor]] = []
        self.is_complete = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note them, or keep those that were noted.

        Raises:
            OtherOperations: If a later pass does other operations.
        """
        if not self.is_complete:
            with _Noting(self.noted):
                yield
            self.is_complete = True
            return
        keeping = _Keeping(self.noted)
        with keeping:
            yield
        if keeping.number != len(self.noted):
            raise OtherOperations("The pass ends before all operations with kinks were done.")


class _Noting(TorchFunctionMode):
    def __init__(self, noted: list[tuple[Any, Tensor]]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operation := _operation_of(func, args)) is None:
            return func(*args, **kwargs)
        if operation.returns_both:
            side, output = operation.side(*args, **kwargs)
            self.noted.append((operation, side))
            return output
        with torch.no_grad():  # before it writes in place
            self.noted.append((operation, operation.side(*args, **kwargs)))
        return func(*args, **kwargs)


class _Keeping(TorchFunctionMode):
    def __init__(self, noted: list[tuple[Any, Tensor]]) -> None:
        super().__init__()
        self.noted, self.number = noted, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operation := _operation_of(func, args)) is None:
            return func(*args, **kwargs)
        place, self.number = self.number, self.number + 1
        if place >= len(self.noted) or self.noted[place][0] is not operation:
            raise OtherOperations(f"{getattr(func, '__name__', func)} was not noted at this place.")
        side = self.noted[place][1]
        x, *others = args
        if not _is_in_place(func, args, kwargs):
            return operation.on_side(side, x, *others, **kwargs)
        return x.copy_(operation.on_side(side, x.clone(), *others, **kwargs))


def _operation_of(func: Any, args: tuple[Any, ...]) -> Operation | None:
    operation: Operation | None = _KINKS.get(func)
    if operation is None or not args or not isinstance(args[0], Tensor):
        return None
    if not args[0].is_floating_point():
        return None
    # torch.max and torch.min compare two tensors, or select along one dimension, or of all.
    if operation is _MAX and len(args) > 1 and isinstance(args[1], Tensor):
        return _MAXIMUM
    if operation is _MIN and len(args) > 1 and isinstance(args[1], Tensor):
        return _MINIMUM
    return operation


def _is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return getattr(func, "__name__", "").endswith("_") or bool(kwargs.get("inplace"))


# --- piecewise functions of one entry


def _sign_side(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x > 0


def _leaky(side: Tensor, x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(side, x, negative_slope * x)


def _prelu(side: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # One slope, or one per channel: those are dimension 1.
    shape = (1, -1, *[1] * (x.dim() - 2)) if weight.numel() > 1 and x.dim() > 1 else (-1,)
    return torch.where(side, x, weight.view(shape) * x)


def _elu(
    side: Tensor, x: Tensor, alpha: float = 1.0, scale: float = 1.0, *_: Any, **__: Any
) -> Tensor:
    # What lies on the other side must not overflow: its zero slope times infinity is no number.
    return scale * torch.where(side, x, alpha * torch.expm1(torch.where(side, 0.0, x)))


def _selu(side: Tensor, x: Tensor, inplace: bool = False) -> Tensor:
    return _elu(side, x, 1.6732632423543772, 1.0507009873554805)


def _threshold_side(x: Tensor, threshold: float, *_: Any, **__: Any) -> Tensor:
    return x > threshold


def _threshold(
    side: Tensor, x: Tensor, threshold: float, value: float, inplace: bool = False
) -> Tensor:
    return torch.where(side, x, value)


def _clamp_side(x: Tensor, min: Any = None, max: Any = None, **_: Any) -> Tensor:
    below = torch.zeros_like(x, dtype=torch.bool) if min is None else x < min
    above = torch.zeros_like(x, dtype=torch.bool) if max is None else x > max
    return above.char() - below.char()


def _clamp(side: Tensor, x: Tensor, min: Any = None, max: Any = None, **_: Any) -> Tensor:
    clamped = x if min is None else torch.where(side < 0, min, x)
    return clamped if max is None else torch.where(side > 0, max, clamped)


def _hardtanh_side(
    x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    return _clamp_side(x, min_val, max_val)


def _hardtanh(
    side: Tensor, x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    return _clamp(side, x, min_val, max_val)


def _relu6_side(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _clamp_side(x, 0.0, 6.0)


def _relu6(side: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _clamp(side, x, 0.0, 6.0)


def _hard_side(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _clamp_side(x, -3.0, 3.0)


def _hard_sigmoid(side: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.where(side == 0, x / 6 + 0.5, (side > 0).to(x.dtype))


def _hard_swish(side: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * _hard_sigmoid(side, x)


def _shrink_side(x: Tensor, lambd: float = 0.5) -> Tensor:
    return _clamp_side(x, -lambd, lambd)


def _soft_shrink(side: Tensor, x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(side == 0, torch.zeros_like(x), x - lambd * side)


def _absolute_side(x: Tensor) -> Tensor:
    return torch.sign(x)


def _absolute(side: Tensor, x: Tensor) -> Tensor:
    return x * side


def _l1_side(x: Tensor, target: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.sign(x - target)


def _l1(
    side: Tensor, x: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    losses = (x - target) * side
    losses = losses if weight is None else losses * weight
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


# --- of two tensors, and selections


def _greater(x: Tensor, other: Tensor) -> Tensor:
    return x > other


def _chosen(side: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(side, x, other)


def _other_chosen(side: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(side, other, x)


def _largest_side(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return x.argmax() if dim is None else x.argmax(_one(dim), keepdim=True)


def _smallest_side(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return x.argmin() if dim is None else x.argmin(_one(dim), keepdim=True)


def _one(dim: Any) -> int:
    """A dimension: of several at once the selected place is not one index."""
    if isinstance(dim, int):
        return dim
    if len(dim) == 1:
        return int(dim[0])
    raise OtherOperations("amax and amin of several dimensions keep no sides.")


def _at(side: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """What amax and amin return."""
    if dim is None:
        return x.flatten()[side]
    chosen = x.gather(_one(dim), side)
    return chosen if keepdim else chosen.squeeze(_one(dim))


def _at_with_index(side: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """What `torch.max(x, dim)` returns."""
    values = _at(side, x, dim, keepdim)
    if dim is None:
        return values
    return torch.return_types.max((values, side if keepdim else side.squeeze(_one(dim))))


def _topk_side(x: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    return x.topk(k, dim, *args, **kwargs).indices


def _topk(side: Tensor, x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
    return torch.return_types.topk((x.gather(dim, side), side))


def _sort_side(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.sort(*args, **kwargs).indices


def _sort(side: Tensor, x: Tensor, dim: int = -1, *_: Any, **__: Any) -> Any:
    return torch.return_types.sort((x.gather(dim, side), side))


def _pooled(function: Any, dimensions: int) -> Operation:
    """Of a function that also says where the largest entries lie in the last dimensions."""

    def side(*args: Any, return_indices: bool = False, **kwargs: Any) -> tuple[Tensor, Any]:
        values, indices = function(*args, return_indices=True, **kwargs)
        return indices, ((values, indices) if return_indices else values)

    def on_side(indices: Tensor, x: Tensor, *_: Any, **kwargs: Any) -> Any:
        chosen = x.flatten(-dimensions).gather(-1, indices.flatten(-dimensions))
        values = chosen.view_as(indices)
        return (values, indices) if kwargs.get("return_indices") else values

    return Operation(side, on_side, returns_both=True)


_MAX = Operation(_largest_side, _at_with_index)
_MIN = Operation(_smallest_side, _at_with_index)
_MAXIMUM, _MINIMUM = (
    Operation(_greater, _chosen),
    Operation(_greater, _other_chosen),
)
# Floats and truth values multiply slowly.
_RELU = Operation(_sign_side, lambda side, x, *_, **__: x * side.to(x.dtype))
_CLAMP = Operation(_clamp_side, _clamp)
_CLAMP_MIN = Operation(
    lambda x, min: _clamp_side(x, min), lambda side, x, min: _clamp(side, x, min)
)
_CLAMP_MAX = Operation(
    lambda x, max: _clamp_side(x, None, max), lambda side, x, max: _clamp(side, x, None, max)
)
_F: Any = functional
_T: Any = Tensor


def _table() -> dict[Any, Operation]:
    table = {
        _RELU: (_F.relu, _F.relu_, torch.relu, torch.relu_, _T.relu, _T.relu_),
        Operation(_relu6_side, _relu6): (_F.relu6,),
        Operation(_sign_side, _leaky): (_F.leaky_relu, _F.leaky_relu_),
        Operation(_sign_side, _prelu): (_F.prelu, torch.prelu, _T.prelu),
        Operation(_sign_side, _elu): (_F.elu, _F.elu_),
        Operation(_sign_side, _selu): (_F.selu, torch.selu, torch.selu_),
        Operation(_threshold_side, _threshold): (
            _F.threshold,
            _F.threshold_,
            torch.threshold,
        ),
        Operation(_hardtanh_side, _hardtanh): (_F.hardtanh, _F.hardtanh_),
        Operation(_hard_side, _hard_sigmoid): (_F.hardsigmoid,),
        Operation(_hard_side, _hard_swish): (_F.hardswish,),
        Operation(_shrink_side, _soft_shrink): (_F.softshrink,),
        Operation(_absolute_side, _absolute): (
            torch.abs,
            torch.absolute,
            _T.abs,
            _T.absolute,
            _T.abs_,
        ),
        Operation(_l1_side, _l1): (_F.l1_loss,),
        _CLAMP: (torch.clamp, torch.clip, _T.clamp, _T.clip, _T.clamp_, _T.clip_, torch.clamp_),
        _CLAMP_MIN: (torch.clamp_min, _T.clamp_min, _T.clamp_min_),
        _CLAMP_MAX: (torch.clamp_max, _T.clamp_max, _T.clamp_max_),
        _MAXIMUM: (torch.maximum, _T.maximum),
        _MINIMUM: (torch.minimum, _T.minimum),
        _MAX: (torch.max, _T.max),
        _MIN: (torch.min, _T.min),
        Operation(_largest_side, _at): (torch.amax, _T.amax),
        Operation(_smallest_side, _at): (torch.amin, _T.amin),
        Operation(_topk_side, _topk): (torch.topk, _T.topk),
        Operation(_sort_side, _sort): (torch.sort, _T.sort),
    }
    by_function = {
        function: operation for operation, functions in table.items() for function in functions
    }
    for dimensions in (1, 2, 3):
        for name in (f"max_pool{dimensions}d", f"adaptive_max_pool{dimensions}d"):
            operation = _pooled(getattr(functional, name), dimensions)
            by_function |= {getattr(functional, name): operation}
            if name.startswith("max"):
                by_function |= {getattr(torch, name): operation}
    return by_function


_KINKS = _table()
