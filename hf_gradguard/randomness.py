"""Random numbers that nobody else can predict.

A Trainer seeds every rank alike, so noise from the global generator is the same on all ranks. And
torch's own generators can be computed backward: each word of its Mersenne Twister is a linear
function of the state, so that the noise on coordinates whose gradient is known (zeros, or signs of
large values) gives away all the noise there is. A GPU's Philox has a key of 64 bits.

Everything that protects is drawn from a `Stream`: the keystream of ChaCha20 (RFC 8439) under a key
of 256 bits, on the CPU by the `cryptography` package, elsewhere in torch's integer operations.

What is made of it in float64 uses operations that IEEE 754 defines to the last bit, so that all
processors draw the same numbers, and so do the compiled loops of the extra `fast`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import index
from os import urandom
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

if TYPE_CHECKING:
    from .randomness_kernel import Kernel

__all__ = ["GRID", "KEY_BYTES", "Stream", "normal", "private_draws", "signs", "torch_generator"]

KEY_BYTES = 32
BLOCK_WORDS = 16
# Pairs of numbers at once, in whole blocks: what is made of them stays in a processor's cache, and
# torch, which shares out what is longer, leaves them to the one thread that makes them.
_CHUNK = 2**15
_CHUNK_ELSEWHERE = 2**24
ROOT_HALF = 0x3FE6A09E667F3BCD
"""The bits of the float64 √½: what is left of a number's bits above these says its exponent."""
_SMALL_DRAW = 2**10  # words, of which signs are made together
_STATE_WORDS = 624  # of a Mersenne Twister

GRID = 2.0**-14
"""The spacing of the grid of `Stream.noisy` times √entries, in standard deviations, at most."""

