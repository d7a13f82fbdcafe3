"""What may reach the optimizer: gradients that were protected and exchanged, and nothing else.

Whoever calls `loss.backward()` (a `training_step` of one's own, a callback, a loss that
differentiates) adds a true gradient to `.grad`, from where it would be sent to other ranks or
trained on. So the package writes down which tensors it put there, and every later hand-over looks
whether they are those, unchanged. That is a comparison of two integers a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)

INSTEAD = (
    "Do not override training_step, or end it with super().training_step(...); change the loss in "
    "compute_loss or compute_loss_func, and what is shared in a Defense. In a callback or a loss "
    "use torch.autograd.grad, which leaves .grad alone."
)


class Ledger(TrainerCallback):
    """The gradients that the package wrote, from the first message of a step to the optimizer.

    As a callback it watches the optimizer of every training.

    Example:
        >>> ledger = Ledger()
        >>> ledger.check(model.parameters(), "share a message")
        >>> model(**batch).loss.backward()
        >>> ledger.check(model.parameters(), "share a message")
        Traceback (most recent call last):
        RuntimeError: GradGuardTrainer will not share a message: the .grad of ... is not its own ...
    """

    def __init__(self) -> None:
        # A tensor is held only as long as `.grad` holds it, so that its identity means something.
        self._written: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._exchanged = False
        self._watched: Any = None

    def check(self, parameters: Iterable[nn.Parameter], what: str) -> None:
        """Refuse to go on unless every `.grad` is none, or as it was written.

        Raises:
            RuntimeError: With the name of a parameter whose `.grad` is not.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                self._written.pop(parameter, None)
            elif not self._is_ours(parameter, gradient):
                name = self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
                raise RuntimeError(
                    f"GradGuardTrainer will not {what}: the .grad of {name} is not its own work, "
                    "or was changed since. Something called backward(), or wrote to .grad, so it "
                    f"may hold a gradient that is not protected. {INSTEAD}"
                )

    def write(self, parameters: Iterable[nn.Parameter]) -> None:
        """The `.grad` of these is as it should be, and not exchanged yet."""
        self._exchanged = False
        self._note(parameters)

    def exchange(self, parameters: Iterable[nn.Parameter]) -> None:
        """The `.grad` of these was exchanged, and that of no others."""
        self._written.clear()
        self._exchanged = True
        self._note(parameters)

    def guard(self, accelerator: Accelerator) -> None:
        """Let an accelerator clip what was exchanged, and keep it from differentiating."""
        clips = ("clip_grad_norm_", "clip_grad_value_")
        guarded = {name: self._clipping(getattr(accelerator, name)) for name in clips}
        for name, method in {"backward": _refuse_backward, **guarded}.items():
            setattr(accelerator, name, method)

    def on_train_begin(
        self,
        args: TrainingArguments,
        *_: Any,
        model: nn.Module,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look at what the optimizer is given before each of its steps."""
        self._written.clear()
        self._exchanged = False
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        wrapped = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        held = [p for group in getattr(wrapped, "param_groups", []) for p in group["params"]]
        if strangers := [p for p in held if p not in self._names]:
            raise NotImplementedError(
                f"GradGuardTrainer does not support {len(strangers)} of the optimizer's parameters "
                f"(shapes {', '.join(str(tuple(p.shape)) for p in strangers[:3])}), which are none "
                "of the model's: a loss has its own. They would not be trained. Make them part of "
                "the model, or take a loss without any."
            )
        if wrapped is not self._watched:
            wrapped.register_step_pre_hook(self._before_step)
            self._watched = wrapped

    def _is_ours(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        tensor, version = self._written.get(parameter, (None, -1))
        return tensor is gradient and version == gradient._version

    def _note(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._written[parameter] = (parameter.grad, parameter.grad._version)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        self.check(held, "step")
        if not self._exchanged:
            raise RuntimeError(
                "GradGuardTrainer will not step: nothing was exchanged since the last step. "
                f"{INSTEAD}"
            )
        if left := [self._names.get(p, "?") for p in self._written if p not in held]:
            logger.warning_once(
                f"Shared, but not trained: {', '.join(left[:5])} ({len(left)} in all). The "
                "optimizer does not hold them: it was made of others, or before they were "
                "unfrozen. Freeze them (requires_grad=False); what is to be unfrozen later must "
                "be trainable when the optimizer is made: freeze it in on_train_begin."
            )
        self._written.clear()
        self._exchanged = False

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.check(parameters, "clip")
            found = clip(parameters, *args, **kwargs)
            self._note(parameters)
            return found

        return guarded


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "GradGuardTrainer differentiates and protects a batch by itself: accelerator.backward() "
        f"would add the true gradient to .grad, past the defense. {INSTEAD}"
    )
