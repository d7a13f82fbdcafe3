"""Exact noise in compiled loops, which the extra `fast` brings: Numba's.

The loops make the same numbers as torch's operations in `randomness`, to the last bit: they compile
the very functions that torch's operations go through, and each operation is IEEE 754's. Numba
neither reorders sums nor fuses a product with a sum unless it is told to. Before the loops are
used, some of their numbers are compared.

Nothing is written to a disk: Numba would unpickle what it finds in a folder of compiled code, so
each process compiles anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["Kernel", "compiled_kernel"]

_Loop = Callable[..., None]
_compiled = njit(nogil=True, error_model="numpy")  # a division by zero is IEEE 754's, and unasked


@dataclass(frozen=True)
class Kernel:
    """Compiled loops over contiguous arrays of NumPy, which hold no lock of Python's.

    Args:
        fill: For each distribution the loop `(words, numbers)`, which turns 2 n words of 64 bits
            into numbers of standard deviation 1 in float64, as `randomness.EXACT` does.
        add: The loop `(values, deviations, numbers, fineness, noisy)`, which rounds values, and
            numbers times their deviation, to a grid and adds them up there, as `Stream.noisy` does.
            `deviations` is an array or a number.

    Example:
        >>> loops = Kernel({}, lambda *arrays: None)
        >>> list(loops.fill)
        []
    """

    fill: dict[str, _Loop]
    add: _Loop


@functools.cache
def compiled_kernel(
    minus_twice_log: Callable[[float, float], float],
    quarter_sine: Callable[[float], float],
    root_half: int,
) -> Kernel:
    """Return the kernel, which is compiled for the types that it is called with when it is called.

    Args:
        minus_twice_log: The function that gives -2 ln(2ᵉ m) from e and m.
        quarter_sine: The function that gives sin(π v/2) from v.
        root_half: The bits of √½, from which on m is.

    Example:
        >>> from hf_gradguard.randomness import ROOT_HALF, minus_twice_log, quarter_sine
        >>> loops = compiled_kernel(minus_twice_log, quarter_sine, ROOT_HALF)
        >>> numbers = np.empty(2)
        >>> loops.fill["gaussian"](np.array([2**62, 0]), numbers)  # a radius of u = 1/2, no angle
        >>> [round(float(number), 3) for number in numbers]
        [1.177, 0.0]
    """
    logarithm, sine = _compiled(minus_twice_log), _compiled(quarter_sine)

    @_compiled
    def minus_twice_log_uniform(word: int) -> float:
        bits = _bits(abs(float(word)) * 2.0**-63 + 2.0**-64)
        exponent = (bits - root_half) >> 52
        return logarithm(float(exponent), _float(bits - (exponent << 52)))

    @_compiled
    def gaussian(words: np.ndarray, numbers: np.ndarray) -> None:
        pairs = len(words) // 2
        for pair in range(pairs):
            radius = math.sqrt(minus_twice_log_uniform(words[pair]))
            turns = float(words[pairs + pair]) * 2.0**-62
            aside = 1.0 - abs(turns)
            numbers[pair] = sine(aside) * radius
            numbers[pairs + pair] = sine(math.copysign(1.0 - abs(aside), turns)) * radius

    @_compiled
    def laplace(words: np.ndarray, numbers: np.ndarray) -> None:
        count = len(words) // 2
        for place in range(count):
            upward = minus_twice_log_uniform(words[place])
            downward = minus_twice_log_uniform(words[count + place])
            numbers[place] = (upward - downward) * (0.5 * math.sqrt(0.5))

    return Kernel({"gaussian": gaussian, "laplace": laplace}, _add)


def _add(
    values: np.ndarray,
    deviations: np.ndarray | float,
    numbers: np.ndarray,
    fineness: float,
    noisy: np.ndarray,
) -> None:
    loop = _add_alike if isinstance(deviations, float) else _add_each
    loop(values, deviations, numbers, fineness, noisy)


@_compiled
def _add_alike(
    values: np.ndarray, deviation: float, numbers: np.ndarray, fineness: float, noisy: np.ndarray
) -> None:
    spacing = 1.0 / fineness
    for place in range(len(values)):
        on_grid = np.rint(float(values[place]) * fineness)
        noisy[place] = (on_grid + np.rint(numbers[place] * deviation * fineness)) * spacing


@_compiled
def _add_each(
    values: np.ndarray,
    deviations: np.ndarray,
    numbers: np.ndarray,
    fineness: float,
    noisy: np.ndarray,
) -> None:
    spacing = 1.0 / fineness
    for place in range(len(values)):
        on_grid = np.rint(float(values[place]) * fineness)
        noise = np.rint(numbers[place] * float(deviations[place]) * fineness)
        noisy[place] = (on_grid + noise) * spacing


@intrinsic
def _bits(context: Any, number: Any) -> Any:
    """Return a float64's bits as an int64."""
    return types.int64(types.float64), lambda _, builder, __, arguments: builder.bitcast(
        arguments[0], ir.IntType(64)
    )


@intrinsic
def _float(context: Any, bits: Any) -> Any:
    """Return the float64 of an int64's bits."""
    return types.float64(types.int64), lambda _, builder, __, arguments: builder.bitcast(
        arguments[0], ir.DoubleType()
    )
