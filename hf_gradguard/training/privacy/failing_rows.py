"""A row at which reading, collating or the model fails adds nothing, and stops nothing.

A training that ended in an error at the first message that holds a row would tell that the row is
there, and ε counts no such message. So the row's term is zero, which is within its bound, and only
its own process is told. The other rows stay: where one row could take them along, it would move the
sum by all that they add.

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
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils import logging

from ...gradient_map.domain import check_batch, count_rows
from ...gradient_map.per_sample.clipping import OTHER_LENGTHS, real_tokens, row_shapes, rows_of
from ...gradient_map.replay import ModuleState, draws_restored
from ...gradient_map.types import LossFunction
from ..clients.batches import (
    CLIENT,
    ROW,
    SHARE,
    ClientCollator,
    ClientRows,
    SampledRow,
    WholeCollator,
)
from ..message import ClientBatch
from ..refusals import refusal
from .coupling import ALONE, CHANGES, collate_watched, copied, different
from .private_rows import DUMMY

logger = logging.get_logger(__name__)


def log_failure(error: Exception) -> None:
    """Tell this process, once for each kind of error, that a row was left out: without the error's
    text, which may hold the row.

    Example:
        >>> log_failure(IndexError("Target 9 is out of bounds."))
    """
    logger.warning_once(_FAILED.format(type(error).__name__))


def passing(rows: list[Any], attempt: Callable[[Any], object]) -> list[Any]:
    """Return those of some rows for which an attempt does not fail.

    Example:
        >>> passing([1, 0, 2], lambda row: 1 / row)
        [1, 2]
    """
    passed = []
    for row in rows:
        try:
            attempt(row)
        except Exception as error:
            log_failure(error)
        else:
            passed.append(row)
    return passed


class ReadableRows(ClientRows):
    """A data set of which a row that cannot be read is an error in its place.

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
    """Tells which rows a collator treats by themselves, and makes batches of the usual form of.

    Whether a row passes is decided by it and by one other row of the data, the anchor, which is the
    same for all: never by what else is in its batch. Else one row could decide whether others add
    something.

    Some rows of the data are looked at when it is made, before a message leaves. What fails for
    many of them is no single row's doing, and raises there.

    Args:
        data: All rows.
        collate: What makes a batch of rows.
        config: The model's, which may name the padding.

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
            rows: As the data set gives them.
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
            row: As the data set gives it.
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
            raise NotImplementedError(_other_form(self._form, forms))
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
    """Return what a collator may tell rows apart by, but for their values: names, types, shapes and
    lengths, of what a row holds too.

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
    """Return what batches of single rows have in common: names, types and shapes, but for the
    lengths of texts, which a mask or the padding's id tells apart from their padding.

    Args:
        batch: Of one row.
        config: The model's.

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
    """Tell whether an entry is labels of as many classes, whose number does not follow a text's
    length.

    Example:
        >>> is_of_classes("labels", torch.zeros(1, 3)), is_of_classes("x", torch.zeros(1, 3))
        (True, False)
    """
    return name.endswith("labels") and torch.as_tensor(entry).is_floating_point()


def _other_form(usual: dict[str, Any], forms: list[dict[str, Any]]) -> str:
    """Say in which entry rows differ."""
    form = next(form for form in forms if form != usual)
    name = next(n for n in {**usual, **form} if usual.get(n) != form.get(n))
    entry, usual_entry = form.get(name), usual.get(name)
    if entry and usual_entry and entry[0] == usual_entry[0] and len(entry) == 2:
        shapes = (entry[1] or ())[1:], (usual_entry[1] or ())[1:]
        return OTHER_LENGTHS.format(name=name, shape=shapes[0], known_shape=shapes[1])
    return _FORMS.format(name)


@dataclass
class PassingCollator(ClientCollator):
    """Collates the rows that pass a trial. A client without any has the trial's anchor, for its
    shapes, which counts for nothing.

    Args:
        trial: Of single rows.
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


