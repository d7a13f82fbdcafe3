"""The types that everything here speaks of."""

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
    """What maps and defenses ask of a client's devices, over which its model is cut.

    `hf_gradguard.sharded` has the one there is, and is imported where a sharded model is met. Of a
    client of one device there is none.
    """

    group: Any
    size: int

    def fingerprint(self) -> list[int]:
        """What devices of several clients must have alike to average what they hold."""

    def joined(self, numbers: Mapping[str, Tensor], how: How = "sum") -> dict[str, Tensor]:
        """Numbers of parameters' own parts, as numbers of whole parameters."""

    def any(self, flag: bool) -> bool:
        """Whether something holds on any device."""

    def union(self, names: frozenset[str]) -> frozenset[str]:
        """Those of the model's parameters that any device names."""

    def gathered(self, number: Tensor) -> list[float]:
        """A number of each device."""

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of devices' tensors."""

    def sums(self, name: str, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Row and column sums of a part of a matrix, of which the columns' become the whole's."""

    def counts(self, name: str) -> bool:
        """Whether this device's part of a parameter counts."""

    def add_later_(
        self, later_sums: Tensor, shares: Tensor, position: Tensor, sizes: Mapping[str, int]
    ) -> None:
        """Add to sums over the entries that stand later what stands later on other devices."""

    def stream_of(self, name: str, generator: Stream) -> Stream:
        """Where the random numbers of a parameter come from."""

    def streams(
        self, tensors: Mapping[str, Tensor], generator: Stream
    ) -> Iterator[tuple[dict[str, Tensor], Stream]]:
        """Tensors with the stream that their random numbers are to come from."""

    def gradient(self, loss: Tensor, parameters: Iterable[str]) -> dict[str, Tensor]:
        """This device's part of the mean of devices' gradients."""

    def add_to_grad(self, parameter: nn.Parameter, gradient_part: Tensor) -> None:
        """Add this device's part of a gradient to `.grad`."""

    def new_message(self, generator: Stream) -> Stream:
        """This device's stream for the next message, given one of its own."""

    def version(self, parameter: nn.Parameter) -> int:
        """How often this device's part was written to."""

    def reshard(self) -> None:
        """Let the model hold its own shards alone again."""

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that a forward pass uses, by name."""


class ClientMap(Protocol):
    """What layers, sensitivities and candidates ask of a `GradientMap`, which is made of them."""

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
        """The shared ones."""

    def evaluate(self, x: Tensor, entries: Mapping[str, Any] | None = None) -> Tensor:
        """The loss at another input."""

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """The gradient at another input."""

    def input_gradient(self, value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The derivatives of what was computed from the gradient."""

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Jᵀv, of several v."""

    def twice(self) -> ClientMap:
        """The same map, with second derivatives."""
