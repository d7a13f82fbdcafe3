"""Learning rates follow noise.

Adam divides a step by √v, where v averages g² + Σ: noise of r times the gradient makes steps
√(1 + r²) times shorter. A rate that much larger gives them back their length.
"""

from __future__ import annotations

import math

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
    ratio = defense.noise_ratio
    return None if ratio is None else math.sqrt(1 + ratio**2)


def scale_learning_rate(
    optimizer: torch.optim.Optimizer, defense: Defense, args: TrainingArguments, made: bool = True
) -> None:
    """Raise the rates of an optimizer of Adam's kind that the Trainer made; say so once.

    Args:
        optimizer: Before the scheduler of a training has seen it. Its groups remember the factor,
            also in checkpoints, so that another training under another defense changes it.
        defense: Of the messages.
        args: `scale_learning_rate=False` leaves rates alone.
        made: Whether it was made just now. One that was given, by whomever, is left alone.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> noise = make_defense("gaussian_noise", relative_scale=3.0)
        >>> scale_learning_rate(optimizer, noise, GradGuardConfig("out"))
        >>> round(optimizer.param_groups[0]["lr"] / 1e-4, 3)
        3.162
    """
    if "adam" not in type(getattr(optimizer, "optimizer", optimizer)).__name__.lower():
        return
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
    for group in optimizer.param_groups:
        before = group.get(_FACTOR, 1.0 if made else None)
        if before is not None:
            group[_FACTOR] = factor or 1.0
            for name in {"lr", "initial_lr"} & group.keys():
                group[name] *= group[_FACTOR] / before


_FACTOR = "gradguard_noise_factor"
_OUT = {
    False: "State the noise as relative_scale, or choose the rate by trying.",
    True: "Choose the rate by trying.",
}
"""What to do where the ratio is not known, without and with clipping by samples."""
