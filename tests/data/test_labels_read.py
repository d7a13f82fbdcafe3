"""Labels in files that are no classes of a model: what is wrong, what to do, and no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_gradguard.data.class_labels import number_classes
from hf_gradguard.data.samples import load_samples
from hf_gradguard.data.tables import DataError

SECRET = "confidential"
MODEL = {"bad": 0, "good": 1}
WRONG: dict[str, tuple[list[Any], str]] = {
    "no label": ([0, 1, -1, 0], r"row 3: .* -1, which stands for no label\. Leave such rows out"),
    "from 1": ([1, 2, 1, 2], r"counts classes from 1 to 2, .* 0 to 1\. Subtract 1"),
    "beyond": ([0, 1, 7, 1], r"row 3: .*no class of the model: correct it"),
    "halves": ([0, 1, 0.5, 1], r"row 3: .*a number with a point.*num_labels=1"),
    "other names": (["bad", "good", "so so", "bad"], r"row 3: .*classes are: bad, good"),
    "missing": ([0, 1, None, 1], r"row 3: column 'label' is empty\. Fill it"),
}
LISTS: dict[str, tuple[list[Any], str]] = {
    "one hot": ([[0, 1], [1, 0], [0, 1], [1, 0]], r"a list\. .*multi_label_classification"),
    "lists of one": ([[0], [1], [0], [1]], r"a list\. Give one class a row"),
}


def save(labels: list[Any], path: Path) -> str:
    rows = [{"text": f"{SECRET} {number}", "label": label} for number, label in enumerate(labels)]
    if path.suffix == ".csv":
        lines = [f"{row['text']},{'' if row['label'] is None else row['label']}" for row in rows]
        path.write_text("\n".join(["text,label", *lines, ""]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("case", [*WRONG, *LISTS])
def test_labels_that_are_no_classes(case: str, suffix: str, tmp_path: Path) -> None:
    labels, message = (WRONG | LISTS)[case]
    if (case in LISTS and suffix == ".csv") or (case == "halves" and suffix != ".csv"):
        return  # no such cell; all would be numbers with a point
    file = save(labels, tmp_path / f"rows{suffix}")
    with pytest.raises(DataError, match=message) as refusal:
        load_samples(file, kind="text", count=4, classes=MODEL)
    assert SECRET not in str(refusal.value)
    assert f"rows{suffix}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_draw_does_not_hide_that_labels_count_from_1(tmp_path: Path) -> None:
    """Of rows with the label 1 alone each would be taken for the model's second class."""
    file = save([1] * 20 + [2], tmp_path / "rows.csv")
    for seed in range(3):
        with pytest.raises(DataError, match="Subtract 1"):
            load_samples(file, kind="text", count=1, classes=MODEL, seed=seed)
    np.savez(tmp_path / "rows.npz", image=np.zeros((3, 8, 8), np.uint8), label=[1, 2, 1])
    with pytest.raises(DataError, match="Subtract 1"):
        load_samples(str(tmp_path / "rows.npz"), kind="image", count=1, classes=MODEL)


def test_numbers_that_are_names_are_no_places(tmp_path: Path) -> None:
    file = save([1, 2, 1, 2], tmp_path / "rows.csv")
    samples = load_samples(file, kind="text", count=4, classes={"1": 0, "2": 1})
    assert {label for _, label in samples} == {0, 1}
    samples = load_samples(save([1, 0], tmp_path / "few.csv"), kind="text", count=2, classes=MODEL)
    assert {label for _, label in samples} == {0, 1}


@pytest.mark.parametrize("labels", ["several", "token"])
def test_one_value_where_a_list_stands_for_a_row(labels: str, tmp_path: Path) -> None:
    file = save([0, 1], tmp_path / "rows.jsonl")
    text = Path(file).read_text()
    Path(file).write_text(text.replace('"text"', '"words"').replace('"label"', '"labels"'))
    with pytest.raises(DataError, match="one value, and the model takes a list of classes a row"):
        load_samples(file, kind="text", count=2, classes=MODEL, labels=labels, column="words")


def test_rows_without_a_class_in_another_split() -> None:
    features = Features(text=Value("string"), label=ClassLabel(names=["bad", "good"]))
    train = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features)
    test = Dataset.from_dict({"text": [SECRET], "label": [-1]}, features)
    with pytest.raises(DataError, match=r"'test', row 1: .*it is -1, which stands for no label"):
        number_classes(DatasetDict(train=train, test=test), "label")
