"""Noise that is correlated over a client's messages, so that most of it cancels in their sum.

What a linear optimizer has added up after t messages is a prefix sum, A g with A the lower
triangle of ones. With A = B C, the messages C⁻¹(C g + σ z) = g + σ C⁻¹ z hide g as well as
C g + σ z does, which is one Gaussian mechanism. The weights get A g + σ B z. Independent noise is
C = I: a sum of T messages has noise of σ √T. With C = A^½ it has about σ (1 + ln(T)/π).

A rate that falls to zero makes the last weights the mean of all prefix sums. C = A has the least
noise there is in them, σ, and √T times as much on the way. Between A^½ and A, A^0.6 has 1.2 σ.

Factors here are Toeplitz matrices of T × T, given by their first column c. z is drawn as messages
are made, and C⁻¹ z needs a few running sums (buffers) or the last few noises (bands) only.

References: Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams" (2022), whose Theorem 2.1 lets g depend on earlier messages;
Fichtenberger, Henzinger and Upadhyay, "Constant Matters" (2023): the square root; Choquette-Choo
et al., "(Amplified) Banded Matrix Factorization" (2023); Kalinin and Lampert, "Banded Square Root
Matrix Factorization" (2024): sensitivity; Dvijotham et al., "Efficient and Near-Optimal Online
Noise Generation for Streaming Differential Privacy" (2024): buffers (BLT).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..randomness import Stream, grid_spacing

Factorization = Literal["blt", "banded", "square_root"]
BUFFERS = 5
_CHUNK = 2**15
_SEARCH_STEPS = 200
_SHARE_OF_PREFIX = 0.05  # of the last prefix sum's variance, beside that of the last weights
_SLOWEST = 1 - 1e-9  # of fitted decays
Keys = Callable[[int], bytes | None]
"""Gives the key of the noise of a message, by its number; `None` where that noise was never drawn.
"""


@dataclass(frozen=True, eq=False)
class CorrelatedNoise:
    """The noises C⁻¹ z of a client's messages so far, as far as later ones depend on them.

    Each z is drawn from a generator of its own, of which nothing is kept. So no two messages have
    the same z unless somebody uses one key twice. Two transcripts that continue from one
    `CorrelatedNoise` share the messages before it, and count as two mechanisms.

    Args:
        factor: The factor C.
        messages: The number T of messages that it was made for.
        position: How many of them are shared already.
        memory: What the factor keeps of their noise, `(factor.memory, entries)` in float64; `None`
            before the first.

    Example:
        >>> noise = CorrelatedNoise(Banded((1.0, 0.5)), messages=2)
        >>> first, noise = noise.draw(3, "cpu", Stream())
        >>> second, noise = noise.draw(3, "cpu", Stream())
        >>> first.shape, noise.position
        (torch.Size([3]), 2)
    """

    factor: Factor
    messages: int
    position: int = 0
    memory: Tensor | None = None

    def draw(
        self, entries: int, device: torch.device | str, generator: Stream
    ) -> tuple[Tensor, CorrelatedNoise]:
        """Draw the next message's noise.

        Args:
            entries: The number of entries of the message; the same for all messages.
            device: The device to draw on.
            generator: The source of z.

        Returns:
            The noise before it is scaled, `(entries,)` in float64, and what is remembered after it.

        Raises:
            RuntimeError: If all messages are shared, or an earlier one had another number of
                entries.
        """
        if self.position >= self.messages:
            raise RuntimeError(
                f"dp_sgd with correlated=True was planned for messages={self.messages}, and all of "
                "them are shared: one more would be less protected. Plan for more of them."
            )
        if self.memory is not None and self.memory.shape[1] != entries:
            raise RuntimeError(
                f"dp_sgd with correlated=True made noise of {self.memory.shape[1]} entries, and a "
                f"message has {entries}: what is shared may not change within a training."
            )
        white_noise = generator.normal((entries,), device=device, dtype=torch.float64)
        return self._advanced(white_noise)

    def _advanced(self, white_noise: Tensor) -> tuple[Tensor, CorrelatedNoise]:
        shape = self.factor.memory, len(white_noise)
        memory = white_noise.new_zeros(shape) if self.memory is None else self.memory
        noise, memory = self.factor.correlate(white_noise, memory.to(white_noise.device))
        return noise, replace(self, position=self.position + 1, memory=memory)

    def resumed_at(self, position: int, keys: Keys = lambda _: None) -> CorrelatedNoise:
        """Return what is remembered before a later message.

        Messages between may have left without being remembered, as before a kill. Their noise is
        drawn again by its key, so that later noise cancels it. Noise without a key was never drawn.

        Args:
            position: The message's number.
            keys: The function that returns the key of each message between.
        """
        noise = self
        while noise.memory is not None and noise.position < position:
            entries, device = noise.memory.shape[1], noise.memory.device
            key = keys(noise.position)
            if key is None:
                zeros = torch.zeros(entries, dtype=torch.float64, device=device)
                _, noise = noise._advanced(zeros)
            else:
                _, noise = noise.draw(entries, device, Stream(key))
        return replace(noise, position=position)

    def tensors(self) -> Tensors:
        """Return the tensors to continue from, without any key; none before the first message."""
        if self.memory is None:
            return {}
        factor = self.factor
        numbers = [factor.bands] if isinstance(factor, Banded) else [factor.decays, factor.weights]
        state = {
            "memory": self.memory.clone(),
            "factor": torch.tensor(numbers, dtype=torch.float64),
            "plan": torch.tensor([self.messages, self.position]),
        }
        return {f"{_PREFIX}{name}": tensor for name, tensor in state.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> CorrelatedNoise | None:
        """Read the noise from a checkpoint's tensors, if they hold it.

        The factor is the stored one, even where another machine would fit it in other digits.
        """
        if f"{_PREFIX}factor" not in tensors:
            return None
        memory, numbers, plan = (tensors.pop(f"{_PREFIX}{n}") for n in ("memory", "factor", "plan"))
        rows = [tuple(row) for row in numbers.tolist()]
        factor: Factor = Banded(*rows) if len(rows) == 1 else Buffered(*rows)
        messages, position = map(int, plan.tolist())
        return cls(factor, messages, position, memory.clone())

    def power(self) -> float:
        """Return the variance of the last message's noise where z has variance 1."""
        return float(self.factor.inverse(self.position).square().sum())

    def sensitivity(self, participations: int, min_separation: int | None) -> float:
        """Return how far a row moves all messages together; see the function `sensitivity`."""
        return _sensitivity(self.factor, self.messages, participations, min_separation)


