"""What ranks tell each other at every step: averages, and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .secure_aggregation import Bits, FixedPoint, Masks, SecureAggregation


def average(
    tensors: Sequence[Tensor],
    accelerator: Accelerator,
    secure: SecureAggregation | None = None,
    bits: Bits = 64,
) -> None:
    """Replace tensors by their means over ranks, in place. All ranks must give the same ones in the
    same order.

    Args:
        tensors: Floating-point ones.
        accelerator: Carries them.
        secure: Hides each rank's from the others and from who carries them, all but their mean.
        bits: Of a word that an entry becomes there: 32 for gradients, 64 for figures.

    Raises:
        OverflowError: On all ranks, before anything is exchanged, if `secure` has no room for an
            entry of one of them.
        RuntimeError: If a rank died or does not answer, or ranks gave different tensors.

    Example:
        >>> average([torch.ones(3)], Accelerator(cpu=True))
    """
    if accelerator.num_processes == 1:
        return
    point, masks = (None, None) if secure is None else _agreed(tensors, accelerator, secure, bits)
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        if point is None or masks is None:
            mean = _reduced(flat, accelerator, "mean")
        else:
            words = point.encode(flat)
            masks.hide(words)
            mean = point.mean(_reduced(words, accelerator, "sum"))
        for tensor, mean_part in zip(
            bucket, mean.split([tensor.numel() for tensor in bucket]), strict=True
        ):
            tensor.copy_(mean_part.view_as(tensor))


def _agreed(
    tensors: Sequence[Tensor], accelerator: Accelerator, secure: SecureAggregation, bits: Bits
) -> tuple[FixedPoint, Masks]:
    """The fixed point and the masks of an exchange that all ranks are ready for.

    Ranks first add up, hidden likewise, how many of them have an entry too large. So no rank waits
    for one that refuses, none learns which one it is, and nothing of a message has left any. The
    sum is a small number only if all masks are gone from it: if every rank is at the same exchange
    of the same tensors, and the sum wraps.
    """
    point = secure.point(bits)
    masks = secure.masks(f"{point} {[(tensor.dtype, tensor.numel()) for tensor in tensors]}")
    largest = point.largest(tensors)
    refuses = not largest <= point.bound  # NaN is not
    votes = torch.tensor([refuses, 0, 0, 0], dtype=point.word, device=accelerator.device)
    masks.hide(votes)
    count, *padding = _reduced(votes, accelerator, "sum").tolist()
    if any(padding) or not 0 <= count <= point.ranks:
        raise RuntimeError(
            "The masks of secure_aggregation are not gone from the sum, so nothing was exchanged. "
            "Ranks differ in what they exchange (the model, its types, secure_aggregation_range), "
            "keys or messages were changed on their way, or this backend's sums do not wrap."
        )
    if count:
        this_rank = (
            f"This rank's largest is {largest:g}." if refuses else "This rank's are within it."
        )
        advice = {
            32: "Set a higher secure_aggregation_range, the same on all ranks, or make gradients "
            "or noise smaller.",
            64: "Losses, counts and statistics so large have no room: look for one that diverges.",
        }
        raise OverflowError(
            f"{count} of {point.ranks} ranks have an entry that is not finite, or beyond "
            f"±{point.bound:g}, so nothing was exchanged. {this_rank} {advice[bits]}"
        )
    return point, masks


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


def average_gradients(
    parameters: Iterable[nn.Parameter],
    accelerator: Accelerator,
    secure: SecureAggregation | None = None,
) -> None:
    """Replace parameters' `.grad` by its mean over ranks: the only exchange of gradients there
    is.

    Raises:
        OverflowError, RuntimeError: As for `average`.

    Example:
        >>> average_gradients(model.parameters(), Accelerator(cpu=True))
    """
    parameters = list(parameters)
    # Every rank reduces the same tensors in the same order, also those it never used.
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    average(gradients, accelerator, secure, bits=32)


def any_rank(due: bool, accelerator: Accelerator, secure: SecureAggregation | None = None) -> bool:
    """Whether something is due on any rank. All ranks must ask.

    Example:
        >>> any_rank(True, Accelerator(cpu=True))
        True
    """
    flag = torch.tensor(float(due), device=accelerator.device)
    average([flag], accelerator, secure)
    return bool(flag)
