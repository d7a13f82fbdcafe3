"""Which way of drawing rows a Trainer with `dp_sgd(per_sample=True)` has, and where it has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...defenses import Chain
from ...leakage import PrivacyAccount
from ..config import setting
from ..message import Client
from ..refusals import is_iterable
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
        NotImplementedError: Where batches could not be drawn as (ε, δ) takes them to be.

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
    args, say = trainer.args, "GradGuardTrainer does not support dp_sgd with per_sample=True"
    if chained:
        raise NotImplementedError(
            f"{say} in a chain: what stands beside it may look at the data again, and nothing says "
            "that it does not. Use it alone."
        )
    if setting(args, "num_clients"):
        raise NotImplementedError(
            f"{say} with num_clients, which draws clients and a fixed number of their rows. Leave "
            "it out: ranks and clients_per_process have fixed rows of their own here."
        )
    if getattr(args, "include_num_input_tokens_seen", "no") not in (False, "no"):
        raise NotImplementedError(
            f"{say} and include_num_input_tokens_seen: how many tokens a batch has tells of its "
            "rows, and ε does not cover it. Leave it out."
        )
    if own_batches or trainer.train_dataset is None or is_iterable(trainer.train_dataset):
        if trainer.defense.delta is not None or is_iterable(trainer.train_dataset):
            raise NotImplementedError(
                f"{say} and delta where batches are not drawn by the Trainer itself, row by row "
                "from a data set with a length: ε is of Poisson sampling. Leave "
                "get_train_dataloader as it is, or give noise_multiplier without delta, and "
                "account for your own way of drawing batches."
            )
        return
    if getattr(args, "train_sampling_strategy", "random") != "random" or (
        args.accelerator_config.split_batches
    ):
        raise NotImplementedError(
            f"{say} where batches are made by length or split: ε is of rows that are drawn "
            "independently. Leave train_sampling_strategy and split_batches at their defaults."
        )
