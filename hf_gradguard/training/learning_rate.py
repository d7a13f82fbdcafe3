"""Learning rates follow noise.

Adam divides a step by √v, where v averages g² + Σ: noise of r times the gradient makes steps
√(1 + r²) times shorter. A rate that much larger gives them back their length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from ..defenses import Defense

logger = logging.get_logger(__name__)


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


def scale_learning_rate(
    optimizer: torch.optim.Optimizer, defense: Defense, args: TrainingArguments, is_new: bool = True
) -> list[float]:
    """Raise the rates of an optimizer of Adam's kind that the Trainer made; say so once.

    Args:
        optimizer: Before the scheduler of a training has seen it. Its groups remember the factor,
            also in checkpoints, so that another training under another defense changes it.
        defense: Of the messages.
        args: `scale_learning_rate=False` leaves rates alone.
        made: Whether it was made just now. One that was given, by whomever, is left alone.

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
    if "adam" not in type(getattr(optimizer, "optimizer", optimizer)).__name__.lower():
        return [1.0] * len(optimizer.param_groups)
    factor = rate_factor(defense) if getattr(args, "scale_learning_rate", False) else 1.0
    if factor is None:
        logger.warning_once(
            "The learning rate stays as it is: how large this noise is beside the gradient depends "
            "on the gradient. Adam's steps will be √(1 + r²) times shorter under noise of r times "
            f"the gradient. {_OUT[getattr(defense, 'per_sample', False)]}"
        )
    elif factor > 1:
        logger.warning_once(
            f"learning_rate counts {factor:.3g} times ({args.learning_rate * factor:.3g}): Adam "
            "divides its steps by as much under this noise. scale_learning_rate=False leaves it "
            "alone."
        )
    changes = []
    for group in optimizer.param_groups:
        old_factor = group.get(_FACTOR, 1.0 if is_new else None)
        new_factor = factor or 1.0
        changes.append(1.0 if old_factor is None else new_factor / old_factor)
        if old_factor is not None:
            group[_FACTOR] = new_factor
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] *= changes[-1]
    return changes


@contextmanager
def loaded_rates_follow(
    optimizer: torch.optim.Optimizer, scheduler: Any, defense: Defense, args: TrainingArguments
) -> Iterator[None]:
    """What is read from a checkpoint in here, of whatever noise, has the rates of this noise.

    Args:
        optimizer: What `scale_learning_rate` has seen. If the Trainer made it, a checkpoint whose
            groups remember no factor is of a run without one.
        scheduler: Of its rates, which has them too.
        defense: Of the messages.
        args: As for `scale_learning_rate`.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        >>> without, args = optimizer.state_dict(), GradGuardConfig("out")
        >>> noise = make_defense("gaussian_noise", relative_scale=3.0)
        >>> _ = scale_learning_rate(optimizer, noise, args)
        >>> with loaded_rates_follow(optimizer, scheduler, noise, args):
        ...     optimizer.load_state_dict(without)
        >>> [round(rate / 1e-4, 3) for rate in scheduler.base_lrs]
        [3.162]
    """
    is_new = all(_FACTOR in group for group in optimizer.param_groups)
    yield
    changes = scale_learning_rate(optimizer, defense, args, is_new)
    _scale_schedule(scheduler, changes)


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
