"""Noise that is correlated over a client's messages, so that most of it cancels in their sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..randomness import Stream, grid_spacing
from .factorization import Banded, Buffered, Factor, sensitivity

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
        """Return how far a row moves all messages together; see `factorization.sensitivity`."""
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
    on_grid = values.double().div_(spacing).round_() + (noise / spacing).round_()
    largest = float(on_grid.abs().max()) if len(on_grid) else 0.0
    if not largest < 2.0**53:
        raise OverflowError(
            f"A message of {largest * spacing:g} is too large for its noise's grid."
        )
    assert math.frexp(spacing)[0] == 0.5  # a power of two: scaling rounds nothing
    return on_grid.mul_(spacing).to(values.dtype)
