"""Random numbers that nobody else can predict.

A Trainer seeds every rank alike, so noise from the global generator is the same on all ranks. And
torch's own generators can be computed backward: each word of its Mersenne Twister is a linear
function of the state, so that the noise on coordinates whose gradient is known (zeros, or signs of
large values) gives away all the noise there is. A GPU's Philox has a key of 64 bits.

Everything that protects is drawn from a `Stream`: the keystream of ChaCha20 (RFC 8439) under a key
of 256 bits, on the CPU by the `cryptography` package, elsewhere in torch's integer operations.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import index
from os import urandom
from typing import Literal

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

__all__ = ["GRID", "KEY_BYTES", "Stream", "normal", "private_draws", "signs", "torch_generator"]

KEY_BYTES = 32
BLOCK_WORDS = 16
# Pairs of numbers at once, in whole blocks: what is made of them stays in a processor's cache, and
# torch, which shares out what is longer, leaves them to the one thread that makes them.
_CHUNK = 2**15
_CHUNK_ELSEWHERE = 2**24
_SMALL_DRAW = 2**10  # words, of which signs are made together
_STATE_WORDS = 624  # of a Mersenne Twister

GRID = 2.0**-14
"""The spacing of the grid of `Stream.noisy` times √entries, in standard deviations, at most."""

Distribution = Literal["gaussian", "laplace"]
_Draw = tuple[bytes, bytes]
_Maker = Callable[[Tensor], tuple[Tensor, ...]]
_FEWEST = 2.0**-16
"""The smallest deviation relative to the largest. Smaller ones have a grid that is coarser for
them, so that all whole numbers fit into a float64.
"""


class Stream:
    """Random numbers from the keystream of ChaCha20.

    Every draw has a nonce of its own, counted up, and counts its blocks from 0. One key serves 2⁹⁶
    draws of up to 256 GiB each. A process that was forked gets a new key.

    Args:
        key: 32 bytes. Default: drawn from the operating system. Whoever knows the key knows all the
            numbers.

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
        if key is None:
            self._key = urandom(KEY_BYTES)
        elif not isinstance(key, bytes):
            raise TypeError(f"A key is bytes, not {key!r}. From seeds: Stream.from_seeds.")
        elif len(key) != KEY_BYTES:
            raise ValueError(f"A key has {KEY_BYTES} bytes, but this one has {len(key)}.")
        else:
            self._key = key
        self._private = key is None
        self._draws, self._process = 0, os.getpid()

    @classmethod
    def from_seeds(cls, *seeds: int) -> Stream:
        """Return the stream that whole numbers of at least 0 determine.

        It is meant for tests: whoever knows the seeds knows the noise.

        Raises:
            ValueError: If a seed is below 0.
            TypeError: If a seed is no whole number.
        """
        seeds = tuple(map(index, seeds))
        if any(seed < 0 for seed in seeds):
            raise ValueError(f"Seeds must be at least 0, but are {seeds}.")
        written = ",".join(str(seed) for seed in seeds).encode()
        kdf = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"hf-gradguard: stream from seeds")
        return cls(kdf.derive(written))

    def spawn(self) -> Stream:
        """Return a stream with a key of its own, drawn from this one."""
        child = Stream(self.bytes(KEY_BYTES))
        child._private = self._private
        return child

    def bytes(self, count: int) -> bytes:
        """Draw `count` bytes."""
        word_chunks = self.words((count + 3) // 4)
        return b"".join(words.numpy().tobytes() for words in word_chunks)[:count]

    def normal(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw standard normal numbers, by Box and Muller's method.

        The radius is made of 64 bits and computed in float64, so that tails reach 9.4 σ. The angle
        is made of 32 bits, or of 64 for float64.
        """
        is_wide = dtype == torch.float64
        make, words_per_pair = (_wide_normal, 4) if is_wide else (_narrow_normal, 3)
        return self._draw_numbers(words_per_pair, shape, device, dtype, make, per=2)

    def signs(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw numbers that are 1 or -1 with equal odds, from one bit each."""

        def make(words: Tensor) -> tuple[Tensor, ...]:
            shifts: Iterable[Tensor] = (words.bitwise_left_shift(bit) for bit in range(32))
            if len(words) <= _SMALL_DRAW:  # all at once: calls would take longer than numbers
                shifts = (words.bitwise_left_shift(torch.arange(32).to(words)[:, None]).flatten(),)
            return tuple(
                shifted_words.bitwise_and_(-(2**31)).bitwise_or_(0x3F800000).view(torch.float32)
                for shifted_words in shifts
            )

        return self._draw_numbers(1, shape, device, dtype, make, per=32)

    def exponential(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw exponential numbers of mean 1, from 64 bits each."""
        return self._draw_numbers(
            2, shape, device, dtype, lambda w: (_log_uniform(w.view(torch.int64)).neg_(),)
        )

    def uniform(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw uniform numbers in [0, 1), of 24 bits each, or of 53 in float64."""
        if dtype == torch.float64:
            return self._draw_numbers(
                2, shape, device, dtype, lambda w: (shifted(w.view(torch.int64), 11) * 2.0**-53,)
            )
        return self._draw_numbers(
            1, shape, device, dtype, lambda w: (shifted(w, 8).float() * 2.0**-24,)
        )

    def integers(
        self, high: int, shape: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Draw whole numbers from 0 to `high` - 1, as int64.

        Their odds differ by less than high/2⁶³.

        Raises:
            ValueError: If `high` is below 1 or above 2³².
        """
        if not 1 <= high <= 2**32:
            raise ValueError(f"high must be from 1 to 2**32, but is {high}.")
        return self._draw_numbers(
            2, shape, device, torch.int64, lambda w: (shifted(w.view(torch.int64), 1) % high,)
        )

    def words(self, count: int, *, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Draw `count` uniform int32 by chunks, the same on all devices.

        Use each chunk before asking for the next one: they share a buffer.
        """
        return _words(*self._next_draw(), 1, 0, count, torch.device(device))

    def __getstate__(self) -> object:
        raise TypeError(
            "A Stream is not copied and not stored: the same numbers would be drawn twice, and its "
            "key would lie in a file. Use spawn(), or make a new one."
        )

    def noisy(
        self, values: Tensor, deviation: Tensor, entries: int, noise: Distribution = "gaussian"
    ) -> Tensor:
        """Add independent noise to values, both as whole multiples of a grid's spacing.

        The low bits of a sum of floats show what was added: only few floats are g plus a multiple
        of a float. So values and noise, drawn in float64, are each rounded to the grid and added up
        there, exactly. Noise on the grid is the same whatever it is added to, and all that follows,
        such as rounding to float32, sees only the sum. Rounding moves two sets of values apart by
        at most GRID of the least deviation, over all entries together.

        Args:
            values: The values, `(n,)` floats.
            deviation: The standard deviation of each entry's noise, `(n,)` or `()`, which must be
                known without the values. An entry whose deviation is 0 does not change.
            entries: The number of entries of the whole message, of which `values` may be a part.
            noise: The distribution of the noise.
        """
        noisy, deviation = torch.empty_like(values), deviation.to(values.device)
        least, most = deviation.aminmax() if deviation.numel() else (deviation, 0)
        if most == 0:  # what is not finite goes on, and shows
            return values.clone()
        is_bare = None if least > 0 else deviation == 0
        if is_bare is not None:
            least = deviation[~is_bare].amin()
        fineness = 1 / grid_spacing(float(least), float(most), entries)  # dividing would be slower

        def add(start: int, unit_noise: Tensor) -> None:
            part = slice(start, start + len(unit_noise))
            std = deviation[part] if deviation.dim() else deviation
            on_grid = values[part].to(torch.float64, copy=True).mul_(fineness).round_()
            on_grid.add_(unit_noise.mul_(std).mul_(fineness).round_()).mul_(1 / fineness)
            noisy[part] = on_grid

        self._draw_chunks(*_MAKERS[noise], len(values), values.device, add)
        return noisy if is_bare is None else torch.where(is_bare, values, noisy)

    def _draw_numbers(
        self,
        words_per_number: int,
        shape: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype,
        make: _Maker,
        per: int = 1,
    ) -> Tensor:
        """Draw numbers once.

        `make` turns n · `words_per_number` words into `per` tensors of n numbers.
        """
        drawn = torch.empty(math.prod(shape), device=device, dtype=dtype)

        def write(start: int, numbers: Tensor) -> None:
            drawn[start : start + len(numbers)] = numbers

        self._draw_chunks(make, words_per_number, per, len(drawn), drawn.device, write)
        return drawn.view(tuple(shape))

    def _draw_chunks(
        self,
        make: _Maker,
        words_per_number: int,
        per: int,
        size: int,
        device: torch.device,
        write: Callable[[int, Tensor], None],
    ) -> None:
        """Draw numbers once, and call `write` with each chunk and the place of its first number."""
        draw, count = self._next_draw(), -(-size // per)

        def fill(start: int, end: int) -> None:
            done = start * per
            for words in _words(*draw, words_per_number, start, end, device):
                for numbers in make(words):
                    needed = numbers[: size - done]
                    write(done, needed)
                    done += len(needed)

        ends = _thread_ends(count, device)
        if len(ends) == 1:
            fill(0, count)
        else:  # each goes on in the middle of one keystream: what comes out is the same
            with ThreadPoolExecutor(len(ends)) as threads:
                list(threads.map(fill, [0, *ends[:-1]], ends))

    def _next_draw(self) -> _Draw:
        """Return the key and the nonce of the next draw."""
        if self._private and os.getpid() != self._process:  # a fork would draw what its parent does
            self._key, self._process = urandom(KEY_BYTES), os.getpid()
        nonce = self._draws.to_bytes(12, "little")
        self._draws += 1
        return self._key, nonce


def _words(
    key: bytes,
    nonce: bytes,
    words_per_number: int,
    start: int,
    end: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield `words_per_number` 32-bit words for each number from `start` to `end`, by chunks."""
    chunk = _chunk(device)
    chunk_sizes = [min(chunk, end - k) * words_per_number for k in range(start, end, chunk)]
    make = keystream if _on_cpu(device) else functools.partial(_keystream_elsewhere, device)
    return make(key, nonce, chunk_sizes, start * words_per_number // BLOCK_WORDS)


def _keystream_elsewhere(
    device: torch.device, key: bytes, nonce: bytes, chunk_sizes: Sequence[int], block: int
) -> Iterator[Tensor]:
    """Yield what `keystream` does, on another device."""
    for size in chunk_sizes:
        blocks = -(-size // BLOCK_WORDS)
        yield chacha20_words(key, nonce, block, blocks, device)[:size]
        block += blocks


def grid_spacing(least: float, most: float, entries: int) -> float:
    """Return the spacing of the grid for noise of these deviations.

    It is a power of two, so that scaling rounds nothing.

    Args:
        least: The smallest standard deviation that is not 0.
        most: The largest standard deviation.
        entries: The number of entries of the message.
    """
    fineness = GRID / 2 ** math.ceil(math.log2(max(entries, 1)) / 2)
    return 2.0 ** (math.frexp(max(least, _FEWEST * most))[1] - 1) * fineness


def _thread_ends(count: int, device: torch.device) -> list[int]:
    """Return where each thread's numbers end, in whole chunks."""
    chunk = _chunk(device)
    chunks = count // chunk
    threads = min(torch.get_num_threads(), chunks) if _on_cpu(device) else 1
    return [round(n * chunks / threads) * chunk for n in range(1, threads)] + [count]


def _narrow_normal(words: Tensor) -> tuple[Tensor, ...]:
    """Return normal pairs, each from 3 words: a radius of 64 bits and an angle of 32."""
    pairs = len(words) // 3
    radius = _log_uniform(words[: 2 * pairs].view(torch.int64)).mul_(-2).float().sqrt_()
    angle = words[2 * pairs :].float().mul_(math.pi * 2.0**-31)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _wide_normal(words: Tensor) -> tuple[Tensor, ...]:
    """Return normal pairs in float64, each from 4 words."""
    pairs = len(words) // 4
    radius = _log_uniform(words[: 2 * pairs].view(torch.int64)).mul_(-2).sqrt_()
    angle = words[2 * pairs :].view(torch.int64).double().mul_(math.pi * 2.0**-63)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _laplace(words: Tensor) -> tuple[Tensor, ...]:
    """Return Laplace numbers of variance 1 in float64, each from 4 words.

    The difference of two exponential numbers has variance 2.
    """
    upward, downward = _log_uniform(words.view(torch.int64)).chunk(2)
    return (downward.sub_(upward).mul_(math.sqrt(0.5)),)


_MAKERS: dict[Distribution, tuple[_Maker, int, int]] = {
    "gaussian": (_wide_normal, 4, 2),
    "laplace": (_laplace, 4, 1),
}
"""For each distribution the function that makes its numbers, of how many words, and how many at a
time.
"""


def _log_uniform(words: Tensor) -> Tensor:
    """Return ln u in float64 for u uniform in (0, 1] from 64-bit words; u is at least 2⁻⁶⁴."""
    # Sizes, not values: floats near 0 are dense, so that tails have no gaps.
    return words.double().abs_().mul_(2.0**-63).add_(2.0**-64).log_()


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
    """Draw standard normal numbers from either kind of generator, for what is not shared.

    Args:
        generator: A `Stream` or a generator of torch's; `None` makes a new `Stream`.
        shape: The result's shape.
        device: The result's device.
        dtype: The result's type.

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
    """Draw numbers that are 1 or -1 with equal odds, for what is not shared; see `normal`.

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
    """Return a generator of torch's for what hides nothing, such as attacks, from either kind.

    Args:
        generator: A generator of torch's, which is returned as it is; or a `Stream`, or `None` for
            a new one, which gives the seed.
        device: The result's device.

    Example:
        >>> generator = torch.Generator()
        >>> torch_generator(generator, "cpu") is generator
        True
    """
    if isinstance(generator, torch.Generator):
        return generator
    seed = int.from_bytes((generator or Stream()).bytes(8), "little") >> 1
    return torch.Generator(device=device).manual_seed(seed)


@contextmanager
def private_draws(stream: Stream, device: torch.device | str) -> Iterator[None]:
    """Let torch's global generators follow `stream` meanwhile.

    Afterwards they are as before, so that whatever else draws from them (the order of data,
    checkpoints of their state) never sees it.

    Args:
        stream: A stream with a key of its own.
        device: The device of the model. On the CPU the generator's whole state is drawn; an
            accelerator's has a key of 64 bits.

    Example:
        >>> with private_draws(Stream(), "cpu"):
        ...     mask = torch.nn.functional.dropout(torch.ones(9))
    """
    device = torch.device(device)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_twister_state(stream))
            yield
        return
    accelerator = torch.get_device_module(device.type)
    index = accelerator.current_device() if device.index is None else device.index
    with torch.random.fork_rng(devices=[index], device_type=device.type):
        torch.set_rng_state(_twister_state(stream))
        accelerator.manual_seed(int.from_bytes(stream.bytes(8), "little"))
        yield


def _twister_state(stream: Stream) -> Tensor:
    """Return a state of a CPU generator, of 19,968 bits. A seed would be cut to 32."""
    state = torch.Generator().manual_seed(0).get_state()
    words = torch.cat([chunk.long() for chunk in stream.words(_STATE_WORDS)])
    # after the seed, two flags and the place: the words, as unsigned 64 bits each
    state.view(torch.int64)[3 : 3 + _STATE_WORDS] = words & 0xFFFFFFFF
    return state


def chacha20_words(
    key: bytes, nonce: bytes, first_block: int, blocks: int, device: torch.device | str
) -> Tensor:
    """Compute blocks of ChaCha20's keystream in torch's integer operations, on any device.

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        first_block: The number of the first block.
        blocks: The number of blocks.
        device: The device to compute on.

    Returns:
        `(16 * blocks,)` words as int32, as little-endian bytes give them.

    Reference: RFC 8439, Section 2.3.
    """
    constants = b"expand 32-byte k"
    fixed = torch.frombuffer(bytearray(constants + key), dtype=torch.int32).to(device)
    nonce_words = torch.frombuffer(bytearray(nonce), dtype=torch.int32).to(device)
    counter = torch.arange(first_block, first_block + blocks, device=device)
    start = torch.empty(BLOCK_WORDS, blocks, dtype=torch.int32, device=device)
    start[:12], start[13:] = fixed[:, None], nonce_words[:, None]
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


def keystream(
    key: bytes, nonce: bytes, chunk_sizes: Sequence[int], block: int = 0
) -> Iterator[Tensor]:
    """Yield chunks of words of the keystream from a block on, computed on the CPU.

    Use each chunk before asking for the next one: they share a buffer.

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        chunk_sizes: The number of words of each chunk.
        block: The number of the first block.
    """
    cipher = algorithms.ChaCha20(key, block.to_bytes(4, "little") + nonce)
    encryptor, most = Cipher(cipher, mode=None).encryptor(), 4 * max(chunk_sizes, default=0)
    # Zeros are encrypted: what comes out is the keystream.
    zeros, buffer = memoryview(bytes(most)), bytearray(most + 63)
    for size in chunk_sizes:
        encryptor.update_into(zeros[: 4 * size], buffer)
        yield torch.frombuffer(buffer, dtype=torch.int32, count=size)


def shifted(words: Tensor, bits: int) -> Tensor:
    """Return words shifted right as if they were unsigned."""
    width = 8 * words.element_size()
    return (words >> bits) & ((1 << (width - bits)) - 1)


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits) | shifted(words, 32 - bits)
