"""What couples rows before the model is refused where ε is of rows; what only draws is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from account_worker import trainer
from helpers import VOCABULARY, make_task, pad, ragged_rows, refuses, word_tokenizer
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_gradguard.gradient_map.replay import DrawState
from hf_gradguard.training.privacy.coupling import EARLY_BATCHES, LATER_INTERVAL, CouplingCheck

Rows = list[dict[str, Any]]


def pictures(count: int = 12) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.rand(3, 4, 4, generator=generator), "labels": row % 2}
        for row in range(count)
    ]


def texts(count: int = 12) -> Rows:
    return [{key: value.tolist() for key, value in row.items()} for row in ragged_rows(count)]


def mixup(draw: Callable[[int], tuple[float, list[int]]]) -> Callable[[Rows], dict[str, Tensor]]:
    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        share, order = draw(len(rows))
        x = batch["pixel_values"]
        return {**batch, "pixel_values": share * x + (1 - share) * x[order]}

    return collate


def centered(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    return {**batch, "pixel_values": batch["pixel_values"] - batch["pixel_values"].mean(0)}


def by_size(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    return {**batch, "pixel_values": batch["pixel_values"] / len(rows)}


def shared_entry(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    return {**batch, "mean": batch["pixel_values"].mean()}


def centered_and_noisy(rows: Rows) -> dict[str, Tensor]:
    batch = centered(rows)
    return {**batch, "pixel_values": batch["pixel_values"] + torch.randn(len(rows), 3, 4, 4)}


def others_labels(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    return {**batch, "labels": batch["labels"] + batch["labels"].sum()}


def packed(rows: Rows) -> dict[str, Tensor]:
    """A row is filled up with the next one's entries."""
    batch = default_data_collator(rows)
    x = batch["pixel_values"].flatten(1)
    return {"pixel_values": torch.cat([x, x.roll(-1, 0)[:, :4]], 1), "labels": batch["labels"]}


def followed_by(place: Callable[[int, int], int]) -> Callable[[Rows], dict[str, Tensor]]:
    """Rows are followed by what another one holds, which `place` says of a row's and their count;
    a row itself by nothing.
    """

    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        x = batch["pixel_values"].flatten(1)
        followers = [place(row, len(x)) for row in range(len(x))]
        more = [x[k] if 0 <= k < len(x) and k != n else 0 * x[n] for n, k in enumerate(followers)]
        return {**batch, "pixel_values": torch.cat([x, torch.stack(more)], 1)}

    return collate


COUPLING = {
    "packing": packed,
    "the first row": followed_by(lambda row, count: 0),
    "the last row": followed_by(lambda row, count: count - 1),
    "the row before": followed_by(lambda row, count: row - 1),
    "the row after": followed_by(lambda row, count: row + 1),
    "mixup by torch": mixup(lambda n: (float(torch.rand(())), torch.randperm(n).tolist())),
    "mixup by numpy": mixup(
        lambda n: (float(np.random.beta(0.4, 0.4)), np.random.permutation(n).tolist())
    ),
    "mixup by random": mixup(lambda n: (random.random(), random.sample(range(n), n))),
    "mixup without draws": mixup(lambda n: (0.7, [*range(1, n), 0])),
    "mean": centered,
    "mean and noise": centered_and_noisy,
    "size": by_size,
    "an entry for all": shared_entry,
    "labels": others_labels,
}


