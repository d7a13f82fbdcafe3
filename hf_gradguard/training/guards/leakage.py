"""What a leakage limit, a log or an account cannot be had with."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import TrainingArguments

from ...defenses import Defense
from ...defenses.dp import DPSGD
from ...leakage import FisherAccountant
from ..config import setting
from .checks import is_iterable, refuse


def check_leakage(
    args: TrainingArguments,
    defense: Defense,
    accountant: FisherAccountant | None,
    own_batches: bool,
    train_dataset: Any = None,
) -> None:
    """Refuse limits and accounts that nothing could keep, and second derivatives through kernels
    that have none.

    Args:
        args: Training arguments, whose `leakage_*` and `use_liger_kernel` count.
        defense: What protects the messages.
        accountant: Of the Trainer's messages, if there is one.
        own_batches: Whether the Trainer's class draws its batches in a way of its own.
        train_dataset: By whose rows an accountant knows the examples.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> limited = GradGuardConfig("out", leakage_limit=0.1)
        >>> check_leakage(limited, make_defense("pruning"), None, own_batches=False)
        Traceback (most recent call last):
        NotImplementedError: GradGuardTrainer does not support leakage_limit with pruning: ...
    """
    refuse(_LEAKAGE, Measured(args, defense, accountant, own_batches, train_dataset))


class Measured(NamedTuple):
    """What is to be measured, of which messages."""

    args: TrainingArguments
    defense: Defense
    accountant: FisherAccountant | None
    own_batches: bool
    train_dataset: Any

    @property
    def has_limit(self) -> bool:
        """Whether messages that leak too much are kept back."""
        return setting(self.args, "leakage_limit") is not None

    @property
    def measures(self) -> bool:
        """Whether any message's leakage is estimated."""
        logs = bool(setting(self.args, "leakage_logging_steps"))
        return logs or self.has_limit or self.accountant is not None


def _of_fused_losses(measured: Measured) -> str:
    defense = measured.defense
    needs_twice = measured.measures or defense.facts.needs_second_order
    if not measured.args.use_liger_kernel or not needs_twice:
        return ""
    return (
        "Liger kernels where anything differentiates twice: their fused losses compute gradients "
        "in the forward pass, so second derivatives are silently wrong. Set "
        "use_liger_kernel=False; or use a defense that differentiates once (noise, pruning, "
        f"quantization; {defense.name} may not), with no leakage_logging_steps, leakage_limit or "
        "accountant."
    )


def _of_half_precision(measured: Measured) -> str:
    if not measured.args.fp16:
        return ""
    if setting(measured.args, "noise_for") == "sum":
        return (
            "fp16 with noise_for='sum': one rank's overflow would leave its part of the noise out. "
            "Use bf16=True, or noise_for='message'."
        )
    if not measured.measures:
        return ""
    return (
        "fp16 with leakage_logging_steps, leakage_limit or an accountant: they differentiate "
        "twice, where a scaled loss gives the gradient alone. Use bf16=True."
    )


def _of_devices(measured: Measured) -> str:
    """`devices.py` refuses what arguments ask for."""
    if measured.accountant is None or not measured.args.fsdp:
        return ""
    return (
        "an accountant with clients of several devices: no device holds the whole map that Fisher "
        "information is computed from. Leave it out, or give each client one device."
    )


def _of_unknown_noise(measured: Measured) -> str:
    binds = measured.has_limit or measured.accountant is not None
    if not binds or measured.defense.facts.adds_gaussian_noise:
        return ""
    setting = "leakage_limit" if measured.has_limit else "an accountant"
    return (
        f"{setting} with {measured.defense.name}: it adds no "
        "Gaussian noise of known covariance to the true gradient, so there is no Fisher "
        "information to bound or to add up. Use gaussian_noise, optimal_noise, dp_sgd or "
        "optimal_dp_sgd, alone, first in a chain, or after pruning. leakage_logging_steps logs "
        "leakage/i2f_lower_bound for every defense."
    )


def _of_shuffled_epochs(measured: Measured) -> str:
    accountant = measured.accountant
    if accountant is None or accountant.noise_multiplier is None or measured.own_batches:
        return ""
    return (
        "an accountant with a sampling rate: its factor κ is for batches that are drawn afresh "
        "at every step, and the Trainer shuffles epochs. Leave sampling_rate, noise_multiplier "
        "and delta out, or override get_train_dataloader with one that draws afresh."
    )


def _of_little_noise(measured: Measured) -> str:
    accountant, defense = measured.accountant, measured.defense
    if accountant is None or accountant.noise_multiplier is None:
        return ""
    multiplier = 0.0
    if isinstance(defense, DPSGD) and defense.clip_by == "norm" and defense.scale is not None:
        multiplier = defense.scale / defense.clip
    if accountant.noise_multiplier <= multiplier * (1 + 1e-9):
        return ""
    return (
        f"an accountant with noise_multiplier={accountant.noise_multiplier:g}: its factor κ "
        "needs a message that one example cannot move by more than a multiple of the noise, "
        f"and here that gives at most {multiplier:g}. Use dp_sgd with clip_by='norm' and "
        "scale=noise_multiplier*clip, or leave the three arguments out."
    )


def _of_unnumbered_rows(measured: Measured) -> str:
    if measured.accountant is None or not is_iterable(measured.train_dataset):
        return ""
    return (
        "an accountant with an iterable data set: its rows have no numbers, and by its content an "
        "example that is augmented or masked anew would be another one at every visit. Use a data "
        "set with rows (datasets: load it without streaming)."
    )


_LEAKAGE = (
    _of_fused_losses, _of_half_precision, _of_unknown_noise, _of_shuffled_epochs, _of_little_noise,
    _of_unnumbered_rows, _of_devices,
)  # fmt: skip
