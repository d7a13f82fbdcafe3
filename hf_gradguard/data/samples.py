"""Labeled samples from local files or the Hub."""

from __future__ import annotations

from . import installed as installed

# isort: split
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Image

from .files import load_rows, pick_column

Sample = tuple[Any, int]
"""A text or an image, with its class id."""

_COLUMNS = {
    "text": ("text", "sentence", "content"),
    "image": ("image", "img", "x_train", "x", "images"),
}
_LABEL_COLUMNS = ("label", "labels", "y_train", "y")


def load_samples(
    dataset: str,
    *,
    kind: str,
    count: int,
    spare: int = 0,
    seed: int = 0,
    classes: Mapping[str, int] | None = None,
    column: str | None = None,
    label_column: str | None = None,
    split: str = "train",
    config: str | None = None,
) -> list[Sample]:
    """Samples drawn at random, without replacement.

    Args:
        dataset: A tsv, csv, json or parquet file, a folder of images (one subfolder a class), an
            npz file of images and labels, or a Hub name.
        kind: `"text"` or `"image"`: the name of a domain.
        count: How many.
        spare: How many more behind them, or as many as there are.
        seed: Of the draw.
        classes: The model's `label2id`, for labels that are names.
        column: Of texts or images. Default: the first usual name that there is.
        label_column: Of labels. Default: the same.
        split: Of a Hub data set or a folder.
        config: Of a Hub data set with several.

    Raises:
        ValueError: If there are fewer, there is no such column, or a label is no class of the
            model.

    Example:
        >>> written = (tmp_path / "few.tsv").write_text("sentence\\tlabel\\na fine film\\t1\\n")
        >>> load_samples(str(tmp_path / "few.tsv"), kind="text", count=1)
        [('a fine film', 1)]
    """
    usual = _COLUMNS[kind]
    if dataset.endswith(".npz"):
        with np.load(dataset, allow_pickle=False) as arrays:
            names = list(arrays)
            inputs: Any = arrays[pick_column(names, column, usual, dataset)]
            labels: Any = arrays[
                pick_column(names, label_column, _LABEL_COLUMNS, dataset, "--label_column")
            ]
        chosen = _draw(len(inputs), count, spare, seed, dataset)
        return [(inputs[i], _class_id(labels[i].item(), classes)) for i in chosen]
    rows = load_rows(dataset, split, config)
    name = pick_column(rows.column_names, column, usual, dataset)
    label_name = pick_column(
        rows.column_names, label_column, _LABEL_COLUMNS, dataset, "--label_column"
    )
    rows = rows.select(_draw(len(rows), count, spare, seed, dataset))
    if kind == "image":
        rows = rows.cast_column(name, Image())
    return [(row[name], _class_id(row[label_name], classes)) for row in rows]


def load_inputs(
    dataset: str,
    *,
    kind: str,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
) -> list[Any]:
    """All texts or images of a data set, without labels. Arguments are those of `load_samples`.

    Raises:
        ValueError: If there is no such column.

    Example:
        >>> written = (tmp_path / "list.csv").write_text("text\\na fine film\\n")
        >>> load_inputs(str(tmp_path / "list.csv"), kind="text")
        ['a fine film']
    """
    usual = _COLUMNS[kind]
    if dataset.endswith(".npz"):
        with np.load(dataset, allow_pickle=False) as arrays:
            return list(arrays[pick_column(list(arrays), column, usual, dataset)])
    rows = load_rows(dataset, split, config)
    name = pick_column(rows.column_names, column, usual, dataset)
    if kind == "image":
        rows = rows.cast_column(name, Image())
    return list(rows[name])


def _draw(available: int, count: int, spare: int, seed: int, dataset: str) -> list[int]:
    if not 1 <= count <= available:
        raise ValueError(
            f"samples must be from 1 to the {available} that {dataset} has, but is {count}."
        )
    drawn: list[int] = np.random.default_rng(seed).permutation(available)[: count + spare].tolist()
    return drawn


def _class_id(label: Any, classes: Mapping[str, int] | None) -> int:
    if isinstance(label, int):
        return label
    if classes and label in classes:
        return classes[label]
    raise ValueError(
        f"{label!r} is no class of the model. Its classes are: "
        f"{', '.join(map(str, classes or ['unnamed']))}."
    )
