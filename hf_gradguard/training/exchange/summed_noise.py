"""Noise whose strength is stated for the sum of all clients' messages."""

from __future__ import annotations

import dataclasses
import math

from transformers import TrainingArguments
from transformers.utils import logging

from ...defenses import Defense
from ..config import setting

logger = logging.get_logger(__name__)


def is_summed(defense: Defense, args: TrainingArguments) -> bool:
    """Whether a `scale` is of the sum of messages.

    Example:
        >>> is_summed(make_defense("gaussian_noise"), TrainingArguments("out"))
        False
    """
    summed = setting(args, "noise_for") == "sum"
    return summed and not getattr(defense, "per_sample", False)


def share_of_noise(defense: Defense, args: TrainingArguments, ranks: int) -> Defense:
    """The defense of one message. With `noise_for="sum"`, each of the n messages that are exchanged
    at a time gets 1/√n of `scale`, so that their sum has noise of `scale`.

    Raises:
        NotImplementedError: With `noise_for="sum"`, for a defense without Gaussian noise of a
            stated `scale`, or a limit that would keep messages, and so their noise, back.
        ValueError: With `noise_for="sum"`, if there are more clients than rows of a batch.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> args = GradGuardConfig("out", secure_aggregation=True, noise_for="sum")
        >>> share_of_noise(make_defense("gaussian_noise", scale=0.2), args, ranks=4).scale
        0.1
    """
    if not is_summed(defense, args):
        return defense  # of a noise multiplier `PrivateRows` gives each message its share
    from ...defenses.noise import NoiseDefense  # settings alone import no defense

    if not (
        isinstance(defense, NoiseDefense)
        and defense.facts.adds_gaussian_noise
        and defense.scale is not None
    ):
        raise NotImplementedError(
            f"GradGuardTrainer does not support noise_for='sum' with {defense}: its messages carry "
            "no Gaussian noise of a stated scale, which alone adds up as is known. Use "
            "gaussian_noise, optimal_noise, dp_sgd or optimal_dp_sgd with scale=, not in a chain, "
            "or noise_for='message'."
        )
    if args.leakage_limit is not None:
        raise NotImplementedError(
            "GradGuardTrainer does not support noise_for='sum' with leakage_limit: a message that "
            "is kept back takes its noise out of the sum. Leave one of them out."
        )
    if args.per_device_train_batch_size < args.clients_per_process:
        raise ValueError(
            f"noise_for='sum' with clients_per_process={args.clients_per_process} of "
            f"per_device_train_batch_size={args.per_device_train_batch_size} rows: some clients "
            "would never have any. Take larger batches, or fewer clients."
        )
    messages = ranks * args.clients_per_process
    own = defense.scale / math.sqrt(messages)
    logger.warning_once(
        f"noise_for='sum': scale={defense.scale:g} is of the sum of {messages} messages, and each "
        f"has noise of scale {own:g}. Leakage figures, limits and accountants count that of one "
        "message alone."
    )
    return dataclasses.replace(defense, scale=own)
