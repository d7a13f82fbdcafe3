"""Partitions of one data set's rows among clients.

Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..refusals import is_of_datasets

Rows = np.ndarray


def partition_iid(rows: int, num_clients: int, generator: np.random.Generator) -> list[Rows]:
    """Return rows in random order, cut into parts whose sizes differ by one at most.

    Args:
        rows: The number of rows.
        num_clients: The number of parts.
        generator: The source of all randomness.

    Returns:
        The numbers of each client's rows, sorted.

    Example:
        >>> [len(part) for part in partition_iid(10, 3, np.random.default_rng(0))]
        [4, 3, 3]
    """
    return [
        np.sort(client_rows)
        for client_rows in np.array_split(generator.permutation(rows), num_clients)
    ]


def partition_dirichlet(
    labels: Sequence[int] | Rows, num_clients: int, alpha: float, generator: np.random.Generator
) -> list[Rows]:
    """Divide the rows of each class among clients in proportions p ~ Dirichlet(α, …, α).

    The proportions are drawn for every class anew.

    Args:
        labels: The class ids, `(n,)`.
        num_clients: The number of parts.
        alpha: The concentration α > 0. If it is small, a class is on few clients. If it is large,
            parts are as good as equal.
        generator: The source of all randomness.

    Returns:
        The numbers of each client's rows, sorted. Clients differ in size; some can be empty.

    Example:
        >>> parts = partition_dirichlet([0, 1] * 50, 4, 0.5, np.random.default_rng(0))
        >>> sum(len(part) for part in parts)
        100
    """
    labels = np.asarray(labels)
    rows_of_clients: list[list[Rows]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(generator.dirichlet([alpha] * num_clients))
        for client_rows, share in zip(
            rows_of_clients, np.split(rows, np.rint(ends[:-1] * len(rows)).astype(int)), strict=True
        ):
            client_rows.append(share)
    return [np.sort(np.concatenate(client_rows)) for client_rows in rows_of_clients]


def make_partition(
    data: Any, num_clients: int, partition: str, alpha: float, seed: int
) -> list[Rows]:
    """Return the rows of each client of a data set.

    Raises:
        ValueError: If the data set has no length, no class labels where those are needed, or a
            client would have no rows.

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
        rows_of_clients = partition_iid(len(data), num_clients, generator)
    else:
        rows_of_clients = partition_dirichlet(class_labels(data), num_clients, alpha, generator)
    empty = [client for client, client_rows in enumerate(rows_of_clients) if not len(client_rows)]
    if empty:
        raise ValueError(
            f"Of {num_clients} clients {len(empty)} would have no rows of {len(data)} (the first "
            f"is client {empty[0]}). Take fewer clients, a larger dirichlet_alpha, or another "
            "data_seed."
        )
    return rows_of_clients


def class_labels(data: Any) -> Rows:
    """Return the class ids of a data set's rows, from its column `labels` or `label`.

    Raises:
        ValueError: If there is no such column, or it holds no whole numbers.

    Example:
        >>> class_labels([{"label": 2}, {"label": 0}])
        array([2, 0])
    """
    if is_of_datasets(data, "Dataset"):
        names = data.column_names
        columns = data.with_format(None)  # without what makes pixels of each row
        labels = next(
            (np.asarray(columns[name]) for name in ("labels", "label") if name in names), None
        )
    else:
        names = sorted(data[0]) if len(data) else []
        labels = next(
            (
                np.asarray([row[name] for row in data])
                for name in ("labels", "label")
                if name in names
            ),
            None,
        )
    if labels is None or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"partition='dirichlet' divides by class, but the rows of {names} have no class ids "
            "(whole numbers) called `labels` or `label`. Rename the column, or take "
            "partition='iid'."
        )
    return labels


def fetched(data: Any, rows: list[int]) -> Sequence[Any]:
    """Return rows of a data set, all at once where the data set can.

    A negative number stands for the shapes of an empty batch, and gives the last row.

    Example:
        >>> fetched(["zero", "one", "two"], [2, 0])
        ['two', 'zero']
    """
    rows = [row if row >= 0 else len(data) + row for row in rows]
    fetch = getattr(data, "__getitems__", None)
    return fetch(rows) if fetch and rows else [data[row] for row in rows]