class AttemptsPassingRows:
    """Does with a client what fails for none of its rows. A client without such a row has another
    row of the data, for its shapes, and shares noise alone.

    Args:
        trainer: Gives other rows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._spare: dict[str, Any] | None = None

    def __call__(
        self, attempt: Callable[..., Any], module: nn.Module, client: ClientBatch,
        loss_fn: LossFunction, *arguments: Any,
    ) -> Any:  # fmt: skip
        """Attempt it with all rows, or with those for which the loss can be computed.

        Args:
            attempt: Takes the other arguments.
            module: The bare model.
            client: Whose rows.
            loss_fn: `(model, batch)`, the client's mean loss.
            *arguments: Further ones.

        Raises:
            Exception: What was raised for all rows, if no row is found for which it is not, or if
                it is for none by itself.
        """
        try:
            self._check(module, client.batch)
            outcome = attempt(module, client, loss_fn, *arguments)
        except Exception:
            state = ModuleState(module)
            passing_client = self._passing(module, client, loss_fn)
            state.restore()
            if passing_client is None:
                raise
            client = passing_client
            outcome = attempt(module, client, loss_fn, *arguments)
        if arguments:  # else the model may not have run
            self._spare = rows_of(client.batch, [0], count_rows(client.batch))
        return outcome

    def _check(self, module: nn.Module, batch: dict[str, Any]) -> None:
        check_batch(module, batch, self._trainer.asks_for_input)

    def _evaluate(self, module: nn.Module, batch: dict[str, Any], loss_fn: LossFunction) -> None:
        self._check(module, batch)
        loss = loss_fn(module, batch)
        if loss.requires_grad:
            parameters = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)

    def _passing(
        self, module: nn.Module, client: ClientBatch, loss_fn: LossFunction
    ) -> ClientBatch | None:
        """Return the client with the rows that pass by themselves; `None` if that changes nothing,
        or no row is known that passes.
        """
        count = count_rows(client.batch)

        def evaluate(row: int) -> None:
            self._evaluate(module, rows_of(client.batch, [row], count), loss_fn)

        rows = passing(list(range(count)), evaluate)
        if len(rows) == count:
            return None
        places = torch.tensor(rows, dtype=torch.int64)
        numbers = places if client.rows is None else client.rows[places.to(client.rows.device)]
        if rows and not client.is_empty:
            return client._replace(batch=rows_of(client.batch, rows, count), rows=numbers)
        if self._spare is None:
            self._spare = self._other_batch(module, loss_fn)
        if self._spare is None:
            return None
        return client._replace(batch=self._spare, rows=numbers[:0])

    def _other_batch(self, module: nn.Module, loss_fn: LossFunction) -> dict[str, Any] | None:
        """Return another row of the data that passes, if one of the first does."""
        loader = self._trainer.get_train_dataloader()

        def batch_of(row: int) -> dict[str, Any]:
            places = loader.dataset.__getitems__([SampledRow(row, 0, 1.0)])
            batch = self._trainer._prepare_inputs(loader.collate_fn(places))
            return {n: entry for n, entry in batch.items() if n not in (CLIENT, SHARE, ROW)}

        def attempt(row: int) -> None:
            self._evaluate(module, batch_of(row), loss_fn)

        for row in range(min(len(loader.dataset), TRIED)):
            if passing([row], attempt):
                return batch_of(row)
        return None


LOOKED_AT = 64
"""Rows of the data that are looked at before a message leaves."""
TRIED = 16
"""Other rows, before what fails is taken for the doing of the model."""
USUAL = 0.75
"""The part of the rows looked at that must pass. Those that do not add nothing."""
_NONE = "No row of the first {} that were looked at can be collated."
_FORMS = (
    "GradGuardTrainer does not support dp_sgd with per_sample=True where rows become batches of "
    "several forms: {!r} is missing for some, or of another type or shape, so that one row decides "
    "what a batch of others becomes. Give all rows the same columns and types."
)
_ODD = (
    "A row adds nothing to its messages, for {}: what a row is beside others must not change them, "
    "and a training that stopped would tell that the row is there. Only this process is told."
)
_FAILED = (
    "{} at a row of the training data, which adds nothing to its messages: a training that stopped "
    "would tell that the row is there. Only this process is told. Look for labels out of range, "
    "cut-off files and empty texts."
)
