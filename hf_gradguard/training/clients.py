"""Whose a batch is: clients of a rank, and a federation on one data set, of which some clients are
drawn each round.

Partitions as in Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification" (2019); weights by size as in McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import TrainingArguments

from ..defenses import Defense
from ..gradient_map.domain import domain_of_batch

PARTITIONS = ("iid", "dirichlet")
CLIENT, SHARE = "gradguard_client", "gradguard_share"
"""Entries of a collated batch: each row's client, and that client's share of the round."""

Rows = np.ndarray


def partition_iid(rows: int, num_clients: int, generator: np.random.Generator) -> list[Rows]:
    """Rows in random order, cut into parts that differ by one at most.

    Args:
        rows: How many there are.
        num_clients: How many parts.
        generator: Source of all randomness.

    Returns:
        The numbers of each client's rows, sorted.

    Example:
        >>> [len(part) for part in partition_iid(10, 3, np.random.default_rng(0))]
        [4, 3, 3]
    """
    return [np.sort(part) for part in np.array_split(generator.permutation(rows), num_clients)]


def partition_dirichlet(
    labels: Sequence[int] | Rows, num_clients: int, alpha: float, generator: np.random.Generator
) -> list[Rows]:
    """The rows of each class divided among clients in proportions p ~ Dirichlet(α, …, α), drawn for
    every class anew.

    Args:
        labels: `(n,)` class ids.
        num_clients: How many parts.
        alpha: α > 0. Small: a class is on few clients. Large: as good as equal parts.
        generator: Source of all randomness.

    Returns:
        The numbers of each client's rows, sorted. Clients differ in size; some can be empty.

    Example:
        >>> parts = partition_dirichlet([0, 1] * 50, 4, 0.5, np.random.default_rng(0))
        >>> sum(len(part) for part in parts)
        100
    """
    labels = np.asarray(labels)
    parts: list[list[Rows]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(generator.dirichlet([alpha] * num_clients))
        for part, own in zip(
            parts, np.split(rows, np.rint(ends[:-1] * len(rows)).astype(int)), strict=True
        ):
            part.append(own)
    return [np.sort(np.concatenate(part)) for part in parts]


class Pick(NamedTuple):
    """One place of a batch: a row (`None` where the client has no more), its client, and that
    client's share.
    """

    row: int | None
    client: int
    share: float


@dataclass
class ClientSampler(Sampler[Pick]):
    """Rounds of clients, drawn anew each round: the same on every rank for one seed and epoch.

    Client k lives on rank k modulo `ranks`, so that what it remembers stays in one place. In a
    round every rank draws `per_rank` of its clients, and each of those `batch_size` of its own
    rows, or all that it has if those are fewer. A client's share is its number of rows over that of
    all clients drawn in the round.

    Args:
        parts: The rows of each client.
        per_rank: Clients a rank and round.
        batch_size: Rows a client and round.
        ranks: How many ranks there are.
        seed: Of all draws.

    Yields:
        `ranks` × `per_rank` × `batch_size` places a round, rank by rank and client by client. An
        epoch has as many rounds as it takes to draw as many rows as there are.

    Example:
        >>> halves = [np.arange(0, 4), np.arange(4, 8)]
        >>> [len(halves[pick.client]) for pick in ClientSampler(halves, per_rank=1, batch_size=4)]
        [4, 4, 4, 4, 4, 4, 4, 4]
    """

    parts: Sequence[Rows]
    per_rank: int
    batch_size: int
    ranks: int = 1
    seed: int = 0
    epoch: int = 0

    @property
    def rounds(self) -> int:
        """Rounds an epoch, at least one."""
        return max(1, sum(map(len, self.parts)) // (self.ranks * self.per_rank * self.batch_size))

    def __len__(self) -> int:
        return self.rounds * self.ranks * self.per_rank * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader, so that epochs differ and a resumed run goes on with the right
        one.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[Pick]:
        generator = np.random.default_rng([self.seed, self.epoch])
        hosted = [np.arange(rank, len(self.parts), self.ranks) for rank in range(self.ranks)]
        for _ in range(self.rounds):
            drawn = [
                int(k)
                for own in hosted
                for k in generator.choice(own, self.per_rank, replace=False)
            ]
            whole = sum(len(self.parts[k]) for k in drawn)
            for client in drawn:
                own, share = self.parts[client], len(self.parts[client]) / whole
                rows = generator.choice(own, min(self.batch_size, len(own)), replace=False)
                yield from (Pick(int(row), client, share) for row in rows)
                yield from [Pick(None, client, share)] * (self.batch_size - len(rows))


class ClientRows(Dataset):
    """A data set read by `Pick`.

    Example:
        >>> ClientRows(["zero", "one"])[Pick(row=1, client=5, share=0.5)][0]
        'one'
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, pick: Pick) -> tuple[Any, Pick]:
        return (None if pick.row is None else self.data[pick.row]), pick


@dataclass
class ClientCollator:
    """Collates as `collate` does, leaves empty places out, and says whose the rows are.

    Example:
        >>> places = [({"labels": 1}, Pick(3, 5, 0.5)), (None, Pick(None, 5, 0.5))]
        >>> ClientCollator(lambda rows: {"labels": [row["labels"] for row in rows]})(places)
        {'labels': [1], 'gradguard_client': tensor([5]), 'gradguard_share': tensor([0.5000])}
    """

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, places: list[tuple[Any, Pick]]) -> dict[str, Any]:
        filled = [(row, pick) for row, pick in places if pick.row is not None]
        batch = dict(self.collate([row for row, _ in filled]))
        batch[CLIENT] = torch.tensor([pick.client for _, pick in filled])
        batch[SHARE] = torch.tensor([pick.share for _, pick in filled])
        return batch