@pytest.mark.parametrize("case", COUPLING)
@pytest.mark.parametrize("seed", range(3))
def test_what_couples_rows_is_refused(case: str, seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    check = CouplingCheck(pictures(), COUPLING[case])
    with refuses("coupled-rows"):
        [check([1, 4, 7, 9, 2]) for _ in range(EARLY_BATCHES)]


def tokenizer() -> Any:
    made = word_tokenizer([f"word{number}" for number in range(VOCABULARY)])
    made.add_special_tokens({"mask_token": "[MASK]"})
    return made


def masked(by: str) -> Callable[[Rows], dict[str, Tensor]]:
    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = pad([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
        size = tuple(batch["input_ids"].shape)
        draws = {
            "torch": lambda: torch.rand(size).numpy(),
            "numpy": lambda: np.random.rand(*size),
            "random": lambda: np.array([[random.random() for _ in range(size[1])]] * size[0]),
        }[by]()
        hidden = torch.as_tensor(draws < 0.3)
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 3)}

    return collate


def whole_words(rows: Rows) -> dict[str, Tensor]:
    """Draws as often as a row has words: others' numbers move the draws of rows after them."""
    batch = pad([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
    for ids, row in zip(batch["input_ids"], rows, strict=True):
        words = list(range(len(row["input_ids"])))
        random.shuffle(words)
        ids[words[: 1 + len(words) // 4]] = 3
    return batch


class OwnGenerator:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        batch = pad([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
        hidden = self.generator.random(tuple(batch["input_ids"].shape)) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(torch.as_tensor(hidden), 3)}


def with_positions(rows: Rows) -> dict[str, Tensor]:
    """Counted on through the padding."""
    batch = pad([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {**batch, "position_ids": positions}


def padded_left(rows: Rows) -> dict[str, Tensor]:
    batch = pad([{k: torch.as_tensor(v).flip(0) for k, v in row.items()} for row in rows])
    return {key: value.flip(1) for key, value in batch.items()}


hidden_source = np.random.default_rng(4)


def from_elsewhere(rows: Rows) -> dict[str, Tensor]:
    batch = pad([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
    hidden = hidden_source.random(tuple(batch["input_ids"].shape)) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(torch.as_tensor(hidden), 3)}


DRAWING: dict[str, Callable[[], Callable[[Rows], Any]]] = {
    "torch": lambda: masked("torch"),
    "numpy": lambda: masked("numpy"),
    "random": lambda: masked("random"),
    "whole words": lambda: whole_words,
    "a generator of its own": OwnGenerator,
    "a source that is not seen": lambda: from_elsewhere,
    "positions": lambda: with_positions,
    "padding on the left": lambda: padded_left,
    "padding": lambda: (
        lambda rows: pad([{k: torch.as_tensor(v) for k, v in r.items()} for r in rows])
    ),
    "masks of a language model": lambda: DataCollatorForLanguageModeling(tokenizer()),
    "masks with a seed": lambda: DataCollatorForLanguageModeling(tokenizer(), seed=3),
    "Transformers' padding": lambda: DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=4),
}
OF_TRANSFORMERS = list(DRAWING)[-3:]


@pytest.mark.parametrize("case", DRAWING)
def test_what_only_draws_or_pads_is_taken(case: str) -> None:
    """Over 20 seeds, and nothing changes for the training."""
    collate, rows = DRAWING[case](), texts()
    if case in OF_TRANSFORMERS:
        rows = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
    for seed in range(20):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = DrawState.now()
        CouplingCheck(rows, collate)([seed % 12, *((seed + k) % 12 for k in (2, 5, 7))])
        assert before.plain() == DrawState.now().plain()
    if isinstance(collate, OwnGenerator):
        assert collate.generator.random() == np.random.default_rng(3).random()


def test_a_data_set_that_mixes_what_it_reads_together_is_refused() -> None:
    """As a transform of `datasets` may, which gets a batch at once."""

    class Mixing(list):  # type: ignore[type-arg]
        def __getitems__(self, numbers: list[int]) -> Rows:
            rows = [self[number] for number in numbers]
            mean = torch.stack([row["pixel_values"] for row in rows]).mean(0)
            return [{**row, "pixel_values": row["pixel_values"] - mean} for row in rows]

    with pytest.raises(NotImplementedError, match="'pixel_values' of a row"):
        CouplingCheck(Mixing(pictures()), default_data_collator)([0, 3, 5])


def test_what_begins_later_is_seen() -> None:
    """A collator may change: it is looked at now and then."""
    calls = []

    def later(rows: Rows) -> dict[str, Tensor]:
        calls.append(len(rows))
        return (centered if started else default_data_collator)(rows)

    started = False
    check = CouplingCheck(pictures(), later)
    for _ in range(EARLY_BATCHES + 2):
        check([0, 1, 2])
    looked = len(calls)
    check([0, 1, 2])
    assert len(calls) == looked
    started = True
    with pytest.raises(NotImplementedError, match="coupled"):
        [check([0, 1, 2]) for _ in range(LATER_INTERVAL)]


@pytest.mark.parametrize("begins_at", [1, 2, 3, 4, 101])
def test_what_begins_at_a_batch_that_is_looked_at_is_found_there(begins_at: int) -> None:
    """The first four are looked at, and one in a hundred later."""
    collate = default_data_collator
    check = CouplingCheck(pictures(), lambda rows: collate(rows))
    for _ in range(1, begins_at):
        check([0, 1, 2])
    collate = centered
    with pytest.raises(NotImplementedError, match="coupled"):
        check([0, 1, 2])


def test_batches_between_are_not_looked_at() -> None:
    """Looking costs a few batches each time."""
    calls = []

    def counted(rows: Rows) -> dict[str, Tensor]:
        calls.append(len(rows))
        return default_data_collator(rows)

    check, looked_at = CouplingCheck(pictures(), counted), []
    for batch in range(1, 203):
        before = len(calls)
        check([0, 1, 2])
        if len(calls) > before:
            looked_at.append(batch)
    assert looked_at == [1, 2, 3, 4, 101, 201]


def test_what_couples_rows_in_every_other_batch_is_found_early() -> None:
    """A collator that mixes by chance is looked at under several states of the generators."""

    def by_chance(rows: Rows) -> dict[str, Tensor]:
        mixes = bool(torch.rand(()) < 0.5)
        return (centered if mixes else default_data_collator)(rows)

    found = 0
    for seed in range(20):
        torch.manual_seed(seed)
        check = CouplingCheck(pictures(), by_chance)
        try:
            [check([1, 4, 7, 9, 2]) for _ in range(4)]
        except NotImplementedError:
            found += 1
    assert found == 20


@pytest.mark.parametrize(("share", "is_found"), [(1e-4, True), (1e-8, False)])
def test_a_small_coupling_is_found_and_rounding_is_none(share: float, is_found: bool) -> None:
    """Entries are from 0 to 1. What rows sum up in another order differs by rounding."""

    def nearly_apart(rows: Rows) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        x = batch["pixel_values"]
        return {**batch, "pixel_values": x + share * x.mean(0)}

    check = CouplingCheck(pictures(), nearly_apart)
    if is_found:
        with pytest.raises(NotImplementedError, match="coupled"):
            check([0, 1, 2])
    else:
        check([0, 1, 2])


@pytest.mark.parametrize(("relative", "is_found"), [(4e-5, True), (5e-7, False)])
def test_a_small_coupling_of_large_entries_is_found(relative: float, is_found: bool) -> None:
    """Entries from 1 to 2 have 2⁻²³ = 1.2e-7 between neighbors, and sums in another order are off
    by a few. What is 80 times that is no rounding.
    """

    def nearly_apart(rows: Rows) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        x = 1 + batch["pixel_values"]
        return {**batch, "pixel_values": x * (1 + relative * (x.mean() - 1.5).sign())}

    rows = pictures()
    for row, shift in zip(rows, (-0.4, 0.4, 0.4), strict=False):
        row["pixel_values"] = 0.5 + shift + 0.1 * row["pixel_values"]  # means on both sides of 1.5
    check = CouplingCheck(rows, nearly_apart)
    if is_found:
        with refuses("coupled-rows"):
            check([0, 1, 2])
    else:
        check([0, 1, 2])


def until_accepted(rows: Rows) -> dict[str, Tensor]:
    """Each row draws until a draw is accepted: in total as often, now and then, as other rows."""
    noise = []
    for row in rows:
        noise.append(torch.rand(()))
        while torch.rand(()) < 0.2 + 0.6 * row["labels"]:
            pass
    return {**default_data_collator(rows), "noise": torch.stack(noise)}


def test_draws_that_end_alike_by_chance_are_no_coupling() -> None:
    """Others draw as often in total, but not in the same places, under one state of four: a row
    then has other draws, which looks like coupling. Under a second state it is less likely yet.
    """
    refused = 0
    for seed in range(40):
        torch.manual_seed(seed)
        try:
            CouplingCheck(pictures(), until_accepted)([seed % 12, (seed + 5) % 12])
        except NotImplementedError:
            refused += 1
    assert refused <= 40 // 4  # by one state alone it is most of them


def test_a_source_that_repeats_itself_by_chance_is_no_coupling() -> None:
    """It is not seen, so what it draws looks like others' doing. A batch that came out alike once
    more says nothing: of two values every other one does.
    """
    source = itertools.cycle([0.0, 1.0, 0.0, 1.0, 1.0])

    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        return {**batch, "pixel_values": batch["pixel_values"] + next(source)}

    for _ in range(EARLY_BATCHES):
        CouplingCheck(pictures(), collate)([0, 3])


def collate_rows(rows: Rows) -> dict[str, Tensor]:
    return default_data_collator(rows)


def summed_labels(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    return {**batch, "labels": (batch["labels"] + batch["labels"].sum()) % 3}


def test_a_training_with_epsilon_refuses_it(tmp_path: Path) -> None:
    t = trainer(tmp_path, "epsilon", max_steps=4)
    t.data_collator = summed_labels
    with pytest.raises(NotImplementedError, match="'labels' of a row is another"):
        t.train()
    assert t.state.global_step == 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("couples", [True, False])
def test_a_data_set_of_datasets_in_batches_of_workers(
    tmp_path: Path, couples: bool, workers: int
) -> None:
    t = trainer(tmp_path, "epsilon", max_steps=2, dataloader_num_workers=workers,
                clients_per_process=2)  # fmt: skip
    rows = [{k: v.tolist() for k, v in row.items()} for row in t.train_dataset]
    data = datasets.Dataset.from_list([{**row, "said_by": "someone"} for row in rows])
    if couples:  # a transform gets a batch of rows at once
        data = data.with_transform(
            lambda batch: {**batch, "labels": [sum(batch["labels"]) % 3] * len(batch["labels"])}
        )
        t.args.remove_unused_columns = False
        t.data_collator = lambda rows: default_data_collator(
            [{k: v for k, v in row.items() if k != "said_by"} for row in rows]
        )
    t.train_dataset = data
    if couples:
        with pytest.raises(NotImplementedError, match="'labels' of a row is another"):
            t.train()
        return
    t.data_collator = DataCollatorWithPadding(tokenizer())
    t.train()
    assert t.state.global_step == 2


def hidden_tokens(rows: Rows) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 3)}


def test_looking_changes_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(CouplingCheck, "__call__", lambda *_: None)
        t = trainer(tmp_path, "epsilon", max_steps=3, noise_seed=1)
        t.data_collator = hidden_tokens
        t.train()
        weights.append(torch.cat([p.detach().flatten() for p in t.model.parameters()]))
    assert torch.equal(*weights)
    assert len(make_task("bert")[1]) == 3
