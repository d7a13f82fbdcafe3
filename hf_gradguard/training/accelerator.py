"""The Trainer's accelerator, for a rank that shares nothing but protected gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .guards.watch import INSTEAD, Ledger


class GuardedAccelerator(Accelerator):
    """An accelerator that wraps no model in DDP, differentiates nothing, clips only what was
    exchanged, and sends no rank's own counts.

    Args:
        accelerator: The Trainer's, whose state this one takes over.
        ledger: Of the gradients that may be clipped.
        average: Replaces a number by its mean over ranks, in place.

    Example:
        >>> guarded = GuardedAccelerator(Accelerator(cpu=True), Ledger(), lambda number: None)
        >>> guarded.backward(model(**batch).loss)
        Traceback (most recent call last):
        RuntimeError: GradGuardTrainer differentiates and protects a batch by itself: ...
    """

    def __init__(
        self, accelerator: Accelerator, ledger: Ledger, average: Callable[[Tensor], None]
    ) -> None:
        # The Trainer has set one up already, and processes can be set up only once.
        self.__dict__.update(vars(accelerator))
        self._ledger, self._average = ledger, average
        self._keeps_own: bool | None = None  # of a loss that runs now

    @property
    def num_senders(self) -> int:
        """How many send gradients that were protected apart from each other: here each process."""
        return self.num_processes

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> Any:
        """As in Accelerate. "Evaluation mode" is its word for preparing a model (device, autocast)
        without wrapping it in DDP.
        """
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Refused.

        Raises:
            RuntimeError: With what to do instead.
        """
        raise RuntimeError(
            "GradGuardTrainer differentiates and protects a batch by itself: "
            "accelerator.backward() would add the true gradient to .grad, past the defense. "
            f"{INSTEAD}"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: gradients were unscaled before they were protected."""

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, of what was exchanged."""
        with self._ledger.clipping(parameters) as checked:
            return super().clip_grad_norm_(checked, *args, **kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, of what was exchanged."""
        with self._ledger.clipping(parameters) as checked:
            return super().clip_grad_value_(checked, *args, **kwargs)

    def note_stepped(self, model: nn.Module, optimizer: Any, folder: str | Path) -> None:
        """When an optimizer's state is saved to a checkpoint: here nothing is to be done."""

    def loading_optimizer(
        self, model: nn.Module, folder: str | Path
    ) -> AbstractContextManager[None]:
        """While an optimizer's state is loaded from a checkpoint: here nothing is to be done."""
        return nullcontext()

    def gather(self, tensor: Any) -> Any:
        """As in Accelerate. A count, which the Trainer gathers to add it up, is added up on the
        way: the sum of all ranks', followed by zeros, so that nobody sees another rank's.
        """
        if self._is_kept("gather") or self.num_processes == 1:
            return tensor
        if not isinstance(tensor, Tensor) or tensor.numel() > 1 or tensor.is_floating_point():
            return super().gather(tensor)
        mean = tensor.to(torch.float64, copy=True).reshape(1)  # whole numbers up to 2⁵³
        self._average(mean)
        total = (mean * self.num_processes).round().to(tensor.dtype)
        return torch.cat([total, total.new_zeros(self.num_processes - 1)])

    def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate."""
        if self._is_kept("gather_for_metrics"):
            return input_data
        return super().gather_for_metrics(input_data, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate."""
        return tensor if self._is_kept("reduce") else super().reduce(tensor, *args, **kwargs)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, which exchanges sizes."""
        if self._is_kept("pad_across_processes"):
            return tensor
        return super().pad_across_processes(tensor, *args, **kwargs)

    @contextmanager
    def in_loss(self, keeps_own: bool) -> Iterator[None]:
        """While a loss runs, nothing is exchanged.

        Args:
            keeps_own: Whether what the loss gathers is for its log alone, where this rank's own
                does. Else gathering is refused: the loss would be another one.
        """
        self._keeps_own = keeps_own
        try:
            yield
        finally:
            self._keeps_own = None

    def _is_kept(self, operation: str) -> bool:
        if self._keeps_own is False and self.num_processes > 1:
            raise NotImplementedError(
                f"GradGuardTrainer does not support a loss that calls accelerator.{operation}: the "
                "other ranks would be sent figures of this rank's own batch, unprotected. Compute "
                "the loss without it, or train on one rank."
            )
        return bool(self._keeps_own)
