"""The types that the gradient map and defenses use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from ..randomness import Stream
from .replay import Replay

Batch = Mapping[str, Any]
"""What a collator returns, labels included."""
Tensors = dict[str, Tensor]
"""One tensor per shared parameter, by name and in its shape."""
LossFunction = Callable[[nn.Module, dict[str, Any]], Tensor]
"""`(model, batch) -> scalar`: the mean loss of the batch."""


How = Literal["sum", "min", "max"]
"""What the numbers of several devices become."""


class Shards(Protocol):
    """The interface of a client's devices, over which its model is cut, for maps and defenses.

    `hf_gradguard.sharded` has the implementation, and is imported where a sharded model is met. A
    client of one device has none.
    """

    group: Any
    size: int

    def fingerprint(self) -> list[int]:
        """Return numbers that must agree between devices of several clients that are averaged."""

    def joined(self, numbers: Mapping[str, Tensor], how: How = "sum") -> dict[str, Tensor]:
        """Combine numbers of shards into numbers of whole parameters, by name."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any device."""

    def union(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of the model's parameters that any device names."""

    def gathered(self, number: Tensor) -> list[float]:
        """Return each device's number."""

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum of devices' tensors."""

    def sums(self, name: str, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return row and column sums of a shard of a matrix; column sums are the whole matrix's."""

    def counts(self, name: str) -> bool:
        """Return whether this device's copy of a parameter counts."""

    def add_later_(
        self, later_sums: Tensor, shares: Tensor, position: Tensor, sizes: Mapping[str, int]
    ) -> None:
        """Add what stands later on other devices to sums over this device's later entries."""

    def stream_of(self, name: str, generator: Stream) -> Stream:
        """Return the stream of a parameter's random numbers."""

    def streams(
        self, tensors: Mapping[str, Tensor], generator: Stream
    ) -> Iterator[tuple[dict[str, Tensor], Stream]]:
        """Yield tensors with the stream that their random numbers come from."""

    def gradient(self, loss: Tensor, parameters: Iterable[str]) -> dict[str, Tensor]:
        """Return this device's shard of the mean of devices' gradients."""

    def add_to_grad(self, parameter: nn.Parameter, gradient_part: Tensor) -> None:
        """Add this device's part of a gradient to `.grad`."""

    def new_message(self, generator: Stream) -> Stream:
        """Return this device's stream for the next message."""

    def version(self, parameter: nn.Parameter) -> int:
        """Return how often this device's shard was written to."""

    def reshard(self) -> None:
        """Let the model hold its own shards alone again."""

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the whole parameters that a forward pass uses, by name."""


class ClientMap(Protocol):
    """The interface of a `GradientMap` that layers, sensitivities and candidates use."""

    model: nn.Module
    loss_fn: LossFunction
    replay: Replay
    is_clipped: bool
    shards: Shards | None

    @property
    def input(self) -> Tensor:
        """The continuous input."""

    @property
    def loss(self) -> Tensor:
        """The loss at it."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The shared parameters."""

    def evaluate(self, x: Tensor, entries: Mapping[str, Any] | None = None) -> Tensor:
        """Return the loss at another input."""

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """Return the gradient at another input."""

    def input_gradient(self, value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the derivatives of what was computed from the gradient."""

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Return Jᵀv of several v."""

    def twice(self) -> ClientMap:
        """Return the same map, with second derivatives."""
