"""The effect of noise on an optimizer's steps, and the notice that names it.

The notice comes once, and a rate changes on request only.

Adam divides a step by √v, where v averages g² + σ². Under noise of r times the gradient a step
gains less by a factor near c r, where c = ‖g‖₁/(√d ‖g‖), and moves weights at random as far as
before. The first effect asks for a higher rate, the second for a lower one. No factor that is made
of r and c fits both (docs/findings/rates.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from ..defenses import Defense
from .config import setting

logger = logging.get_logger(__name__)

_NORMALIZING = (
    "adam", "adafactor", "adagrad", "adalomo", "apollo", "lamb", "lars", "lion", "muon", "rmsprop",
    "sophia",
)  # fmt: skip
"""Parts of the names of optimizers that divide a step by the size of the gradients they got."""
_LEAST_RATIO = 1.0
"""The least noise, in units of the gradient, that a notice names.

Less noise changes steps by less than two neighboring rates of a grid differ.
"""


def set_rates(
    args: TrainingArguments,
    defense: Defense,
    processes: int,
    optimizer: Any,
    lr_scheduler: Any = None,
    users_optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Multiply an optimizer's rates by √(1 + r²) if `scale_learning_rate` asks for it.

    r is how large noise is beside the gradient, in the mean of a step's messages. Without that
    setting rates stay, and rank 0 logs once what this noise does to the optimizer's steps.

    Args:
        args: The training arguments.
        defense: The defense of the messages.
        processes: The number of processes that share messages.
        optimizer: The optimizer of the training that begins.
        lr_scheduler: The optimizer's schedule of rates, if it has one.
        users_optimizer: The optimizer that a user passed to the Trainer as `optimizers=`. Its rates
            stay as they are.

    Raises:
        ValueError: If the user's own optimizer is to be changed, or the settings do not say r.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> noise = make_defense("gaussian_noise", relative_scale=3.0)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> set_rates(GradGuardConfig("out"), noise, 1, optimizer)
        >>> optimizer.param_groups[0]["lr"]
        0.0001
        >>> args = GradGuardConfig("out", scale_learning_rate=True)
        >>> set_rates(args, noise, 1, optimizer)
        >>> round(optimizer.param_groups[0]["lr"] / 1e-4, 3)
        3.162
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    per_process = setting(args, "clients_per_process") * args.gradient_accumulation_steps
    messages, factor = processes * per_process, 1.0
    if setting(args, "scale_learning_rate"):
        factor = _requested_factor(defense, messages)
        if plain is users_optimizer:
            raise ValueError(_GIVEN.format(factor=factor))
    if plain is not users_optimizer:
        # This runs without the setting, too: a checkpoint may bring the factor of other noise.
        changes = [_set_factor(group, factor) for group in plain.param_groups]
        _scale_schedule(getattr(lr_scheduler, "scheduler", lr_scheduler), changes)
    if args.process_index:
        return
    if factor > 1:
        logger.warning_once(_SCALED.format(factor=factor, rate=plain.param_groups[0]["lr"]))
    elif notice := rate_notice(plain, defense, messages, args.max_grad_norm):
        logger.warning_once(notice)


def _requested_factor(defense: Defense, messages: int) -> float:
    """Return √(1 + r²/n) for n messages of ratio r.

    Raises:
        ValueError: If the defense's settings do not say r.
    """
    ratio = defense.facts.noise_ratio
    if ratio is None:
        raise ValueError(
            "scale_learning_rate needs noise that is stated as relative_scale: how large this "
            "noise is beside the gradient depends on the gradient. Choose learning_rate by trying."
        )
    return math.hypot(1, ratio / math.sqrt(messages))


def _set_factor(group: dict[str, Any], factor: float) -> float:
    """Multiply a group's rates, and return by how much they changed.

    The group remembers its factor, also in a checkpoint, so no rate is multiplied twice.
    """
    change = factor / group.get(_FACTOR, 1.0)
    if change != 1:
        group[_FACTOR] = factor
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] *= change
    return change


def _scale_schedule(scheduler: Any, changes: list[float]) -> None:
    """Multiply the rates that a scheduler, and the schedulers inside it, remember."""
    for name in {"base_lrs", "_last_lr"} & set(getattr(scheduler, "__dict__", ())):
        rates = getattr(scheduler, name)
        setattr(scheduler, name, [rate * by for rate, by in zip(rates, changes, strict=True)])
    for part in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(part, changes)


def rate_notice(
    optimizer: torch.optim.Optimizer, defense: Defense, messages: int, max_grad_norm: float | None
) -> str | None:
    """Return a notice of what noise does to an optimizer's steps, and how to find a rate.

    It is `None` if noise does little to them, or nothing that is known.

    Args:
        optimizer: The optimizer as it will be used. Its rates stay as they are.
        defense: The defense of each message.
        messages: The number of messages that a step averages. Each has noise of its own.
        max_grad_norm: The norm that the average is clipped to. With 0 or `None` it is not clipped.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> noise = make_defense("gaussian_noise", relative_scale=20.0)
        >>> print(rate_notice(optimizer, noise, messages=4, max_grad_norm=1.0))
        The learning rate stays 0.0001. Under noise of 10 times the gradient ...
        >>> rate_notice(optimizer, make_defense("pruning"), messages=1, max_grad_norm=1.0)
    """
    ratio = defense.facts.noise_ratio
    kind, rate = type(optimizer).__name__, optimizer.param_groups[0]["lr"]
    rate = optimizer.param_groups[0].get("initial_lr", rate)  # before a schedule's warm-up
    normalizes = any(name in kind.lower() for name in _NORMALIZING)
    if ratio is None:
        return None if not normalizes else _UNKNOWN.format(rate=f"{rate:.3g}", kind=kind)
    averaged = ratio / math.sqrt(messages)
    if averaged < _LEAST_RATIO:
        return None
    about = f"noise of {averaged:.3g} times the gradient"
    about += f" in the mean of {messages} messages" * (messages > 1)
    if normalizes:
        tried = ", ".join(f"{rate * factor:.2g}" for factor in (1, 2, 4, 8))
        return _NORMALIZED.format(
            rate=f"{rate:.3g}", about=about, kind=kind, tried=tried, defense=defense.name, r=ratio
        )
    if max_grad_norm:
        return _CLIPPED.format(about=about, norm=max_grad_norm, factor=math.hypot(1, averaged))
    return None


def warn_of_noise(defense: Defense) -> None:
    """Warn of what noise does to the steps of a training loop, whose optimizer is not known.

    Example:
        >>> warn_of_noise(make_defense("gaussian_noise", relative_scale=20.0))
    """
    ratio = defense.facts.noise_ratio
    if ratio is not None and ratio >= _LEAST_RATIO:
        logger.warning_once(_IN_A_LOOP.format(ratio=ratio))


_FACTOR = "gradguard_noise_factor"
_SCALED = (
    "scale_learning_rate: the learning rate is {factor:.3g} times as high, {rate:.3g}. In three of "
    "six tasks this was too high (docs/findings/rates.md)."
)
_GIVEN = (
    "scale_learning_rate changes no optimizer that was passed as optimizers=. Give that one a rate "
    "{factor:.3g} times as high, and leave scale_learning_rate out."
)
_NORMALIZED = (
    "The learning rate stays {rate}. Under {about} {kind}'s steps are mostly noise, and no factor "
    "suits all tasks: in six, the best rate was 1 to 8 times that without noise. Try {tried}: "
    "gradguard recommend --defense {defense}:relative_scale={r:g} --learning_rate {rate} tries "
    "them on your model and data."
)
_CLIPPED = (
    "max_grad_norm={norm:g} counts noise: under {about} a message is {factor:.3g} times as long, "
    "so clipping shortens what it says of the gradient by up to as much. Set max_grad_norm=0, or "
    "{factor:.3g} times as large."
)
_IN_A_LOOP = (
    "protect() changes no learning rate. Under noise of {ratio:g} times the gradient in each "
    "message, steps of optimizers such as AdamW are mostly noise, and no factor suits all tasks: "
    "in six, the best rate was 1 to 8 times that without noise. Gradient clipping counts the noise."
)
_UNKNOWN = (
    "The learning rate stays {rate}. Under noise {kind}'s steps are mostly noise where that is "
    "larger than the gradient, which settings do not say here. Try rates of 1 to 8 times that "
    "without noise: gradguard recommend does."
)
