"""One client's noise, correlated over its messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import Tensors
from ..randomness import Stream, grid_spacing
from .factorization import Banded, Buffered, Factor, sensitivity

Keys = Callable[[int], bytes | None]
"""Gives the key of the noise of a message, by its number; `None` where that noise was never drawn.
"""


class NoiseStream:
    """The noises C⁻¹ z of a client's messages, one after the other.

    Each z is drawn under a key of its own. Neither this object's state nor a copy of it holds one,
    so no two objects ever draw the same noise. Two that go on from one state share the messages
    before it, and count as two mechanisms.

    Args:
        factor: C.
        messages: T, for which it was made.
        position: How many of them are shared already, under other noise.

    Attributes:
        position: How many are shared.
        keys: Gives the keys of messages to come, and of those that left without being remembered.
            Without it noise is from the generator that `draw` is given.

    Example:
        >>> stream = NoiseStream(Banded((1.0, 0.5)), messages=2)
        >>> first, second = stream.draw(3, torch.device("cpu"), Stream()), stream.draw(3, "cpu")
        >>> first.shape, stream.position
        (torch.Size([3]), 2)
    """

    def __init__(self, factor: Factor, messages: int, position: int = 0) -> None:
        self.factor, self.messages, self.position = factor, messages, position
        self.keys: Keys | None = None
        self._memory: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "keys": None}

    def draw(
        self, entries: int, device: torch.device | str, generator: Stream | None = None
    ) -> Tensor:
        """Draw the next message's noise, `(entries,)` in float64, before it is scaled.

        Args:
            entries: Of the message; as many as of the last one.
            device: Where to draw it.
            generator: Of the noise, where `keys` gives no key. Default: a new `Stream`.

        Raises:
            RuntimeError: If all messages are shared, or another one had more or fewer entries.
        """
        if self.position >= self.messages:
            raise RuntimeError(
                f"dp_sgd with correlated=True was planned for messages={self.messages}, and all of "
                "them are shared: one more would be less protected. Plan for more of them."
            )
        if self._memory is None:
            shape = self.factor.memory, entries
            self._memory = torch.zeros(shape, dtype=torch.float64, device=device)
        if self._memory.shape[1] != entries:
            raise RuntimeError(
                f"dp_sgd with correlated=True made noise of {self._memory.shape[1]} entries, and a "
                f"message has {entries}: what is shared may not change within a training."
            )
        key = None if self.keys is None else self.keys(self.position)
        stream = (generator or Stream()) if key is None else Stream(key)
        white_noise = stream.normal((entries,), device=device, dtype=torch.float64)
        noise, self._memory = self.factor.correlate(white_noise, self._memory.to(device))
        self.position += 1
        return noise

    def skip_to(self, position: int) -> None:
        """Go on at a later message. Those between left without being remembered, as before a kill:
        the noise that they had is drawn again by its key, for what follows to cancel it. Noise
        without a key was never drawn.
        """
        while self._memory is not None and self.position < position:
            entries, device = self._memory.shape[1], self._memory.device
            if self.keys is not None and self.keys(self.position) is not None:
                self.draw(entries, device)
            else:
                zeros = torch.zeros(entries, dtype=torch.float64, device=device)
                _, self._memory = self.factor.correlate(zeros, self._memory)
                self.position += 1
        self.position = position

    def state_dict(self) -> Tensors:
        """What is needed to go on, without any key; nothing before the first message."""
        if self._memory is None:
            return {}
        factor = self.factor
        numbers = [factor.bands] if isinstance(factor, Banded) else [factor.decays, factor.weights]
        return {
            "memory": self._memory.clone(),
            "factor": torch.tensor(numbers, dtype=torch.float64),
            "plan": torch.tensor([self.messages, self.position]),
        }

    @classmethod
    def of_state(cls, state: Tensors) -> NoiseStream:
        """Take up what `state_dict` returned, of another one. Its factor is the one that it was
        made with, also where another machine would fit it in other digits.
        """
        rows = [tuple(row) for row in state["factor"].tolist()]
        factor: Factor = Banded(*rows) if len(rows) == 1 else Buffered(*rows)
        stream = cls(factor, *map(int, state["plan"].tolist()))
        stream._memory = state["memory"].clone()
        return stream

    def power(self) -> float:
        """Of the last message's noise: its variance where z has 1."""
        return float(self.factor.inverse(self.position).square().sum())

    def sensitivity(self, participations: int, min_separation: int | None) -> float:
        """See `factorization.sensitivity`."""
        return _sensitivity(self.factor, self.messages, participations, min_separation)


@functools.lru_cache(maxsize=16)
def _sensitivity(
    factor: Factor, messages: int, participations: int, min_separation: int | None
) -> float:
    """The same at every message of a plan."""
    return sensitivity(factor.column(messages), participations, min_separation)


def add_on_grid(values: Tensor, noise: Tensor, deviation: float, entries: int) -> Tensor:
    """Values with noise, each rounded to the grid that `Stream.noisy` has for independent noise of
    that deviation, and added up there, exactly.

    The sum is what rounding makes of the values on the grid with noise that is not rounded. So what
    is shared follows from a Gaussian mechanism of values on the grid, at all messages together,
    and rounding moves two sets of values apart by at most GRID of the deviation.

    Args:
        values: `(n,)` floats.
        noise: `(n,)` in float64, of this deviation or more.
        deviation: Known without the values.
        entries: Of the whole message.

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
