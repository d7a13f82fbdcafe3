"""Packing of updates in few bytes: nonzero entries by position and value, few levels by number.

A packed tensor is a vector of bytes, and unpacks to the same bits. It holds nothing that the whole
tensor does not show, such as the positions of zeros and the number of levels. So packing tells a
server nothing new.

Positions are stored as gaps in Golomb-Rice code: k bits of each, and the rest in unary. The best k
comes near the entropy of random positions. k = 0 is a bitmap.

Reference: Rice, Plaunt, "Adaptive Variable-Length Coding for Efficient Compression of Spacecraft
Television Data" (1971); Golomb, "Run-length Encodings" (1966).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..gradient_map import Tensors

_MAGIC = b"GGP1"
_FORM = struct.Struct("<4sBBBxIQQ")
_SPARSE, _LEVELS, _ADDED, _OF_ZEROS = 1, 2, 4, 8  # flags
_CHUNK = 2**20  # numbers whose bits are unpacked at a time; a multiple of 8
_SAMPLE = 2**16
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class _Form(NamedTuple):
    """The header of a packed tensor.

    Args:
        flags: Bits that say whether zeros are left out, whether values are numbers of levels, and
            whether the tensor is to be added to what was received.
        low_bits: k, the number of each gap's low bits.
        level_bits: The number of bits of a level's number.
        level_count: The number of levels.
        sent_count: The number of entries that are sent.
        unary_bits: The number of bits of all gaps' upper parts.
    """

    flags: int
    low_bits: int
    level_bits: int
    level_count: int
    sent_count: int
    unary_bits: int


def pack(tensor: Tensor, is_added: bool = False) -> Tensor:
    """Pack a floating-point tensor into bytes, `(n,)` of uint8: at most 32 more than it has.

    Args:
        tensor: A tensor of any shape, which the receiver has to know.
        is_added: Whether the receiver is to add it to what it has.

    Example:
        >>> update = torch.zeros(1000).index_fill_(0, torch.tensor([7, 500]), 0.5)
        >>> packed = pack(update)
        >>> len(packed), torch.equal(unpack("w", packed, update), update)
        (35, True)
    """
    words = _words_of(tensor)
    entries, flags, low_bits, unary_bits, unary, low = words, _ADDED * is_added, 0, 0, b"", b""
    is_zero = words == 0
    zero_count = int(is_zero.sum())
    if zero_count:
        # The positions are those of zeros or of all others, whichever are fewer.
        of_zeros = 2 * zero_count < len(words)
        gaps = np.diff(np.flatnonzero(is_zero if of_zeros else ~is_zero), prepend=-1) - 1
        low_bits = _best_low_bits(gaps)
        ends = np.cumsum((gaps >> low_bits) + 1)
        ones = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
        ones[ends - 1] = 1
        unary, unary_bits, low = np.packbits(ones).tobytes(), len(ones), _to_bits(gaps, low_bits)
        entries, flags = words[~is_zero], flags | _SPARSE | _OF_ZEROS * of_zeros
    levels, level_bits = _levels_of(entries), 0
    values = entries.tobytes()
    if levels is not None:
        level_bits = (len(levels) - 1).bit_length()
        numbers = _to_bits(np.searchsorted(levels, entries), level_bits)
        if levels.nbytes + len(numbers) < len(values):
            values, flags = levels.tobytes() + numbers, flags | _LEVELS
    if not flags & _LEVELS:
        levels, level_bits = None, 0
    level_count = 0 if levels is None else len(levels)
    form = _FORM.pack(_MAGIC, flags, low_bits, level_bits, level_count, len(entries), unary_bits)
    return torch.frombuffer(bytearray(form + unary + low + values), dtype=torch.uint8)


def is_packed(tensor: Tensor) -> bool:
    """Return whether bytes are a packed tensor's.

    Example:
        >>> is_packed(pack(torch.zeros(3))), is_packed(torch.zeros(3))
        (True, False)
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) < _FORM.size:
        return False
    return tensor[: len(_MAGIC)].numpy().tobytes() == _MAGIC


def is_added(tensor: Tensor) -> bool:
    """Return whether a packed tensor is to be added to what was received."""
    return bool(int(tensor[len(_MAGIC)]) & _ADDED)


