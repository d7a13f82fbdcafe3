"""The one way in which tensors are averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor


def average(tensors: Sequence[Tensor], accelerator: Accelerator) -> None:
    """Replace tensors by their means over ranks, in place. All ranks must give the same ones in the
    same order.
    """
    if accelerator.num_processes == 1:
        return
    for bucket in buckets(tensors):
        mean = accelerator.reduce(
            torch.cat([tensor.flatten() for tensor in bucket]), reduction="mean"
        )
        for tensor, part in zip(
            bucket, mean.split([tensor.numel() for tensor in bucket]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor], entries: int = 2**23) -> Iterator[list[Tensor]]:
    """Runs of tensors of one type with about `entries` entries: few, large collectives in bounded
    memory.
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (
            tensor.dtype != bucket[0].dtype
            or sum(t.numel() for t in bucket) + tensor.numel() > entries
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
