"""All that ranks tell each other: the same start, averages, and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments


def average(tensors: Sequence[Tensor], accelerator: Accelerator) -> None:
    """Replace tensors by their means over ranks, in place. All ranks must give the same ones in the
    same order.

    Example:
        >>> average([torch.ones(3)], Accelerator(cpu=True))
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

    Example:
        >>> [len(bucket) for bucket in buckets([torch.ones(3)] * 4, entries=6)]
        [2, 2]
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


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Replace parameters' `.grad` by its mean over ranks: the only exchange of gradients there
    is.

    Example:
        >>> average_gradients(model.parameters(), Accelerator(cpu=True))
    """
    parameters = list(parameters)
    # Every rank reduces the same tensors in the same order, also those it never used.
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average([p.grad for p in parameters if p.grad is not None], accelerator)


def any_rank(due: bool, accelerator: Accelerator) -> bool:
    """Whether something is due on any rank. All ranks must ask.

    Example:
        >>> any_rank(True, Accelerator(cpu=True))
        True
    """
    found = torch.tensor(float(due), device=accelerator.device)
    return bool(accelerator.reduce(found, reduction="sum"))


class StartAlike(TrainerCallback):
    """What wrapping in DDP would have done: every rank starts from rank 0's parameters and
    buffers.
    """

    def __init__(self) -> None:
        self._started = False

    def on_train_begin(
        self, args: TrainingArguments, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            # later on buffers hold statistics of rank 0's data
            buffers = [] if self._started else list(model.buffers())
            with torch.no_grad():
                broadcast([tensor.detach() for tensor in (*model.parameters(), *buffers)])
        self._started = True
