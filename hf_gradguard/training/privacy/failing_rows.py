"""A row at which reading, collating or the model fails adds nothing, and stops nothing.

A training that ended in an error at the first message that holds a row would tell that the row is
there, and ε counts no such message. So the row's term is zero, which is within its bound, and only
its own process is told. What fails for every row of the first message is no row's doing: it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ...gradient_map.domain import check_batch, count_rows
from ...gradient_map.module_state import ModuleState
from ...gradient_map.per_sample.plan import rows_of
from ...gradient_map.types import LossFunction
from ..clients.batches import CLIENT, ROW, SHARE, ClientCollator, ClientRows, SampledRow
from ..message import ClientBatch
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


@dataclass
class PassingCollator(ClientCollator):
    """Collates the rows for which that does not fail. A client without any has another row, of an
    earlier batch or of the data, for its shapes, which counts for nothing.

    Args:
        data: All rows.
    """

    data: Any = ()
    _spare: Any = None

    def __call__(self, places: list[Any]) -> dict[str, Any]:
        readable = [pair for pair in places if not isinstance(pair[0], Exception)]
        try:
            batch = super().__call__(self._completed(readable, places))
        except Exception:
            collated = passing(readable, lambda pair: self.collate([pair[0]]))
            if len(collated) == len(readable):
                raise
            readable = collated
            batch = super().__call__(self._completed(readable, places))
        self._spare = readable[-1][0] if readable else self._spare
        return batch

    def _completed(self, readable: list[Any], places: list[Any]) -> list[Any]:
        clients = {place.client for _, place in readable}
        spare = readable[-1][0] if readable else self._spare
        missing = {place.client: place for _, place in places if place.client not in clients}
        if missing and spare is None:  # the first batch has no row that passes
            spare = self._other_row()
        if missing and spare is None:
            raise next((row for row, _ in places if isinstance(row, Exception)), _NONE)
        return readable + [(spare, place._replace(row=DUMMY)) for place in missing.values()]

    def _other_row(self) -> Any:
        """Return another row of the data that can be read and collated, if one of the first can."""
        for number in range(min(len(self.data), LOOKED_AT)):
            if passing([number], lambda number: self.collate([self.data[number]])):
                return self.data[number]
        return None


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
        except NotImplementedError:  # a refusal is of a model or of settings
            raise
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
        with torch.no_grad():
            loss_fn(module, batch)

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

        for row in range(min(len(loader.dataset), LOOKED_AT)):
            if passing([row], attempt):
                return batch_of(row)
        return None


LOOKED_AT = 16
"""Other rows, before what fails is taken for the doing of the model or the collator."""
_NONE = ValueError("No row of the first batch can be collated.")
_FAILED = (
    "{} at a row of the training data, which adds nothing to its messages: a training that stopped "
    "would tell that the row is there. Only this process is told. Look for labels out of range, "
    "cut-off files and empty texts."
)
