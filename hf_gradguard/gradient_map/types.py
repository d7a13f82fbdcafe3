"""The types that everything here speaks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from .replay import Replay

if TYPE_CHECKING:
    from ..sharded.shards import Shards

Batch = Mapping[str, Any]
"""What a collator returns, labels included."""
Tensors = dict[str, Tensor]
"""One tensor per shared parameter, by name and in its shape."""
LossFunction = Callable[[nn.Module, dict[str, Any]], Tensor]
"""`(model, batch) -> scalar`: the mean loss of the batch."""


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
