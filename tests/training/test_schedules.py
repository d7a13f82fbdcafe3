"""Which schedules of Transformers and torch fall to zero, and which follow a metric."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refuses
from torch.optim import lr_scheduler
from transformers import SchedulerType, TrainingArguments, get_scheduler

from hf_gradguard.defenses.correlated import make_factor, sensitivity
from hf_gradguard.training.privacy.correlated_rows import check_is_linear
from hf_gradguard.training.privacy.schedules import falls_to_zero, follows_evaluation

STEPS = 40
FALLING = {
    "linear": True, "cosine": True, "polynomial": True, "cosine_with_restarts": True,
    "constant": False, "constant_with_warmup": False, "inverse_sqrt": False,
    "cosine_with_min_lr": False, "cosine_warmup_with_min_lr": False, "warmup_stable_decay": True,
    "reduce_lr_on_plateau": False, "greedy": False,
}  # fmt: skip
FOLLOWING = {"reduce_lr_on_plateau", "greedy"}
SETTINGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 10},
}


def optimizer(rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def scheduler(name: str, rate: float = 0.1, **settings: Any) -> Any:
    settings = settings or SETTINGS.get(name, {})
    return get_scheduler(name, optimizer(rate), 5, STEPS, scheduler_specific_kwargs=settings)


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_every_schedule_of_transformers_is_judged(name: str) -> None:
    """By its own rates: a new name has to be added here once somebody has looked at it."""
    made = scheduler(name)
    assert falls_to_zero(made, STEPS) == FALLING[name]
    assert follows_evaluation(made) == (name in FOLLOWING)


@pytest.mark.parametrize(
    ("name", "settings", "falls"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, False),  # its rates rise again
        ("cosine", {"num_cycles": 1.0}, False),  # a whole wave, which ends where it began
        ("cosine_with_min_lr", {"min_lr_rate": 0.009}, True),
        ("cosine_with_min_lr", {"min_lr_rate": 0.011}, False),
        ("polynomial", {"lr_end": 0.0009}, True),
        ("polynomial", {"lr_end": 0.0011}, False),
    ],
)
def test_settings_of_a_schedule_count(name: str, settings: dict[str, Any], falls: bool) -> None:
    assert falls_to_zero(scheduler(name, **settings), STEPS) == falls


@pytest.mark.parametrize("cycles", [10, 50, 100])
def test_a_rise_between_few_steps_is_seen(cycles: int) -> None:
    """Rates that rise again at each restart look constant from one restart to the next."""
    steps = 1000
    restarts = {"num_cycles": cycles}
    made = get_scheduler(
        "cosine_with_restarts", optimizer(), 0, steps, scheduler_specific_kwargs=restarts
    )
    assert not falls_to_zero(made, steps)


def noise_in_last_weights(rates: np.ndarray[Any, Any], is_falling: bool) -> float:
    """The standard deviation of Σ η_t (C⁻¹ z)_t, times C's sensitivity: by hand."""
    steps = len(rates)
    factor = make_factor("blt", steps, falling_rate=is_falling)
    inverse = factor.inverse(steps).numpy()
    weights = [float(rates[begun:] @ inverse[: steps - begun]) for begun in range(steps)]
    return math.hypot(*weights) * sensitivity(factor.column(steps))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("linear", {}), ("cosine", {}), ("polynomial", {}), ("cosine_with_restarts", {}),
        ("warmup_stable_decay", {"num_decay_steps": 100}), ("constant", {}),
        ("constant_with_warmup", {}), ("inverse_sqrt", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
    ],
)  # fmt: skip
def test_noise_is_planned_as_leaves_less_in_the_last_weights(
    name: str, settings: dict[str, Any]
) -> None:
    steps = 200
    made = get_scheduler(name, optimizer(), 0, steps, scheduler_specific_kwargs=settings)
    rates = np.array([made.lr_lambdas[0](step) for step in range(steps)])
    planned = falls_to_zero(made, steps)
    assert noise_in_last_weights(rates, planned) < noise_in_last_weights(rates, not planned)


def test_a_training_that_ends_early_does_not_fall() -> None:
    assert not falls_to_zero(scheduler("linear"), STEPS // 2)


def test_long_schedules_are_looked_at_from_end_to_end() -> None:
    long = get_scheduler("cosine_with_restarts", optimizer(), 0, 100_000,
                         scheduler_specific_kwargs={"num_cycles": 2})  # fmt: skip
    assert not falls_to_zero(long, 100_000)
    assert falls_to_zero(get_scheduler("linear", optimizer(), 0, 100_000), 100_000)


def test_schedules_of_torch() -> None:
    assert not falls_to_zero(lr_scheduler.CosineAnnealingLR(optimizer(), STEPS), STEPS)
    assert not falls_to_zero(None, STEPS)
    assert not follows_evaluation(None)
    assert not follows_evaluation(lr_scheduler.OneCycleLR(optimizer(), 0.1, STEPS))
    assert follows_evaluation(lr_scheduler.ReduceLROnPlateau(optimizer()))


@pytest.mark.parametrize("name", sorted(FOLLOWING))
def test_rates_that_follow_a_metric_are_refused(tmp_path: Path, name: str) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_grad_norm=0.0)
    made = scheduler(name)
    with refuses("correlated-schedule"):
        check_is_linear(made.optimizer, args, made)
    check_is_linear(optimizer(), args, scheduler("linear"))
