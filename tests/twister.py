"""The attack on noise from a Mersenne Twister, as linear algebra over GF(2). For tests.

Every bit of a Twister's word is a sum (XOR) of bits of its state, 624 words of 32 bits. torch's
float32 `normal_` on a CPU makes noise of 16 words at a time, under every ATEN_CPU_CAPABILITY: with
u = (word & 0xFFFFFF) / 2²⁴, value j < 8 is r cos 2πu and value j + 8 is r sin 2πu, where u is of
word j + 8 and r = √(-2 ln(1 - u')) of word j. So angles give bits of words, and so do signs. Enough
of them are a system of equations with one solution: the state.

Sources: Matsumoto and Nishimura, "Mersenne Twister" (1998), for the recurrence; torch's
ATen/native/cpu/DistributionTemplates.h, `normal_fill`, for the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORDS, LAG, WORD_BITS = 624, 397, 32
UNKNOWNS = WORDS * WORD_BITS
_ROW = UNKNOWNS // 64 + 1  # 64 bits each; the last one holds the right-hand sides
_TWIST = 0x9908B0DF
_BLOCK = 16  # values that torch makes at once
_ANGLE_BITS = 8  # of the 24 that an angle has: float32 values say them for sure

Rows = NDArray[np.uint64]  # a bit in each row's every column


def next_words(state: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """What a Twister draws after the 624 words, not yet tempered, of its state."""
    x = np.concatenate([state, np.zeros(count, np.uint32)])
    for start in range(0, count, WORDS - LAG):  # so many at once, since x[k] is of x[k - 227]
        own = slice(start, min(start + WORDS - LAG, count))
        ahead = x[own.start + 1 : own.stop + 1]
        mixed = (x[own] & np.uint32(0x80000000)) | (ahead & np.uint32(0x7FFFFFFF))
        new = x[own.start + LAG : own.stop + LAG] ^ (mixed >> np.uint32(1))
        x[own.start + WORDS : own.stop + WORDS] = new ^ (ahead & np.uint32(1)) * np.uint32(_TWIST)
    y = x[WORDS:].copy()
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return y ^ (y >> np.uint32(18))


def normals(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The noise that torch makes of a multiple of 16 words."""
    u = (words & np.uint32(0xFFFFFF)).reshape(-1, 2, _BLOCK // 2) / 2**24
    radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), 2 * np.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)


def linear_complexity(bits: Sequence[int]) -> tuple[int, int]:
    """How many bits back the shortest recurrence goes that makes these bits, by Berlekamp and
    Massey's method, and the recurrence: the bits so far back of each bit that is set in it add up
    to 0.

    About half their number for random bits; never more than 19,937 for those of a Twister.
    """
    found, before, length, gap, window = 1, 1, 0, 1, 0
    for index, bit in enumerate(bits):
        window = window << 1 | int(bit)
        if not (found & window).bit_count() & 1:
            gap += 1
        elif 2 * length > index:
            found, gap = found ^ before << gap, gap + 1
        else:
            found, before = found ^ before << gap, found
            length, gap = index + 1 - length, 1
    return length, found


class Solution(NamedTuple):
    """What the equations say.

    Args:
        state: 624 words, so that as many of the equations hold as are independent.
        contradictions: How many of the others do not hold. 0: this is the state.
    """

    state: NDArray[np.uint32]
    contradictions: int


