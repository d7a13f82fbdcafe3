"""Checks whether rows are coupled before the model sees them.

(ε, δ) holds for a sum in which each row has one bounded term. A collator that mixes rows, or
subtracts the batch's mean, lets one row change the terms of all others, and no clipping of samples
bounds that. So a row's tensors beside other rows are compared with its tensors without them, at the
start of a training and from time to time.

A collator may draw random numbers, as for the masks of a language model. Then a row alone has other
draws than in a batch. So the other rows are exchanged instead: copies of one row take their place,
under the same draws. If the generators end in the same state, the draws were the same, and the
other rows cause any difference.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...gradient_map.replay import DrawState, draws_restored
from ..clients.partition import fetched
from ..refusals import refusal
from .fingerprint import seed_all

logger = logging.get_logger(__name__)

EARLY_BATCHES, LATER_INTERVAL = 4, 100
"""The number of batches that are checked at first, and the interval of those that are later."""
_STATES = 4  # a collator that draws is checked under so many states of the generators
_HITS = 2  # rows must be coupled under so many states: in one, other draws may end in the same
_REPEATS = 3  # the batch is made again so often before anything is refused


class CouplingCheck:
    """A check whether rows are coupled by how they are read and collated.

    Nothing changes for the training. All generators are put back. A copy of the collator is tried,
    so that its own counts and draws stay as they are.

    Args:
        data: The training data.
        collate: The collator, which makes a batch of rows.

    Example:
        >>> rows = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([5.0])}]
        >>> def centered(rows):
        ...     x = torch.stack([row["x"] for row in rows])
        ...     return {"x": x - x.mean(0)}
        >>> CouplingCheck(rows, centered)([0, 1])
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... with per_sample=True where rows are ...
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self._data, self._collate = data, collate
        self._batches = 0

    def __call__(self, numbers: list[int]) -> None:
        """Check a batch of rows, if one is due.

        Args:
            numbers: The numbers of the batch's rows in the data set.

        Raises:
            NotImplementedError: If another row changes the tensors of one of them.
        """
        distinct = list(dict.fromkeys(numbers))
        if len(distinct) < 2:
            return
        is_due = self._batches < EARLY_BATCHES or self._batches % LATER_INTERVAL == 0
        self._batches += 1
        if is_due:
            with draws_restored():
                self._look(distinct)

    def _look(self, numbers: list[int]) -> None:
        longest = numbers[int(np.argmax([_size(row) for row in fetched(self._data, numbers)]))]
        start = self._batches % len(numbers)
        for number in dict.fromkeys([numbers[start], numbers[start - 1], longest]):
            others = [n for n in numbers if n != number]
            # In front, its draws are the same if rows draw one after the other. At the end, a
            # collator may have added something of the rows before.
            for place, rows in ((0, [number, *others]), (-1, [*others, number])):
                copies = [n if n == longest else number for n in rows]
                if name := self._coupled(rows, copies, place):
                    raise refusal("coupled-rows", fault=CHANGES.format(name))

    def _coupled(self, rows: list[int], copies: list[int], place: int) -> str:
        """Return the entry in which a row is coupled to the others; an empty text if none is.

        Args:
            rows: The numbers of the rows.
            copies: The same numbers, with copies of that row in the place of all others but the
                longest, which decides how many numbers are drawn.
            place: The place of the row.
        """
        hits = []
        for attempt in range(_STATES):
            if attempt:
                seed_all(self._batches + attempt)
            state, name = DrawState.now(), ""
            batch, end, draws = self._collate_rows(rows, state)
            if not draws:
                alone, _, _ = self._collate_rows([rows[place]], state)
                name = different(batch, alone, place, len(rows), in_place=False)
            if not name:  # a collator may still pad rows with content of other rows
                exchanged, exchanged_end, _ = self._collate_rows(copies, state)
                if end != exchanged_end:
                    continue  # the draws differed, so a difference would show nothing
                name = different(batch, exchanged, place, len(rows), in_place=True)
            if name and self._is_replayed(rows, state, batch):
                hits.append(name)
            if not draws or len(hits) == _HITS:
                return hits[0] if hits else ""
        return ""

    def _is_replayed(self, rows: list[int], state: DrawState, batch: Mapping[str, Any]) -> bool:
        """Return whether the same rows under the same draws give the same batch again."""
        for _ in range(_REPEATS):
            replayed, _, _ = self._collate_rows(rows, state)
            if any(
                different(batch, replayed, place, len(rows), True) for place in range(len(rows))
            ):
                logger.warning_once(_NOT_REPLAYED)
                return False
        return True

    def _collate_rows(
        self, numbers: list[int], state: DrawState
    ) -> tuple[Mapping[str, Any], Any, bool]:
        """Return a batch, the generators' states after it, and whether anything was drawn."""
        state.restore()
        try:
            return collate_watched(copied(self._collate), list(fetched(self._data, numbers)))
        except Exception as error:
            error.add_note(ALONE)
            raise


