"""A row that stops a training shows that it is in the data. Whatever fails at one row, the training
goes on, with as many messages, and every message is that of the other rows.
"""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import ROWS, trainer
from torch import Tensor, nn
from transformers import DefaultDataCollator, default_data_collator

from hf_gradguard import make_defense
from hf_gradguard.training.clients.batches import DUMMY, WholeCollator
from hf_gradguard.training.privacy.correlated_rows import CorrelatedRows
from hf_gradguard.training.privacy.failing_rows import is_stock

BAD, WORD = 5, 19


class Rows(torch.utils.data.Dataset):
    """Rows of which one may be cut off."""

    def __init__(self, rows: list[Any], is_cut_off: bool) -> None:
        self.rows, self.is_cut_off = rows, is_cut_off

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        if number == BAD and self.is_cut_off:
            raise OSError(f"truncated: {self.rows[number]}")
        return self.rows[number]


def is_private(row: dict[str, Any]) -> bool:
    return bool((torch.as_tensor(row["input_ids"]) == WORD).all())


def collate(rows: list[dict[str, Any]], failure: str = "none") -> dict[str, Tensor]:
    if any(isinstance(row["labels"], str) for row in rows):
        raise ValueError("a row has no label: private words")
    if failure == "refused by the collator" and any(map(is_private, rows)):
        raise NotImplementedError("private words are not supported")
    if failure == "two rows":
        rows = [row for row in rows for _ in range(1 + is_private(row))]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if failure == "couples" and any(map(is_private, rows)):
        batch["labels"] = batch["labels"].roll(1, 0)
    return batch


