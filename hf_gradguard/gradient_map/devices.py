"""The devices of one client.

Over several, a model is cut (`sharding.py`). Each device holds a part of every parameter, a shard
of its rows, and the same part of the client's gradient. What a defense does to entries, each device
does to its own. What it asks of a whole gradient (norms, ranges, ranks, whether all is finite) is
taken over the client's devices. Nothing here leaves the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .replay import differentiate

How = Literal["sum", "min", "max"]


class Devices:
    """Of a client that has one: what it holds is all there is."""

    size, rank = 1, 0

    def fingerprint(self) -> list[int]:
        """What devices of several clients must have alike to average what they hold: their place,
        how many of a client there are, and the names, shapes and types of their parts.
        """
        return [self.rank, self.size, 0]

    def check_present(self) -> None:
        """Refuse to let a part of a gradient be taken for all of it."""

    def gradient(
        self,
        loss: Tensor,
        parameters: Mapping[str, nn.Parameter],
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> dict[str, Tensor]:
        """This device's part of the client's gradient. `.grad` stays as it was."""
        return differentiate(loss, parameters, retain_graph=retain_graph, create_graph=create_graph)

    def each(self, figures: Mapping[str, Tensor], how: How = "sum") -> dict[str, Tensor]:
        """Figures of parameters' own parts, by name, as figures of whole parameters.

        Args:
            figures: One number per parameter.
            how: What two parts' figures become.
        """
        return dict(figures)

    def total(self, figures: Mapping[str, Tensor]) -> Tensor:
        """The sum of all parameters' figures."""
        return torch.stack(list(self.each(figures).values())).sum()

    def any(self, flag: bool) -> bool:
        """Whether something holds on any device. All have to ask."""
        return flag

    def gathered(self, number: Tensor) -> list[float]:
        """A number of each device."""
        return [float(number)]

    def new_message(self, generator: Stream) -> Stream:
        """This device's stream for the next message, given one of its own."""
        return generator

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of devices' tensors, the same bits on all of them."""
        return tensor

    def counts(self, name: str) -> bool:
        """Whether this device's part of a parameter counts: of one that all hold, the first's."""
        return True

    def later(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum of the figures of all parts that stand after this device's part: parameters in
        their order, and devices within a parameter.
        """
        return later_sums(figures)

    def sums(self, name: str, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Row and column sums of a part of a matrix, of which the columns' become the whole's."""
        return sums

    def streams(
        self, tensors: Mapping[str, Tensor], generator: Stream
    ) -> Iterator[tuple[dict[str, Tensor], Stream]]:
        """Tensors with the stream that their random numbers are to come from."""
        yield dict(tensors), generator


ONE = Devices()
_present: ContextVar[Devices] = ContextVar("devices", default=ONE)


def devices() -> Devices:
    """Those of the client whose message is being made."""
    return _present.get()


@contextmanager
def of_client(client: Devices) -> Iterator[None]:
    """While a client's message is made, `devices()` are its own.

    Example:
        >>> with of_client(ONE):
        ...     devices() is ONE
        True
    """
    token = _present.set(client)
    try:
        yield
    finally:
        _present.reset(token)


def later_sums(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each name the sum of those after it."""
    if not figures:
        return {}
    stacked = torch.stack(list(figures.values()))
    after = stacked.flip(0).cumsum(0).flip(0) - stacked
    return dict(zip(figures, after, strict=True))
