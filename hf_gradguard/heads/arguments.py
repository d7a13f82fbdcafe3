"""The arguments that a private head is trained with, by rules that need no search."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ..defenses.dp import DPSGD
from ..leakage import dp_sgd_noise_multiplier
from ..training.config import GradGuardConfig

CLIP, NOISE_MULTIPLIER, DELTA = 0.3, 1.5, 1e-5
BATCH_SIZE = 16
_RATE, _RATE_UNDEFENDED, _LEAST_NOISE = 0.8, 1.25, 0.3
_CORRELATED_ERROR = 1.1
"""The noise in the last weights, of rate 1 that falls to zero, in units of one message's noise at
the same σ. Independent noise has √(T/3).
"""
_OF_DEFENSE = {field.name for field in fields(DPSGD)}


def default_learning_rate(
    batch_size: float = BATCH_SIZE,
    noise_multiplier: float | None = NOISE_MULTIPLIER,
    clip: float = CLIP,
    passes: int = 1,
    independent_messages: int | None = None,
) -> float:
    """Return a learning rate of SGD for a head, by what is known without data.

    Features have norm 1, so the noise that is left in a class's last weights is the noise of its
    score. The rate makes it 0.9. With correlated noise that depends on neither the number of
    messages nor on classes or directions. The rate was chosen on two tasks and checked on others:
    docs/findings/heads.md.

    Args:
        batch_size: The number of rows of a message, or its mean.
        noise_multiplier: σ. With less than 0.3 of it, clipping is the limit. 0 or `None` is of a
            training without a defense, which clips nothing either.
        clip: The clipping bound C of a row's gradient.
        passes: The number of messages that a row is in, each of which takes noise of its own.
        independent_messages: The number of messages, if their noise is independent: it adds up.

    Example:
        >>> round(default_learning_rate(), 1), round(default_learning_rate(64, clip=0.1), 1)
        (28.4, 341.3)
        >>> round(default_learning_rate(noise_multiplier=0), 1)
        20.0
        >>> round(default_learning_rate(independent_messages=200), 1)
        3.8
    """
    if not noise_multiplier:
        return _RATE_UNDEFENDED * batch_size
    rate = _RATE * batch_size / (clip * max(noise_multiplier, _LEAST_NOISE)) / passes
    if independent_messages is not None:
        rate *= _CORRELATED_ERROR / math.sqrt(independent_messages / 3)
    return rate


def training_arguments(output_dir: str, num_rows: int, **settings: Any) -> GradGuardConfig:
    """Return the arguments of a head's training: each row in one message, noise that cancels.

    A row is protected against everybody who sees all messages and knows in which one it is. What
    is not set is: `clip=0.3`, `noise_multiplier=1.5`, a `delta` of 1e-5 or a tenth of one over the
    rows, messages of 16 rows, one pass, SGD with a rate that falls to zero, and
    `default_learning_rate`.

    Args:
        output_dir: The folder of the model.
        num_rows: The number of rows of the training data, of all ranks.
        **settings: Arguments of `GradGuardConfig`, and settings of `dp_sgd`, by name.
            `noise_multiplier=0` trains undefended.

    Raises:
        ValueError: If there are fewer rows than a message takes, or a setting is out of range.

    Example:
        >>> args = training_arguments("out", 2000, target_epsilon=3.0, use_cpu=True)
        >>> args.lr_scheduler_type.value, round(args.learning_rate, 1)
        ('linear', 30.7)
    """
    of_defense = {name: settings.pop(name) for name in list(settings) if name in _OF_DEFENSE}
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE, "num_train_epochs": 1.0, "optim": "sgd",
        "lr_scheduler_type": "linear", "max_grad_norm": 0.0, "save_strategy": "no",
        "report_to": "none", "dataloader_pin_memory": False,
    }  # fmt: skip
    args = GradGuardConfig(output_dir, **(defaults | settings))
    messages, of_a_pass = messages_of(args, num_rows)
    defense_settings = args.defense_kwargs
    if args.defense is None:
        args.defense = "dp_sgd" if of_defense.get("noise_multiplier") != 0 else "none"
        passes = math.ceil(messages / of_a_pass)
        if args.defense == "dp_sgd":
            defense_settings = _dp_sgd(of_defense, num_rows, passes)
        args.defense_kwargs = defense_settings
    if "learning_rate" not in settings:
        named = defense_settings if isinstance(defense_settings, dict) else {}
        batch_size, is_correlated = batch_size_of(args), named.get("correlated", False)
        noise_multiplier = named.get("noise_multiplier")
        if target := named.get("target_epsilon"):
            event = (1.0, 1) if is_correlated else (1 / of_a_pass, messages)
            noise_multiplier = dp_sgd_noise_multiplier(target, named["delta"], *event)
        args.learning_rate = default_learning_rate(
            batch_size, noise_multiplier, named.get("clip", CLIP),
            passes=math.ceil(messages / of_a_pass) if is_correlated else 1,
            independent_messages=None if is_correlated else messages,
        )  # fmt: skip
    args.check()
    return args


def batch_size_of(args: GradGuardConfig) -> int:
    """Return the number of rows of a client's message.

    Args:
        args: The training's arguments.
    """
    return args.per_device_train_batch_size // args.clients_per_process


def messages_of(args: GradGuardConfig, num_rows: int) -> tuple[int, int]:
    """Return how many messages a client sends, in all and in one pass over its rows.

    Args:
        args: The training's arguments.
        num_rows: The number of rows of the training data, of all ranks.

    Raises:
        ValueError: If there are fewer rows than a message takes.

    Example:
        >>> args = GradGuardConfig("out", per_device_train_batch_size=16, num_train_epochs=2)
        >>> messages_of(args, 3200)
        (400, 200)
    """
    clients, size = args.world_size * args.clients_per_process, batch_size_of(args)
    of_a_pass = num_rows // clients // size
    if not of_a_pass:
        raise ValueError(
            f"{num_rows} rows of {clients} client(s) are too few for messages of {size}: set a "
            "smaller per_device_train_batch_size."
        )
    if args.max_steps > 0:
        return args.max_steps * args.gradient_accumulation_steps, of_a_pass
    return math.ceil(of_a_pass * args.num_train_epochs), of_a_pass


def _dp_sgd(settings: dict[str, Any], num_rows: int, passes: int) -> dict[str, Any]:
    """Return the settings of `dp_sgd`, with defaults for those that are not given."""
    defaults: dict[str, Any] = {
        "per_sample": True,
        "correlated": settings.get("correlated", True),
        "clip": CLIP,
        "delta": min(DELTA, 0.1 / num_rows),
    }
    if settings.get("target_epsilon") is None:
        defaults["noise_multiplier"] = NOISE_MULTIPLIER
    if defaults["correlated"]:
        defaults["participations"] = passes
    return defaults | settings
