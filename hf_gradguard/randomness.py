"""Random numbers that nobody else can predict.

A Trainer seeds every rank alike, so noise from the global generator is the same on all ranks. And
torch's own generators can be computed backward: each word of its Mersenne Twister is a linear
function of the state, so that the noise on coordinates whose gradient is known (zeros, or signs of
large values) gives away all the noise there is. A GPU's Philox has a key of 64 bits.

Everything that protects is drawn from a `Stream`: the keystream of ChaCha20 (RFC 8439) under a key
of 256 bits, on the CPU by the `cryptography` package, elsewhere in torch's integer operations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

KEY_BYTES, BLOCK_WORDS = 32, 16
_CHUNK = 2**16  # pairs of numbers at once: what is made of them stays in a processor's cache
_CHUNK_ELSEWHERE = 2**24
_ZEROS = memoryview(bytes(16 * _CHUNK))  # what is encrypted: the keystream is what comes out


class Stream:
    """Numbers from the keystream of ChaCha20.

    Every draw has a nonce of its own, counted up; its blocks are counted from 0. One key serves
    2⁹⁶ draws of up to 256 GiB each. A process that was forked gets a new key.

    Args:
        key: 32 bytes. Default: from the operating system. Whoever knows them knows all the numbers.

    Raises:
        ValueError: If the key has another length.

    Example:
        >>> noise = Stream().normal((2, 3))
        >>> noise.shape, noise.dtype
        (torch.Size([2, 3]), torch.float32)
        >>> bool((Stream.from_seeds(1).normal((9,)) == Stream.from_seeds(1).normal((9,))).all())
        True
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"A key has {KEY_BYTES} bytes, but this one has {len(key)}.")
        self._private = key is None
        self._key = os.urandom(KEY_BYTES) if key is None else bytes(key)
        self._draws, self._process = 0, os.getpid()

    @classmethod
    def from_seeds(cls, *seeds: int) -> Stream:
        """The stream that whole numbers of at least 0 determine. For tests: whoever knows them
        knows the noise.

        Raises:
            ValueError: If a seed is below 0.
        """
        if any(seed < 0 for seed in seeds):
            raise ValueError(f"Seeds must be at least 0, but are {seeds}.")
        written = ",".join(str(int(seed)) for seed in seeds).encode()
        kdf = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"hf-gradguard: stream from seeds")
        return cls(kdf.derive(written))

    def spawn(self) -> Stream:
        """A stream with a key of its own, drawn from this one."""
        child = Stream(self.bytes(KEY_BYTES))
        child._private = self._private
        return child

    def bytes(self, count: int) -> bytes:
        """So many bytes."""
        parts = self._words(1, (count + 3) // 4, torch.device("cpu"), _CHUNK)
        return b"".join(words.numpy().tobytes() for words in parts)[:count]

    def normal(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normal numbers, by Box and Muller's method.

        The radius is from 64 bits and computed in float64, so that tails reach 8.7 σ; the angle is
        from 32 bits, for float64 from 64.
        """
        device, size = torch.device(device), math.prod(shape)
        exact = dtype == torch.float64
        out = torch.empty(size, device=device, dtype=dtype)
        chunk, done = _chunk(device), 0
        for words in self._words(4 if exact else 3, (size + 1) // 2, device, chunk):
            pairs = len(words) // (4 if exact else 3)
            radius = _exponential(words[: 2 * pairs].view(torch.int64)).mul_(2).sqrt_()
            if exact:
                angle = words[2 * pairs :].view(torch.int64).double().mul_(math.pi * 2.0**-63)
            else:
                radius = radius.float()
                angle = words[2 * pairs :].float().mul_(math.pi * 2.0**-31)
            for part in (angle.cos(), angle.sin()):
                taken = min(pairs, size - done)
                out[done : done + taken] = part.mul_(radius)[:taken]
                done += taken
        return out.view(tuple(shape))

    def exponential(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Exponential numbers of mean 1, from 64 bits each."""
        return self._each(2, shape, device, dtype, lambda w: _exponential(w.view(torch.int64)))

    def uniform(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Uniform numbers in [0, 1): of 24 bits, or in float64 of 53."""
        if dtype == torch.float64:
            return self._each(
                2, shape, device, dtype, lambda w: _shifted(w.view(torch.int64), 11) * 2.0**-53
            )
        return self._each(1, shape, device, dtype, lambda w: _shifted(w, 8).float() * 2.0**-24)

    def integers(
        self, high: int, shape: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Whole numbers from 0 to `high` - 1, as int64. Their odds differ by less than high/2⁶³.

        Raises:
            ValueError: If `high` is below 1 or above 2³².
        """
        if not 1 <= high <= 2**32:
            raise ValueError(f"high must be from 1 to 2**32, but is {high}.")
        return self._each(
            2, shape, device, torch.int64, lambda w: _shifted(w.view(torch.int64), 1) % high
        )

    def words(self, count: int, *, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Uniform int32, alike on all devices; use each part before asking for the next one."""
        return self._words(1, count, torch.device(device), _chunk(torch.device(device)))

    def __getstate__(self) -> object:
        raise TypeError(
            "A Stream is not copied and not stored: the same numbers would be drawn twice, and its "
            "key would lie in a file. Use spawn(), or make a new one."
        )

    def _each(
        self,
        words_each: int,
        shape: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype,
        make: Callable[[Tensor], Tensor],
    ) -> Tensor:
        device, size = torch.device(device), math.prod(shape)
        out, done = torch.empty(size, device=device, dtype=dtype), 0
        for words in self._words(words_each, size, device, _chunk(device)):
            made = make(words)[: size - done]
            out[done : done + len(made)] = made
            done += len(made)
        return out.view(tuple(shape))

    def _words(self, each: int, count: int, device: torch.device, chunk: int) -> Iterator[Tensor]:
        """One draw: `each` 32-bit words for each of `count` things, `chunk` things at a time."""
        if self._private and os.getpid() != self._process:  # a fork would draw what its parent does
            self._key, self._process = os.urandom(KEY_BYTES), os.getpid()
        nonce = self._draws.to_bytes(12, "little")
        self._draws += 1
        # Whole blocks, so that every part starts with one.
        chunk = max(BLOCK_WORDS, chunk // BLOCK_WORDS * BLOCK_WORDS)
        parts = [min(chunk, count - start) * each for start in range(0, count, chunk)]
        if _on_cpu(device):
            yield from _keystream(self._key, nonce, parts)
            return
        block = 0
        for size in parts:
            blocks = -(-size // BLOCK_WORDS)
            yield chacha20_words(self._key, nonce, block, blocks, device)[:size]
            block += blocks


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


def _keystream(key: bytes, nonce: bytes, parts: Sequence[int]) -> Iterator[Tensor]:
    """So many words at a time of the keystream from block 0, on the CPU. Each part is to be used
    before the next one is asked for.
    """
    if not parts:
        return
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce), mode=None).encryptor()
    buffer = bytearray(4 * max(parts) + 63)
    for size in parts:
        encryptor.update_into(_ZEROS[: 4 * size], buffer)
        yield torch.frombuffer(buffer, dtype=torch.int32, count=size)


def _exponential(words: Tensor) -> Tensor:
    """-ln u in float64 for u uniform in (0, 1] from 64-bit words; u is at least 2⁻⁵⁵."""
    return words.double().mul_(2.0**-64).add_(0.5).add_(2.0**-55).log_().neg_()


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Words shifted right as if they were unsigned."""
    width = 8 * words.element_size()
    return (words >> bits) & ((1 << (width - bits)) - 1)


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits) | _shifted(words, 32 - bits)


def _chunk(device: torch.device) -> int:
    return _CHUNK if _on_cpu(device) else _CHUNK_ELSEWHERE


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def together(
    tensors: Mapping[str, Tensor], draw: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Random tensors in the shapes of those given. Small neighbors are cut from one draw, since a
    draw costs as much as a thousand numbers. Large ones have draws of their own, so that no more is
    held than one of them.

    Args:
        tensors: By name.
        draw: Gives a random tensor in the shape, type and place of the one that it gets, whose
            entries are independent of each other.

    Yields:
        A name, and what was drawn for it, in the order of `tensors`.

    Example:
        >>> like = {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}
        >>> drawn = dict(together(like, lambda tensor: Stream().normal(tensor.shape)))
        >>> drawn["weight"].shape, drawn["bias"].shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        other = next(iter(parts.values()), tensor)
        size = sum(part.numel() for part in parts.values()) + tensor.numel()
        fits = size <= _chunk(tensor.device)
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
    drawn = draw(next(iter(parts.values())).new_zeros(sum(sizes))).split(sizes)
    for (name, part), own in zip(parts.items(), drawn, strict=True):
        yield name, own.view(part.shape)


def normal(
    generator: Stream | torch.Generator | None,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Standard normal numbers for an estimate that is not shared, from either kind of generator.

    Args:
        generator: `None` makes a `Stream`.
        shape: Of the result.
        device: Of the result.
        dtype: Of the result.
    """
    if isinstance(generator, torch.Generator):
        return torch.randn(tuple(shape), generator=generator, device=device, dtype=dtype)
    return (generator or Stream()).normal(shape, device=device, dtype=dtype)


def torch_generator(
    generator: Stream | torch.Generator | None, device: torch.device | str
) -> torch.Generator:
    """A generator of torch's for what hides nothing, such as attacks, from either kind.

    Args:
        generator: One of torch's is returned as it is; a `Stream`, or `None` for a new one, gives
            the seed.
        device: Of the result.
    """
    if isinstance(generator, torch.Generator):
        return generator
    seed = int.from_bytes((generator or Stream()).bytes(8), "little") >> 1
    return torch.Generator(device=device).manual_seed(seed)
