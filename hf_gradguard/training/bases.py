"""What Trainers of TRL and sentence-transformers do that the mixin has to know."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

_STEPS = {("trl", "SFTTrainer"), ("trl", "DPOTrainer")}
"""Trainers whose own training step only enters a context, of offloading, that is refused."""

_EXCHANGES = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
_FIGURES = ("_metrics", "_total_train_tokens", "accum_loss_components")
"""What TRL and sentence-transformers add up while they compute a loss, to log it."""


def check_order(trainer_class: type, mixin: type) -> None:
    """Refuse a class in which another Trainer would come before the mixin, or whose training step
    would not run.

    Args:
        trainer_class: A subclass of the mixin.
        mixin: `GradGuardMixin`.

    Raises:
        TypeError: For an order of bases that leaves the mixin out of the way.
        NotImplementedError: For a Trainer with a training step of its own.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> from hf_gradguard import GradGuardMixin
        >>> class Wrong(Seq2SeqTrainer, GradGuardMixin):
        ...     pass
        Traceback (most recent call last):
        TypeError: Wrong: GradGuardMixin has to stand before Seq2SeqTrainer, ...
    """
    order = trainer_class.__mro__
    place = order.index(mixin)
    for base in order[:place]:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            raise TypeError(
                f"{trainer_class.__name__}: GradGuardMixin has to stand before {base.__name__}, "
                "whose methods would run in the place of those that protect. Write "
                f"class {trainer_class.__name__}(GradGuardMixin, {base.__name__})."
            )
    for base in order[place + 1 : order.index(Trainer)]:
        known = (base.__module__.split(".")[0], base.__name__) in _STEPS
        if "training_step" in vars(base) and not known:
            raise NotImplementedError(
                f"GradGuardMixin does not support {base.__name__}: its own training_step would "
                "not run. Change the loss in compute_loss, or call hf_gradguard.protect in a loop "
                "of your own."
            )


def draws_batches(trainer_class: type, mixin: type) -> bool:
    """Whether a class draws training batches in a way of its own, or a base does."""
    return any(
        "get_train_dataloader" in vars(base)
        for base in trainer_class.__mro__
        if base not in (mixin, Trainer)
    )


def base_refusals(args: TrainingArguments) -> Iterator[str]:
    """Arguments of TRL's configurations that cannot be protected, each with the way out."""
    if getattr(args, "activation_offloading", False):
        yield (
            "activation_offloading: it is entered in a training step that does not run. Use "
            "activation checkpointing."
        )
    if getattr(args, "precompute_ref_log_probs", False) and args.world_size > 1:
        yield (
            "precompute_ref_log_probs on several ranks: every rank would be sent the reference's "
            "log-probabilities of all ranks' texts. Leave it out."
        )


def check_loss(loss: Any) -> None:
    """Refuse a loss that sends what it is computed from to other ranks.

    Args:
        loss: A Trainer's `loss`, as sentence-transformers has it: a module, or several by name.

    Raises:
        NotImplementedError: With the reason and the way out.

    Example:
        >>> check_loss(nn.MSELoss())
    """
    losses = loss.values() if isinstance(loss, dict) else [loss]
    for one in losses:
        modules = one.modules() if isinstance(one, nn.Module) else []
        if any(getattr(module, "gather_across_devices", False) for module in modules):
            raise NotImplementedError(
                f"GradGuardTrainer does not support {type(one).__name__} with "
                "gather_across_devices=True: every rank would be sent all ranks' embeddings, "
                "unprotected. Leave it at False."
            )


@contextmanager
def alone(trainer: Trainer, counts: bool) -> Iterator[None]:
    """While a Trainer computes a loss, its figures are this rank's own: nothing is gathered.

    Trainers gather rewards and log-probabilities of every example to log their means. And a loss is
    computed several times per batch, which must not count several times.

    Args:
        trainer: Of any class.
        counts: Whether this pass is the one that its figures are of.
    """
    kept = {} if counts else _figures(trainer)
    own: dict[str, Any] = vars(trainer.accelerator)
    before = {name: own[name] for name in _EXCHANGES if name in own}
    own.update(dict.fromkeys(_EXCHANGES, _unchanged))
    try:
        yield
    finally:
        for name in _EXCHANGES:
            del own[name]
        own.update(before)
        for name, value in kept.items():
            setattr(trainer, name, value)


def _figures(trainer: Trainer) -> dict[str, Any]:
    own = vars(trainer)
    return {name: copy.deepcopy(own[name]) for name in _FIGURES if name in own}


def _unchanged(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor
