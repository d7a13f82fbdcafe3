"""Sums over ranks of which no rank, and nobody who carries messages, sees another's part.

Numbers become whole ones (a fixed point), and every two ranks add and subtract the same random
mask: what leaves a rank is uniform, and in the sum, modulo 2³² or 2⁶⁴, all masks are gone.

Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(2017), without its recovery of clients that drop out: a rank that dies stops the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from torch import Tensor

from ..randomness import Stream
from .key_agreement import KEY_BYTES, agree, load_identity

Bits = Literal[32, 64]
FIGURES = 2.0**32
"""Largest size of what is no gradient: losses, counts, statistics. Their unit is below 4e-9 on
up to four ranks.
"""


_CHUNK = 2**16  # entries at once on the CPU: they stay in a processor's cache


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.reshape(-1)
    return flat.split(_CHUNK if tensor.device.type == "cpu" else max(len(flat), 1))


class FixedPoint(NamedTuple):
    """Whole numbers that stand for fractions.

    Args:
        bound: Largest |x| of a rank.
        ranks: How many are added up.
        bits: Of a word.

    Example:
        >>> point = FixedPoint(bound=1.0, ranks=3, bits=32)
        >>> point.encode(torch.tensor([0.5, -1.0])) * point.unit
        tensor([ 0.5000, -1.0000])
    """

    bound: float
    ranks: int
    bits: Bits

    @property
    def word(self) -> torch.dtype:
        """The type of a word."""
        return torch.int32 if self.bits == 32 else torch.int64

    @property
    def unit(self) -> float:
        """What 1 stands for: a power of two, so that scaling by it rounds nothing. The sum stays
        within 99 % of a word's range, which leaves room for rounding.
        """
        return 2.0 ** math.ceil(
            math.log2(self.ranks * self.bound / (0.99 * 2.0 ** (self.bits - 1)))
        )

    def encode(self, values: Tensor) -> Tensor:
        """To the nearest whole number of units."""
        words = torch.empty(values.shape, dtype=self.word, device=values.device)
        wide = torch.promote_types(values.dtype, self._wide)
        for word, value in zip(_chunks(words), _chunks(values), strict=True):
            word.copy_((value.to(wide) / self.unit).round_())
        return words

    def mean(self, words: Tensor) -> Tensor:
        """Of a sum over ranks."""
        values = torch.empty(words.shape, dtype=self._wide, device=words.device)
        for value, word in zip(_chunks(values), _chunks(words), strict=True):
            value.copy_(word).mul_(self.unit).div_(self.ranks)
        return values

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.bits == 32 else torch.float64

    def largest(self, tensors: Sequence[Tensor]) -> float:
        """Of all |x|; NaN if one is."""
        ends = [end for tensor in tensors if tensor.numel() for end in tensor.aminmax()]
        return float(torch.stack([end.double().abs() for end in ends]).max()) if ends else 0.0


class Masks(NamedTuple):
    """The masks of one rank in one exchange.

    Args:
        streams: Of each other rank, and whether it is added: the lower rank of two adds.

    Example:
        >>> key, words = bytes(32), torch.tensor([1, 2])
        >>> one, two = words.clone(), words.clone()
        >>> Masks([(Stream(key), True)]).hide(one)
        >>> Masks([(Stream(key), False)]).hide(two)
        >>> one + two
        tensor([2, 4])
    """

    streams: Sequence[tuple[Stream, bool]]

    def hide(self, words: Tensor) -> None:
        """Add and subtract the next masks, in place."""
        words_per_entry = words.element_size() // 4
        for stream, adds in self.streams:
            done = 0
            for chunk in stream.words(words_per_entry * len(words), device=words.device):
                mask = chunk.view(words.dtype)
                masked = words[done : done + len(mask)]
                masked.add_(mask) if adds else masked.sub_(mask)
                done += len(mask)


class SecureAggregation:
    """The keys of this rank, and new masks for every exchange.

    Keys are agreed upon in the first exchange of a training, a resumed one too, and never stored.
    An exchange makes its masks of them, and then replaces each by one derived from it: no mask
    comes twice, and whoever reads a rank's memory later cannot take masks off what was sent before.

    Args:
        accelerator: Of the training.
        bound: Largest size of an entry of a gradient.
        keys: Folder of identity keys, see `load_identity`.

    Raises:
        NotImplementedError: For fewer than three ranks.
        FileNotFoundError: As for `load_identity`.
        ValueError: As for `load_identity`.

    Example:
        >>> SecureAggregation(Accelerator(cpu=True))
        Traceback (most recent call last):
        ...
        NotImplementedError: secure_aggregation on 1 rank(s) is not supported...
    """

    def __init__(
        self, accelerator: Accelerator, bound: float = 16.0, keys: str | None = None
    ) -> None:
        rank, ranks = accelerator.process_index, accelerator.num_processes
        if ranks < 3:
            raise NotImplementedError(
                f"secure_aggregation on {ranks} rank(s) is not supported: of two, each learns the "
                "other's message from the mean and its own. Take three ranks or more, or leave it "
                "out."
            )
        self.bound = bound
        self._accelerator, self._rank = accelerator, rank
        self._identity = None if keys is None else load_identity(keys, rank, ranks)
        self._keys: dict[int, bytes] = {}

    def check_carrier(self, accelerator: object) -> None:
        """Refuse another accelerator than its own.

        Raises:
            NotImplementedError: With the way out.
        """
        if accelerator is not self._accelerator:
            raise NotImplementedError(
                "Messages are added up securely over the processes of Accelerate's Accelerator. "
                "Pass the one that SecureAggregation was made with, or leave secure out."
            )

    def agree(self) -> None:
        """New keys. All ranks must call it.

        Raises:
            ValueError: As for `agree`.
        """
        self._keys = agree(self._accelerator, self._identity)

    def point(self, bits: Bits) -> FixedPoint:
        """For gradients (32) or figures (64)."""
        bound = self.bound if bits == 32 else FIGURES
        return FixedPoint(bound, self._accelerator.num_processes, bits)

    def masks(self, layout: str) -> Masks:
        """Of the next exchange. They cancel only if all ranks describe it alike."""
        if not self._keys:
            self.agree()
        # Keys move on at once, so that an exchange that fails half way has used up its masks.
        streams = [
            (Stream(_derived(key, f"masks of {layout}")), self._rank < peer)
            for peer, key in self._keys.items()
        ]
        self._keys = {peer: _derived(key, "next key") for peer, key in self._keys.items()}
        return Masks(streams)

    def agreed(
        self, tensors: Sequence[Tensor], bits: Bits, add_up: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Takes means of tensors' entries, in an exchange that all ranks are ready for.

        Ranks first add up, hidden likewise, how many of them have an entry too large. So no rank
        waits for one that refuses, none learns which one it is, and nothing of a message has left
        any. The sum is a small number only if all masks are gone from it: if every rank is at the
        same exchange of the same tensors, and the sum wraps.

        Args:
            tensors: All that the exchange is of.
            bits: Of a word.
            add_up: Over ranks.

        Raises:
            OverflowError: On all ranks, if there is no room for an entry of one of them.
            RuntimeError: If ranks differ in what they exchange.
        """
        point = self.point(bits)
        masks = self.masks(f"{point} {[(tensor.dtype, tensor.numel()) for tensor in tensors]}")
        # A rank that refused later, alone, would leave the others waiting in a collective.
        self._vote(point, masks, point.largest(tensors), add_up)

        def mean_of(flat: Tensor) -> Tensor:
            words = point.encode(flat)
            masks.hide(words)
            return point.mean(add_up(words))

        return mean_of

    def _vote(
        self, point: FixedPoint, masks: Masks, largest: float, add_up: Callable[[Tensor], Tensor]
    ) -> None:
        """Go on only if every rank's entries fit."""
        refuses = not largest <= point.bound  # NaN is not
        device = self._accelerator.device
        # The zeros' masks cancel like the vote's: what is left of them shows that ranks differ.
        votes = torch.tensor([refuses, 0, 0, 0], dtype=point.word, device=device)
        masks.hide(votes)
        count, *padding = add_up(votes).tolist()
        if any(padding) or not 0 <= count <= point.ranks:
            raise RuntimeError(
                "The masks of secure_aggregation are not gone from the sum, so nothing was "
                "exchanged. Ranks differ in what they exchange (the model, its types, "
                "secure_aggregation_range), keys or messages were changed on their way, or this "
                "backend's sums do not wrap."
            )
        if count:
            this_rank = (
                f"This rank's largest is {largest:g}." if refuses else "This rank's are within it."
            )
            raise OverflowError(
                f"{count} of {point.ranks} ranks have an entry that is not finite, or beyond "
                f"±{point.bound:g}, so nothing was exchanged. {this_rank} {_ADVICE[point.bits]}"
            )

    def __getstate__(self) -> object:
        raise TypeError("Keys are not copied and not stored: two exchanges would have one mask.")


_ADVICE = {
    32: "Set a higher secure_aggregation_range, the same on all ranks, or make gradients or noise "
    "smaller.",
    64: "Losses, counts and statistics so large have no room: look for one that diverges.",
}


def _derived(key: bytes, purpose: str) -> bytes:
    info = b"hf-gradguard: secure aggregation, " + purpose.encode()
    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(key)