Distribution = Literal["gaussian", "laplace"]
Number = TypeVar("Number", float, Tensor)
_Draw = tuple[bytes, bytes]
_Maker = Callable[[Tensor], tuple[Tensor, ...]]
_Take = Callable[[int, Tensor], None]
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
        if dtype != torch.float64:
            return self._draw_numbers(3, shape, device, dtype, _narrow_normal, per=2)
        loops = _loops("gaussian", math.prod(shape), torch.device(device))
        make = exact_normal if loops is None else functools.partial(_filled_pairs, loops)
        return self._draw_numbers(4, shape, device, dtype, make, per=2)

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
        spacing = grid_spacing(float(least), float(most), entries)
        sums = _Sums(values, deviation, 1 / spacing, noise, noisy)
        numbers_per_draw = _NUMBERS_OF_FOUR_WORDS[noise]
        self._draw_chunks(4, numbers_per_draw, len(values), values.device, sums.adder)
        sums.settle()
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

        def write(start: int, words: Tensor) -> None:
            for numbers in make(words):
                needed = numbers[: len(drawn) - start]
                drawn[start : start + len(needed)] = needed
                start += len(needed)

        self._draw_chunks(words_per_number, per, len(drawn), drawn.device, lambda: write)
        return drawn.view(tuple(shape))

    def _draw_chunks(
        self,
        words_per_number: int,
        per: int,
        size: int,
        device: torch.device,
        taker: Callable[[], _Take],
    ) -> None:
        """Draw words once, and let a taker of each thread have each chunk.

        It gets the place of the chunk's first number, and the chunk.
        """
        draw, count = self._next_draw(), -(-size // per)

        def fill(start: int, end: int) -> None:
            take = taker()
            for words in _words(*draw, words_per_number, start, end, device):
                take(start * per, words)
                start += len(words) // words_per_number

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


_TAIL_OF_LOGARITHM = (
    -0.2923289937008681, -0.30663443201112084, -0.36365778250523445, -0.4444442226959016,
    -0.5714285725195097, -0.7999999999979901, -1.333333333333334,
)  # fmt: skip
_SINE = (
    5.87297574479995e-12, -6.684416831856085e-10, 5.6921364280986254e-08, -3.5988430204672576e-06,
    0.0001604411847130916, -0.004681754135304255, 0.07969262624616565, -0.6459640975062462,
    1.5707963267948966,
)  # fmt: skip
"""Of polynomials through Chebyshev's points, the highest power first."""


def minus_twice_log(exponent: Number, mantissa: Number) -> Number:
    """Return -2 ln(2ᵉ m) for whole e and m from √½ to √2, in float64.

    With s = (m - 1)/(m + 1) it is -2 e ln 2 - 4 s - 4 s³/3 - …, whose tail is a polynomial. It is a
    part of the specification: numbers are what these operations give in this order, for floats
    (compiled or not) and for tensors, which are overwritten.

    Args:
        exponent: e, as a float.
        mantissa: m.
    """
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    logarithm = _TAIL_OF_LOGARITHM[0] * z
    for power in range(1, len(_TAIL_OF_LOGARITHM) - 1):
        logarithm += _TAIL_OF_LOGARITHM[power]
        logarithm *= z
    logarithm += _TAIL_OF_LOGARITHM[-1]
    z *= s
    logarithm *= z
    s *= 4.0
    logarithm -= s
    exponent *= -2.0 * math.log(2.0)
    logarithm += exponent
    return logarithm


def quarter_sine(turns: Number) -> Number:
    """Return sin(π v/2) for v from -1 to 1, in float64; a part of the specification likewise.

    Args:
        turns: v, in quarter turns.
    """
    z = turns * turns
    sine = _SINE[0] * z
    for power in range(1, len(_SINE) - 1):
        sine += _SINE[power]
        sine *= z
    sine += _SINE[-1]
    sine *= turns
    return sine


def exact_normal(words: Tensor) -> tuple[Tensor, ...]:
    """Return pairs of normal numbers in float64, each from two words of 64 bits, by Box and Muller.

    Every operation is IEEE 754's, so that they are the same wherever they are made.

    Args:
        words: The radii's words, and then the angles', as integers of 32 or 64 bits.

    Returns:
        The cosines times the radii, and the sines.
    """
    of_radii, of_angles = words.view(torch.int64).chunk(2)
    radius = _square_root(_minus_twice_log_uniform(of_radii))
    turns = of_angles.double().mul_(2.0**-62)
    aside = 1.0 - turns.abs()
    cosine, sine = quarter_sine(aside), quarter_sine((1.0 - aside.abs()).copysign_(turns))
    return cosine.mul_(radius), sine.mul_(radius)


def exact_laplace(words: Tensor) -> tuple[Tensor, ...]:
    """Return Laplace numbers of variance 1 in float64, each from two words of 64 bits.

    The difference of two exponential numbers has variance 2. Operations are as `exact_normal`'s.

    Args:
        words: The first exponential numbers' words, and then the second's.

    Returns:
        The numbers alone.
    """
    upward, downward = _minus_twice_log_uniform(words.view(torch.int64)).chunk(2)
    return (upward.sub_(downward).mul_(0.5 * math.sqrt(0.5)),)


def _minus_twice_log_uniform(words: Tensor) -> Tensor:
    """Return -2 ln u for the u of `_uniform`, as `minus_twice_log` does."""
    bits = _uniform(words).view(torch.int64)
    exponent = (bits - ROOT_HALF).bitwise_right_shift_(52)
    mantissa = bits.sub_(exponent << 52).view(torch.float64)
    return minus_twice_log(exponent.double(), mantissa)


def _square_root(numbers: Tensor) -> Tensor:
    """Return roots as IEEE 754 rounds them. Torch's are MKL's on some processors, which differ."""
    if numbers.device.type == "cpu":
        np.sqrt(numbers.numpy(), out=numbers.numpy())
        return numbers
    return numbers.sqrt_()


def _nearly_normal(words: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return `exact_normal`'s numbers times `scale`, by the functions of torch's libraries.

    They are off by `_NEARNESS` times `scale` at most.
    """
    of_radii, of_angles = words.view(torch.int64).chunk(2)
    radius = _log_uniform(of_radii).mul_(-2.0 * scale**2).sqrt_()
    angle = of_angles.double().mul_(math.pi * 2.0**-63)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _nearly_laplace(words: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return `exact_laplace`'s numbers likewise."""
    upward, downward = _log_uniform(words.view(torch.int64)).chunk(2)
    return (downward.sub_(upward).mul_(math.sqrt(0.5) * scale),)


_EXACT: dict[Distribution, _Maker] = {"gaussian": exact_normal, "laplace": exact_laplace}
_NEARLY: dict[Distribution, Callable[[Tensor, float], tuple[Tensor, ...]]] = {
    "gaussian": _nearly_normal,
    "laplace": _nearly_laplace,
}
_COMPILED_TYPES = torch.float32, torch.float64
_NUMBERS_OF_FOUR_WORDS: dict[Distribution, int] = {"gaussian": 2, "laplace": 1}
_NEARNESS = 1.5 * 2.0**-46
"""How far numbers may be apart from `_EXACT`'s that are made by functions which err by a unit of
the last bit at most, as MKL's, SLEEF's and C libraries' do: 9.4 σ times what an angle, a cosine and
a radius may be off.
"""


class _Sums:
    """Values and noise that are rounded to a grid and added up there, chunk by chunk."""

    def __init__(
        self,
        values: Tensor,
        deviation: Tensor,
        fineness: float,
        noise: Distribution,
        noisy: Tensor,
    ) -> None:
        if deviation.dtype not in _COMPILED_TYPES:
            deviation = deviation.double()  # exactly
        self._values, self._deviation, self._noisy = values, deviation, noisy
        self._fineness, self._spacing = fineness, 1 / fineness  # dividing would be slower
        self._exact, self._nearly = _EXACT[noise], _NEARLY[noise]
        self._unclear: list[tuple[np.ndarray, ...]] = []
        loops = _loops(noise, len(values), values.device)
        is_each = deviation.shape == values.shape
        if loops and values.dtype in _COMPILED_TYPES and (is_each or not deviation.dim()):
            self.adder = self._compiled_adder(loops, noise)
        else:
            # Near numbers are made in steps, whose squares must be floats.
            is_near = _on_cpu(values.device) and 2.0**-400 < fineness < 2.0**400
            self.adder = self._near_adder if is_near else self._exact_adder

    adder: Callable[[], _Take]
    """Makes what adds the noise of a chunk of words to the values from a place on, for one thread.
    All that there are add the same.
    """

    def _exact_adder(self) -> _Take:
        def add(start: int, words: Tensor) -> None:
            for numbers in self._exact(words):
                needed = numbers[: len(self._values) - start]
                places = slice(start, start + len(needed))
                self._noisy[places] = self._sum(places, self._whole_steps(places, needed))
                start += len(needed)

        return add

    def _near_adder(self) -> _Take:
        """Take numbers that are nearly right, and note where that may not be enough."""
        memory, is_each = torch.empty(_CHUNK, dtype=torch.float64), bool(self._deviation.dim())
        blur = self._fineness * _NEARNESS  # of a number of deviation 1, in steps
        scale = self._fineness * (1.0 if is_each else float(self._deviation))

        def add(start: int, words: Tensor) -> None:
            columns = words.view(torch.int64).view(2, -1).numpy()
            for row, numbers in enumerate(self._nearly(words, scale)):
                steps = numbers[: len(self._values) - start]
                if not len(steps):
                    return
                places = slice(start, start + len(steps))
                std = self._std(places)
                if is_each:
                    steps.mul_(std)
                whole_steps = torch.round(steps, out=memory[: len(steps)])
                distance = steps.sub_(whole_steps).abs_().numpy()
                unclear = np.flatnonzero(~(distance < 0.5 - blur * float(std.amax())))
                if is_each:
                    unclear = unclear[~(distance[unclear] < 0.5 - blur * std.numpy()[unclear])]
                if len(unclear):
                    self._unclear.append((unclear + start, unclear * 0 + row, columns[:, unclear]))
                on_grid = steps.copy_(self._values[places]).mul_(self._fineness).round_()
                self._noisy[places] = on_grid.add_(whole_steps).mul_(self._spacing)
                start += len(steps)

        return add

    def settle(self) -> None:
        """Add the noise again where it was not clear how its numbers round."""
        if not self._unclear:
            return
        places, rows, words = (
            torch.from_numpy(np.concatenate(entries, axis=-1))
            for entries in zip(*self._unclear, strict=True)
        )
        numbers = torch.stack(self._exact(words.flatten()))
        whole_steps = self._whole_steps(places, numbers.gather(0, rows[None])[0])
        self._noisy[places] = self._sum(places, whole_steps).to(self._noisy.dtype)

    def _compiled_adder(self, loops: Kernel, noise: Distribution) -> Callable[[], _Take]:
        values, noisy = self._values.detach().contiguous().numpy(), self._noisy.numpy()
        stds = self._deviation.detach().contiguous().numpy()

        def adder() -> _Take:
            memory = np.empty(_CHUNK * _NUMBERS_OF_FOUR_WORDS[noise])

            def add(start: int, words: Tensor) -> None:
                numbers = memory[: len(words) * _NUMBERS_OF_FOUR_WORDS[noise] // 4]
                loops.fill[noise](words.view(torch.int64).numpy(), numbers)
                places = slice(start, start + len(numbers))
                std = stds[places] if stds.ndim else float(stds)
                loops.add(values[places], std, numbers, self._fineness, noisy[places])

            return add

        return adder

    def _whole_steps(self, places: slice | Tensor, unit_noise: Tensor) -> Tensor:
        return unit_noise.mul_(self._std(places)).mul_(self._fineness).round_()

    def _std(self, places: slice | Tensor) -> Tensor:
        return self._deviation[places] if self._deviation.dim() else self._deviation

    def _sum(self, places: slice | Tensor, whole_steps: Tensor) -> Tensor:
        on_grid = self._values[places].to(torch.float64, copy=True).mul_(self._fineness).round_()
        return on_grid.add_(whole_steps).mul_(self._spacing)


def _filled_pairs(loops: Kernel, words: Tensor) -> tuple[Tensor, ...]:
    """Return what `exact_normal` does, by compiled loops."""
    long_words = words.view(torch.int64)
    numbers = torch.empty(len(long_words), dtype=torch.float64)
    loops.fill["gaussian"](long_words.numpy(), numbers.numpy())
    return numbers.chunk(2)


def _loops(noise: Distribution, count: int, device: torch.device) -> Kernel | None:
    """Return compiled loops for so many numbers, where they are installed and worth a compilation.

    Until then, and elsewhere than on a processor, numbers are made by torch's operations: the same.
    """
    global _numbers_made
    if not _on_cpu(device):
        return None
    _numbers_made += count
    return _compiled_loops(noise) if _numbers_made >= _WORTH_COMPILING else None


@functools.cache
def _compiled_loops(noise: Distribution) -> Kernel | None:
    """Return compiled loops, of which some numbers were compared with torch's operations'."""
    if not importlib.util.find_spec("numba"):
        return None
    (words,) = keystream(bytes(KEY_BYTES), bytes(12), [2**14])
    expected = torch.cat(_EXACT[noise](words))
    numbers = torch.empty_like(expected)
    try:
        from .randomness_kernel import compiled_kernel

        loops = compiled_kernel(minus_twice_log, quarter_sine, ROOT_HALF)
        loops.fill[noise](words.view(torch.int64).numpy(), numbers.numpy())
    except Exception as error:  # a Numba that does not go with this NumPy, Python or processor
        warnings.warn(f"{_WITHOUT_LOOPS} Numba failed: {error}", stacklevel=2)
        return None
    if torch.equal(numbers, expected):
        return loops
    warnings.warn(f"{_WITHOUT_LOOPS} Its loops do not round as torch does here.", stacklevel=2)
    return None


_WITHOUT_LOOPS = "Exact noise is drawn by torch's operations, at a third of the speed."
_WORTH_COMPILING = 2**24
"""Numbers after which a process compiles: compiling takes as long as making some 2²⁸ of them."""
_numbers_made = 0


def _log_uniform(words: Tensor) -> Tensor:
    """Return ln u for the u of `_uniform`, by the logarithm of torch's libraries."""
    return _uniform(words).log_()


def _uniform(words: Tensor) -> Tensor:
    """Return u in float64, uniform in (0, 1], from 64-bit words; u is at least 2⁻⁶⁴."""
    # Sizes, not values: floats near 0 are dense, so that tails have no gaps.
    return words.double().abs_().mul_(2.0**-63).add_(2.0**-64)


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
