"""Sums over ranks in which no rank, and nobody who carries messages, sees another's contribution.

Numbers become whole ones (a fixed point), and every two ranks add and subtract the same random
mask. What leaves a rank is uniform, and all masks cancel in the sum, modulo 2³² or 2⁶⁴.

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
"""The largest size of numbers that are no gradients: losses, counts, statistics. Their unit is
below 4e-9 on up to four ranks.
"""


_CHUNK = 2**16  # entries at once on the CPU: they stay in a processor's cache


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.reshape(-1)
    return flat.split(_CHUNK if tensor.device.type == "cpu" else max(len(flat), 1))


class FixedPoint(NamedTuple):
    """A fixed-point format: whole numbers that stand for fractions and can be summed over ranks.

    Args:
        bound: The largest |x| of a rank.
        ranks: The number of ranks whose numbers are added up.
        bits: The number of bits of a word.

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
        """The type of a word, `torch.int32` or `torch.int64`."""
        return torch.int32 if self.bits == 32 else torch.int64

    @property
    def unit(self) -> float:
        """The number that the word 1 stands for.

        It is a power of two, so that scaling by it rounds nothing. The sum stays within 99 % of a
        word's range, which leaves room for rounding.
        """
        return 2.0 ** math.ceil(
            math.log2(self.ranks * self.bound / (0.99 * 2.0 ** (self.bits - 1)))
        )

    def encode(self, values: Tensor) -> Tensor:
        """Round values to the nearest whole number of units, and return these as words."""
        words = torch.empty(values.shape, dtype=self.word, device=values.device)
        wide = torch.promote_types(values.dtype, self._wide)
        for word, value in zip(_chunks(words), _chunks(values), strict=True):
            word.copy_((value.to(wide) / self.unit).round_())
        return words

    def mean(self, words: Tensor) -> Tensor:
        """Return the mean over ranks that a sum of their words stands for."""
        values = torch.empty(words.shape, dtype=self._wide, device=words.device)
        for value, word in zip(_chunks(values), _chunks(words), strict=True):
            value.copy_(word).mul_(self.unit).div_(self.ranks)
        return values

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.bits == 32 else torch.float64

    def largest(self, tensors: Sequence[Tensor]) -> float:
        """Return the largest |x| of all entries, or NaN if one is NaN."""
        ends = [end for tensor in tensors if tensor.numel() for end in tensor.aminmax()]
        return float(torch.stack([end.double().abs() for end in ends]).max()) if ends else 0.0


class Masks(NamedTuple):
    """The masks of one rank in one exchange.

    Args:
        streams: A stream for each other rank, and whether it is added: of two ranks the lower one
            adds.

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
        """Add or subtract the next masks, in place."""
        words_per_entry = words.element_size() // 4
        for stream, adds in self.streams:
            done = 0
            for chunk in stream.words(words_per_entry * len(words), device=words.device):
                mask = chunk.view(words.dtype)
                masked = words[done : done + len(mask)]
                masked.add_(mask) if adds else masked.sub_(mask)
                done += len(mask)


class SecureAggregation:
    """The keys of this rank, which give new masks for every exchange.

    Keys are agreed upon in the first exchange of a training, also of a resumed one, and never
    stored. An exchange makes its masks from them, and then replaces each key by one derived from
    it. So no mask is used twice, and whoever reads a rank's memory later cannot take masks off what
    was sent before.

    Args:
        accelerator: The training's accelerator, which carries the messages.
        bound: The largest size of an entry of a gradient.
        keys: The folder of identity keys, see `load_identity`.

    Raises:
        NotImplementedError: If there are fewer than three ranks.
        FileNotFoundError: If an identity key is missing, see `load_identity`.
        ValueError: If an identity key is unusable, see `load_identity`.

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
        """Refuse another accelerator than the one that these keys were made with.

        Raises:
            NotImplementedError: If it is another one; the message names the way out.
        """
        if accelerator is not self._accelerator:
            raise NotImplementedError(
                "Messages are added up securely over the processes of Accelerate's Accelerator. "
                "Pass the one that SecureAggregation was made with, or leave secure out."
            )

    def agree(self) -> None:
        """Agree on new keys with the other ranks; all ranks must call it.

        Raises:
            ValueError: If a signature or a key is refused, see
                `hf_gradguard.secure.key_agreement.agree`.
        """
        self._keys = agree(self._accelerator, self._identity)

    def point(self, bits: Bits) -> FixedPoint:
        """Return the fixed-point format for gradients (32 bits) or figures (64 bits)."""
        bound = self.bound if bits == 32 else FIGURES
        return FixedPoint(bound, self._accelerator.num_processes, bits)

    def masks(self, layout: str) -> Masks:
        """Return the masks of the next exchange.

        They cancel only if all ranks give the same `layout`.
        """
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
        """Return a function that averages tensors over ranks, once all are ready for this exchange.

        Ranks first add up, also masked, how many of them have an entry that is too large. So no
        rank waits for one that refuses, none learns which one it is, and nothing of a message has
        left any rank. That sum is a small number only if all masks cancel in it: if every rank is
        at the same exchange of the same tensors.

        Args:
            tensors: All tensors of the exchange.
            bits: The number of bits of a word.
            add_up: The function that adds up words over ranks.

        Raises:
            OverflowError: If an entry of any rank does not fit. All ranks raise it.
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
        """Raise an error on all ranks unless every rank's entries fit."""
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
