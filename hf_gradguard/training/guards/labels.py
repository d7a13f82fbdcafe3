"""Labels that a model's loss cannot take: said before training, in one line and without a row.

Later it would be a row of a batch that stops the run, with whatever the loss says of it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from transformers import Trainer

from ...models import label_kind, task_of
from ..privacy.labels import RandomizedLabels
from ..refusals import is_of_datasets

_COLUMNS = ("labels", "label", "label_ids")
_TASKS = ("text-classification", "image-classification", "token-classification")
_IGNORED = -100
_INSTEAD = "Make them class ids: whole numbers from 0 to {}"


def check_all_labels(trainer: Any) -> None:
    """Look at all labels of tables and lists that a Trainer trains on, or evaluates on meanwhile.

    Args:
        trainer: The Trainer. Its model, data and loss count: a loss or a collator of the user's own
            may take other labels.

    Raises:
        ValueError: If `check_labels` raises it.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> trainer = GradGuardTrainer(model, defense="pruning", train_dataset=train_dataset)
        >>> check_all_labels(trainer)
    """
    task, loss = task_of(trainer.model), trainer.compute_loss_func or type(trainer).compute_loss
    collator = trainer.data_collator
    source = getattr(collator, "__module__", type(collator).__module__)
    is_stock = loss is Trainer.compute_loss and source.split(".")[0] == "transformers"
    if task is None or task.name not in _TASKS or not is_stock:
        return
    takes_bools = not hasattr(collator, "tokenizer")  # of a column called label
    check_labels("train_dataset", trainer.train_dataset, trainer.model, takes_bools)
    if trainer.args.eval_strategy != "no":
        datasets = trainer.eval_dataset
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            check_labels("eval_dataset", dataset, trainer.model, takes_bools)


def check_labels(name: str, dataset: Any, model: Any, takes_bools: bool = False) -> None:
    """Refuse labels that a classifier cannot take.

    Data that is not a table or a list is not looked at: reading all of it may take long, or draw.

    Args:
        name: The name of the argument that the data came by.
        dataset: The data.
        model: A classifier of Transformers.
        takes_bools: Whether the collator makes numbers of a column `label` of true and false.

    Raises:
        ValueError: If labels are wrong, with what to do, and no row of them.

    Example:
        >>> check_labels("train_dataset", [{"labels": 0}, {"labels": 1}], model)
        >>> check_labels("train_dataset", [{"labels": 1}, {"labels": 2}, {"labels": 3}], model)
        Traceback (most recent call last):
        ValueError: train_dataset: its labels count from 1 to 3, and the model's classes from 0 ...
    """
    if isinstance(dataset, RandomizedLabels):
        dataset = dataset.data
    column, labels = _labels_of(dataset)
    if takes_bools and column == "label" and all(isinstance(label, bool) for label in labels):
        return
    if labels and (wrong := what_is_wrong(labels, label_kind(model), model.config.num_labels)):
        raise ValueError(f"{name}: {wrong}")


def _labels_of(dataset: Any) -> tuple[str, list[Any]]:
    """The column of a table's or a list's labels, and these as they stand; none of other data."""
    if is_of_datasets(dataset, "Dataset") and dataset.format["type"] != "custom":
        column = _column_of(dataset.column_names)
        return column, dataset.with_format(None)[column][:] if column else []
    if isinstance(dataset, list | tuple) and dataset and isinstance(dataset[0], Mapping):
        column = _column_of(dataset[0])
        return column, [row[column] for row in dataset if column in row]
    return "", []


def _column_of(names: Iterable[str]) -> str:
    return next((column for column in _COLUMNS if column in names), "")


def what_is_wrong(labels: Iterable[Any], kind: str, classes: int) -> str:
    """Say what is wrong with labels, and what to do; nothing if a model can take them.

    Args:
        labels: The labels of rows.
        kind: The kind of labels that the model takes, as `label_kind` returns it.
        classes: The number of the model's classes.

    Example:
        >>> what_is_wrong([-1, -1], "class", 2)
        'every label is -1, which stands for no label: take a split that has labels.'
        >>> what_is_wrong([0, 1], "class", 2)
        ''
    """
    plain = [_plain(label) for label in labels]
    instead = _INSTEAD.format(classes - 1)
    if any(label is None for label in plain):
        return "some rows have no label (None). Leave them out, or fill them in."
    if any(isinstance(number, float) and math.isnan(number) for number in _numbers(plain)):
        return "some labels are NaN. Leave these rows out, or fill them in."
    if any(isinstance(entry, str) for entry in _entries(plain)):
        return (
            f"its labels are texts. {instead}, by model.config.label2id; a table of datasets does "
            "so by class_encode_column."
        )
    if kind == "number":
        return ""
    lists = [label for label in plain if isinstance(label, list)]
    if kind == "token" or not lists:
        return _wrong_ids(list(_entries(plain)), classes, instead) if kind != "several" else (
            f"the model takes several classes a row, so a label is a list of {classes} numbers 0.0 "
            "or 1.0; here it is one number."
        )  # fmt: skip
    if len(lists) < len(plain):
        return "some labels are lists and some are numbers. Give all rows the same."
    lengths = set(map(len, lists))
    if kind == "class" and lengths == {1}:
        return _wrong_ids([label[0] for label in lists], classes, instead)
    if lengths != {classes}:
        return (
            f"its labels are lists of {min(lengths)} to {max(lengths)} numbers, and the model has "
            f"{classes} classes. {instead}; or, for several classes a row, lists of {classes} "
            "numbers 0.0 or 1.0."
        )
    if all(isinstance(number, int) for label in lists for number in label):
        return (
            f"its labels are lists of {classes} whole numbers. For one class a row give its place "
            "(the index of the 1); for several give numbers with a point (0.0 and 1.0) and set "
            'problem_type="multi_label_classification".'
        )
    return ""


def _wrong_ids(ids: list[Any], classes: int, instead: str) -> str:
    if any(isinstance(number, bool) for number in ids):
        return f"its labels are true and false. {instead}: int(label)."
    if any(isinstance(number, float) for number in ids):
        return (
            f"its labels are numbers with a point. {instead}: int(label); or, for a regression, "
            "load the model with num_labels=1."
        )
    counted = [number for number in ids if number != _IGNORED]
    least, most = min(counted, default=0), max(counted, default=0)
    if least >= 0 and most < classes:
        return ""
    if least == most == -1:
        return "every label is -1, which stands for no label: take a split that has labels."
    if least == -1 and most < classes:
        return (
            "some labels are -1, which stands for no label. Leave these rows out, or set their "
            f"label to {_IGNORED}, which counts for nothing."
        )
    span = f"its labels count from {least} to {most}, and the model's classes from 0 to"
    if (least, most) == (1, classes):
        return f"{span} {classes - 1}: subtract 1 from each label."
    if least >= 0:
        return (
            f"{span} {classes - 1}. Load the model with num_labels={most + 1}, or correct the "
            f"labels{': they may count from 1' if least == 1 else ''}."
        )
    return f"{span} {classes - 1}. {instead}; {_IGNORED} is for what is not to count."


def _plain(label: Any) -> Any:
    """A label without numpy's and torch's types."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        return label.tolist()
    return [_plain(entry) for entry in label] if isinstance(label, list | tuple) else label


def _entries(labels: Iterable[Any]) -> Iterator[Any]:
    """What labels are, or what lists of them hold."""
    for label in labels:
        yield from label if isinstance(label, list) else [label]


def _numbers(labels: Iterable[Any]) -> Iterator[Any]:
    return (entry for entry in _entries(labels) if isinstance(entry, numbers.Number))
