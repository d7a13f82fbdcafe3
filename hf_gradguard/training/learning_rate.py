"""Learning rates follow noise.

Adam divides a step by √v, where v averages g² + Σ: noise of r times the gradient makes steps
√(1 + r²) times shorter. A rate that much larger gives them back their length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..defenses import Defense
from .config import setting

logger = logging.get_logger(__name__)

_NORMALIZING = ("adafactor", "rmsprop", "adagrad", "lamb", "lars", "lion", "sophia")
"""Optimizers whose steps are shorter under noise, beside Adam's kind."""


def rate_factor(defense: Defense) -> float | None:
    """√(1 + r²), or `None` if settings do not say r.

    Only `relative_scale` says it: the same on all ranks, before anything is trained, and telling
    nothing of a gradient.

    Example:
        >>> round(rate_factor(make_defense("gaussian_noise", relative_scale=20.0)), 3)
        20.025
        >>> rate_factor(make_defense("pruning"))
        1.0
        >>> rate_factor(make_defense("gaussian_noise", scale=1e-3))
    """
    ratio = defense.facts.noise_ratio
    return None if ratio is None else math.sqrt(1 + ratio**2)


class RatesFollowNoise(TrainerCallback):
    """When a training begins: whoever made its optimizer, and whatever a checkpoint brought, it has
    the rates of the noise of this training.

    Args:
        defense: Gives that of the messages.
        users_optimizer: The optimizer that the Trainer was passed as `optimizers=`, if any: its
            rates stay.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> noise = make_defense("gaussian_noise", relative_scale=3.0)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        >>> args, follow = GradGuardConfig("out"), RatesFollowNoise(lambda: noise, None)
        >>> follow.on_train_begin(args, optimizer=optimizer, lr_scheduler=schedule)
        >>> [round(rate / 1e-4, 3) for rate in schedule.base_lrs]
        [3.162]
    """

    def __init__(
        self, defense: Callable[[], Defense], users_optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._defense, self._users_optimizer = defense, users_optimizer

    def on_train_begin(
        self, args: TrainingArguments, *_: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any
    ) -> None:
        """Multiply rates, and what the scheduler remembers of them."""
        plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        changes = scale_learning_rate(plain, self._defense(), args, plain is self._users_optimizer)
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)
        _scale_schedule(scheduler, changes)


def scale_learning_rate(
    optimizer: torch.optim.Optimizer,
    defense: Defense,
    args: TrainingArguments,
    is_given: bool = False,
) -> list[float]:
    """Raise the rates of an optimizer of Adam's kind that the Trainer made; say so once.

    Args:
        optimizer: Its groups remember the factor, also in checkpoints, so that another training
            under another defense changes it.
        defense: Of the messages.
        args: `scale_learning_rate=False` leaves rates alone.
        is_given: Whether the Trainer was passed it. Then it is left alone.

    Returns:
        What the rate of each group was multiplied with.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> noise = make_defense("gaussian_noise", relative_scale=3.0)
        >>> _ = scale_learning_rate(optimizer, noise, GradGuardConfig("out"))
        >>> round(optimizer.param_groups[0]["lr"] / 1e-4, 3)
        3.162
    """
    unchanged = [1.0] * len(optimizer.param_groups)
    if "adam" not in type(optimizer).__name__.lower():
        _warn_of_others(type(optimizer).__name__, defense)
        return unchanged
    factor = rate_factor(defense) if setting(args, "scale_learning_rate") else 1.0
    if factor is None:
        logger.warning_once(
            "The learning rate stays as it is: how large this noise is beside the gradient depends "
            "on the gradient. Adam's steps will be √(1 + r²) times shorter under noise of r times "
            f"the gradient. {_OUT[getattr(defense, 'per_sample', False)]}"
        )
    elif factor > 1 and is_given:
        logger.warning_once(
            "The optimizer was passed as optimizers=, so its learning rate stays as it is. Under "
            f"this noise Adam's steps are {factor:.3g} times shorter: choose the rate for that."
        )
    elif factor > 1:
        logger.warning_once(
            f"learning_rate counts {factor:.3g} times ({args.learning_rate * factor:.3g}): Adam "
            "divides its steps by as much under this noise. scale_learning_rate=False leaves it "
            "alone."
        )
    if is_given:
        return unchanged
    changes = []
    for group in optimizer.param_groups:
        new_factor = factor or 1.0
        changes.append(new_factor / group.get(_FACTOR, 1.0))
        group[_FACTOR] = new_factor
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] *= changes[-1]
    return changes


def _warn_of_others(kind: str, defense: Defense) -> None:
    """Say that the rate of an optimizer of another kind stays, if noise makes its steps shorter."""
    if any(name in kind.lower() for name in _NORMALIZING) and rate_factor(defense) != 1:
        logger.warning_once(
            f"The learning rate stays as it is: {kind} divides its steps by the size of what it "
            "gets, as Adam does, but no factor for it is known. Under noise its steps are shorter: "
            "choose the rate by trying."
        )


def _scale_schedule(scheduler: Any, changes: list[float]) -> None:
    """Multiply what a scheduler remembers of the groups' rates, and those that it is made of."""
    for name in {"base_lrs", "_last_lr"} & vars(scheduler).keys():
        rates = getattr(scheduler, name)
        setattr(scheduler, name, [rate * by for rate, by in zip(rates, changes, strict=True)])
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(inner, changes)


_FACTOR = "gradguard_noise_factor"
_OUT = {
    False: "State the noise as relative_scale, or choose the rate by trying.",
    True: "Choose the rate by trying.",
}
"""What to do where the ratio is not known, without and with clipping by samples."""
