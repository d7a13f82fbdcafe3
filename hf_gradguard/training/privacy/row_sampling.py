"""Which way of drawing rows a Trainer with `dp_sgd(per_sample=True)` has, and where it has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...defenses import Chain
from ...leakage import PrivacyAccount
from ..config import setting
from ..message import Client
from ..refusals import is_iterable, refusal
from .account import AccountFile
from .known_seed import is_noise_known
from .private_rows import PrivateRows, is_proved


def private_rows_of(
    trainer: Any,
    own_batches: bool,
    clients: Callable[[], Sequence[Client]],
    account: PrivacyAccount | None,
    account_file: AccountFile | None = None,
) -> PrivateRows | None:
    """What draws and counts the rows of a Trainer whose defense is `dp_sgd` with `per_sample`;
    `None` for all other defenses, and where no rows are drawn here.

    Args:
        trainer: With its `defense`, arguments and data.
        own_batches: Whether its class draws batches in a way of its own.
        clients: As for `PrivateRows`.
        account: Likewise.
        account_file: Likewise.

    Raises:
        UnsupportedError: Where batches could not be drawn as (ε, δ) takes them to be.

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
