"""Labels that are randomized before anything is computed from them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.randomness import Stream
from hf_gradguard.training.privacy.labels import (
    LabelKey,
    RandomizedLabels,
    keep_probability,
    randomized_response,
)

DRAWS = 6000


@pytest.mark.statistics
@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 2), (1.0, 20), (3.0, 5)])
def test_odds(epsilon: float, classes: int) -> None:
    """Every probability within 5 deviations of its own; the largest odds are e^ε exactly."""
    stream, label = Stream.from_seeds(0), classes - 2
    drawn = Counter(randomized_response(label, epsilon, classes, stream) for _ in range(DRAWS))
    keep = keep_probability(epsilon, classes)
    other = (1 - keep) / (classes - 1)
    assert keep / other == pytest.approx(math.exp(epsilon))
    for value in range(classes):
        expected = keep if value == label else other
        tolerance = 5 * math.sqrt(expected * (1 - expected) / DRAWS)
        assert drawn[value] / DRAWS == pytest.approx(expected, abs=tolerance)


def rows(count: int = 40) -> list[dict[str, Any]]:
    batch = make_task("bert", dtype=torch.float32, batch_size=count)[1]
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def test_a_row_is_released_once() -> None:
    """Not at every epoch: the same key and row give the same label, other keys another draw."""
    data = [{"labels": 0}] * 200
    one, again = (RandomizedLabels(data, 0.5, 3, key) for key in [LabelKey((1,))] * 2)
    labels = [row["labels"] for row in map(one.__getitem__, range(200))]
    assert labels == [again[index]["labels"] for index in range(200)]
    assert labels[-1] == one[-1]["labels"]
    other = RandomizedLabels(data, 0.5, 3, LabelKey())
    assert labels != [other[index]["labels"] for index in range(200)]
    assert len(set(labels)) == 3
    assert data == [{"labels": 0}] * 200


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_labels_are_randomized_by_every_name_that_collators_take(
    name: str, as_tensor: bool
) -> None:
    """`default_data_collator` makes `labels` of each of them."""
    label = torch.tensor(1) if as_tensor else 1
    data = RandomizedLabels([{name: label, "x": 7}] * 200, 0.5, 3, LabelKey((1,)))
    released = [data[index] for index in range(200)]
    assert {int(row[name]) for row in released} == {0, 1, 2}
    assert all(row.keys() == {name, "x"} for row in released)
    if as_tensor or name != "label_ids":  # of which it takes lists alone
        batches = [default_data_collator([row]) for row in released]
        assert {int(batch["labels"]) for batch in batches} == {0, 1, 2}


@pytest.mark.parametrize(
    "names", [("labels", "label"), ("labels", "label_ids"), ("label", "label_ids")]
)
def test_two_labels_of_a_row_are_refused(names: tuple[str, str]) -> None:
    """Only one of them would be randomized."""
    data = RandomizedLabels([dict.fromkeys(names, 1)], 0.5, 3, LabelKey())
    with refuses("labels-in-two-columns"):
        data[0]


def config(tmp_path: Path, **more: Any) -> GradGuardConfig:
    settings = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "defense": "none", "protect_labels": "randomized_response", "label_epsilon": 0.5,
    }  # fmt: skip
    return GradGuardConfig(**(settings | more))


class Seen(GradGuardTrainer):
    """Notes the labels that a loss is computed from, by row."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = getattr(self, "seen", {})
        for ids, label in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
            if self.state.global_step >= 0 and model.training:
                self.seen.setdefault(tuple(ids), set()).add(label)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_the_trainer_sees_nothing_but_randomized_labels(tmp_path: Path) -> None:
    """Over three epochs one label a row; at ε = 0.5 and 3 classes about half of them wrong; the
    evaluation's are true.
    """
    model, _ = make_task("bert", dtype=torch.float32)
    data = rows()
    trainer = Seen(model, config(tmp_path, max_steps=30), train_dataset=data, eval_dataset=data)
    trainer.train()
    truth = {tuple(row["input_ids"].tolist()): int(row["labels"]) for row in data}
    assert trainer.seen.keys() == truth.keys()
    assert all(len(labels) == 1 for labels in trainer.seen.values())
    right = sum(truth[ids] in labels for ids, labels in trainer.seen.items()) / len(truth)
    assert right == pytest.approx(keep_probability(0.5, 3), abs=0.35)
    assert right < 1
    assert not isinstance(trainer.eval_dataset, RandomizedLabels)


