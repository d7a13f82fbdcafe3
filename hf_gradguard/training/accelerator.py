"""The Trainer's accelerator for a rank that shares nothing but protected gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .exchange.gradients import INSTEAD, Ledger
from .refusals import refusal


class GuardedAccelerator(Accelerator):
    """An accelerator that exchanges nothing of a rank but what is protected.

    It wraps no model in DDP, differentiates nothing, clips only exchanged gradients, and sends no
    rank's own counts.

    Args:
        accelerator: The Trainer's accelerator, whose state this one takes over.
        ledger: The ledger of the gradients that may be clipped.
        average: The function that replaces a number by its mean over ranks, in place.

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
        """The number of senders whose gradients are protected separately: here each process."""
        return self.num_processes

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> Any:
        """Prepare a model as Accelerate does, without wrapping it in DDP.

        "Evaluation mode" is Accelerate's word for that (device and autocast alone).
        """
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Raise RuntimeError: nothing else may differentiate a loss.

        Raises:
            RuntimeError: Always; the message says what to do instead.
        """
        raise RuntimeError(
            "GradGuardTrainer differentiates and protects a batch by itself: "
            "accelerator.backward() would add the true gradient to .grad, past the defense. "
            f"{INSTEAD}"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients were unscaled before they were protected."""

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip exchanged gradients by norm, as Accelerate does."""
        with self._ledger.clipping(parameters) as checked:
            return super().clip_grad_norm_(checked, *args, **kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip exchanged gradients by value, as Accelerate does."""
        with self._ledger.clipping(parameters) as checked:
            return super().clip_grad_value_(checked, *args, **kwargs)

    def note_stepped(self, model: nn.Module, optimizer: Any, folder: str | Path) -> None:
        """Do nothing when an optimizer's state is saved to a checkpoint; subclasses note it."""

    def loading_optimizer(
        self, model: nn.Module, folder: str | Path
    ) -> AbstractContextManager[None]:
        """Do nothing while an optimizer's state is loaded; subclasses prepare it."""
        return nullcontext()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors as Accelerate does, but counts as their sum.

        A count, which the Trainer gathers to add it up, is added up on the way: the result is the
        sum of all ranks', followed by zeros, so that nobody sees another rank's.
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
        """Gather data for metrics, as Accelerate does."""
        if self._is_kept("gather_for_metrics"):
            return input_data
        return super().gather_for_metrics(input_data, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce a tensor over ranks, as Accelerate does."""
        return tensor if self._is_kept("reduce") else super().reduce(tensor, *args, **kwargs)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad a tensor across processes, as Accelerate does, which exchanges sizes."""
        if self._is_kept("pad_across_processes"):
            return tensor
        return super().pad_across_processes(tensor, *args, **kwargs)

    @contextmanager
    def in_loss(self, keeps_own: bool) -> Iterator[None]:
        """Let nothing be exchanged while a loss runs.

        Args:
            keeps_own: Whether a loss gathers for its log alone, and gets this rank's own values.
                Else gathering is refused, because the loss would be another one.
        """
        self._keeps_own = keeps_own
        try:
            yield
        finally:
            self._keeps_own = None

    def _is_kept(self, operation: str) -> bool:
        if self._keeps_own is False and self.num_processes > 1:
            raise refusal("loss-that-exchanges", operation=operation)
        return bool(self._keeps_own)
