"""Two properties of a schedule of learning rates: whether it follows the data, and how it ends.

Both are read from the scheduler itself, and not from its name, so a new kind is judged as well.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

_NEARLY_ZERO = 0.01  # in units of the highest rate, since some schedules end just above zero
_POINTS = 1001  # at most so many steps of a schedule are looked at


def follows_evaluation(scheduler: Any) -> bool:
    """Return whether a scheduler's rates follow a metric, so that nobody knows them beforehand.

    Args:
        scheduler: The Trainer's scheduler; `None` if rates stay constant.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> follows_evaluation(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
        True
    """
    plain = getattr(scheduler, "scheduler", scheduler)  # Accelerate wraps it
    return plain is not None and "metrics" in inspect.signature(plain.step).parameters


def falls_to_zero(scheduler: Any, steps: int) -> bool:
    """Return whether learning rates end at zero, and never rise again once they have fallen.

    A user's scheduler that is no `LambdaLR` cannot be asked about later steps. The answer is then
    no: noise is planned for constant rates, which is right for any schedule.

    Args:
        scheduler: The Trainer's scheduler.
        steps: The number of optimizer steps of the training.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 30)
        >>> falls_to_zero(schedule, steps=30), falls_to_zero(schedule, steps=15)
        (True, False)
    """
    plain = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(plain, LambdaLR):
        return False
    counts = np.linspace(0, steps, min(steps + 1, _POINTS)).round().astype(int).tolist()
    return all(_ends_at_zero([rate(step) for step in counts]) for rate in plain.lr_lambdas)


def _ends_at_zero(rates: list[float]) -> bool:
    highest = max(rates)
    afterwards = np.diff(rates[rates.index(highest) :])
    return bool(rates[-1] <= _NEARLY_ZERO * highest and (afterwards <= 0).all())
