"""Assignment of a batch's rows to clients.

A rank hosts several clients, or a federation on one data set, of which some clients are drawn each
round.

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

from ...gradient_map.domain import count_rows, domains_in
from ..config import setting
from ..refusals import refusal
from .partition import Rows, fetched, make_partition

CLIENT, SHARE, ROW = "gradguard_client", "gradguard_share", "gradguard_row"
"""Entries of a collated batch: each row's client, that client's share of the round, and which row
of the data set it is.
"""


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


class NumberedRows(Dataset):
    """A data set whose rows know their number.

    Example:
        >>> NumberedRows(["zero", "one"])[1]
        ('one', 1)
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

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


def split(batch: dict[str, Any], num_clients: int) -> list[dict[str, Any]]:
    """Cut a batch by rows into `num_clients` clients.

    The first ones are larger by one row where the batch does not divide.

    Example:
        >>> [len(part["labels"]) for part in split(batch, 2)]
        [1, 1]
    """
    if num_clients == 1:
        return [dict(batch)]
    # All texts in one row: cut by rows, one client would have them all.
    rows = count_rows(batch)
    if rows == 1 and _is_padding_free(batch):
        raise refusal("padding-free")
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    parts_of = torch.arange(rows, device=device).tensor_split(num_clients)
    return [_take(batch, index, rows) for index in parts_of]


def clients_in(
    batch: dict[str, Any],
) -> Iterator[tuple[int, float, Tensor | None, dict[str, Any]]]:
    """Return the clients of a batch of `ClientCollator`.

    Each has its number, its weight in the round, the numbers of its rows in the data set, and its
    rows.

    Example:
        >>> whose = {CLIENT: torch.tensor([5, 0]), SHARE: torch.tensor([0.25, 0.75])}
        >>> rows = {ROW: torch.tensor([3, 8])}
        >>> [found[:3] for found in clients_in({**batch, **whose, **rows})]
        [(0, 0.75, tensor([8])), (5, 0.25, tensor([3]))]
    """
    columns = {key: value for key, value in batch.items() if key not in (CLIENT, SHARE)}
    numbers, shares = batch[CLIENT], batch[SHARE]
    if count_rows(columns) != len(numbers):
        raise refusal("padding-free")
    # In the order of their numbers: messages of one noise_seed come in the same order again.
    for number in numbers.unique():
        index = (numbers == number).nonzero().flatten()
        client_batch = _take(columns, index, len(numbers))
        yield int(number), float(shares[index[0]]), client_batch.pop(ROW, None), client_batch


def _take(batch: dict[str, Any], index: Tensor, rows: int) -> dict[str, Any]:
    """Some rows of a batch; what holds for all of them stays whole."""
    taken = {}
    for key, value in batch.items():
        length = len(value) if isinstance(value, list | tuple) or _dim(value) else 1
        if length == rows:
            chosen = (
                value[index] if isinstance(value, Tensor) else [value[k] for k in index.tolist()]
            )
            taken[key] = chosen
        elif length == 1 or not isinstance(value, Tensor | list | tuple):
            taken[key] = value
        else:
            raise refusal("entries-of-no-row", name=key, entries=length, rows=rows)
    return taken


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _is_padding_free(batch: dict[str, Any]) -> bool:
    """Return whether the row of a batch is several texts.

    Their bounds are given then, or positions begin again.
    """
    positions = batch.get("position_ids")
    restarts = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) < 0).any())
    return restarts or any(key.startswith(("cu_seq_lens", "seq_idx")) for key in batch)


def _data_seed(args: TrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed
