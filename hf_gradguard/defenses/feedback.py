"""Error feedback: what a message left out of the gradient is added to the next one.

    v = g + e,   share C(v),   e ← v - C(v)

So Σ shared = Σ g - e: what a biased defense leaves out is late, and not lost. Where C is a
contraction, ‖v - C(v)‖² ≤ (1-δ)‖v‖², e stays within a constant of the gradients' size.

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes" (ICML 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from transformers.utils import logging

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.types import Shards
from ..randomness import Stream
from .base import (
    Defense,
    DefenseFacts,
    Message,
    Reader,
    cast_like,
    check_whole,
    norm,
    true_gradient,
)
from .mechanism import Mechanism

logger = logging.get_logger(__name__)

LARGEST = 10.0
"""e is dropped when its norm is more than so many times the gradient's, and that of the one before:
under a defense that is no contraction it would grow, and drown the gradient. Where entries wait for
k batches, more than 10 k times.
"""
MOST = 255  # batches that are counted
STALE = 20
"""e is dropped when the client's last message is more than so many optimizer steps old: it points
from where the model was then.
"""
_TOO_SELDOM = (
    "A client's last message is more than {} optimizer steps old. So what it left out is dropped, "
    "and with min_batches={} it begins anew, with an empty message. Let clients take part more "
    "often, or give min_batches=1, which shares what is one batch's alone."
)


@dataclass(frozen=True, eq=False)
class Residual:
    """The residual e that one client's earlier messages left out of its gradients.

    Args:
        min_batches: The least number of batches of whose gradients a sent entry is the sum.
        by_entry: Whether batches are counted entry by entry, for messages that send some entries
            whole and others not at all.
        error: The residual e by the parameters' names; empty where nothing is left.
        gradients: The number of gradients that are added up in g + e, the present one included.
        batches: For each entry of g + e, the number of batches that it is a sum over.
        size: The norm of the gradient of the message before.
        last_step: The number of optimizer steps before the last message, where steps are counted.

    Example:
        >>> residual, corrected = Residual().added_to({"weight": torch.tensor([1.0, 3.0])}, 3.2)
        >>> corrected
        {'weight': tensor([1., 3.])}
        >>> residual = residual.with_error({"weight": torch.tensor([1.0, 0.0])}, size=3.2)
        >>> residual.added_to({"weight": torch.tensor([1.0, 3.0])}, 3.2)[1]
        {'weight': tensor([2., 3.])}
    """

    min_batches: int = 1
    by_entry: bool = False
    error: Tensors = field(default_factory=dict)
    gradients: int = 0
    batches: Tensors = field(default_factory=dict)
    size: float = 0.0
    last_step: int | None = None

    def added_to(
        self, gradient: Tensors, size: float, shards: Shards | None = None, step: int | None = None
    ) -> tuple[Residual, Tensors]:
        """Return the residual with this gradient counted, and the corrected gradient g + e.

        If e belongs to other parameters, is stale or is too large, it is dropped, and the corrected
        gradient is g.

        Args:
            gradient: The gradient g.
            size: The norm of g.
            shards: The map's shards.
            step: The number of finished optimizer steps, where somebody counts them.
        """
        former_shapes = {name: error.shape for name, error in self.error.items()}
        is_same = former_shapes == {name: g.shape for name, g in gradient.items()}
        # Steps are counted by a Trainer, and not by a loop of one's own.
        is_counted = step is not None and self.last_step is not None
        is_stale = is_counted and step - self.last_step > STALE  # type: ignore[operator]
        usual_norm = self.min_batches * max(size, self.size)
        if self.error and is_stale and self.min_batches > 1:
            logger.warning_once(_TOO_SELDOM.format(STALE, self.min_batches))
        residual = self
        if not is_same or is_stale or norm(self.error, shards) > LARGEST * usual_norm:
            residual = replace(self, error={}, gradients=0, batches={})
        # A batch without a gradient hides nothing of another one.
        residual = replace(residual, gradients=residual.gradients + (size > 0))
        if self.by_entry:
            residual = replace(residual, batches=residual._counted(gradient))
        if not residual.error:
            return residual, gradient
        return residual, {name: g + residual.error[name].to(g) for name, g in gradient.items()}

    def _counted(self, gradient: Tensors) -> Tensors:
        """Return the counts of batches with this one, which counts where its gradient is not zero.

        So a batch does not count in an embedding's rows of other tokens.
        """
        counts = self.batches or {
            name: torch.zeros_like(g, dtype=torch.uint8) for name, g in gradient.items()
        }
        return {
            name: counts[name] + ((g != 0) & (counts[name] < MOST)) for name, g in gradient.items()
        }

    def relative_squares(self) -> Tensors | None:
        """Return e² relative to the last gradient's squared norm; `None` if e is empty."""
        if not self.error or not self.size:
            return None
        return {name: (error / self.size).square() for name, error in self.error.items()}

    @property
    def too_few(self) -> bool:
        """Whether g + e is the sum of too few gradients to send any of it."""
        return self.gradients < self.min_batches

    def ready(self) -> dict[str, Tensor] | None:
        """Return masks of the entries that are sums over enough batches.

        The result is `None` where entries are not counted.
        """
        if not self.by_entry:
            return None
        return {name: count >= self.min_batches for name, count in self.batches.items()}

    def with_error(
        self,
        error: Tensors,
        size: float,
        sent: Mapping[str, Tensor] | None = None,
        step: int | None = None,
    ) -> Residual:
        """Return the residual after a message.

        Args:
            error: The part that the message left out.
            size: The norm of its gradient.
            sent: The masks of the entries that it sent.
            step: The number of finished optimizer steps, as for `added_to`.
        """
        batches = self.batches
        if sent is not None:
            batches = {name: n.masked_fill(sent[name], 0) for name, n in batches.items()}
        return replace(self, error=error, size=size, batches=batches, last_step=step)

    def tensors(self) -> Tensors:
        """Return the residual's tensors, for a checkpoint.

        They are as private as the client's gradients are.
        """
        if not self.error:
            return {}
        state = {f"error.{name}": tensor for name, tensor in self.error.items()}
        state |= {f"batches.{name}": tensor for name, tensor in self.batches.items()}
        state["error_size"] = torch.tensor(self.size, dtype=torch.float64)
        state["error_gradients"] = torch.tensor(self.gradients)
        return (
            state
            if self.last_step is None
            else state | {"error_step": torch.tensor(self.last_step)}
        )

    def from_tensors(self, tensors: dict[str, Tensor]) -> Residual | None:
        """Read a residual with this one's settings from a checkpoint, if it holds one."""
        error, batches = (
            {
                key.removeprefix(prefix): tensors.pop(key)
                for key in list(tensors)
                if key.startswith(prefix)
            }
            for prefix in ("error.", "batches.")
        )
        size = float(tensors.pop("error_size", torch.tensor(0.0)))
        gradients = int(tensors.pop("error_gradients", torch.tensor(0)))
        last_step = int(tensors.pop("error_step")) if "error_step" in tensors else None
        if not error:
            return None
        return replace(
            self, error=error, gradients=gradients, batches=batches, size=size, last_step=last_step
        )


