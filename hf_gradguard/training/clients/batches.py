"""Samplers and collators: the rows that make a batch, and how it says whose they are.

A rank hosts several clients, or a federation on one data set, of which some clients are drawn each
round. Rows behind a proof are drawn one by one, or in a fixed order.

Clients are weighted by size as in McMahan et al., "Communication-Efficient Learning of Deep
Networks from Decentralized Data" (2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import TrainingArguments

from ...gradient_map.domain import domains_in
from ...randomness import Stream
from ..config import setting
from ..refusals import refusal
from .partition import Rows, fetched, make_partition

CLIENT, SHARE, ROW = "gradguard_client", "gradguard_share", "gradguard_row"
"""Entries of a collated batch: each row's client, that client's share of the round, and which row
of the data set it is.
"""
DUMMY = -1
"""The row that stands in an empty batch, for its shapes: the last one."""


class SampledRow(NamedTuple):
    """A place of a batch: a row, its client, and that client's weight.

    The row is `None` where the client has no more.
    """

    row: int | None
    client: int
    share: float


@dataclass
class ClientSampler(Sampler[SampledRow]):
    """Rounds of clients, drawn anew each round, the same on every rank for one seed and epoch.

    Client k lives on rank k modulo `ranks`, so that its state stays in one place. In a round every
    rank draws `per_rank` of its clients, and each of those draws `batch_size` of its own rows, or
    takes all that it has if those are fewer. A client's weight is its number of rows over that of
    all clients drawn in the round.

    Args:
        rows_of_clients: The rows of each client.
        per_rank: The number of clients a rank draws in a round.
        batch_size: The number of rows a client draws in a round.
        ranks: The number of ranks.
        seed: The seed of all draws.
        epoch: The number of the epoch, which changes the draws.

    Yields:
        `ranks` × `per_rank` × `batch_size` places a round, rank by rank and client by client. An
            epoch has as many rounds as it takes to draw as many rows as there are.

    Example:
        >>> halves = [np.arange(0, 4), np.arange(4, 8)]
        >>> [len(halves[place.client]) for place in ClientSampler(halves, per_rank=1, batch_size=4)]
        [4, 4, 4, 4, 4, 4, 4, 4]
    """

    rows_of_clients: Sequence[Rows]
    per_rank: int
    batch_size: int
    ranks: int = 1
    seed: int = 0
    epoch: int = 0

    @property
    def rounds(self) -> int:
        """The number of rounds in an epoch, at least one."""
        return max(
            1, sum(map(len, self.rows_of_clients)) // (self.ranks * self.per_rank * self.batch_size)
        )

    def __len__(self) -> int:
        return self.rounds * self.ranks * self.per_rank * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as the data loader does, so that epochs differ.

        A resumed run continues with the right one.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[SampledRow]:
        # The same on every rank, without any exchange: all need each round's total.
        generator = np.random.default_rng([self.seed, self.epoch])
        hosted = [
            np.arange(rank, len(self.rows_of_clients), self.ranks) for rank in range(self.ranks)
        ]
        for _ in range(self.rounds):
            sampled = [
                int(k)
                for candidates in hosted
                for k in generator.choice(candidates, self.per_rank, replace=False)
            ]
            total = sum(len(self.rows_of_clients[k]) for k in sampled)
            for client in sampled:
                candidates, share = (
                    self.rows_of_clients[client],
                    len(self.rows_of_clients[client]) / total,
                )
                rows = generator.choice(
                    candidates, min(self.batch_size, len(candidates)), replace=False
                )
                yield from (SampledRow(int(row), client, share) for row in rows)
                # Ranks read the sampler in turn, so every client takes up as many places.
                yield from [SampledRow(None, client, share)] * (self.batch_size - len(rows))


class RowSampler(Sampler[list[SampledRow]]):
    """A sampler of whole batches, of one rank after the other.

    Attributes:
        rounds: The number of batches of a rank in an epoch.
        ranks: The number of ranks.
    """

    rounds: int
    ranks: int

    def __len__(self) -> int:
        return self.rounds * self.ranks


@dataclass
class PoissonSampler(RowSampler):
    """A sampler that puts each row into each batch by a draw of its own.

    Batches of every rank come in turn. A rank draws its own, and leaves the others' empty.

    Args:
        rows_of_clients: The rows of each client. Client k lives on rank k modulo `ranks`.
        rates: The probability of each client's rows.
        rank: The number of this rank.
        ranks: The number of ranks.
        rounds: The number of batches of a rank in an epoch.
        seed: A seed that makes draws reproducible, by anybody. `None`: keys from the operating
            system.
        epoch: The number of the epoch, which changes the draws of a seed.

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
        """Set the epoch, as the data loader does, so that seeded epochs differ."""
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


class FixedOrderSampler(RowSampler):
    """A sampler of batches in a fixed order, pass after pass.

    Args:
        batch_at: The function that returns the rows of this rank's clients at a batch of a pass.
        rank: The number of this rank.
        ranks: The number of ranks.
        rounds: The number of batches of a rank in a pass.

    Example:
        >>> row_at = lambda place: [SampledRow(place, 0, 1.0)]
        >>> batches = FixedOrderSampler(row_at, 0, ranks=1, rounds=2)
        >>> [[sampled.row for sampled in batch] for batch in batches]
        [[0], [1]]
    """

    def __init__(
        self, batch_at: Callable[[int], list[SampledRow]], rank: int, ranks: int, rounds: int
    ) -> None:
        self._batch_at, self._rank, self.ranks, self.rounds = batch_at, rank, ranks, rounds

    def __iter__(self) -> Iterator[list[SampledRow]]:
        for place in range(self.rounds):
            for rank in range(self.ranks):
                yield self._batch_at(place) if rank == self._rank else []