_PREFIX = "noise_stream/"
"""Of the names in a checkpoint."""


@functools.lru_cache(maxsize=16)
def _sensitivity(
    factor: Factor, messages: int, participations: int, min_separation: int | None
) -> float:
    """The same at every message of a plan."""
    return sensitivity(factor.column(messages), participations, min_separation)


def add_on_grid(values: Tensor, noise: Tensor, deviation: float, entries: int) -> Tensor:
    """Return values with noise, each rounded to a grid and added up there, exactly.

    The grid is the one that `Stream.noisy` has for independent noise of that deviation. The sum
    equals the values on the grid plus unrounded noise, rounded. So the message is a function of a
    Gaussian mechanism's output on values on the grid, and rounding moves two sets of values apart
    by at most GRID of the deviation.

    Args:
        values: The values, floats of shape `(n,)`.
        noise: The noise in float64, of shape `(n,)`, of this deviation or more.
        deviation: The standard deviation, which must be known without the values.
        entries: The number of entries of the whole message.

    Raises:
        OverflowError: If a value is too large for the grid, which has 2⁵³ points on each side of 0.

    Example:
        >>> add_on_grid(torch.tensor([0.25]), torch.tensor([0.5]).double(), 1.0, 1)
        tensor([0.7500])
    """
    spacing = grid_spacing(deviation, deviation, entries)
    assert math.frexp(spacing)[0] == 0.5  # a power of two: scaling rounds nothing
    noisy = torch.empty_like(values)
    for chunk in _chunks(values):
        on_grid = values[chunk].double().div_(spacing).round_()
        on_grid.add_((noise[chunk] / spacing).round_())
        largest = float(on_grid.abs().max())
        if not largest < 2.0**53:
            raise OverflowError(
                f"A message of {largest * spacing:g} is too large for its noise's grid."
            )
        noisy[chunk] = on_grid.mul_(spacing)
    return noisy


def _chunks(entries: Tensor) -> Iterator[slice]:
    """Slices of entries, so many that what is made of them stays in a processor's cache."""
    size = _CHUNK if entries.device.type == "cpu" else max(len(entries), 1)
    return (slice(start, start + size) for start in range(0, len(entries), size))


