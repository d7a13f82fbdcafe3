"""By what the Trainer's accountant knows an example: its row in the data set, whatever became of it
on the way to the model.
"""

# ruff: noqa: F811 (fixtures of the Trainer's tests)

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers import PAD, make_task, pad, ragged_rows, refuses
from test_trainer import MakeTrainer, make_trainer, rows, settings, stack  # noqa: F401
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from hf_gradguard import GradGuardTrainer, make_defense
from hf_gradguard.leakage import DFIL, FisherAccountant, example_keys
from hf_gradguard.training import meter
from hf_gradguard.training.checkpoints.private_state import save_private_state
from hf_gradguard.training.clients.batches import ROW
from hf_gradguard.training.message import Client

NOISE = {"defense": "gaussian_noise", "num_train_epochs": 3, "max_steps": -1}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """What the model sees of every message. Each sample's dFIL is 1."""
    seen = []

    def one_each(gmap: Any, *_: Any) -> meter.MessageDFIL:
        seen.append({key: value.clone() for key, value in gmap.batch.items()})
        one = torch.ones(len(gmap.input), dtype=torch.float64)
        return meter.MessageDFIL(DFIL(one, 0 * one), 1.0)

    monkeypatch.setattr(meter, "message_dfil", one_each)
    return seen


class Masked(Dataset):
    """Hides one token of a row, another one at every visit."""

    def __init__(self) -> None:
        self.rows = rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.rows[index]["input_ids"].clone()
        ids[int(torch.randint(len(ids), ()))] = 3
        return {**self.rows[index], "input_ids": ids}


def test_three_views_count_three_times(
    make_trainer: MakeTrainer, batches: list[dict[str, Tensor]]
) -> None:
    """By content, most of 22 rows would be three examples of 1.0 each."""
    accountant = FisherAccountant()
    make_trainer(data=Masked(), options={"accountant": accountant}, **NOISE).train()
    assert {key: accountant.dfil(key) for key in accountant} == dict.fromkeys(range(22), 3.0)
    views = {tuple(ids) for batch in batches for ids in batch["input_ids"].tolist()}
    assert len(views) > 40


def test_masking_in_the_collator(make_trainer: MakeTrainer, batches: list[Any]) -> None:
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = stack(samples)
        return {**batch, "input_ids": batch["input_ids"].roll(int(torch.randint(9, ())), 1)}

    accountant = FisherAccountant()
    options = {"accountant": accountant, "data_collator": collate}
    make_trainer(options=options, **NOISE).train()
    assert {key: accountant.dfil(key) for key in accountant} == dict.fromkeys(range(22), 3.0)


def test_two_rows_of_one_content_are_two_examples(
    make_trainer: MakeTrainer, batches: list[Any]
) -> None:
    accountant = FisherAccountant()
    options = {"accountant": accountant}
    make_trainer(data=[rows()[0]] * 8, options=options, **NOISE).train()
    assert {key: accountant.dfil(key) for key in accountant} == dict.fromkeys(range(8), 3.0)


def language_rows() -> datasets.Dataset:
    """Rows of several lengths, with a column that no model takes."""
    samples = [{key: value.tolist() for key, value in row.items()} for row in ragged_texts()]
    data = datasets.Dataset.from_list([{**row, "said_by": "someone"} for row in samples])
    return data.with_format("torch")