def test_data_that_are_given_later_are_randomized_too(tmp_path: Path) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    trainer = Seen(model, config(tmp_path), train_dataset=rows())
    trainer.train_dataset = rows()
    trainer.train()
    assert isinstance(trainer.train_dataset, RandomizedLabels)


def labels_of(trainer: GradGuardTrainer) -> list[int]:
    return [int(trainer.train_dataset[i]["labels"]) for i in range(40)]


@pytest.mark.parametrize("seed", [None, 3])
def test_another_data_set_has_another_key_and_one_that_comes_back_its_own(
    tmp_path: Path, seed: int | None
) -> None:
    """Else whoever knows a label of the one would see whether that of the other was kept."""
    model, _ = make_task("bert", dtype=torch.float32)
    data, other = rows(), rows()
    trainer = GradGuardTrainer(model, config(tmp_path, noise_seed=seed), train_dataset=data)
    found = []
    for one in (data, other, data):
        trainer.train_dataset = one
        trainer.train()
        found.append(labels_of(trainer))
    assert found[0] == found[2] != found[1]


def test_labels_that_another_trainer_randomized_are_resumed(tmp_path: Path) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    args = config(tmp_path, save_strategy="steps", save_steps=2)
    first = GradGuardTrainer(model, config(tmp_path), train_dataset=rows())
    second = GradGuardTrainer(model, args, train_dataset=first.train_dataset)
    second.train()
    again = GradGuardTrainer(model, args, train_dataset=rows())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert labels_of(first) == labels_of(second) == labels_of(again)


def test_resuming_goes_on_with_the_same_labels(tmp_path: Path) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    args = config(tmp_path, save_strategy="steps", save_steps=2)
    first = GradGuardTrainer(model, args, train_dataset=rows())
    first.train()
    second = GradGuardTrainer(model, args, train_dataset=rows())
    before = [int(second.train_dataset[i]["labels"]) for i in range(40)]
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    labels = [[int(t.train_dataset[i]["labels"]) for i in range(40)] for t in (first, second)]
    assert labels[0] == labels[1] != before
    (tmp_path / "checkpoint-2" / "gradguard_private_rank0.safetensors").unlink()
    with pytest.raises(ValueError, match="release each label a second time"):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_card_says_it(tmp_path: Path) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    GradGuardTrainer(model, config(tmp_path), train_dataset=rows()).create_model_card()
    assert "ε = 0.5 (randomized response)" in (tmp_path / "README.md").read_text()


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


class OwnLoader(GradGuardTrainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    with refuses("labels-of-unnumbered-rows"):
        GradGuardTrainer(model, config(tmp_path), train_dataset=Endless())
    with refuses("labels-of-own-batches"):
        OwnLoader(model, config(tmp_path), train_dataset=rows())
    for label in (0.5, [0, 1], torch.tensor([1.0, 0.0]), torch.tensor(0.5)):
        data = RandomizedLabels([{"labels": label}], 1.0, 3, LabelKey())
        with refuses("labels-of-no-class"):
            data[0]
    with pytest.raises(ValueError, match="from 0 to 2"):
        RandomizedLabels([{"labels": 3}], 1.0, 3, LabelKey())[0]
    both = RandomizedLabels([{"labels": 1, "label": 1}], 1.0, 3, LabelKey())
    with refuses("labels-in-two-columns"):
        both[0]
    with refuses("labels-of-other-names"):
        GradGuardTrainer(model, config(tmp_path, label_names=["target"]), train_dataset=rows())
    by_class = config(tmp_path, num_clients=2, partition="dirichlet")
    with refuses("labels-with-dirichlet"):
        GradGuardTrainer(model, by_class, train_dataset=rows())
    model.config.problem_type = "regression"
    with refuses("labels-of-one-class"):
        GradGuardTrainer(model, config(tmp_path), train_dataset=rows())
    language_model, _ = make_task("gpt2_lm", dtype=torch.float32)
    trainer = GradGuardTrainer(
        language_model, config(tmp_path), train_dataset=[{"labels": torch.tensor([1, 2])}]
    )
    with refuses("labels-of-no-class"):
        trainer.train_dataset[0]
    for wrong in ({"label_epsilon": None}, {"label_epsilon": 0.0}, {"protect_labels": "head"}):
        with pytest.raises(ValueError, match=r"label_epsilon|protect_labels"):
            config(tmp_path, **wrong)