@dataclass(frozen=True)
class Banded:
    """The factor C of first-column entries c_0 = 1, c_1, …, with zeros below.

    The noise is s_t = (C⁻¹ z)_t = z_t − Σ_{j>0} c_j s_{t−j}.

    Args:
        bands: c_0 to c_{b−1}; c_0 is 1.

    Raises:
        ValueError: If it does not begin with 1.

    Example:
        >>> Banded((1.0, 0.5)).inverse(4).tolist()
        [1.0, -0.5, 0.25, -0.125]
    """

    bands: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bands or self.bands[0] != 1:
            raise ValueError("bands must begin with 1: a factor's diagonal.")

    @property
    def memory(self) -> int:
        """The number of tensors of the noise's shape that it keeps."""
        return len(self.bands) - 1

    def column(self, messages: int) -> Tensor:
        """Return c, `(messages,)` in float64."""
        bands = torch.tensor(self.bands[:messages], dtype=torch.float64)
        return torch.nn.functional.pad(bands, (0, messages - len(bands)))

    def inverse(self, messages: int) -> Tensor:
        """Return the first column of C⁻¹, `(messages,)` in float64."""
        return invert_series(self.column(messages))

    def correlate(self, white_noise: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return (C⁻¹ z)_t, given z_t.

        Args:
            white_noise: z_t, `(n,)`.
            memory: What the last call returned, `(self.memory, n)`, with zeros before the first:
                the last noises, the newest first.

        Returns:
            The noise `(n,)`, and what the next call needs.
        """
        noise = white_noise.clone()
        for chunk in _chunks(noise):
            for band, earlier in zip(self.bands[1:], memory, strict=True):
                noise[chunk].sub_(earlier[chunk] * band)  # in this order it is the same everywhere
        return noise, torch.cat([noise[None], memory])[: self.memory]


@dataclass(frozen=True)
class Buffered:
    """The factor C whose inverse is I minus a sum of geometric series (BLT).

    The noise is s_t = z_t − Σ_i a_i S_i,t, with running sums S_i,t+1 = λ_i S_i,t + z_t.

    Where λ is in [0, 1), a ≥ 0 and Σ a_i/(1 − λ_i) ≤ 1, c is positive and falls: its generating
    function has the poles θ_i of 1 = Σ a_i/(s − λ_i), which lie between the λ_i and 1, with
    positive residues. `sensitivity` asks for that.

    Args:
        decays: λ.
        weights: a.

    Raises:
        ValueError: If they are not so.

    Example:
        >>> Buffered((0.5,), (0.25,)).inverse(4).tolist()
        [1.0, -0.25, -0.125, -0.0625]
    """

    decays: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.decays, self.weights, strict=True))
        in_range = all(0 <= decay < 1 and weight >= 0 for decay, weight in pairs)
        if not in_range or sum(weight / (1 - decay) for decay, weight in pairs) > 1 + 1e-12:
            raise ValueError(
                "decays must be in [0, 1), weights at least 0, and the sum of weights/(1 - decays) "
                f"at most 1, but they are {self.decays} and {self.weights}."
            )

    @property
    def memory(self) -> int:
        """The number of tensors of the noise's shape that it keeps."""
        return len(self.decays)

    def column(self, messages: int) -> Tensor:
        """Return c, `(messages,)` in float64."""
        return invert_series(self.inverse(messages))

    def inverse(self, messages: int) -> Tensor:
        """Return the first column of C⁻¹, `(messages,)` in float64."""
        decays, weights = _float64(self.decays), _float64(self.weights)
        powers = decays[:, None] ** torch.arange(messages - 1, dtype=torch.float64)
        return torch.cat([torch.ones(1, dtype=torch.float64), -(weights @ powers)])

    def correlate(self, white_noise: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return (C⁻¹ z)_t, given z_t.

        Args:
            white_noise: z_t, `(n,)`.
            memory: The running sums that the last call returned, `(self.memory, n)`; zeros before
                the first.

        Returns:
            The noise `(n,)`, and the running sums for the next call.
        """
        noise, sums = white_noise.clone(), torch.empty_like(memory)
        for chunk in _chunks(noise):
            white = white_noise[chunk]
            for weight, decay, earlier, later in zip(
                self.weights, self.decays, memory[:, chunk], sums[:, chunk], strict=True
            ):
                noise[chunk].sub_(earlier * weight)  # a sum in this order is the same everywhere
                torch.mul(earlier, decay, out=later).add_(white)
        return noise, sums


Factor = Banded | Buffered


def make_factor(
    kind: Factorization,
    messages: int,
    participations: int = 1,
    min_separation: int | None = None,
    bands: int | None = None,
    falling_rate: bool = False,
) -> Factor:
    """Return a factor for a number of messages, which is all that decides it.

    Nothing of it is secret.

    Args:
        kind: `"blt"`: five buffers, fitted for the least noise in the last prefix sum at the
            sensitivity of these participations; `"square_root"`: the square root of the prefix sum,
            optimal among Toeplitz factors for one participation, which keeps all noises;
            `"banded"`: its first bands.
        messages: T.
        participations: In how many messages a row may be.
        min_separation: How far apart these are, at least.
        bands: The number of bands of `"banded"`. Default: `min_separation`, with which a row's
            messages add up as if they had nothing to do with each other.
        falling_rate: Whether learning rates fall to zero. `"blt"` is then fitted for the least
            noise in the last weights (`final_error`), with a twentieth of the last prefix sum's
            variance: noise on the way is what gradients are taken at.

    Raises:
        ValueError: If an argument is out of range, or `"banded"` has no number of bands.

    Example:
        >>> factor = make_factor("blt", messages=200)
        >>> round(float(prefix_error(factor, 200)[-1]) * sensitivity(factor.column(200)), 2)
        2.75
    """
    for name, number in (("messages", messages), ("participations", participations)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, but is {number}.")
    if kind == "square_root":
        return Banded(tuple(square_root(messages).tolist()))
    if kind == "banded":
        count = bands or min_separation
        if count is None or count < 1:
            raise ValueError("factorization='banded' needs bands, or min_separation.")
        return Banded(tuple(square_root(min(count, messages)).tolist()))
    if kind != "blt":
        raise ValueError(f"factorization must be blt, banded or square_root, but is {kind!r}.")
    return _fitted(messages, participations, min_separation or 1, falling_rate)


def square_root(messages: int) -> Tensor:
    """Return the first column of A^½, `(messages,)` in float64: binom(2j, j)/4^j, of 1/√(1 − x).

    Example:
        >>> square_root(4).tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    j = torch.arange(1, messages, dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), ((2 * j - 1) / (2 * j)).cumprod(0)])


