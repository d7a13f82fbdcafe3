"""The trial of rows, which leaves out those at which reading or collating fails.

Whether a row passes must not follow from other rows: where one row could take others along, it
would move the sum by all that they add. `AttemptsPassingRows` does the same where the model fails.

What fails for many rows is no row's doing. It raises before a message leaves: what is looked at
then follows the data, but nobody else sees the outcome.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils import logging

from ...gradient_map.per_sample.clipping import real_tokens, row_shapes
from ...gradient_map.replay import draws_restored
from ..clients.batches import DUMMY, ClientCollator, ClientRows, SampledRow, WholeCollator
from ..refusals import UnsupportedError, refusal
from .coupling import ALONE, CHANGES, collate_watched, copied, different
from .private_rows import log_failure

logger = logging.get_logger(__name__)


class ReadableRows(ClientRows):
    """A data set that gives an error in the place of a row that cannot be read.

    Example:
        >>> place = SampledRow(row=0, client=5, share=0.5)
        >>> ReadableRows([]).__getitems__([place])
        [(IndexError('list index out of range'), SampledRow(row=0, client=5, share=0.5))]
    """

    def __getitems__(self, places: list[Any]) -> list[tuple[Any, SampledRow]]:
        if isinstance(places[0], list):
            (places,) = places
        try:
            return super().__getitems__(places)
        except Exception:
            return [self._read(place) for place in places]

    def _read(self, place: SampledRow) -> tuple[Any, SampledRow]:
        try:
            return super().__getitems__([place])[0]
        except Exception as error:
            log_failure(error)
            return error, place


class RowTrial:
    """A trial of rows: a collator must treat each by itself, and make a batch of the usual form.

    Whether a row passes is decided by it and by one other row of the data, the anchor, which is the
    same for all: never by what else is in its batch. Else one row could decide whether others add
    something.

    Some rows of the data are looked at when it is made, before a message leaves. What fails for
    many of them is no single row's doing, and raises there.

    Args:
        data: The data set of all rows.
        collate: The function that makes a batch of rows.
        config: The model's configuration, which may name the padding.

    Attributes:
        anchor: A row that passes.

    Raises:
        ValueError: If no row can be collated.
        NotImplementedError: If rows are coupled, or batches of single rows differ in their form.

    Example:
        >>> rows = [{"x": torch.zeros(3)}, {"x": torch.zeros(3)}, {"x": torch.zeros(2)}]
        >>> stack = lambda rows: {"x": torch.stack([row["x"] for row in rows])}
        >>> trial = RowTrial(rows[:2], stack)
        >>> [trial.passes(row) for row in rows]
        [True, True, False]
    """

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Mapping[str, Any]], config: Any = None
    ) -> None:
        self._collate, self._config = collate, config
        self.anchor: Any = None
        self._draws = False
        self._passed: set[Hashable] = set()
        self._is_stock = is_stock(collate)
        with draws_restored():
            self._learn(data)

    def passing(self, rows: list[Any], one_by_one: bool = False) -> list[bool]:
        """Tell of each of some rows whether it passes.

        Where the collator is one of Transformers' own, which do by all values alike, a row passes
        if one of its kind did. All generators are put back, and what the collator counts or draws
        by itself stays.

        Args:
            rows: The rows, as the data set gives them.
            one_by_one: Whether each row is tried, whatever its kind.
        """
        if one_by_one or not self._is_stock:
            with draws_restored():
                collate = copied(self._collate)
                return [self.passes(row, collate) for row in rows]
        kinds = [kind_of(row) for row in rows]
        verdicts = [kind in self._passed for kind in kinds]
        untried = [n for n, is_known in enumerate(verdicts) if not is_known]
        if untried:
            found = self.passing([rows[n] for n in untried], one_by_one=True)
            for n, passes in zip(untried, found, strict=True):
                verdicts[n] = passes
                if passes:
                    self._passed.add(kinds[n])
        return verdicts

    def passes(self, row: Any, collate: Callable[..., Any] | None = None) -> bool:
        """Tell whether a row passes.

        Args:
            row: The row, as the data set gives it.
            collate: A copy of the collator.
        """
        try:
            reason = self._fault(row, collate or copied(self._collate))
        except Exception as error:
            log_failure(error)
            return False
        if reason:
            logger.warning_once(_ODD.format(reason))
        return not reason

    def _fault(self, row: Any, collate: Callable[..., Any]) -> str:
        """Say in what a row differs from others, or how it is coupled to them."""
        alone = collate([copy.copy(row)])
        if form_of(alone, self._config) != self._form:
            return "it makes a batch of another form"
        pair = collate([copy.copy(row), copy.copy(self.anchor)])
        if self._draws:  # rows beside each other have other draws than alone
            return ""
        name = different(pair, alone, 0, 2, in_place=False) or different(
            pair, self._anchor_alone, -1, 2, in_place=False
        )
        return name and CHANGES.format(name)

    def _learn(self, data: Any) -> None:
        """Find the form that rows have, and whether the collator treats them by themselves."""
        collate, rows, forms, errors = copied(self._collate), [], [], []
        places = np.linspace(0, len(data) - 1, min(len(data), LOOKED_AT)).astype(int)
        for row, _ in ReadableRows(data).__getitems__([SampledRow(int(n), 0, 1.0) for n in places]):
            try:
                if isinstance(row, Exception):
                    raise row
                alone, _, draws = collate_watched(collate, [copy.copy(row)])
                forms.append(form_of(alone, self._config))
                rows.append(row)
                self._draws |= draws
            except Exception as error:
                log_failure(error)
                errors.append(error)
        if not rows:
            for failure in errors:
                if isinstance(failure, NotImplementedError):  # with its own way out
                    raise failure
            raise ValueError(_NONE.format(len(errors))) from next(iter(errors), None)
        self._form = max(forms, key=forms.count)
        usual = [row for row, form in zip(rows, forms, strict=True) if form == self._form]
        if len(usual) < USUAL * len(rows):
            raise _other_form(self._form, forms)
        self.anchor = usual[0]
        self._anchor_alone = collate([copy.copy(self.anchor)])
        faults: list[Exception] = []
        for row in usual[1:]:
            try:
                if fault := self._fault(row, collate):
                    faults.append(refusal("coupled-rows", fault=fault))
            except Exception as error:
                faults.append(error)
        if len(faults) > (1 - USUAL) * len(usual):
            faults[0].add_note(ALONE)
            raise faults[0]


def is_stock(collate: Any) -> bool:
    """Tell whether a collator is one of Transformers' own, which do by all values alike.

    Example:
        >>> is_stock(default_data_collator), is_stock(lambda rows: {})
        (True, False)
    """
    if type(collate) is WholeCollator:  # a wrapper of another kind may do anything
        return is_stock(collate.collate)
    if type(collate) is RemoveColumnsCollator:
        return is_stock(collate.data_collator)
    return collate is default_data_collator or type(collate) in _STOCK


_STOCK = (DataCollatorWithPadding, DefaultDataCollator)


def kind_of(entry: Any) -> Hashable:
    """Return what a collator may tell rows apart by, but for their values.

    These are names, types, shapes and lengths, of what a row holds too.

    Example:
        >>> kind_of({"label": 1, "input_ids": [3, 4]}) == kind_of({"label": 0, "input_ids": [5, 6]})
        True
        >>> kind_of({"label": 1}) == kind_of({"label": 1.0})
        False
    """
    if isinstance(entry, Tensor | np.ndarray):
        return type(entry), entry.dtype, tuple(entry.shape)
    if isinstance(entry, Mapping):
        return type(entry), tuple((name, kind_of(part)) for name, part in entry.items())
    if isinstance(entry, list | tuple):
        return type(entry), len(entry), frozenset(map(kind_of, entry))
    # of pictures
    return type(entry), getattr(entry, "size", None), getattr(entry, "mode", None)


def form_of(batch: Mapping[str, Any], config: Any = None) -> dict[str, Any]:
    """Return what batches of single rows have in common: names, types and shapes.

    Lengths of texts are left out, which a mask or the padding's id tells apart from their padding.

    Args:
        batch: The batch of one row.
        config: The model's configuration.

    Example:
        >>> ids = torch.zeros(1, 7, dtype=torch.int64)
        >>> form_of({"input_ids": ids, "attention_mask": ids, "labels": torch.tensor([1])})
        {'input_ids': (torch.int64, 1, 2), ..., 'labels': (torch.int64, (1,))}
    """
    fixed = row_shapes(batch, real_tokens(SimpleNamespace(config=config), batch))  # type: ignore
    form: dict[str, Any] = {}
    for name, entry in batch.items():
        if isinstance(entry, Mapping):
            form[name] = form_of(entry, config)
        elif not isinstance(entry, Tensor | np.ndarray):
            form[name] = type(entry), len(entry) if isinstance(entry, list | tuple) else None
        elif name in fixed or entry.ndim < 2 or is_of_classes(name, entry):
            form[name] = entry.dtype, tuple(entry.shape)
        else:
            form[name] = entry.dtype, len(entry), entry.ndim
    return form


def is_of_classes(name: str, entry: Any) -> bool:
    """Tell whether an entry is labels of as many classes.

    Their number does not follow a text's length.

    Example:
        >>> is_of_classes("labels", torch.zeros(1, 3)), is_of_classes("x", torch.zeros(1, 3))
        (True, False)
    """
    return name.endswith("labels") and torch.as_tensor(entry).is_floating_point()


def _other_form(usual: dict[str, Any], forms: list[dict[str, Any]]) -> UnsupportedError:
    """Return the refusal that names the entry in which rows differ."""
    form = next(form for form in forms if form != usual)
    name = next(n for n in {**usual, **form} if usual.get(n) != form.get(n))
    return refusal("rows-of-several-forms", name=name, form=form.get(name), usual=usual.get(name))


@dataclass
class PassingCollator(ClientCollator):
    """A collator of the rows that pass a trial.

    A client without any has the trial's anchor, for its shapes, which counts for nothing.

    Args:
        trial: The trial of single rows.
    """

    trial: RowTrial | None = None

    def __call__(self, places: list[Any]) -> dict[str, Any]:
        assert self.trial is not None
        readable = [pair for pair in places if not isinstance(pair[0], Exception)]
        verdicts = self.trial.passing([row for row, _ in readable])
        try:
            return self._collated(readable, verdicts, places)
        except Exception:  # by a value, which a row's kind does not tell
            tried = self.trial.passing([row for row, _ in readable], one_by_one=True)
            if tried == verdicts:
                raise
            return self._collated(readable, tried, places)

    def _collated(
        self, readable: list[Any], verdicts: list[bool], places: list[Any]
    ) -> dict[str, Any]:
        """Return the batch of rows that pass, with the anchor for each client that has none."""
        assert self.trial is not None
        passing = [pair for pair, passes in zip(readable, verdicts, strict=True) if passes]
        clients = {place.client for _, place in passing}
        missing = {place.client: place for _, place in places if place.client not in clients}
        return super().__call__(
            passing + [(self.trial.anchor, p._replace(row=DUMMY)) for p in missing.values()]
        )


LOOKED_AT = 64
"""Rows of the data that are looked at before a message leaves."""
USUAL = 0.75
"""The part of the rows looked at that must pass. Those that do not add nothing."""
_NONE = "No row of the first {} that were looked at can be collated."
_ODD = (
    "A row adds nothing to its messages, for {}: what a row is beside others must not change them, "
    "and a training that stopped would tell that the row is there. Only this process is told."
)
