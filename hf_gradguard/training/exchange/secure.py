"""Secure sums of a Trainer, and noise whose strength is stated for the sum of all messages.

This is the Trainer's one door to the room `secure`: nothing else imports that, and only a Trainer
that is asked for it does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from ...defenses import Defense
from ...defenses.noise import NoiseDefense
from ...secure import SecureAggregation
from ...secure.aggregation import FixedPoint
from ..config import setting
from ..refusals import refusal
from .gradients import SecureSum

logger = logging.get_logger(__name__)

LEAST_STEPS = 4.0
"""The least deviation of a message's noise, in steps of the grid that messages are rounded to on
their way. Rounded noise then has the same distribution on the grid, whatever was added to it, up to
exp(-2π² 4²) of it.
"""


def secure_sum_of(args: TrainingArguments, accelerator: Accelerator) -> SecureSum | None:
    """Return the secure sum that training arguments ask for; `None` without it.

    Example:
        >>> secure_sum_of(TrainingArguments("out"), Accelerator(cpu=True)) is None
        True
    """
    if not setting(args, "secure_aggregation"):
        return None
    settings: Any = args
    bound, keys = settings.secure_aggregation_range, settings.secure_aggregation_keys
    return SecureAggregation(accelerator, bound, keys)


def share_of_noise(defense: Defense, args: TrainingArguments, ranks: int) -> Defense:
    """Return the defense of a single message whose noise is stated for the sum of n messages.

    With `noise_for="sum"`, each of the n messages that are exchanged at a time gets 1/√n of
    `scale`, so that their sum has noise of `scale`.

    Args:
        defense: The defense as it was asked for.
        args: The training arguments.
        ranks: The number of ranks.

    Raises:
        UnsupportedError: If the defense has no Gaussian noise of a stated `scale`, or if a limit
            could withhold messages, and so their noise.
        ValueError: If there are more clients than rows of a batch, or the noise is finer than the
            grid of secure aggregation.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> args = GradGuardConfig("out", secure_aggregation=True, noise_for="sum")
        >>> share_of_noise(make_defense("gaussian_noise", scale=0.2), args, ranks=4).scale
        0.1
    """
    settings: Any = args
    if not (
        isinstance(defense, NoiseDefense)
        and defense.facts.adds_gaussian_noise
        and defense.scale is not None
    ):
        raise refusal("sum-of-unknown-noise", defense=defense)
    if settings.leakage_limit is not None:
        raise refusal("sum-with-limit")
    if settings.per_device_train_batch_size < settings.clients_per_process:
        raise ValueError(
            f"noise_for='sum' with clients_per_process={settings.clients_per_process} of "
            f"per_device_train_batch_size={settings.per_device_train_batch_size} rows: some "
            "clients would never have any. Take larger batches, or fewer clients."
        )
    messages = ranks * settings.clients_per_process
    message_scale = defense.scale / math.sqrt(messages)
    floor = getattr(defense, "floor", None) or 1.0  # the least share of the power of any entry
    weight = settings.clients_per_process * settings.gradient_accumulation_steps
    check_resolution(settings, ranks, message_scale * math.sqrt(floor) / weight)
    logger.warning_once(
        f"noise_for='sum': scale={defense.scale:g} is of the sum of {messages} messages, and each "
        f"has noise of scale {message_scale:g}. Leakage figures, limits and accountants count that "
        "of one message alone."
    )
    return dataclasses.replace(defense, scale=message_scale)


def check_resolution(args: Any, ranks: int, deviation: float) -> float:
    """Return the step of the grid that all ranks round to before they add up: a power of two.

    Args:
        args: The training arguments.
        ranks: The number of ranks.
        deviation: The standard deviation of the noise of one message that a rank sends.

    Raises:
        ValueError: If the grid is too coarse for such noise.
    """
    step = FixedPoint(args.secure_aggregation_range, ranks, 32).unit
    if deviation < LEAST_STEPS * step:
        raise ValueError(
            f"noise_for='sum' with noise of {deviation:.3g} in what a rank sends: secure "
            f"aggregation rounds to multiples of {step:.3g}, which shows what such weak noise was "
            "added to. Take more noise, or a smaller secure_aggregation_range."
        )
    return step


def rounding_of_sum(args: Any, model: nn.Module, ranks: int, deviation: float) -> float:
    """Return how far rounding moves two of a rank's sums apart at most: √d steps of the grid.

    Args:
        args: The training arguments.
        model: The model whose d parameter entries are trained.
        ranks: The number of ranks.
        deviation: The standard deviation of the noise of one message that a rank sends.
    """
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return check_resolution(args, ranks, deviation) * math.sqrt(entries)