def sensitivity(
    column: Tensor, participations: int = 1, min_separation: int | None = None
) -> float:
    """Return the most that a row of norm 1 moves C g, in whichever messages it is.

    C's entries are not negative, so rows' contributions add up most where they all point the same
    way; and c falls, so they add up most in the earliest messages that are as close as they may be
    (Kalinin and Lampert, 2024, Theorem 2).

    Args:
        column: c, `(T,)`: at least 0, never rising.
        participations: In how many messages a row may be.
        min_separation: How far apart these are, at least. Default: 1, next to each other.

    Raises:
        ValueError: If c is negative or rises somewhere.

    Example:
        >>> sensitivity(torch.tensor([1.0, 0.5]), participations=2)
        1.8027756377319946
    """
    column = column.double()
    if bool((column < 0).any()) or bool((column.diff() > 1e-12).any()):
        raise ValueError("The factor's column must be at least 0 and never rise.")
    return float(_square_sensitivity(column, participations, min_separation or 1).sqrt())


def prefix_error(factor: Factor, messages: int) -> Tensor:
    """Return the standard deviation of each prefix sum's noise B z for z ~ N(0, I), `(messages,)`.

    Times the sensitivity, and σ times the clip, it is that of sums of this many messages.

    Example:
        >>> prefix_error(Banded((1.0,)), 4).square()  # independent noise: t
        tensor([1.0000, 2.0000, 3.0000, 4.0000], dtype=torch.float64)
    """
    return factor.inverse(messages).cumsum(0).square().cumsum(0).sqrt()


def final_error(factor: Factor, messages: int) -> float:
    """Return the standard deviation of Σ_t (1 − t/T) (C⁻¹ z)_t, t from 0.

    It is that of the noise in the last weights after a rate that falls from 1 to zero, as the mean
    of all prefix sums, scaled as in `prefix_error`.

    Example:
        >>> factor = make_factor("blt", messages=200, falling_rate=True)
        >>> round(final_error(factor, 200) * sensitivity(factor.column(200)), 2)  # at least 1
        1.09
    """
    return float(_square_final_error(factor.inverse(messages)).sqrt())


