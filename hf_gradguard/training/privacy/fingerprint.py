"""A fingerprint of a data set's rows, which a run knows by number.

An account adds up by row, a label is randomized by row, and a client has rows. So a resumed run
checks that they are the same rows.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...gradient_map.replay import draws_restored
from ..clients.partition import fetched
from ..refusals import is_of_datasets

MOST = 1024
"""The most rows that are read. In a larger data set they are spread evenly over all rows."""
_TRIED = 8  # so many rows are read twice: a field that differs is drawn at random each time


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python. Call it inside `draws_restored`.

    Example:
        >>> with draws_restored():
        ...     seed_all(3)
        ...     torch.initial_seed()
        3
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def data_fingerprint(data: Any, salt: str) -> str | None:
    """Return a checksum of a data set's rows in their order; `None` if rows have no number.

    Fields that a data set draws at random are left out, unless the global generators decide them.
    All generators stay as they are.

    Args:
        data: The training data.
        salt: The salt of a run. Without it, anybody could compare the checksum with guesses of the
            data.

    Example:
        >>> rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
        >>> data_fingerprint(rows, "run") == data_fingerprint(rows[::-1], "run")
        False
    """
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    if is_of_datasets(data, "Dataset"):
        data = data.with_format(None)  # a transform would turn each row into pixels
    count = len(data)
    numbers = np.unique(np.linspace(0, count - 1, min(count, MOST)).round().astype(int)).tolist()
    digest = hashlib.sha256(f"{salt} {count}".encode())
    with draws_restored():
        random_fields = set[str]()
        for number in numbers[:_TRIED]:
            first_read, second_read = _fields(_row(data, number)), _fields(_row(data, number))
            names = first_read.keys() | second_read.keys()
            random_fields |= {n for n in names if first_read.get(n) != second_read.get(n)}
        for number in numbers:
            for name, content in sorted(_fields(_row(data, number)).items()):
                if name not in random_fields:
                    digest.update(name.encode() + content)
    return digest.hexdigest()


class Fingerprints:
    """A cache that computes `data_fingerprint` once for all checkpoints of a run.

    Example:
        >>> fingerprints, rows = Fingerprints(), [{"text": "a"}]
        >>> fingerprints(rows, "run") == fingerprints(rows, "run") == data_fingerprint(rows, "run")
        True
    """

    def __init__(self) -> None:
        self._last: tuple[Any, str, str | None] = None, "", None

    def __call__(self, data: Any, salt: str) -> str | None:
        """Return the `data_fingerprint` of the data, computed anew only for other arguments.

        Args:
            data: The training data.
            salt: The salt of a run.
        """
        if self._last[0] is not data or self._last[1] != salt:
            self._last = data, salt, data_fingerprint(data, salt)
        return self._last[2]


def _row(data: Any, number: int) -> Any:
    seed_all(number)
    try:
        (row,) = fetched(data, [number])
    except Exception as error:  # training raises the same error when it reads this row
        return type(error).__name__
    return row


def _fields(row: Any) -> dict[str, bytes]:
    """Return a checksum of each of a row's entries, by name."""
    if not isinstance(row, Mapping):
        return {"": _checksum(row)}
    return {str(name): _checksum(value) for name, value in row.items()}


def _checksum(value: Any) -> bytes:
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    """Add a value's content to a digest, or its class if its content has no known form."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(
            f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
        )
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(str(name).encode())
            _feed(digest, value[name])
    elif isinstance(value, list | tuple | np.ndarray):
        plain = all(type(entry) in (int, float, str, bool) for entry in value)
        digest.update(f"[{len(value)}]{value if plain else ''}".encode())
        for entry in () if plain else value:
            _feed(digest, entry)
    elif isinstance(value, str | int | float | bool | bytes | np.generic | None):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # a picture
        digest.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    else:
        digest.update(type(value).__qualname__.encode())