def check_min_batches(value: object) -> None:
    """Refuse a number of batches that cannot be counted.

    Raises:
        ValueError: If it cannot.
    """
    check_whole("min_batches", value, 1)
    if value > MOST:  # type: ignore[operator]
        raise ValueError(f"min_batches must be at most {MOST}, but is {value}.")


@dataclass
class BiasedDefense(Defense):
    """A base of defenses that leave out a part of the gradient, which later messages make up for.

    Args:
        error_feedback: Whether to add to each gradient what the client's earlier messages left out,
            e. This is private state. It is dropped where ‖e‖ > 10 ‖g‖ for this gradient and the one
            before, when the last message is more than 20 optimizer steps old, and when other
            parameters are trained.

    Example:
        >>> defense = make_defense("pruning", ratio=0.9, error_feedback=True)
        >>> once, again = defense(gmap), defense(gmap)
        >>> once.has_residual, again.has_residual
        (False, True)
    """

    _: KW_ONLY
    error_feedback: bool = False

    counts_entries: ClassVar[bool] = False
    """Whether `min_batches` is counted entry by entry."""

    def __call__(self, gmap: GradientMap, generator: Stream | None = None) -> Message:
        if not self.error_feedback:
            return super().__call__(gmap, generator)
        gradient, shards = true_gradient(gmap), gmap.shards
        size = norm(gradient, shards)
        residual, corrected = self._residual.added_to(gradient, size, shards, self._step)
        self.remember(residual=residual)
        message = super().__call__(self.corrected(gmap, cast_like(corrected, gmap)), generator)
        # What an earlier defense of a chain withheld stays withheld, and waits.
        sent = gmap.restrict(dict(message))
        error = {name: v - sent[name].to(v.dtype) for name, v in corrected.items()}
        self.remember(residual=residual.with_error(error, size, message.transmitted, self._step))
        metrics = {"left_out": norm(error, shards) / size} if size else {}
        # Nothing of it is the true gradient's once earlier batches are in it: no other facts hold.
        return Message(
            sent, transmitted=message.transmitted, has_residual=corrected is not gradient,
            metrics=message.metrics | metrics,
        )  # fmt: skip

    def corrected(self, gmap: GradientMap, corrected_gradient: Tensors) -> GradientMap:
        """Return the map with the residual of earlier messages added to its gradient."""
        return gmap.corrected(corrected_gradient)

    @property
    def _residual(self) -> Residual:
        return self.state.get("residual") or self._no_residual()

    def _no_residual(self) -> Residual:
        """Return the residual before a client's first message."""
        least: int = getattr(self, "min_batches", None) or 1
        return Residual(least, self.counts_entries and least > 1)

    def _mechanism(self, message: Message) -> Mechanism | None:
        if not self.error_feedback:
            return super()._mechanism(message)
        # Nothing was left out before the first message.
        return Mechanism() if replace(self, error_feedback=False).facts.is_exact else None

    @property
    def facts(self) -> DefenseFacts:
        warmup = self._no_residual().min_batches - 1 if self.error_feedback else 0
        return replace(super().facts, warmup_messages=warmup)

    def state_readers(self) -> dict[str, Reader]:
        # Without feedback nobody takes it, and it is refused.
        readers: dict[str, Reader] = {"residual": self._no_residual().from_tensors}
        return super().state_readers() | (readers if self.error_feedback else {})
