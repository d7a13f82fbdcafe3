"""Which classes of Trainers may have the mixin before them, and which of their methods run."""

from __future__ import annotations

from transformers import Trainer

from .checks import unsupported

_STEPS = {("trl", name) for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer")}
"""Trainers whose own training step only enters a context, of offloading, that is refused."""


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
        keeps_step = (base.__module__.split(".")[0], base.__name__) in _STEPS
        if "training_step" in vars(base) and not keeps_step:
            raise NotImplementedError(
                f"GradGuardMixin does not support {base.__name__}: its own training_step would "
                "not run. Change the loss in compute_loss, or call hf_gradguard.protect in a loop "
                "of your own."
            )


def draws_batches(trainer_class: type, mixin: type) -> bool:
    """Whether a class draws training batches in a way of its own, or a base does."""
    return _overrides(trainer_class, mixin, "get_train_dataloader")


def check_drawing(trainer: Trainer, mixin: type, reason: str) -> None:
    """Refuse a sampler of one's own where rows are drawn in another way: what it excludes would be
    trained on all the same. Likewise what would change how many are drawn.

    Args:
        trainer: Its class, what was assigned to it alone, and its arguments count.
        mixin: `GradGuardMixin`.
        reason: What draws rows.

    Raises:
        NotImplementedError: With the way out.

    Example:
        >>> from hf_gradguard import GradGuardMixin, GradGuardTrainer
        >>> check_drawing(GradGuardTrainer(model, defense="none"), GradGuardMixin, "num_clients")
    """
    name = "_get_train_sampler"
    if name in vars(trainer) or _overrides(type(trainer), mixin, name):
        raise unsupported(
            f"{name} with {reason}, which draws rows in its own way: rows that the "
            "sampler leaves out would be trained on. Leave them out of train_dataset (select, "
            f"filter), and leave {name} as it is."
        )
    if trainer.args.auto_find_batch_size:
        raise unsupported(
            f"auto_find_batch_size with {reason}: another batch size would be another sampling "
            "rate, and other shares of clients, within a training. Find the size first, and set "
            "per_device_train_batch_size."
        )


def _overrides(trainer_class: type, mixin: type, name: str) -> bool:
    return any(name in vars(base) for base in trainer_class.__mro__ if base not in (mixin, Trainer))