def unpack(name: str, packed: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that was packed, to the last bit.

    Args:
        name: The tensor's name, for errors.
        packed: The bytes as `pack` made them, `(n,)` of uint8.
        like: A tensor of the same shape and type. Packed bytes state neither, so they cannot ask
            for more memory than the model has.

    Raises:
        ValueError: If `pack` cannot have made these bytes from such a tensor.
        FloatingPointError: If an entry is not finite.

    Example:
        >>> unpack("w", pack(torch.ones(2, 3)), torch.empty(2, 3)).sum()
        tensor(6.)
        >>> unpack("w", pack(torch.ones(2, 3))[:-1], torch.empty(2, 3))
        Traceback (most recent call last):
        ValueError: 'w' is packed wrongly: it has 31 bytes and not 32.
    """
    if not is_packed(packed):
        raise ValueError(f"{name!r} is packed wrongly: it does not begin as a packed tensor.")
    buffer = packed.numpy().tobytes()
    form = _Form(*_FORM.unpack_from(buffer)[1:])
    words_type = _WORDS[like.element_size()]
    _check_form(name, form, like.numel())
    lengths = _lengths(form, words_type.itemsize, like.numel())
    if len(buffer) != _FORM.size + sum(lengths):
        raise ValueError(
            f"{name!r} is packed wrongly: it has {len(buffer)} bytes and not "
            f"{_FORM.size + sum(lengths)}."
        )
    parts, start = [], _FORM.size
    for length in lengths:
        parts.append(buffer[start : start + length])
        start += length
    entries = np.frombuffer(parts[2], words_type)
    if form.flags & _LEVELS:
        numbers = _from_bits(parts[3], form.sent_count, form.level_bits)
        if len(numbers) and int(numbers.max()) >= form.level_count:
            raise ValueError(f"{name!r} is packed wrongly: it counts more levels than it has.")
        entries = entries[numbers]
    words = np.zeros(like.numel(), words_type)
    is_sent = np.full(len(words), not form.flags & _SPARSE or bool(form.flags & _OF_ZEROS))
    if form.flags & _SPARSE:
        is_sent[_positions(name, form, parts[0], parts[1], len(words))] ^= True
    words[is_sent] = entries
    tensor = torch.from_numpy(words.view(f"<i{words_type.itemsize}")).view(like.dtype)
    if not torch.isfinite(tensor).all():
        raise FloatingPointError(f"{name!r} is not finite.")
    return tensor.view(like.shape)


def unpack_update(packed: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Tensors:
    """Return the weights, or their difference, that a client packed.

    Tensors that are not packed are not changed.

    Args:
        packed: Tensors by name.
        received: The weights that the client got.

    Raises:
        ValueError: If a name was not received, or a tensor is packed wrongly.
        FloatingPointError: If an entry is not finite.

    Example:
        >>> packed = {"w": pack(torch.ones(3), is_added=True)}
        >>> unpack_update(packed, {"w": torch.ones(3)})
        {'w': tensor([2., 2., 2.])}
    """
    update = {}
    for name, tensor in packed.items():
        start = received.get(name)
        if start is None:
            raise ValueError(f"{name!r} was sent, but not received.")
        if start.is_floating_point() and tensor.dtype == torch.uint8:
            if is_packed(tensor) and is_added(tensor):
                wide = start.to(torch.promote_types(start.dtype, torch.float32))
                tensor = (wide + unpack(name, tensor, wide)).to(start.dtype)
            else:
                tensor = unpack(name, tensor, start)
        update[name] = tensor
    return update


def _words_of(tensor: Tensor) -> np.ndarray:
    """Return the entries' bits as whole numbers, so that -0 is not 0, and nothing is rounded."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().cpu().contiguous().flatten().view(integer)
    words: np.ndarray = flat.numpy().view(_WORDS[tensor.element_size()])
    return words


def _best_low_bits(gaps: np.ndarray) -> int:
    """Return the number of low bits with which gaps take the fewest bits."""
    if not len(gaps):
        return 0
    # One bit more than the mean has costs one bit a gap, and saves less than one on average.
    candidates = range(int(gaps.mean()).bit_length() + 1)
    return min(candidates, key=lambda k: k * len(gaps) + int((gaps >> k).sum()))


def _levels_of(entries: np.ndarray) -> np.ndarray | None:
    """Return the values that occur; `None` if they are many."""
    if not len(entries):
        return None
    sample = entries[:: -(-len(entries) // _SAMPLE)]
    if 2 * len(np.unique(sample)) > max(len(sample), 2):
        return None
    levels: np.ndarray = np.unique(entries)
    return levels


def _gap_count(form: _Form, size: int) -> int:
    """Return the number of gaps: that of zeros, or of entries that are sent."""
    return size - form.sent_count if form.flags & _OF_ZEROS else form.sent_count


def _lengths(form: _Form, item_size: int, size: int) -> tuple[int, int, int, int]:
    """Return the lengths of a packed tensor's four parts, in bytes.

    They are the gaps' upper parts, their lower parts, values or levels, and levels' numbers.
    """
    has_levels = bool(form.flags & _LEVELS)
    return (
        -(-form.unary_bits // 8),
        -(-_gap_count(form, size) * form.low_bits // 8),
        item_size * (form.level_count if has_levels else form.sent_count),
        -(-form.sent_count * form.level_bits // 8),
    )


def _check_form(name: str, form: _Form, size: int) -> None:
    """Refuse a header that `pack` would not write for so many entries.

    Raises:
        ValueError: If it would not.
    """
    is_sparse, has_levels = bool(form.flags & _SPARSE), bool(form.flags & _LEVELS)
    for reason, is_wrong in (
        ("it has unknown flags", form.flags > (_SPARSE | _LEVELS | _ADDED | _OF_ZEROS)),
        ("it counts more entries than there are", form.sent_count > size),
        ("it lacks entries", not is_sparse and form.sent_count != size),
        ("its positions are too long", form.unary_bits > 2 * size),
        ("its gaps are too wide", form.low_bits > size.bit_length()),
        ("it has positions of all", not is_sparse
         and (form.unary_bits + form.low_bits > 0 or bool(form.flags & _OF_ZEROS))),
        ("its levels do not fit", (form.level_count > 0) != has_levels),
        ("its levels' bits do not fit",
         form.level_bits != max(form.level_count - 1, 0).bit_length()),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"{name!r} is packed wrongly: {reason}.")


def _positions(name: str, form: _Form, unary: bytes, low: bytes, size: int) -> np.ndarray:
    count, ends = (
        _gap_count(form, size),
        np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8))),
    )
    if len(ends) != count or (count and ends[-1] != form.unary_bits - 1):
        raise ValueError(f"{name!r} is packed wrongly: its positions are not as many as entries.")
    gaps = np.diff(ends, prepend=-1) - 1 << form.low_bits
    gaps |= _from_bits(low, count, form.low_bits)
    if count and (gaps.max() >= size or gaps.sum() + count > size):
        raise ValueError(f"{name!r} is packed wrongly: a position is outside of the tensor.")
    positions: np.ndarray = np.cumsum(gaps + 1) - 1
    return positions


def _to_bits(numbers: np.ndarray, width: int) -> bytes:
    """Return the lowest bits of whole numbers, end to end."""
    chunks, size = [], _item_size(width)
    for start in range(0, len(numbers) if width else 0, _CHUNK):
        chunk = numbers[start : start + _CHUNK].astype(f">u{size}").view(np.uint8)
        bits = np.unpackbits(chunk.reshape(-1, size), axis=1)
        chunks.append(np.packbits(bits[:, -width:]).tobytes())
    return b"".join(chunks)


def _from_bits(buffer: bytes, count: int, width: int) -> np.ndarray:
    packed, size = np.frombuffer(buffer, np.uint8), _item_size(width)
    numbers = np.zeros(count, np.int64)
    for start in range(0, count if width else 0, _CHUNK):
        length = min(_CHUNK, count - start)
        bits = np.zeros((length, 8 * size), np.uint8)
        chunk = packed[start * width // 8 :]
        bits[:, -width:] = np.unpackbits(chunk, count=length * width).reshape(length, width)
        numbers[start : start + length] = np.packbits(bits, axis=1).view(f">u{size}").ravel()
    return numbers


def _item_size(width: int) -> int:
    """Bytes of the smallest type of whole numbers that has so many bits."""
    return next(size for size in (1, 2, 4, 8) if width <= 8 * size)