def copied(collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a collator, which shares its models and tokenizers.

    Counts and draws of the copy leave the collator as it is.

    Example:
        >>> copied(list)([1])
        [1]
    """
    return copy.deepcopy(collate, _kept_whole(collate))


def collate_watched(
    collate: Callable[..., Mapping[str, Any]], rows: list[Any]
) -> tuple[Mapping[str, Any], Any, bool]:
    """Return a batch, the generators' states after it, and whether anything was drawn.

    Args:
        collate: The collator.
        rows: The rows of the batch.

    Example:
        >>> collate_watched(lambda rows: {"x": rows}, [1])[::2]
        ({'x': [1]}, False)
    """
    start, states_at_start = DrawState.now().plain(), _states(collate)
    batch = collate(rows)
    end, states = DrawState.now().plain(), _states(collate)
    return batch, (end, states), end != start or states != states_at_start


def different(
    batch: Mapping[str, Any], exchanged: Mapping[str, Any], place: int, rows: int, in_place: bool
) -> str:
    """Return the first entry in which a row differs between two batches, apart from padding.

    It is an empty text if there is no such entry.

    Args:
        batch: A batch with the row.
        exchanged: A batch with the row beside other rows, or alone.
        place: The place of the row in `batch`.
        rows: The number of rows of `batch`.
        in_place: Whether the row has the same place in `exchanged`, which then has as many rows.

    Example:
        >>> different({"x": [1, 2]}, {"x": [3]}, place=1, rows=2, in_place=False)
        'x'
    """
    for name, value in batch.items():
        if name not in exchanged:
            return str(name)
        exchanged_value = exchanged[name]
        if isinstance(value, Mapping) and isinstance(exchanged_value, Mapping):
            if inner_name := different(value, exchanged_value, place, rows, in_place):
                return f"{name}.{inner_name}"
            continue
        if _length(value) == rows and _length(exchanged_value) == (rows if in_place else 1):
            value, exchanged_value = value[place], exchanged_value[place if in_place else 0]
        if not _alike(value, exchanged_value):
            return str(name)
    return ""


def _length(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else -1
    return len(value) if isinstance(value, list | tuple) else -1


def _alike(row: Any, compared: Any) -> bool:
    """Return whether two rows are equal where both have entries; elsewhere one is padded."""
    if not isinstance(row, Tensor | np.ndarray | list | tuple) or not isinstance(
        compared, type(row)
    ):
        is_nan = row != row and compared != compared  # not equal to itself
        return type(row) is type(compared) and bool(is_nan or row == compared)
    try:
        row, compared = torch.as_tensor(row), torch.as_tensor(compared)
    except (TypeError, ValueError, RuntimeError):  # texts, or lists of several lengths
        return bool(row == compared)
    if row.dim() != compared.dim():
        return False
    short = [min(pair) for pair in zip(row.shape, compared.shape, strict=True)]
    return any(
        _equal(_cut(row, short, at_end), _cut(compared, short, at_end)) for at_end in (False, True)
    )


def _equal(row: Tensor, compared: Tensor) -> bool:
    if torch.equal(row, compared):  # much faster, and nearly always so
        return True
    return row.is_floating_point() and torch.allclose(
        row, compared, rtol=1e-5, atol=1e-7, equal_nan=True
    )


def _cut(tensor: Tensor, shape: list[int], at_end: bool) -> Tensor:
    corner = tuple(
        slice(length - size, length) if at_end else slice(size)
        for length, size in zip(tensor.shape, shape, strict=True)
    )
    return tensor[corner]


def _size(row: Any) -> int:
    """Return the size of a row's largest entry, which tells how long a collator makes a batch."""
    values = row.values() if isinstance(row, Mapping) else [row]
    return max((_numel(value) for value in values), default=0)


def _numel(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return len(value) if hasattr(value, "__len__") else 1


def _held_objects(collate: Any) -> Iterator[Any]:
    """Yield a collator and what it holds, three levels deep, since wrappers hold collators."""
    level = [collate]
    for _ in range(4):
        yield from level
        level = [
            held_object
            for holder in level
            if not isinstance(holder, nn.Module | PreTrainedTokenizerBase)
            for held_object in getattr(holder, "__dict__", {}).values()
        ]


def _kept_whole(collate: Any) -> dict[int, Any]:
    """Return the objects that a copy of a collator shares with it, which are large, by their id."""
    large = (nn.Module, PreTrainedTokenizerBase)
    return {
        id(held_object): held_object
        for held_object in _held_objects(collate)
        if isinstance(held_object, large)
    }


def _states(collate: Any) -> list[Any]:
    """Return the states of the generators that a collator holds; it may make one when called."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [_state_of(held) for held in _held_objects(collate) if isinstance(held, kinds)]


def _state_of(generator: Any) -> Any:
    """Return a value that is equal for two generators in the same state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(generator)


CHANGES = "{!r} of a row is another beside other rows than without them"
ALONE = (
    "dp_sgd with per_sample=True collates some rows of a batch by themselves, to see that no other "
    "row changes what they become. The collator has to take any number of rows."
)
_NOT_REPLAYED = (
    "The collator draws from a source of its own, so what it makes of rows differs from call to "
    "call, and whether it couples them cannot be looked at. ε holds only if it treats each row by "
    "itself."
)
