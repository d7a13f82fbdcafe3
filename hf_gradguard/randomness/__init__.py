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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import index
from os import urandom

import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from .chacha import BLOCK_WORDS, chacha20_words, keystream, shifted
from .cut import together

__all__ = ["KEY_BYTES", "Stream", "normal", "signs", "together", "torch_generator"]

KEY_BYTES = 32
# Pairs of numbers at once: what is made of them stays in a processor's cache, and torch, which
# shares out what is longer, leaves them to the one thread that makes them.
_CHUNK = 2**15
_CHUNK_ELSEWHERE = 2**24
_FEW = 2**10  # words, of which signs are made together

_Draw = tuple[bytes, bytes]  # key and nonce


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
        if key is not None and not isinstance(key, bytes):
            raise TypeError(f"A key is bytes, not {key!r}. From seeds: Stream.from_seeds.")
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"A key has {KEY_BYTES} bytes, but this one has {len(key)}.")
        self._private = key is None
        self._key = urandom(KEY_BYTES) if key is None else bytes(key)
        self._draws, self._process = 0, os.getpid()

    @classmethod
    def from_seeds(cls, *seeds: int) -> Stream:
        """The stream that whole numbers of at least 0 determine. For tests: whoever knows them
        knows the noise.

        Raises:
            ValueError: If a seed is below 0.
            TypeError: If one is no whole number.
        """
        seeds = tuple(map(index, seeds))
        if any(seed < 0 for seed in seeds):
            raise ValueError(f"Seeds must be at least 0, but are {seeds}.")
        written = ",".join(str(seed) for seed in seeds).encode()
        kdf = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"hf-gradguard: stream from seeds")
        return cls(kdf.derive(written))

    def spawn(self) -> Stream:
        """A stream with a key of its own, drawn from this one."""
        child = Stream(self.bytes(KEY_BYTES))
        child._private = self._private
        return child

    def bytes(self, count: int) -> bytes:
        """So many bytes."""
        parts = _words(*self._next_draw(), 1, (count + 3) // 4, torch.device("cpu"), _CHUNK)
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
        exact = dtype == torch.float64

        def make(words: Tensor) -> tuple[Tensor, Tensor]:
            pairs = len(words) // (4 if exact else 3)
            radius, angle = words[: 2 * pairs].view(torch.int64), words[2 * pairs :]
            if exact:
                angle = angle.view(torch.int64).double().mul_(math.pi * 2.0**-63)
                radius = _log_uniform(radius).mul_(-2).sqrt_()
            else:
                angle = angle.float().mul_(math.pi * 2.0**-31)
                radius = _log_uniform(radius).mul_(-2).float().sqrt_()
            return angle.cos().mul_(radius), angle.sin_().mul_(radius)

        return self._each(4 if exact else 3, shape, device, dtype, make, per=2)

    def signs(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """1 or -1, from a bit each: a float's sign before the bits of 1."""

        def make(words: Tensor) -> tuple[Tensor, ...]:
            shifts: Iterable[Tensor] = (words.bitwise_left_shift(bit) for bit in range(32))
            if len(words) <= _FEW:  # all at once: calls would take longer than numbers
                shifts = (words.bitwise_left_shift(torch.arange(32).to(words)[:, None]).flatten(),)
            return tuple(
                one.bitwise_and_(-(2**31)).bitwise_or_(0x3F800000).view(torch.float32)
                for one in shifts
            )

        return self._each(1, shape, device, dtype, make, per=32)

    def exponential(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Exponential numbers of mean 1, from 64 bits each."""
        return self._each(
            2, shape, device, dtype, lambda w: (_log_uniform(w.view(torch.int64)).neg_(),)
        )

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
                2, shape, device, dtype, lambda w: (shifted(w.view(torch.int64), 11) * 2.0**-53,)
            )
        return self._each(1, shape, device, dtype, lambda w: (shifted(w, 8).float() * 2.0**-24,))

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
            2, shape, device, torch.int64, lambda w: (shifted(w.view(torch.int64), 1) % high,)
        )

    def words(self, count: int, *, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Uniform int32, alike on all devices; use each part before asking for the next one."""
        device = torch.device(device)
        return _words(*self._next_draw(), 1, count, device, _chunk(device))

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
        make: Callable[[Tensor], tuple[Tensor, ...]],
        per: int = 1,
    ) -> Tensor:
        """One draw: `make` gives `per` tensors of as many numbers as it gets `words_each` words."""
        device, size, draw = torch.device(device), math.prod(shape), self._next_draw()
        out, count, chunk = (
            torch.empty(size, device=device, dtype=dtype),
            -(-size // per),
            _chunk(device),
        )

        def fill(first: int, last: int) -> None:
            done = first * per
            for words in _words(*draw, words_each, last - first, device, chunk, first):
                for part in make(words):
                    taken = min(len(part), size - done)
                    out[done : done + taken] = part[:taken]
                    done += taken

        ends = _shares(count, chunk, device)
        if len(ends) == 1:
            fill(0, count)
        else:  # each goes on in the middle of one keystream: what comes out is the same
            with ThreadPoolExecutor(len(ends)) as threads:
                list(threads.map(fill, [0, *ends[:-1]], ends))
        return out.view(tuple(shape))

    def _next_draw(self) -> _Draw:
        """Key and nonce."""
        if self._private and os.getpid() != self._process:  # a fork would draw what its parent does
            self._key, self._process = urandom(KEY_BYTES), os.getpid()
        nonce = self._draws.to_bytes(12, "little")
        self._draws += 1
        return self._key, nonce


def _words(
    key: bytes,
    nonce: bytes,
    each: int,
    count: int,
    device: torch.device,
    chunk: int,
    first: int = 0,
) -> Iterator[Tensor]:
    """`each` 32-bit words for each of `count` things after the first ones, `chunk` things at a
    time.
    """
    # Whole blocks, so that every part starts with one.
    chunk = max(BLOCK_WORDS, chunk // BLOCK_WORDS * BLOCK_WORDS)
    parts = [min(chunk, count - start) * each for start in range(0, count, chunk)]
    block = first * each // BLOCK_WORDS
    if _on_cpu(device):
        yield from keystream(key, nonce, parts, block)
        return
    for size in parts:
        blocks = -(-size // BLOCK_WORDS)
        yield chacha20_words(key, nonce, block, blocks, device)[:size]
        block += blocks


def _shares(count: int, chunk: int, device: torch.device) -> list[int]:
    """Where the shares of threads end, in whole parts."""
    parts = count // max(chunk, BLOCK_WORDS)
    threads = min(torch.get_num_threads(), parts) if _on_cpu(device) else 1
    return [round(n * parts / threads) * chunk for n in range(1, threads)] + [count]


def _log_uniform(words: Tensor) -> Tensor:
    """ln u in float64 for u uniform in (0, 1] from 64-bit words; u is at least 2⁻⁵⁵."""
    return words.double().mul_(2.0**-64).add_(0.5).add_(2.0**-55).log_()


def _chunk(device: torch.device) -> int:
    return _CHUNK if _on_cpu(device) else _CHUNK_ELSEWHERE


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


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

    Example:
        >>> normal(None, (2, 3), torch.device("cpu"), torch.float32).shape
        torch.Size([2, 3])
    """
    if isinstance(generator, torch.Generator):
        return torch.randn(tuple(shape), generator=generator, device=device, dtype=dtype)
    return (generator or Stream()).normal(shape, device=device, dtype=dtype)


def signs(
    generator: Stream | torch.Generator | None,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """1 or -1 with equal odds, for an estimate that is not shared; see `normal`.

    Example:
        >>> drawn = signs(torch.Generator(), (9,), torch.device("cpu"), torch.float32)
        >>> bool((drawn.abs() == 1).all())
        True
    """
    if isinstance(generator, torch.Generator):
        bits = torch.randint(2, tuple(shape), generator=generator, device=device)
        return bits.to(dtype).mul_(2).sub_(1)
    return (generator or Stream()).signs(shape, device=device, dtype=dtype)


def torch_generator(
    generator: Stream | torch.Generator | None, device: torch.device | str
) -> torch.Generator:
    """A generator of torch's for what hides nothing, such as attacks, from either kind.

    Args:
        generator: One of torch's is returned as it is; a `Stream`, or `None` for a new one, gives
            the seed.
        device: Of the result.

    Example:
        >>> generator = torch.Generator()
        >>> torch_generator(generator, "cpu") is generator
        True
    """
    if isinstance(generator, torch.Generator):
        return generator
    seed = int.from_bytes((generator or Stream()).bytes(8), "little") >> 1
    return torch.Generator(device=device).manual_seed(seed)