def invert_series(column: Tensor) -> Tensor:
    """Return the first column of a lower triangular Toeplitz matrix's inverse.

    It is computed by Newton's iteration.

    Args:
        column: The matrix's first column, `(T,)` in float64, beginning with 1.

    Example:
        >>> invert_series(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)).tolist()
        [1.0, -0.5, 0.25]
    """
    inverse, terms = column[:1].reciprocal(), 1
    while terms < len(column):
        terms = min(2 * terms, len(column))
        product = _times(column[:terms], inverse, terms)
        error = -product + torch.nn.functional.one_hot(torch.tensor(0), terms) * 2
        inverse = _times(inverse, error, terms)
    return inverse


def _times(series: Tensor, factor: Tensor, length: int) -> Tensor:
    """The first coefficients of a product of series."""
    if length <= 64:  # exact where numbers are, and faster
        matrix = _toeplitz(series, length)[:, : len(factor)]
        return matrix @ factor
    size = 2 * length
    spectrum = torch.fft.rfft(series, size) * torch.fft.rfft(factor, size)
    return torch.fft.irfft(spectrum, size)[:length]


def _toeplitz(column: Tensor, length: int) -> Tensor:
    padded = torch.nn.functional.pad(column, (length, length - len(column)))
    place = torch.arange(length)
    return padded[length + place[:, None] - place]


def response(column: Tensor, participations: int, min_separation: int) -> Tensor:
    """Return C g of a row of norm 1 in the messages 0, b, 2b, …, `(T,)`.

    Args:
        column: c, `(T,)`.
        participations: In how many messages it is, as far as there are so many.
        min_separation: b.

    Example:
        >>> response(torch.tensor([1.0, 0.5, 0.25]), 2, 2).tolist()
        [1.0, 0.5, 1.25]
    """
    total = column
    for number in range(1, participations):
        shift = number * min_separation
        if shift >= len(column):
            break
        total = total + torch.nn.functional.pad(column, (shift, -shift))
    return total


def _square_sensitivity(column: Tensor, participations: int, min_separation: int) -> Tensor:
    return response(column, participations, min_separation).square().sum()


def _square_final_error(inverse: Tensor) -> Tensor:
    return (inverse.cumsum(0).cumsum(0) / len(inverse)).square().sum()


@functools.lru_cache(maxsize=16)
def _fitted(
    messages: int, participations: int, min_separation: int, falling_rate: bool
) -> Buffered:
    """The buffers of least error, from a start spread over all lengths.

    B's first column is 1 − Σ_i p_i (1 − λ_i^t) with p_i = a_i/(1 − λ_i). So λ and p, whose sum is
    at most 1, are what is searched: every point is a factor that falls.
    """
    count = min(BUFFERS, max(1, messages - 1))
    spread = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    start = -torch.log(messages**spread - 1 + 1e-3)  # of the logit of λ = 1 − T^-spread
    point = torch.cat([-start, torch.zeros(count, dtype=torch.float64), start.new_zeros(1)])
    point.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [point], max_iter=_SEARCH_STEPS, tolerance_grad=1e-9, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    steps = torch.arange(messages, dtype=torch.float64)

    def shape() -> tuple[Tensor, Tensor]:
        decays = torch.sigmoid(point[:count])
        return decays, torch.softmax(point[count:], 0)[:count] * (1 - decays)

    def loss() -> Tensor:
        optimizer.zero_grad()
        decays, weights = shape()
        inverse = -(weights @ decays[:, None] ** steps[:-1])
        inverse = torch.cat([inverse.new_ones(1), inverse])
        square = _square_sensitivity(invert_series(inverse), participations, min_separation)
        error = inverse.cumsum(0).square().sum()
        if falling_rate:
            error = _square_final_error(inverse) + _SHARE_OF_PREFIX * error
        log_error = (square * error).log()
        log_error.backward()
        return log_error

    if messages > 1:
        with torch.enable_grad():
            optimizer.step(loss)
    decays, weights = (numbers.detach() for numbers in shape())
    # Few digits: whoever fits it again, on another machine, gets the same. They are of 1 - λ and of
    # a/(1 - λ), rounded up and down: long trainings need both small, and the sum stays at most 1.
    decays = decays.clamp(max=_SLOWEST)
    shares = _cut(weights / (1 - decays))
    decays = 1 + _cut(decays - 1)
    weights = shares * (1 - decays)
    return Buffered(tuple(decays.tolist()), tuple(weights.tolist()))


def _cut(numbers: Tensor) -> Tensor:
    """Rounded down to four significant digits."""
    unit = 10 ** (numbers.abs().clamp(min=1e-12).log10().floor() - 3)
    return (numbers / unit).floor() * unit


def _float64(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