class Failing(torch.autograd.Function):
    """Fails when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise RuntimeError("private words")


class Stops:
    """Fails at rows of one word, in the forward or in the backward pass."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.is_due = kind, False
        model.get_input_embeddings().register_forward_hook(self.look)
        model.classifier.register_forward_hook(self.fail)

    def look(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.is_due = bool((args[0] == WORD).all(1).any())

    def fail(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.is_due and self.kind == "the model":
            raise NotImplementedError("private words are not supported")
        return Failing.apply(output) if self.is_due else output


FAILURES = [
    "label", "token", "not a number", "reading", "collating", "length", "column", "type",
    "refused by the collator", "two rows", "couples", "the model", "the backward pass",
]  # fmt: skip


def run(folder: Path, kind: str, failure: str, size: int, **settings: Any) -> Any:
    """A training of rows of which one fails."""
    sizes = {"per_device_train_batch_size": size, "max_steps": ROWS // size, **settings}
    training = trainer(folder, kind, **sizes)
    rows = [dict(row) for row in training.train_dataset]
    if failure == "label":
        rows[BAD]["labels"] = torch.tensor(77)
    if failure == "token":
        rows[BAD]["input_ids"] = torch.full_like(rows[BAD]["input_ids"], 10**6)
    if failure == "not a number":
        for row in rows:
            row["input_ids"] = row["input_ids"].where(row["input_ids"] != WORD, WORD - 1)
        rows[BAD]["input_ids"] = torch.full_like(rows[BAD]["input_ids"], WORD)
        with torch.no_grad():
            training.model.get_input_embeddings().weight[WORD] = math.nan
    if failure == "collating":
        rows[BAD]["labels"] = "private words"
    if failure == "length":
        rows[BAD] = {n: t.repeat(2) if t.dim() else t for n, t in rows[BAD].items()}
    if failure == "column":
        rows[BAD] = {n: t for n, t in rows[BAD].items() if n != "attention_mask"}
    if failure == "type":
        rows[BAD]["labels"] = rows[BAD]["labels"].float()
    if failure in FAILURES[-5:]:
        for row in rows:
            row["input_ids"] = row["input_ids"].where(row["input_ids"] != WORD, WORD - 1)
        rows[BAD]["input_ids"] = torch.full_like(rows[BAD]["input_ids"], WORD)
    if failure in ("the model", "the backward pass"):
        Stops(failure, training.model)
    training.train_dataset = Rows(rows, failure == "reading")
    training.data_collator = functools.partial(collate, failure=failure)
    return training


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", ["correlated", "independent"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_training_goes_on(
    kind: str, failure: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    training = run(tmp_path, kind, failure, size)
    training.train()
    assert training.state.global_step == ROWS // size
    assert sum(training.private_rows.account.messages.values()) in (1, ROWS // size)
    assert all(p.isfinite().all() for n, p in training.model.named_parameters() if "classif" in n)
    told = [record.getMessage() for record in caplog.records]
    assert any("adds nothing" in text for text in told) or kind == "independent"  # not drawn
    assert not any("private words" in text or "tensor(" in text for text in told)


@pytest.mark.parametrize("failure", FAILURES)
def test_the_first_message_may_hold_no_other_row(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = CorrelatedRows._order

    def begins_with_bad(self: Any, client: int) -> Any:
        batches = order(self, client)
        place = next(n for n, rows in enumerate(batches) if BAD in rows)
        self._orders[client] = batches[place:] + batches[:place]
        return self._orders[client]

    training = run(tmp_path, "correlated", failure, 1)
    with monkeypatch.context() as patch:
        begins = iter([begins_with_bad])  # only the first time is it turned
        patch.setattr(CorrelatedRows, "_order", lambda *client: next(begins, order)(*client))
        training.train()
    assert training.state.global_step == ROWS


@pytest.mark.parametrize("failure", FAILURES)
def test_a_batch_that_is_clipped_as_a_whole(
    failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in it may be replaced, so nothing in it stops a training."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    training = run(tmp_path, "correlated", failure, 4)
    training.defense = make_defense("dp_sgd", correlated=True, scale=1.0, clip=0.1, delta=1e-5)
    training.train()
    assert training.state.global_step == ROWS // 4
    told = [record.getMessage() for record in caplog.records]
    assert any("adds nothing" in text or "noise alone" in text for text in told)


@pytest.mark.parametrize("failure", ["label", "reading", "collating"])
def test_each_client_shares_its_message(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two clients on a rank the one whose only row fails shares noise."""
    training = run(tmp_path, "correlated", failure, 2, clients_per_process=2, max_steps=8)
    taken: list[int] = []
    count = CorrelatedRows.count

    def counted(rows: Any, batches: Any) -> Any:
        taken.append(len(batches))
        return count(rows, batches)

    monkeypatch.setattr(CorrelatedRows, "count", counted)
    training.train()
    assert taken == [2] * (ROWS // 2)


def test_what_fails_for_every_row_is_no_rows_doing(tmp_path: Path) -> None:
    """A mistake in code or settings stops the first message, as in the stock Trainer."""
    training = run(tmp_path, "correlated", "none", 4)
    training.train_dataset = Rows(
        [{**row, "labels": torch.tensor(77)} for row in training.train_dataset.rows], False
    )
    with pytest.raises(IndexError, match="Target 77"):
        training.train()
    training = run(tmp_path / "collator", "correlated", "none", 4)

    def wrong(rows: Any) -> Any:
        raise KeyError("text")

    training.data_collator = wrong
    with pytest.raises(ValueError, match="No row of the first 16"):
        training.train()


def test_a_row_that_fails_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is that of the other rows, not that of a row in its place."""
    shared, count = {}, CorrelatedRows.count
    for failure in ("none", "label"):
        training = run(tmp_path / failure, "correlated", failure, 4, noise_seed=3)
        place: dict[int, Tensor] = {}
        rows: dict[int, list[int]] = {}
        exchange = training._exchange

        def counted(self: Any, batches: Any, rows: Any = rows) -> Any:
            rows[len(rows)] = batches[0].rows.tolist()
            return count(self, batches)

        def exchanged(module: nn.Module, exchange: Any = exchange, place: Any = place) -> None:
            weight = module.classifier.weight  # type: ignore[union-attr]
            place[len(place)] = weight.grad.clone()
            exchange(module)

        monkeypatch.setattr(CorrelatedRows, "count", counted)
        training._exchange = exchanged
        training.args.learning_rate = 0.0
        training.train()
        shared[failure] = place, rows
    message = next(n for n, chosen in shared["none"][1].items() if BAD in chosen)
    assert shared["label"][1] == shared["none"][1]
    for number, without in shared["label"][0].items():
        off = float((without - shared["none"][0][number]).norm()) * 4
        assert (off > 1e-3) == (number == message)
        assert off <= 1 + 1e-3  # a row's clipped gradient, and no other's
    assert DUMMY not in shared["label"][1][message]


def test_only_transformers_own_collators_are_trusted_by_kinds() -> None:
    """Whatever wraps one of them may do by values what it likes."""

    class Wrapper:
        data_collator = DefaultDataCollator()

        def __call__(self, rows: Any) -> Any:
            return self.data_collator(rows)

    trusted = [default_data_collator, DefaultDataCollator(), WholeCollator(default_data_collator)]
    assert all(map(is_stock, trusted))
    assert not any(map(is_stock, [Wrapper(), collate, functools.partial(default_data_collator)]))