def make_partition(
    data: Any, num_clients: int, partition: str, alpha: float, seed: int
) -> list[Rows]:
    """The rows of each client of a data set.

    Raises:
        ValueError: If it has no length, no class labels where those are needed, or a client would
            have no rows.

    Example:
        >>> data = [{"labels": row % 2} for row in range(8)]
        >>> len(make_partition(data, 2, "dirichlet", alpha=10.0, seed=0))
        2
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(
            "num_clients needs a train_dataset with a length whose rows can be read in any order."
        )
    generator = np.random.default_rng(seed)
    if partition == "iid":
        parts = partition_iid(len(data), num_clients, generator)
    else:
        parts = partition_dirichlet(class_labels(data), num_clients, alpha, generator)
    empty = [client for client, part in enumerate(parts) if not len(part)]
    if empty:
        raise ValueError(
            f"Of {num_clients} clients {len(empty)} would have no rows of {len(data)} (the first "
            f"is client {empty[0]}). Take fewer clients, a larger dirichlet_alpha, or another "
            "data_seed."
        )
    return parts


def class_labels(data: Any) -> Rows:
    """The class ids of a data set's rows, from its column `labels` or `label`.

    Raises:
        ValueError: If there is no such column, or it holds no whole numbers.

    Example:
        >>> class_labels([{"label": 2}, {"label": 0}])
        array([2, 0])
    """
    if isinstance(data, datasets.Dataset):
        names, column = (
            data.column_names,
            data.with_format(None),
        )  # without what makes pixels of each row
        found = next(
            (np.asarray(column[name]) for name in ("labels", "label") if name in names), None
        )
    else:
        names = sorted(data[0]) if len(data) else []
        found = next(
            (
                np.asarray([row[name] for row in data])
                for name in ("labels", "label")
                if name in names
            ),
            None,
        )
    if found is None or found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"partition='dirichlet' divides by class, but the rows of {names} have no class ids "
            "(whole numbers) called `labels` or `label`. Rename the column, or take "
            "partition='iid'."
        )
    return found


def divide(data: Any, args: TrainingArguments, ranks: int) -> list[Rows]:
    """The rows of each of `args.num_clients` clients; nothing without that argument or data.

    Raises:
        ValueError: If the ranks cannot host them alike, or as for `make_partition`.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> parts = divide([{"labels": 0}] * 8, GradGuardConfig("out", num_clients=4), ranks=2)
        >>> [len(part) for part in parts]
        [2, 2, 2, 2]
    """
    count = getattr(args, "num_clients", None)
    if count is None or data is None:
        return []
    if count % ranks or count // ranks < args.clients_per_process:
        raise ValueError(
            f"num_clients={count} must be a multiple of the {ranks} ranks they live on, and at "
            f"least clients_per_process={args.clients_per_process} of them on each."
        )
    return make_partition(data, count, args.partition, args.dirichlet_alpha, _data_seed(args))


def round_sampler(parts: Sequence[Rows], args: TrainingArguments, ranks: int) -> ClientSampler:
    """Draws rounds of the clients that `divide` made.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> args = GradGuardConfig("out", num_clients=2, per_device_train_batch_size=4)
        >>> len(round_sampler([np.arange(4), np.arange(4, 8)], args, ranks=1))
        8
    """
    own = args.per_device_train_batch_size // args.clients_per_process
    return ClientSampler(parts, args.clients_per_process, own, ranks, _data_seed(args))


class ClientBatch(NamedTuple):
    """What one client computes a message of.

    Args:
        defense: The client's own.
        batch: Its rows.
        weight: Of its mean loss in the loss of the step; 0 if nothing in the batch counts.
    """

    defense: Defense
    batch: dict[str, Any]
    weight: float


def split(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Cut a batch by rows into `parts` clients, the first ones larger by one row where it does not
    divide.

    Example:
        >>> [len(part["labels"]) for part in split(batch, 2)]
        [1, 1]
    """
    if parts == 1:
        return [dict(batch)]
    rows = domain_of_batch(batch).main_input(batch)
    parts_of = torch.arange(len(rows), device=rows.device).tensor_split(parts)
    return [_take(batch, index, len(rows)) for index in parts_of]


def drawn(batch: dict[str, Any]) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """The clients of a batch of `ClientCollator`: number, share of the round, and rows of each.

    Example:
        >>> whose = {CLIENT: torch.tensor([5, 0]), SHARE: torch.tensor([0.25, 0.75])}
        >>> [(number, share) for number, share, _ in drawn({**batch, **whose})]
        [(0, 0.75), (5, 0.25)]
    """
    rest = {key: value for key, value in batch.items() if key not in (CLIENT, SHARE)}
    numbers, shares = batch[CLIENT], batch[SHARE]
    for number in numbers.unique():
        index = (numbers == number).nonzero().flatten()
        yield int(number), float(shares[index[0]]), _take(rest, index, len(numbers))


def _take(batch: dict[str, Any], index: Tensor, rows: int) -> dict[str, Any]:
    """Some rows of a batch; what is not of one entry a row stays whole."""
    return {
        key: value[index]
        if isinstance(value, Tensor) and value.dim() and len(value) == rows
        else value
        for key, value in batch.items()
    }


def _data_seed(args: TrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed
