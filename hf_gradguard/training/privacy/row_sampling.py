"""The choice of how a Trainer with per-sample `dp_sgd` draws rows, or its refusal to draw them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...defenses import Chain
from ...leakage import PrivacyAccount
from ..config import setting
from ..message import Client
from ..refusals import is_iterable, refusal
from .private_rows import AccountFile, PrivateRows
from .proofs import is_noise_known, is_proved


def private_rows_of(
    trainer: Any,
    own_batches: bool,
    clients: Callable[[], Sequence[Client]],
    account: PrivacyAccount | None,
    account_file: AccountFile | None = None,
) -> PrivateRows | None:
    """Return the object that draws and counts the rows of a Trainer with per-sample `dp_sgd`.

    It is `None` for all other defenses, and for a Trainer that does not draw rows itself.

    Args:
        trainer: The Trainer, with its `defense`, arguments and data.
        own_batches: Whether the Trainer's class draws batches in its own way.
        clients: A function that returns the rank's clients, as for `PrivateRows`.
        account: The account of messages that ε follows from, as for `PrivateRows`.
        account_file: The file of that account, as for `PrivateRows`.

    Raises:
        UnsupportedError: If batches cannot be drawn in the way that the proof of (ε, δ) needs.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> trainer = GradGuardTrainer(model, defense="pruning")
        >>> private_rows_of(trainer, False, lambda: [], None) is None
        True
    """
    if not is_proved(trainer.defense):
        return None
    _refuse(trainer, isinstance(trainer.defense, Chain), own_batches)
    if own_batches or trainer.train_dataset is None:
        return None
    args = trainer.args
    rows, ranks = len(trainer.train_dataset), trainer.accelerator.num_processes
    kind = PrivateRows
    if trainer.defense.correlated:
        from .correlated_rows import CorrelatedRows

        kind = CorrelatedRows
    private_rows = kind(
        trainer.defense, args, rows, args.process_index, ranks, clients, account, account_file
    )
    private_rows.is_noise_known = functools.partial(is_noise_known, trainer)
    return private_rows


def _refuse(trainer: Any, chained: bool, own_batches: bool) -> None:
    args = trainer.args
    if chained:
        raise refusal("samples-in-chain")
    if setting(args, "num_clients"):
        raise refusal("samples-with-clients")
    if getattr(args, "include_num_input_tokens_seen", "no") not in (False, "no"):
        raise refusal("samples-with-token-counts")
    if own_batches or trainer.train_dataset is None or is_iterable(trainer.train_dataset):
        if trainer.defense.delta is not None or is_iterable(trainer.train_dataset):
            raise refusal("samples-of-own-batches")
        return
    if getattr(args, "train_sampling_strategy", "random") != "random" or (
        args.accelerator_config.split_batches
    ):
        raise refusal("samples-by-length")