def ragged_texts() -> list[dict[str, Tensor]]:
    return [{**row, "labels": torch.tensor(index % 3)} for index, row in enumerate(ragged_rows(22))]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = torch.stack([sample["labels"] for sample in samples])
    texts = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in samples]
    return {**pad(texts), "labels": labels}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train_sampling_strategy": "group_by_length"},
        {"train_sampling_strategy": "sequential", "dataloader_num_workers": 1},
        {"clients_per_process": 2, "gradient_accumulation_steps": 2},
        {"dataloader_drop_last": True},
        {"num_clients": 3},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_row_is_the_one_that_the_model_saw(
    make_trainer: MakeTrainer, batches: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:  # fmt: skip
    numbers: list[list[int]] = []
    record = FisherAccountant.step

    def step(self: FisherAccountant, keys: Any, *values: Any) -> None:
        numbers.append(list(keys))
        record(self, keys, *values)

    monkeypatch.setattr(FisherAccountant, "step", step)
    data = language_rows()
    options = {"accountant": FisherAccountant(), "data_collator": collate}
    make_trainer(data=data, options=options, defense="gaussian_noise", **more).train()
    assert len(numbers) == len(batches) > 1
    for own, batch in zip(numbers, batches, strict=True):
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert len(own) == len(batch["input_ids"])
        for number, ids in zip(own, batch["input_ids"], strict=True):
            assert torch.equal(ids[ids != PAD], data[number]["input_ids"])


@pytest.mark.long
@pytest.mark.parametrize("as_dataset", [True, False])
def test_an_accountant_changes_nothing_for_the_model(
    make_trainer: MakeTrainer, batches: list[dict[str, Tensor]], as_dataset: bool
) -> None:
    """The same batches in the same order, and the same weights in the end."""
    weights, seen = [], []
    for accountant in (None, FisherAccountant()):
        batches.clear()
        data = language_rows() if as_dataset else ragged_texts()
        trainer = make_trainer(
            defense="gaussian_noise", data=data, noise_seed=3, leakage_logging_steps=1,
            options={"accountant": accountant, "data_collator": collate}, **{"max_steps": 8},
        )  # fmt: skip
        trainer.train()
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        seen.append(list(batches))
    assert len(seen[0]) == len(seen[1]) == 8
    for one, other in zip(*seen, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_several_rows_in_one_sample_are_refused(make_trainer: MakeTrainer) -> None:
    def packed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.cat([sample["input_ids"][:2] for sample in samples])[None]
        return {"input_ids": ids, "labels": samples[0]["labels"][None]}

    accountant = FisherAccountant()
    options = {"accountant": accountant, "data_collator": packed}
    trainer = make_trainer(defense="gaussian_noise", options=options)
    with pytest.raises(ValueError, match=r"1 sample\(s\) out of 4 row\(s\).*nothing was shared"):
        trainer.train()
    assert (len(accountant), accountant.steps) == (0, 0)


def test_a_collator_may_say_whose_they_are(make_trainer: MakeTrainer, batches: list[Any]) -> None:
    """Two views of each row in one batch: together they count (1 + 1) · 2."""

    def doubled(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = stack(samples)
        whose = batch.pop("whose")
        return {**{k: torch.cat([v, v]) for k, v in batch.items()}, ROW: torch.cat([whose, whose])}

    data = [{**row, "whose": torch.tensor(100 + index)} for index, row in enumerate(rows())]
    accountant = FisherAccountant()
    options = {"accountant": accountant, "data_collator": doubled}
    make_trainer(data=data, options=options, remove_unused_columns=False, **NOISE).train()
    expected = dict.fromkeys(range(100, 122), 12.0)
    assert {key: accountant.dfil(key) for key in accountant} == expected


class Unnumbered(GradGuardTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


class Numbered(GradGuardTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.loader_of(self.train_dataset, RandomSampler(self.train_dataset))


def test_own_batches_must_say_which_rows_they_are(make_trainer: MakeTrainer) -> None:
    found = {}
    for kind in (Unnumbered, Numbered):
        trainer = make_trainer(defense="gaussian_noise")
        found[kind] = kind(
            trainer.model,
            trainer.args,
            train_dataset=rows(),
            defense="gaussian_noise",
            accountant=FisherAccountant(),
        )
    with pytest.raises(ValueError, match=r"which rows of the data set.*self\.loader_of"):
        found[Unnumbered].train()
    found[Numbered].train()
    assert set(found[Numbered].accountant) <= set(range(22))
    assert len(found[Numbered].accountant) == 12


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from rows()


@pytest.mark.parametrize("iterable", ["torch", "datasets"])
def test_rows_without_numbers_are_refused(make_trainer: MakeTrainer, iterable: str) -> None:
    data = Stream() if iterable == "torch" else language_rows().to_iterable_dataset()
    options = {"accountant": FisherAccountant()}
    with refuses("account-of-unnumbered-rows"):
        make_trainer(
            defense="gaussian_noise", data=data, options=options,
            accelerator_config={"dispatch_batches": False},
        )  # fmt: skip


def test_an_account_by_content_is_not_gone_on_with(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(
        defense="gaussian_noise", options={"accountant": FisherAccountant()}, save_strategy="steps",
        save_steps=2, max_steps=2,
    )  # fmt: skip
    trainer.train()
    before = FisherAccountant()
    gmap = meter.GradientMap(make_task("bert")[0], make_task("bert")[1])
    before.step(example_keys(gmap), torch.ones(2, dtype=torch.float64))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    save_private_state(str(checkpoint), 0, [Client(make_defense("gaussian_noise"))], before)
    (checkpoint / "gradguard_complete.json").unlink()  # which has no checksums in older versions
    resumed = make_trainer(
        defense="gaussian_noise", options={"accountant": FisherAccountant()}, max_steps=4
    )
    with pytest.raises(ValueError, match=r"examples by their content.*without an accountant"):
        resumed.train(resume_from_checkpoint=str(checkpoint))


def test_clients_of_a_federation_keep_the_data_sets_numbers(
    make_trainer: MakeTrainer, batches: list[dict[str, Tensor]]
) -> None:
    accountant = FisherAccountant()
    make_trainer(
        defense="gaussian_noise", options={"accountant": accountant}, num_clients=2, max_steps=6
    ).train()
    visits = np.zeros(22)
    content = {tuple(row["input_ids"].tolist()): index for index, row in enumerate(rows())}
    for batch in batches:
        for ids in batch["input_ids"].tolist():
            visits[content[tuple(ids)]] += 1
    assert {key: accountant.dfil(key) for key in accountant} == {
        row: count for row, count in enumerate(visits.tolist()) if count
    }
