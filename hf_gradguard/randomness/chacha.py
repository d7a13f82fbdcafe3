"""The keystream of ChaCha20 (RFC 8439): by the `cryptography` package on the CPU, elsewhere in
torch's integer operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

BLOCK_WORDS = 16
_ZEROS = memoryview(bytes(2**19))  # what is encrypted: the keystream is what comes out


def chacha20_words(
    key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device | str
) -> Tensor:
    """Blocks of ChaCha20's keystream in torch's integer operations, on any device.

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        first: The number of the first block.
        blocks: How many.
        device: Where to compute.

    Returns:
        `(16 * blocks,)` words as int32, as little-endian bytes give them.

    Reference: RFC 8439, Section 2.3.
    """
    constants = b"expand 32-byte k"
    fixed = torch.frombuffer(bytearray(constants + key), dtype=torch.int32).to(device)
    last = torch.frombuffer(bytearray(nonce), dtype=torch.int32).to(device)
    counter = torch.arange(first, first + blocks, device=device)
    start = torch.empty(BLOCK_WORDS, blocks, dtype=torch.int32, device=device)
    start[:12], start[13:] = fixed[:, None], last[:, None]
    start[12] = (counter - ((counter >> 31) << 32)).to(torch.int32)  # as unsigned 32 bits
    # Four rows of four columns: a round works on all columns, and then on all diagonals, at once.
    a, b, c, d = start.clone().view(4, 4, blocks)
    for _ in range(10):
        for turns in (1, -1):
            a = a + b
            d = _rotated(d ^ a, 16)
            c = c + d
            b = _rotated(b ^ c, 12)
            a = a + b
            d = _rotated(d ^ a, 8)
            c = c + d
            b = _rotated(b ^ c, 7)
            b, c, d = b.roll(-turns, 0), c.roll(-2 * turns, 0), d.roll(-3 * turns, 0)
    return (torch.cat([a, b, c, d]) + start).T.reshape(-1)


def keystream(key: bytes, nonce: bytes, parts: Sequence[int], block: int = 0) -> Iterator[Tensor]:
    """So many words at a time of the keystream from a block, on the CPU. Each part is to be used
    before the next one is asked for.
    """
    if not parts:
        return
    encryptor = Cipher(
        algorithms.ChaCha20(key, block.to_bytes(4, "little") + nonce), mode=None
    ).encryptor()
    most = 4 * max(parts)
    buffer, zeros = bytearray(most + 63), _ZEROS if most <= len(_ZEROS) else memoryview(bytes(most))
    for size in parts:
        encryptor.update_into(zeros[: 4 * size], buffer)
        yield torch.frombuffer(buffer, dtype=torch.int32, count=size)


def shifted(words: Tensor, bits: int) -> Tensor:
    """Words shifted right as if they were unsigned."""
    width = 8 * words.element_size()
    return (words >> bits) & ((1 << (width - bits)) - 1)


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits) | shifted(words, 32 - bits)
