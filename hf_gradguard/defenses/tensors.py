"""Tensors by name: a gradient, a message, variances. Sums are over all shards, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream, draw_tensors

if TYPE_CHECKING:
    from ..sharded.shards import How, Shards


def true_gradient(gmap: GradientMap) -> Tensors:
    """g, checked to be finite and in at least float32."""
    gradient = gmap.gradient()
    check_finite(
        gradient,
        gmap.shards,
        "The gradient of {} is not finite, so nothing was shared. Look for labels out of range, an "
        "overflow in the loss (in half precision use bf16), or a learning rate that made the "
        "weights diverge.",
    )
    return {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in gradient.items()}


def check_finite(tensors: Mapping[str, Tensor], shards: Shards | None, message: str) -> None:
    """Raise `FloatingPointError(message)` with the first name whose tensor holds NaN or
    infinity.
    """
    # A sum with NaN or infinity in it is neither finite: one fast pass, and a closer look only
    # where a sum is not.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    is_finite = bool(torch.isfinite(sums).all())
    if is_finite if shards is None else not shards.any(not is_finite):
        return
    broken = {name: ~torch.isfinite(tensor).all() for name, tensor in tensors.items()}
    for name, is_broken in of_whole(broken, shards, "max").items():
        if is_broken:
            raise FloatingPointError(message.format(name))


def cast_like(shared: Tensors, gmap: GradientMap) -> Tensors:
    """`shared` in the types of the gradient that it stands for."""
    gradient = gmap.gradient()
    return {name: tensor.to(gradient[name].dtype) for name, tensor in shared.items()}


class OnDemand(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, anew each time, so that none are kept.

    Args:
        names: Of all of them.
        make: Gives the tensor of a name; whoever asks may write to it.
        total: The sum of all their entries, if that is known.
    """

    def __init__(
        self, names: Iterable[str], make: Callable[[str], Tensor], total: float | None = None
    ) -> None:
        self._names, self._make, self.total = dict.fromkeys(names), make, total

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_whole(
    numbers: Mapping[str, Tensor], shards: Shards | None, how: How = "sum"
) -> dict[str, Tensor]:
    """Numbers of whole parameters, given those of this device's parts of them."""
    return dict(numbers) if shards is None else shards.each(numbers, how)


def add_up(numbers: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """The sum of one number per parameter, over all shards."""
    return torch.stack(list(of_whole(numbers, shards).values())).sum()


def total(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """The sum over all entries of all tensors, tensors added up in float64."""
    known = getattr(tensors, "total", None)
    if known is not None:
        return torch.tensor(known, dtype=torch.float64)
    return add_up({name: tensor.sum().double() for name, tensor in tensors.items()}, shards)


def count(tensors: Mapping[str, Tensor], shards: Shards | None) -> int:
    """How many entries all tensors have."""
    return int(add_up({name: torch.tensor(t.numel()) for name, t in tensors.items()}, shards))


def power(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """The sum of squares, likewise."""
    return add_up({name: _square_sum(tensor) for name, tensor in tensors.items()}, shards)


def _square_sum(tensor: Tensor) -> Tensor:
    """Without a tensor of squares; by rows, since norms of many entries add up in their own type,
    and round.
    """
    if tensor.dim() < 2:
        return tensor.square().sum().double()
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1).double().square().sum()


def norm(tensors: Mapping[str, Tensor], shards: Shards | None) -> float:
    """The Euclidean norm over all entries of all tensors."""
    return float(power(tensors, shards).sqrt())


def drawn(
    tensors: Mapping[str, Tensor],
    draw: Callable[[Tensor, Stream], Tensor],
    generator: Stream,
    shards: Shards | None,
) -> Iterator[tuple[str, Tensor]]:
    """Random tensors in the shapes of those given: on each of a client's devices others, but for
    parameters that all of them hold.

    Args:
        tensors: By name.
        draw: Gives a random tensor in the shape, type and place of the one that it gets, whose
            entries are independent of each other.
        generator: This device's.
        shards: Of the map.
    """
    groups = [(tensors, generator)] if shards is None else shards.streams(tensors, generator)
    for some, stream in groups:
        yield from draw_tensors(some, lambda like, stream=stream: draw(like, stream))  # type: ignore[misc]


def scaled(tensor: Tensor, factor: float, offset: float = 0.0) -> Tensor:
    """`factor * tensor + offset`, in place where that is possible, and one number for one."""
    if tensor.numel() and not any(tensor.stride()):
        return (tensor[(0,) * tensor.dim()] * factor + offset).expand_as(tensor)
    return tensor.mul_(factor).add_(offset) if offset else tensor.mul_(factor)


def root(variances: Mapping[str, Tensor], name: str) -> Tensor:
    """Standard deviations of variances, one number for one, in place where those were just made."""
    variance = variances[name]
    if variance.numel() and not any(variance.stride()):
        return variance[(0,) * variance.dim()].sqrt().expand_as(variance)
    return variance.sqrt_() if isinstance(variances, OnDemand) else variance.sqrt()
