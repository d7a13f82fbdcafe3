"""Random numbers for many tensors, in few draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

_TOGETHER, _TOGETHER_ELSEWHERE = 2**20, 2**24
"""Numbers of small tensors in one draw, on a processor and on other devices."""


def together(
    tensors: Mapping[str, Tensor], draw: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Random tensors in the shapes of those given. Small neighbors are cut from one draw, since a
    draw costs as much as a thousand numbers, and a long one is shared out over torch's threads.
    Large ones have draws of their own, so that no more is held than one of them.

    Args:
        tensors: By name.
        draw: Gives a random tensor in the shape, type and place of the one that it gets, whose
            values mean nothing. Its entries are independent of each other.

    Yields:
        A name, and what was drawn for it, in the order of `tensors`.

    Example:
        >>> from hf_gradguard.randomness import Stream
        >>> like = {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}
        >>> drawn = dict(together(like, lambda tensor: Stream().normal(tensor.shape)))
        >>> drawn["weight"].shape, drawn["bias"].shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        other = next(iter(parts.values()), tensor)
        size = sum(part.numel() for part in parts.values()) + tensor.numel()
        fits = size <= (_TOGETHER if tensor.device.type == "cpu" else _TOGETHER_ELSEWHERE)
        if not (fits and (tensor.dtype, tensor.device) == (other.dtype, other.device)):
            yield from _cut(parts, draw)
            parts = {}
        parts[name] = tensor
    yield from _cut(parts, draw)


def _cut(
    parts: Mapping[str, Tensor], draw: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    if len(parts) < 2:
        yield from ((name, draw(part)) for name, part in parts.items())
        return
    sizes = [part.numel() for part in parts.values()]
    drawn = draw(next(iter(parts.values())).new_empty(sum(sizes))).split(sizes)
    for (name, part), own in zip(parts.items(), drawn, strict=True):
        yield name, own.view(part.shape)
