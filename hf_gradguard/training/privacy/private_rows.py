"""Differential privacy for the rows of a Trainer's data: batches by Poisson sampling, noise
calibrated to the whole training, and the ε spent so far.

Every client has rows of its own, that no other client has, and draws each of them for each batch
with probability q, independently. So a row changes messages of one client only, by the clipping
bound each. Which rows were drawn nobody else knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather
from torch import nn
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ...defenses import Chain, Defense
from ...defenses.dp import DPSGD, OptimalDPSGD, PrivacyPlan
from ...gradient_map.layers import ROW_ROUNDING
from ...gradient_map.parameters import cache_of
from ...leakage import PrivacyAccount, dp_sgd_noise_multiplier
from ...leakage.differential_privacy import protection_note
from ...randomness import Stream
from ..clients.batches import SampledRow
from ..clients.partition import Rows
from ..config import setting
from ..exchange.start import check_agreed
from ..message import Client, ClientBatch
from .account import AccountFile
from .known_seed import NO_EPSILON, has_known_seed

DUMMY = -1
"""The row that stands in an empty batch, for its shapes: the last one."""


class RowSampler(Sampler[list[SampledRow]]):
    """What it draws at a time is a batch, of one rank after the other.

    Attributes:
        rounds: Batches of a rank in an epoch.
        ranks: How many ranks there are.
    """

    rounds: int
    ranks: int

    def __len__(self) -> int:
        return self.rounds * self.ranks


@dataclass
class PoissonSampler(RowSampler):
    """Batches of every rank in turn, of which a rank draws its own; the others' are left empty.

    Args:
        rows_of_clients: The rows of each client. Client k lives on rank k modulo `ranks`.
        rates: The probability of each client's rows.
        rank: This rank.
        ranks: How many there are.
        rounds: Batches of a rank in an epoch.
        seed: Makes draws reproducible, by anybody. `None`: keys from the operating system.

    Example:
        >>> sampler = PoissonSampler([torch.arange(4).numpy()], [1.0], rank=0, ranks=1, rounds=1)
        >>> [[place.row for place in batch] for batch in sampler]
        [[0, 1, 2, 3]]
    """

    rows_of_clients: Sequence[Rows]
    rates: Sequence[float]
    rank: int
    ranks: int
    rounds: int
    seed: int | None = None
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader, so that seeded epochs differ."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[SampledRow]]:
        stream = Stream()
        if self.seed is not None:
            stream = Stream.from_seeds(self.seed, self.rank, self.epoch, 3)
        share = 1 / len(self.rows_of_clients)
        for _ in range(self.rounds):
            for rank in range(self.ranks):
                if rank != self.rank:
                    yield []
                    continue
                batch = []
                for client in range(rank, len(self.rows_of_clients), self.ranks):
                    client_rows = self.rows_of_clients[client]
                    is_drawn = (
                        stream.uniform((len(client_rows),), dtype=torch.float64)
                        < self.rates[client]
                    )
                    rows = client_rows[is_drawn.numpy()].tolist() or [DUMMY]
                    batch += [SampledRow(row, client, share) for row in rows]
                yield batch


logger = logging.get_logger(__name__)


class PrivateRows(TrainerCallback):
    """Of a Trainer with `dp_sgd(per_sample=True)`.

    Args:
        defense: The one that was asked for.
        args: Training arguments.
        rows: How many the data set has.
        rank: This rank.
        ranks: How many there are.
        clients: Gives the defenses of this rank's clients, which are calibrated when a training
            begins.
        account: Of what was shared so far of this data.
        account_file: Where each message is written down before it is shared.

    Attributes:
        neighbors: In what data sets that ε compares differ, of a row.
        rows_of_clients: On all ranks.
        account: Of this rank's clients, each of which shares as many messages as the others.
        is_noise_known: Says whether any of that noise follows a seed: then no ε is stated.

    Raises:
        ValueError: If a client would have no rows.
    """

    neighbors = "added or removed"

    def __init__(
        self, defense: DPSGD, args: TrainingArguments, rows: int, rank: int, ranks: int,
        clients: Callable[[], Sequence[Client]], account: PrivacyAccount | None = None,
        account_file: AccountFile | None = None,
    ) -> None:  # fmt: skip
        self.defense, self._args, self._rank, self._ranks = defense, args, rank, ranks
        hosted = setting(args, "clients_per_process")
        count = ranks * hosted
        if rows < count:
            raise ValueError(f"{rows} rows of train_dataset are too few for {count} clients.")
        self.rows_of_clients: list[Rows] = [
            np.arange(client, rows, count) for client in range(count)
        ]
        self.batch_size = args.per_device_train_batch_size / hosted
        self._rates = [
            min(1.0, self.batch_size / len(client_rows)) for client_rows in self.rows_of_clients
        ]
        self.rate = max(self._rates)
        self._clients = clients
        self.noise_multiplier = defense.noise_multiplier or defense.client_noise_multiplier
        self.account, self._account_file = account or PrivacyAccount(), account_file
        self.is_noise_known: Callable[[], bool] = lambda: has_known_seed(args)

    def sampler(self) -> RowSampler:
        """Draws the batches of an epoch: as many as would go through all rows once."""
        rounds = math.ceil(min(map(len, self.rows_of_clients)) / self.batch_size)
        seed = setting(self._args, "noise_seed")
        return PoissonSampler(
            self.rows_of_clients, self._rates, self._rank, self._ranks, rounds, seed
        )

    def on_train_begin(
        self, args: TrainingArguments, state: Any, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Find the noise for the messages that are to come, when their number is known."""
        cache_of(model).is_underway = state.global_step > 0
        messages = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        if args.world_size > 1:  # a rank with fewer rows than others draws each more often
            rates = torch.tensor([self.rate], dtype=torch.float64, device=args.device)
            self.rate = float(gather(rates).max())
            self._count_as_others(args.device)
        rounding = self._rounding(args, model)
        if self.defense.noise_multiplier is not None:  # a row moves a sum by more than C then
            self.noise_multiplier = self.defense.noise_multiplier / (1 + rounding)
        if self.defense.target_epsilon is not None:
            assert self.defense.delta is not None  # it was checked with it
            target = self.defense.target_epsilon, self.defense.delta
            if not self._keeps(messages, *target):
                self.noise_multiplier = dp_sgd_noise_multiplier(
                    *target, self.rate, messages, self.account
                )
        multiplier = self.noise_multiplier
        assert multiplier is not None
        if args.world_size > 1:
            hosted = len(self.rows_of_clients) // self._ranks
            agreed = {"the noise multiplier (rows, steps)": multiplier}
            check_agreed(agreed | {"clients_per_process": hosted}, args.device)
        own_multiplier = multiplier * (1 + rounding) / self._messages_of_sum(args)
        own_multiplier *= 1 + rounding_of_rows(self.batch_size)
        self._rounding(args, model)  # refuses noise, known only now, that is too fine
        self._tell_origin(multiplier, self.rate, messages)
        self._plan(PrivacyPlan(own_multiplier, self.batch_size, sampling="poisson"))
        if self._rank == 0:
            self._announce(messages, multiplier)

    def _plan(self, plan: PrivacyPlan) -> None:
        """Give all clients of this rank the mechanism of the plan."""
        for client in self._clients():
            assert isinstance(client.defense, DPSGD)  # private_rows_of saw to it
            client.defense = client.defense.planned(plan)

    def _messages_of_sum(self, args: TrainingArguments) -> float:
        """√n of the n messages that noise is of, if it is of their sum: a rank can take its own out
        of it.
        """
        if setting(args, "noise_for") != "sum":
            return 1.0
        return math.sqrt(len(self.rows_of_clients) - len(self.rows_of_clients) // self._ranks)

    def _rounding(self, args: TrainingArguments, model: nn.Module) -> float:
        """How much further than C a row moves a sum of messages that ranks round before they add
        them up, relative to C. A message by itself is rounded after its noise, which costs nothing.
        """
        if setting(args, "noise_for") != "sum":
            return 0.0
        from ..exchange.secure import rounding_of_sum

        clients = len(self.rows_of_clients) / self._ranks * args.gradient_accumulation_steps
        unit = self.defense.clip / (self.batch_size * clients)  # C in what a rank sends
        least = self.defense.noise_multiplier or self.noise_multiplier or math.inf
        deviation = least * unit / self._messages_of_sum(args)
        return rounding_of_sum(args, model, self._ranks, deviation) / unit

    def _count_as_others(self, device: torch.device) -> None:
        """Ranks share as many messages, but a kill may leave one of them with a record more. The
        account is of settings alone, so ranks may see each other's.
        """
        rows = self.account.state_dict()["messages"]
        length = int(gather(torch.tensor([len(rows)], device=device)).max())
        padded = torch.zeros(length, 3, dtype=torch.float64)
        padded[: len(rows)] = rows
        everyone = gather(padded.to(device)).cpu() if length else padded
        self.account.load_state_dict({"messages": everyone[everyone[:, 0] > 0]})

    def _keeps(self, messages: int, target: float, delta: float) -> bool:
        """Whether a training that goes on keeps its target with the noise that it had."""
        if not self.account.messages:
            return False
        multiplier, rate = list(self.account.messages)[-1]
        if rate != self.rate or self._epsilon_with(multiplier, rate, messages, delta) > target:
            return False
        self.noise_multiplier = multiplier
        return True

    def _epsilon_with(self, multiplier: float, rate: float, messages: int, delta: float) -> float:
        """ε of what was shared so far and of so many messages more."""
        planned = PrivacyAccount(self.account.messages)
        planned.add(multiplier, rate, messages)
        return planned.epsilon(delta)

    def _announce(self, messages: int, multiplier: float) -> None:
        least, most = min(map(len, self.rows_of_clients)), max(map(len, self.rows_of_clients))
        rows = f"{least}" if least == most else f"{least} to {most}"
        text = "dp_sgd with per_sample=True protects one row of the training data"
        if self.is_noise_known():
            text = f"{NO_EPSILON} It would be of one row of the training data"
        elif (delta := self.defense.delta) is not None:
            epsilon = self._epsilon_with(multiplier, self.rate, messages, delta)
            text = (
                f"ε = {epsilon:.4g} at δ = {delta:g} in the end, for one row of the training data, "
                f"{self.neighbors}{protection_note(epsilon)}"
            )
            if delta * most >= 1:
                text += f" (δ is no less than one over {most} rows: it would let a row be shown)"
        logger.warning(
            f"{text}: its gradients in all messages, and not logged losses, evaluation, or other "
            f"rows of the same person. Each of {len(self.rows_of_clients)} clients draws each of "
            f"its {rows} rows with probability {self.rate:.4g} for each of {messages} messages; "
            f"noise multiplier {multiplier:.4g}."
        )

    def count(self, turns: list[ClientBatch]) -> list[ClientBatch]:
        """A step's clients, each of which now shares a message; of an empty batch noise alone."""
        assert self.noise_multiplier is not None
        self._write({"noise_multiplier": self.noise_multiplier, "sampling_rate": self.rate})
        self.account.add(self.noise_multiplier, self.rate)
        return [without_dummy(turn) for turn in turns]

    def _write(self, figures: Mapping[str, Any]) -> None:
        """Write down a message before it leaves, and count what went on elsewhere."""
        if self._account_file is not None:
            for record in self._account_file.write({"messages": 1, **figures}):
                self.account.add(*(record[name] for name in _FIGURES))

    def _tell_origin(self, *figures: float) -> None:
        """Tell the account that a checkpoint is from what this run is to share."""
        if self._account_file is not None:
            self._account_file.tell_origin(dict(zip(_FIGURES, figures, strict=True)))

    def saved_transcript(self) -> dict[str, Any] | None:
        """What a checkpoint has to remember of correlated noise; see `CorrelatedRows`."""
        return None

    def resume(
        self, saved: Mapping[str, Any] | None, records: Iterable[Mapping[str, Any]], is_only: bool
    ) -> None:
        """Take in what a checkpoint has of it, and what left since.

        Args:
            saved: As `saved_transcript` has it.
            records: Of the account of what left, beyond the checkpoint.
            is_only: Whether nobody else goes on with the run.
        """
        if not is_only:
            logger.warning(ELSEWHERE)

    def describe_sampling(self) -> str:
        """For the card: how rows came into messages, and their noise."""
        noise, rates = (
            ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
            for values in zip(*self.account.messages, strict=True)
        )
        return (
            f"Each row's gradient was clipped, and rows were drawn by Poisson sampling (rate "
            f"{rates}): {sum(self.account.messages.values())} messages of each client, noise "
            f"multiplier {noise}."
        )

    @property
    def epsilon(self) -> float | None:
        """ε of what was shared so far, if a δ is set and nobody knows the noise."""
        if self.defense.delta is None or self.is_noise_known():
            return None
        return self.account.epsilon(self.defense.delta)

    def metrics(self) -> dict[str, float]:
        """For the log."""
        return {} if self.epsilon is None else {"defense/epsilon": self.epsilon}


ELSEWHERE = (
    "The account of this run is not where the run wrote it: it goes on in another folder or on "
    "another machine, or its files were copied or restored. What was shared from the same "
    "checkpoint after that and is not in the accounts here adds to ε, and cannot be counted."
)


def rounding_of_rows(batch_size: float) -> float:
    """Bounds how much further than C a row moves a sum of rows that each float32 rounds, relative
    to C. Noise is larger by as much.

    A row adds what it adds whatever stands beside it, but for the last bits: kernels, and the order
    in which rows are summed up, are chosen by how many there are. Of rows that are drawn one by one
    more than are counted here come with a probability below 1e-16.

    Args:
        batch_size: Rows of a message on average.

    Example:
        >>> round(rounding_of_rows(1000), 4)
        0.0099
    """
    return ROW_ROUNDING * (batch_size + 8 * math.sqrt(batch_size) + 40)


def without_dummy(turn: ClientBatch) -> ClientBatch:
    """Return the same; with no rows where the only one stands there for its shapes, so that the
    message is noise alone.
    """
    is_dummy = turn.rows is not None and bool((turn.rows == DUMMY).any())
    return turn._replace(rows=turn.rows[:0]) if is_dummy else turn  # type: ignore[index]


def resume_epsilon(
    account: PrivacyAccount,
    saved: Sequence[Sequence[float]],
    records: Iterable[Mapping[str, Any]],
) -> None:
    """Count what a checkpoint has, and what left after it. What the account has counted beyond that
    stays.

    Args:
        account: Of this process.
        saved: (noise multiplier, sampling rate, messages) of the checkpoint.
        records: Of the account of what left.

    Example:
        >>> account = PrivacyAccount()
        >>> record = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "messages": 1}
        >>> resume_epsilon(account, [[1.0, 0.1, 4]], [record])
        >>> account.messages
        {(1.0, 0.1): 5}
    """
    resumed = PrivacyAccount()
    for multiplier, rate, messages in saved:
        resumed.add(multiplier, rate, int(messages))
    for record in records:
        if "noise_multiplier" in record:
            resumed.add(*(record[name] for name in _FIGURES))
    account.load_state_dict(resumed.state_dict())


def log_protection(defense: Defense) -> None:
    """Log what was recovered behind each defense of a chain, a line each and once a process, and
    what `dp_sgd` without `per_sample` protects, where its name promises more.

    Example:
        >>> log_protection(make_defense("dp_sgd", scale=0.1))
    """
    from ...defenses.measured import recovered_behind

    for link in chained_defenses(defense):
        if is_client_level(link):
            logger.warning_once(CLIENT_LEVEL.format(link.name))
        if link.name != "none" and (recovered := recovered_behind(link)):
            logger.warning_once(f"Known of {link.name}: {recovered}. Stronger attacks find more.")


def is_client_level(defense: Defense) -> bool:
    """Whether a defense of DP's name clips a client's gradient as a whole.

    Example:
        >>> is_client_level(make_defense("dp_sgd", scale=0.1))
        True
    """
    if isinstance(defense, DPSGD):
        return not (defense.per_sample or defense.correlated)
    return isinstance(defense, OptimalDPSGD)


CLIENT_LEVEL = (
    "{} is client-level noise: it clips a client's batch gradient as a whole, so no (ε, δ) of a "
    "row follows, and none is stated. For one row of the data take dp_sgd with per_sample=True."
)
_FIGURES = ("noise_multiplier", "sampling_rate", "messages")


def is_proved(defense: Defense) -> bool:
    """Whether a defense proves something of whole trainings, for rows or for what is clipped as a
    whole.

    Example:
        >>> is_proved(make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0))
        True
    """
    links = chained_defenses(defense)
    return any(getattr(link, n, False) for link in links for n in ("per_sample", "correlated"))


def chained_defenses(defense: Defense) -> Iterator[Defense]:
    if isinstance(defense, Chain):
        yield from chained_defenses(defense.first)
        yield from chained_defenses(defense.second)
    else:
        yield defense