class Equations(NamedTuple):
    """Sums of bits of a Twister's words, each known to be 0 or 1.

    Args:
        words: `(n,)`: the number of a word, counted from 0 after the state.
        masks: `(n,)`: which of its bits add up.
        values: `(n,)` or `(n, victims)`: their sum, for each of those who are attacked at once.
    """

    words: NDArray[np.int64]
    masks: NDArray[np.int64]
    values: NDArray[np.int64]

    @classmethod
    def of_angles(cls, places: NDArray[np.int64], *noises: NDArray[np.float64]) -> Equations:
        """From noise that is seen bare, times any factor: the highest eight bits of its angles.

        Args:
            places: Where blocks of 16 values begin that are known, as numbers of words.
            noises: `(blocks, 16)` for each victim.
        """
        words = (places[:, None] + np.arange(8, _BLOCK)).reshape(-1)
        values = []
        for noise in noises:
            turns = np.arctan2(noise[:, 8:], noise[:, :8]).reshape(-1) / (2 * np.pi) % 1
            highest = np.floor(turns * 2**_ANGLE_BITS).astype(np.int64)
            values.append(highest[:, None] >> np.arange(_ANGLE_BITS) & 1)
        # What rounding may have carried over into the next angle is left out.
        turns = np.arctan2(noises[0][:, 8:], noises[0][:, :8]).reshape(-1) / (2 * np.pi)
        safe = np.abs(turns * 2**_ANGLE_BITS - np.round(turns * 2**_ANGLE_BITS)) > 1e-3
        masks = np.broadcast_to(1 << np.arange(24 - _ANGLE_BITS, 24), values[0].shape)[safe]
        return cls(
            np.repeat(words[safe], _ANGLE_BITS),
            masks.reshape(-1),
            np.stack([value[safe].reshape(-1) for value in values], 1),
        )

    @classmethod
    def of_signs(cls, places: NDArray[np.int64], values: NDArray[np.float64]) -> Equations:
        """From values of a message that have the signs of their noise.

        Args:
            places: `(n,)`: where they are, as numbers of words.
            values: `(n,)`.
        """
        first = places % _BLOCK < _BLOCK // 2  # the cosines
        return cls(
            places + first * (_BLOCK // 2),
            np.where(first, 3 << 22, 1 << 23),
            (values < 0).astype(np.int64),
        )

    def solve(self) -> list[Solution]:
        """The state of every victim."""
        values = self.values.reshape(len(self.words), -1).astype(np.uint64)
        rows = _symbols(self.words, self.masks)
        victims = range(values.shape[1])
        for victim in victims:
            rows[:, -1] |= values[:, victim] << np.uint64(victim)
        pivots = _eliminate(rows)
        rest = rows[len(pivots) :, -1]
        return [
            Solution(
                _substitute(rows[: len(pivots)], pivots, victim),
                int((rest >> np.uint64(victim) & np.uint64(1)).sum()),
            )
            for victim in victims
        ]


def _symbols(words: NDArray[np.int64], masks: NDArray[np.int64]) -> Rows:
    """Which bits of the state each equation adds up: a Twister that runs on symbols."""
    rows = np.zeros((len(words), _ROW), np.uint64)
    state = np.zeros((UNKNOWNS, _ROW - 1), np.uint64)  # a ring; of each bit, what it adds up
    every = np.arange(UNKNOWNS)
    state[every, every // 64] = np.uint64(1) << (every % 64).astype(np.uint64)
    state = state.reshape(WORDS, WORD_BITS, _ROW - 1)
    tempering = _tempering()
    twist = [bit for bit in range(WORD_BITS) if _TWIST >> bit & 1]
    order = np.argsort(words, kind="stable").tolist()
    for number in range(int(words.max()) + 1):
        new, ahead, lagged = (state[(number + k) % WORDS] for k in (0, 1, LAG))
        highest = new[31].copy()
        new[:] = lagged
        new[30] ^= highest
        new[:30] ^= ahead[1:31]
        new[twist] ^= ahead[0]
        while order and words[order[0]] == number:
            row = order.pop(0)
            added = tempering[[bit for bit in range(WORD_BITS) if masks[row] >> bit & 1]]
            parts = np.bitwise_xor.reduce(added).nonzero()[0]
            rows[row, :-1] = np.bitwise_xor.reduce(new[parts])
    return rows


def _tempering() -> NDArray[np.uint8]:
    """`(32, 32)`: which bits of a word are added up in each bit of the tempered word."""
    y = np.uint32(1) << np.arange(32, dtype=np.uint32)
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    y ^= y >> np.uint32(18)
    return np.stack([(y >> np.uint32(bit)) & 1 for bit in range(32)]).astype(np.uint8)


def _eliminate(rows: Rows) -> list[int]:
    """Gauss's elimination, eight columns at a time: the 256 sums of eight pivot rows are made once,
    and each row below takes one of them (the method of the four Russians). The rows become an upper
    triangle, up to the order of columns, whose pivot columns are returned; below it are zeros.
    """
    pivots: list[int] = []
    for first in range(0, UNKNOWNS, 8):
        top, word = len(pivots), first // 64
        strip = np.ascontiguousarray(rows[top:, word]).view(np.uint8)[first // 8 % 8 :: 8].copy()
        columns: list[int] = []
        for bit in range(8):
            # Which rows have this bit, after taking from each the pivots whose columns it has?
            left, new = strip.copy(), len(columns)
            for k, column in enumerate(columns):
                left ^= (strip >> column & 1) * strip[k]
            candidates = np.flatnonzero(left[new:] >> bit & 1)
            if not len(candidates):
                continue
            here = new + int(candidates[0])
            rows[[top + new, top + here]] = rows[[top + here, top + new]]
            strip[[new, here]] = strip[[here, new]]
            # Each pivot's column is in no other pivot row.
            for k, column in enumerate(columns):
                if strip[new] >> column & 1:
                    rows[top + new, word:] ^= rows[top + k, word:]
                    strip[new] ^= strip[k]
            for k in range(new):
                if strip[k] >> bit & 1:
                    rows[top + k, word:] ^= rows[top + new, word:]
                    strip[k] ^= strip[new]
            columns.append(bit)
        if not columns:
            continue
        count = len(columns)
        sums = np.zeros((2**count, _ROW - word), np.uint64)
        for k in range(count):
            sums[2**k : 2 ** (k + 1)] = sums[: 2**k] ^ rows[top + k, word:]
        below = strip[count:]
        which = np.zeros(len(below), np.intp)
        for k, column in enumerate(columns):
            which |= (below >> column & 1).astype(np.intp) << k
        for start in range(0, len(below), 512):  # so that what is gathered stays in the cache
            part = slice(top + count + start, top + count + start + 512)
            rows[part, word:] ^= sums[which[start : start + 512]]
        pivots += [first + column for column in columns]
    return pivots


def _substitute(rows: Rows, pivots: Sequence[int], victim: int) -> NDArray[np.uint32]:
    """The state, with 0 for the bits that are free (31 are never used)."""
    bits = np.zeros(UNKNOWNS, np.uint8)
    packed = np.zeros(_ROW - 1, np.uint64)
    for row, pivot in zip(rows[::-1], reversed(pivots), strict=True):
        known = int(np.bitwise_count(row[:-1] & packed).sum()) & 1
        if known ^ (int(row[-1]) >> victim & 1):
            bits[pivot] = 1
            packed[pivot // 64] |= np.uint64(1) << np.uint64(pivot % 64)
    return np.packbits(bits, bitorder="little").view(np.uint32)
