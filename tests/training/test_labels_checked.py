"""Labels that a loss cannot take: one line before training says what is wrong and what to do, and
nothing of a row.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from helpers import make_task
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.guards.labels import check_labels

ROWS, CLASSES = 12, 3
DEFENSES: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian_noise": {"relative_scale": 1.0},
    "dp_sgd": {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3},
}
WRONG: dict[str, tuple[Any, str]] = {
    "no label": (lambda row: -1 if row == 5 else row % 3, r"some .* -1, .* no label.*-100"),
    "no labels": (lambda row: -1, r"every label is -1, which stands for no label.* split"),
    "from 1": (lambda row: row % 3 + 1, r"count from 1 to 3, .* from 0 to 2: subtract 1"),
    "beyond": (lambda row: 7 if row == 5 else row % 3, r"from 0 to 7, .*0 to 2.*num_labels=8"),
    "from 1 and beyond": (lambda row: row % 5 + 1, r"from 1 to 5.*num_labels=6.*count from 1"),
    "below": (lambda row: -7 if row == 5 else row % 3, r"from -7 to 2.*whole numbers from 0 to 2"),
    "points": (lambda row: float(row % 3), r"numbers with a point.*int\(label\).*num_labels=1"),
    "halves": (lambda row: row / 2, r"numbers with a point"),
    "nan": (lambda row: math.nan if row == 5 else 1.0, r"NaN.*Leave"),
    "bool": (lambda row: bool(row % 2), r"true and false.*int\(label\)"),
    "none": (lambda row: None if row == 5 else row % 3, r"no label \(None\).*Leave them out"),
    "names": (lambda row: "good", r"texts\. .*label2id.*class_encode_column"),
    "numbers as texts": (lambda row: str(row % 3), r"texts"),
    "one hot": (lambda row: [int(n == row % 3) for n in range(3)], r"lists of 3 whole.*index"),
    "uneven": (lambda row: [0] * (1 + row % 2), r"lists of 1 to 2 numbers.*3 classes"),
    "lists and numbers": (lambda row: [0] if row == 5 else 0, r"some .*lists and some .*numbers"),
    "numpy": (lambda row: np.int64(row % 3 + 1), r"subtract 1"),
    "tensors": (lambda row: torch.tensor(row % 3 + 1), r"subtract 1"),
}
RIGHT: dict[str, Any] = {
    "ids": lambda row: row % 3,
    "some that do not count": lambda row: -100 if row == 5 else row % 3,
    "numpy": lambda row: np.int64(row % 3),
    "tensors": lambda row: torch.tensor(row % 3),
    "lists of one": lambda row: [row % 3],
    "several classes": lambda row: [float(n == row % 3) for n in range(3)],
}


def data(label: Any) -> list[dict[str, Any]]:
    batch = make_task("bert", batch_size=ROWS)[1]
    rows = [{k: v[row] for k, v in batch.items() if k != "labels"} for row in range(ROWS)]
    return [{**row, "labels": label(number)} for number, row in enumerate(rows)]


def trainer(folder: Path, defense: str = "none", kind: type = GradGuardTrainer, **more: Any) -> Any:
    model = make_task("bert", dtype=torch.float32)[0]
    assert model.config.num_labels == CLASSES
    arguments: Any = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no",
    } | more.pop("arguments", {})  # fmt: skip
    if kind is Trainer:
        return Trainer(model, TrainingArguments(**arguments), **more)
    arguments |= {"defense": defense, "defense_kwargs": DEFENSES[defense]}
    return kind(model=model, args=GradGuardConfig(**arguments), **more)


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_labels_are_refused_before_training(case: str, defense: str, tmp_path: Path) -> None:
    label, message = WRONG[case]
    protected = trainer(tmp_path, defense, train_dataset=data(label))
    with pytest.raises(ValueError, match=rf"^train_dataset: .*{message}") as refusal:
        protected.train()
    assert protected.state.global_step == 0
    assert protected.shared_messages.total == 0
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", RIGHT)
def test_labels_that_stock_takes_are_taken(case: str, tmp_path: Path) -> None:
    rows = data(RIGHT[case])
    trainer(tmp_path, kind=Trainer, train_dataset=rows).train()
    protected = trainer(tmp_path, train_dataset=rows)
    protected.train()
    assert protected.state.global_step == 1


@pytest.mark.parametrize("where", ["a set", "several sets"])
def test_what_is_evaluated_is_looked_at_before_training(where: str, tmp_path: Path) -> None:
    names = data(lambda row: "good")
    evaluated: Any = names if where == "a set" else {"first": data(lambda row: 0), "second": names}
    arguments = {"eval_strategy": "steps", "eval_steps": 1}
    rows = {"train_dataset": data(lambda row: row % 3), "eval_dataset": evaluated}
    protected = trainer(tmp_path, arguments=arguments, **rows)
    with pytest.raises(ValueError, match=r"^eval_dataset: its labels are texts"):
        protected.train()
    assert protected.state.global_step == 0
    unused = trainer(tmp_path, **rows)
    unused.train()  # nothing is evaluated meanwhile


@pytest.mark.parametrize("column", ["labels", "label", "label_ids"])
def test_tables(column: str) -> None:
    model = make_task("bert")[0]
    check_labels("train_dataset", Dataset.from_dict({column: [0, 1, 2]}), model)
    with pytest.raises(ValueError, match="subtract 1"):
        check_labels("train_dataset", Dataset.from_dict({column: [1, 2, 3]}), model)
    features = Features({column: ClassLabel(names=["bad", "good"]), "n": Value("int64")})
    unlabeled = Dataset.from_dict({column: [-1, -1], "n": [0, 1]}, features)
    with pytest.raises(ValueError, match="every label is -1"):
        check_labels("train_dataset", unlabeled, model)
    in_tensors = Dataset.from_dict({column: [1, 2, 3]}).with_format("torch")
    with pytest.raises(ValueError, match="subtract 1"):
        check_labels("train_dataset", in_tensors, model)
    made = Dataset.from_dict({column: [1, 2, 3]}).with_transform(
        lambda batch: {column: [number - 1 for number in batch[column]]}
    )
    check_labels("train_dataset", made, model)  # what it makes of them is not known here


def test_labels_of_tokens() -> None:
    config = BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,
        vocab_size=9, num_labels=5,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    last = model.config.num_labels - 1
    check_labels("train_dataset", [{"labels": [-100, 0, last]}, {"labels": [last]}], model)
    with pytest.raises(ValueError, match=r"num_labels="):
        check_labels("train_dataset", [{"labels": [0]}, {"labels": [0, last + 1]}], model)
    with pytest.raises(ValueError, match="texts"):
        check_labels("train_dataset", [{"labels": ["O", "B-PER"]}], model)


def test_several_classes_and_numbers() -> None:
    model = make_task("bert")[0]
    model.config.problem_type = "multi_label_classification"
    check_labels("train_dataset", [{"labels": [0.0, 1.0, 1.0]}], model)
    with pytest.raises(ValueError, match=r"a list of 3 numbers 0\.0 or 1\.0"):
        check_labels("train_dataset", [{"labels": 1}], model)
    with pytest.raises(ValueError, match="lists of 3 whole numbers"):
        check_labels("train_dataset", [{"labels": [0, 1, 1]}], model)
    model.config.problem_type = "regression"
    check_labels("train_dataset", [{"labels": -1}, {"labels": 2.5}], model)
    with pytest.raises(ValueError, match="NaN"):
        check_labels("train_dataset", [{"labels": 1.0}, {"labels": math.nan}], model)


def test_true_and_false_of_a_column_called_label(tmp_path: Path) -> None:
    """Transformers' default collator makes numbers of them."""
    rows = [{**row, "label": bool(row.pop("labels"))} for row in data(lambda row: row % 2)]
    trainer(tmp_path, kind=Trainer, train_dataset=rows).train()
    trainer(tmp_path, train_dataset=rows).train()


def test_a_loss_or_a_collator_of_ones_own_may_take_others(tmp_path: Path) -> None:
    class FromOne(GradGuardTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = {**inputs, "labels": inputs["labels"] - 1}
            return super().compute_loss(model, inputs, *args, **kwargs)

    rows = data(lambda row: row % 3 + 1)
    trainer(tmp_path, kind=FromOne, train_dataset=rows).train()

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {k: torch.stack([r[k] for r in rows]) for k in rows[0] if k != "labels"}
        return {**batch, "labels": torch.tensor([row["labels"] - 1 for row in rows])}

    trainer(tmp_path, train_dataset=rows, data_collator=collate).train()