class ClientRows(Dataset):
    """A data set that is read by `SampledRow`.

    Example:
        >>> ClientRows(["zero", "one"])[SampledRow(row=1, client=5, share=0.5)][0]
        'one'
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: SampledRow) -> tuple[Any, SampledRow]:
        return (None if place.row is None else self.data[place.row]), place

    def __getitems__(self, places: list[Any]) -> list[tuple[Any, SampledRow]]:
        """Return the rows of a batch, at once.

        Where sizes vary, the sampler draws the batch whole.
        """
        if isinstance(places[0], list):
            (places,) = places
        rows = iter(fetched(self.data, [place.row for place in places if place.row is not None]))
        return [(None if place.row is None else next(rows), place) for place in places]


@dataclass
class ClientCollator:
    """A collator that leaves empty places out, and adds whose the rows are.

    It collates as `collate` does. `check` sees the rows before.

    Example:
        >>> places = [({"labels": 1}, SampledRow(3, 5, 0.5)), (None, SampledRow(None, 5, 0.5))]
        >>> ClientCollator(lambda rows: {"labels": [row["labels"] for row in rows]})(places)
        {'labels': [1], 'gradguard_client': tensor([5]), ..., 'gradguard_row': tensor([3])}
    """

    collate: Callable[[list[Any]], dict[str, Any]]
    check: Callable[[list[int]], None] | None = None

    def __call__(self, places: list[Any]) -> dict[str, Any]:
        filled = [(row, place) for row, place in places if place.row is not None]
        if self.check is not None:
            self.check([place.row for _, place in filled if place.row >= 0])
        batch = dict(self.collate([row for row, _ in filled]))
        batch[CLIENT] = torch.tensor([place.client for _, place in filled])
        batch[SHARE] = torch.tensor([place.share for _, place in filled])
        batch.setdefault(ROW, torch.tensor([place.row for _, place in filled]))
        return batch


@dataclass
class WholeCollator:
    """A collator that refuses batches with more than one row of an example.

    It collates as `collate` does. With several rows of one example nothing would say which rows
    belong together.

    Example:
        >>> answers = WholeCollator(lambda rows: {"input_ids": torch.zeros(2 * len(rows), 3)})
        >>> answers(["one", "two"])
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: A batch has 4 rows of 2 examples, ...
    """

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = self.collate(examples)
        domains = domains_in(batch) if isinstance(batch, dict) else []
        rows = batch[domains[0].key] if domains else None
        if isinstance(rows, Tensor) and rows.dim() and len(rows) > len(examples):
            raise refusal("rows-of-one-example", rows=len(rows), examples=len(examples))
        return batch


class PlainRows(Dataset):
    """The rows of a table of the library `datasets`, without the table.

    Example:
        >>> PlainRows(["zero", "one"])[1]
        'one'
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        return self.data[row]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return list(fetched(self.data, rows))


class NumberedRows(PlainRows):
    """A data set whose rows know their number.

    Example:
        >>> NumberedRows(["zero", "one"])[1]
        ('one', 1)
    """

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.data[row], row

    def __getitems__(self, rows: list[int]) -> list[tuple[Any, int]]:
        return list(zip(fetched(self.data, rows), rows, strict=True))


@dataclass
class NumberedCollator:
    """A collator that adds the rows' numbers in the data set, unless `collate` added them.

    Example:
        >>> NumberedCollator(lambda rows: {"labels": rows})([("zero", 0), ("one", 1)])
        {'labels': ['zero', 'one'], 'gradguard_row': tensor([0, 1])}
    """

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, numbered: list[tuple[Any, int]]) -> dict[str, Any]:
        batch = dict(self.collate([row for row, _ in numbered]))
        batch.setdefault(ROW, torch.tensor([number for _, number in numbered]))
        return batch


def divide(data: Any, args: TrainingArguments, ranks: int) -> list[Rows]:
    """Return the rows of each of `args.num_clients` clients.

    The result is empty without that argument or without data.

    Raises:
        ValueError: If the ranks cannot host equally many clients, or as for `make_partition`.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> parts = divide([{"labels": 0}] * 8, GradGuardConfig("out", num_clients=4), ranks=2)
        >>> [len(part) for part in parts]
        [2, 2, 2, 2]
    """
    count = setting(args, "num_clients")
    if count is None or data is None:
        return []
    if count % ranks or count // ranks < args.clients_per_process:
        raise ValueError(
            f"num_clients={count} must be a multiple of the {ranks} ranks they live on, and at "
            f"least clients_per_process={args.clients_per_process} of them on each."
        )
    return make_partition(data, count, args.partition, args.dirichlet_alpha, _data_seed(args))


def round_sampler(
    rows_of_clients: Sequence[Rows], args: TrainingArguments, ranks: int
) -> ClientSampler:
    """Return the sampler of rounds of the clients that `divide` made.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> args = GradGuardConfig("out", num_clients=2, per_device_train_batch_size=4)
        >>> len(round_sampler([np.arange(4), np.arange(4, 8)], args, ranks=1))
        8
    """
    per_client = args.per_device_train_batch_size // args.clients_per_process
    return ClientSampler(
        rows_of_clients, args.clients_per_process, per_client, ranks, _data_seed(args)
    )


def _data_seed(args: TrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed
