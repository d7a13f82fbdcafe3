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
_OF_DEFENSE = {field.name for field in fields(DPSGD)}


def default_learning_rate(
    messages: int,
    batch_size: int = BATCH_SIZE,
    noise_multiplier: float | None = NOISE_MULTIPLIER,
    correlated: bool = True,
) -> float:
    """Return a learning rate of SGD for a head, by what is known without data.

    With correlated noise it is 10 for 200 messages of 16 rows, and 40 for 1,600 and more. It grows
    with the messages to the power 2/3, for noise cancels, and falls with more noise. With
    independent noise, which adds up, it is 5 for 200 messages, and falls with the messages to that
    power. Without noise it is 20. All grow with the square root of the batch.

    Args:
        messages: The number of messages of a client.
        batch_size: The number of rows of a message.
        noise_multiplier: σ; 0 or `None` for no noise.
        correlated: Whether noise is correlated.

    Example:
        >>> default_learning_rate(200), default_learning_rate(4209), default_learning_rate(750, 64)
        (10.0, 40.0, 48.0)
        >>> default_learning_rate(200, noise_multiplier=3.0)
        5.0
        >>> default_learning_rate(1590, correlated=False)
        1.3
    """
    growth = (messages / 200) ** (2 / 3)
    if not noise_multiplier:
        rate = 20.0
    elif correlated:
        rate = 10 * min(4.0, max(0.25, growth)) * min(1.0, NOISE_MULTIPLIER / noise_multiplier)
    else:
        rate = 5 / max(1.0, growth) * min(1.0, NOISE_MULTIPLIER / noise_multiplier)
    return float(f"{rate * math.sqrt(batch_size / BATCH_SIZE):.2g}")


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
        >>> args.defense_kwargs["target_epsilon"], args.lr_scheduler_type.value, args.learning_rate
        (3.0, 'linear', 7.3)
    """
    of_defense = {name: settings.pop(name) for name in list(settings) if name in _OF_DEFENSE}
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE, "num_train_epochs": 1.0, "optim": "sgd",
        "lr_scheduler_type": "linear", "max_grad_norm": 0.0, "save_strategy": "no",
        "report_to": "none",
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
        noise_multiplier = named.get("noise_multiplier")
        if target := named.get("target_epsilon"):
            noise_multiplier = dp_sgd_noise_multiplier(target, named["delta"], 1.0, 1)
        args.learning_rate = default_learning_rate(messages, batch_size_of(args), noise_multiplier)
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
