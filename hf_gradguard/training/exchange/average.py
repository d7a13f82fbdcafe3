"""Averages over ranks at every step, and the agreement when to stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

Bits = Literal[32, 64]


class SecureSum(Protocol):
    """The interface of an aggregation that hides each rank's part of an average.

    `hf_gradguard.secure.SecureAggregation` has it, and is imported where it is asked for.
    """

    def agreed(
        self, tensors: Sequence[Tensor], bits: Bits, add_up: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that averages tensors, once all ranks are ready for this exchange."""

    def check_carrier(self, accelerator: object) -> None:
        """Raise an error for another accelerator than its own."""


def average(
    tensors: Sequence[Tensor],
    accelerator: Accelerator,
    secure: SecureSum | None = None,
    bits: Bits = 64,
) -> None:
    """Replace tensors by their means over ranks, in place.

    All ranks must give the same tensors in the same order.

    Args:
        tensors: The floating-point tensors.
        accelerator: The accelerator that carries them.
        secure: The secure aggregation, which shows nobody more than the mean; `None` for none.
        bits: The number of bits of a word that an entry becomes there: 32 for gradients, 64 for
            figures.

    Raises:
        OverflowError: On all ranks, before anything is exchanged, if `secure` has no room for an
            entry of one of them.
        RuntimeError: If a rank died or does not answer, or ranks gave different tensors.

    Example:
        >>> average([torch.ones(3)], Accelerator(cpu=True))
    """
    if accelerator.num_processes == 1:
        return
    mean_of: Callable[[Tensor], Tensor]
    mean_of = functools.partial(_reduced, accelerator=accelerator, reduction="mean")
    if secure is not None:
        add_up = functools.partial(_reduced, accelerator=accelerator, reduction="sum")
        mean_of = secure.agreed(tensors, bits, add_up)
    for bucket in buckets(tensors):
        sizes = [tensor.numel() for tensor in bucket]
        mean = mean_of(torch.cat([tensor.flatten() for tensor in bucket]))
        for tensor, mean_part in zip(bucket, mean.split(sizes), strict=True):
            tensor.copy_(mean_part.view_as(tensor))


def _reduced(tensor: Tensor, accelerator: Accelerator, reduction: str) -> Tensor:
    try:
        return accelerator.reduce(tensor, reduction=reduction)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {accelerator.process_index} could not exchange with the others, so the weights "
            "stay as they were before this step: a rank died, or did not answer within the "
            "process group's timeout. Look at the other ranks' errors, and resume from the last "
            "checkpoint."
        ) from error


def buckets(tensors: Sequence[Tensor], entries: int = 2**23) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one type with about `entries` entries.

    They make few, large collectives in bounded memory.

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


def average_gradients(
    parameters: Sequence[nn.Parameter],
    accelerator: Accelerator,
    secure: SecureSum | None = None,
) -> None:
    """Replace parameters' `.grad` by its mean over ranks.

    This is the only exchange of gradients that there is.

    Raises:
        OverflowError, RuntimeError: As for `average`.

    Example:
        >>> average_gradients(list(model.parameters()), Accelerator(cpu=True))
    """
    # Every rank reduces the same tensors in the same order, also those it never used.
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average([p.grad for p in parameters if p.grad is not None], accelerator, secure, bits=32)


def any_rank(due: bool, accelerator: Accelerator, secure: SecureSum | None = None) -> bool:
    """Return whether something is due on any rank.

    All ranks must call it.

    Example:
        >>> any_rank(True, Accelerator(cpu=True))
        True
    """
    flag = torch.tensor(float(due), device=accelerator.device)
    average([flag], accelerator, secure)
    return bool(flag)
