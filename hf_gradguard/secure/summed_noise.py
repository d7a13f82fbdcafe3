"""Noise whose strength is stated for the sum of all clients' messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from ..defenses import Defense
from ..defenses.noise import NoiseDefense
from .aggregation import FixedPoint

logger = logging.get_logger(__name__)

LEAST_STEPS = 4.0
"""Deviation of a message's noise, in steps of the grid that messages are rounded to on their way.
What is rounded then has the same law on the grid, whatever was added to the noise, up to exp(-2π²
4²) of it.
"""


def share_of_noise(defense: Defense, args: TrainingArguments, ranks: int) -> Defense:
    """The defense of one message with `noise_for="sum"`: each of the n messages that are exchanged
    at a time gets 1/√n of `scale`, so that their sum has noise of `scale`.

    Raises:
        NotImplementedError: For a defense without Gaussian noise of a
            stated `scale`, or a limit that would keep messages, and so their noise, back.
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
        raise NotImplementedError(
            f"GradGuardTrainer does not support noise_for='sum' with {defense}: its messages carry "
            "no Gaussian noise of a stated scale, which alone adds up as is known. Use "
            "gaussian_noise, optimal_noise, dp_sgd or optimal_dp_sgd with scale=, not in a chain, "
            "or noise_for='message'; of correlated noise dp_sgd with per_sample=True."
        )
    if settings.leakage_limit is not None:
        raise NotImplementedError(
            "GradGuardTrainer does not support noise_for='sum' with leakage_limit: a message that "
            "is kept back takes its noise out of the sum. Leave one of them out."
        )
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
    """The step of the grid that all ranks round to before they add up: a power of two.

    Args:
        args: Training arguments.
        ranks: How many there are.
        deviation: Of the noise in what a rank sends, of one message.

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
    """How far that rounding moves two of a rank's sums apart at most, over all entries: √d steps.

    Args:
        args: As for `check_resolution`, and so on.
        model: Whose parameters are trained.
        ranks: Likewise.
        deviation: Likewise.
    """
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return check_resolution(args, ranks, deviation) * math.sqrt(entries)
