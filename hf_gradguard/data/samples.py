"""Labeled samples from local files or the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import COLUMNS, as_images, load_rows, pick_column

if TYPE_CHECKING:
    from datasets import Dataset

Sample = tuple[Any, Any]
"""A text or an image, with its class id; or with another label, as its model takes it."""

_LABEL_COLUMNS = {
    "class": ("label", "labels", "y_train", "y"),
    "number": ("label", "labels", "score", "y"),
    "several": ("labels", "label"),
    "token": ("ner_tags", "pos_tags", "tags", "labels"),
    "text": ("target", "summary", "highlights", "answer", "output", "response", "labels"),
}
_WORDS = ("tokens", "words")
_SOURCES = ("source", "document", "article", "dialogue", "question", "input")


def load_samples(
    dataset: str,
    *,
    kind: str,
    count: int,
    labels: str | None = "class",
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
        labels: `"class"`, `"number"`, `"several"` (names, ids, or one 0 or 1 for each class),
            `"token"` (a class for each of a list of words), `"text"`, or `None` for none.
        spare: How many more behind them, or as many as there are.
        seed: Of the draw.
        classes: The model's `label2id`, for labels that are names.
        column: Of texts or images. Default: the first usual name that there is.
        label_column: Of labels. Default: the same.
        split, config: Of a Hub data set or a folder; a Hub data set with several.

    Raises:
        ValueError: If there are fewer, or no such column, or a label is no class of the model.

    Example:
        >>> written = (tmp_path / "few.tsv").write_text("sentence\\tlabel\\na fine film\\t1\\n")
        >>> load_samples(str(tmp_path / "few.tsv"), kind="text", count=1)
        [('a fine film', 1)]
    """
    input_columns = _input_columns(kind, labels)
    label_columns = _LABEL_COLUMNS.get(labels or "", ())
    convert = _CONVERTERS.get(labels or "", lambda label, classes: label)
    if dataset.endswith(".npz"):
        columns = [(column, input_columns), *([(label_column, label_columns)] if labels else [])]
        arrays = _arrays(dataset, columns)
        indices = _draw(len(arrays[0]), count, spare, seed, dataset)
        return [
            (arrays[0][i], convert(arrays[1][i].tolist(), classes) if labels else None)
            for i in indices
        ]
    rows, name = _rows(dataset, split, config, column, kind, input_columns)
    rows = rows.select(_draw(len(rows), count, spare, seed, dataset))
    inputs = _complete(rows[name], dataset)
    if labels is None:
        return [(content, None) for content in inputs]
    names = rows.column_names
    label_name = pick_column(names, label_column, label_columns, dataset, "--label_column")
    # A data set's ids follow its own order of classes, and the model's another one.
    ids = _model_ids(rows.features[label_name], classes, dataset)
    values = [convert(_mapped(label, ids), classes) for label in rows[label_name]]
    return list(zip(inputs, values, strict=True))


def _complete(inputs: Any, dataset: str) -> list[Any]:
    if any(content is None for content in inputs):
        raise ValueError(f"A row that was drawn from {dataset} is empty.")
    return list(inputs)


def _model_ids(feature: Any, classes: Mapping[str, int] | None, dataset: str) -> list[int] | None:
    """The model's class of each class of a data set that names them; `None` where names say nothing
    of the model's.

    Raises:
        ValueError: If the model has only some of the names.
    """
    names: list[str] = getattr(getattr(feature, "feature", feature), "names", None) or []
    unknown = [name for name in names if name not in (classes or {})]
    if classes is None or len(unknown) == len(names):
        return None
    if unknown:
        raise ValueError(f"{dataset} has a class {unknown[0]!r}, and the model none of that name.")
    return [classes[name] for name in names]


def _mapped(label: Any, ids: list[int] | None) -> Any:
    if ids is None or label is None:
        return label
    return [ids[number] for number in label] if isinstance(label, list) else ids[label]


def _arrays(dataset: str, columns: Sequence[tuple[str | None, tuple[str, ...]]]) -> list[Any]:
    """Of an npz file: inputs, and labels if there is a second column."""
    flags = ("--column", "--label_column")
    with np.load(dataset, allow_pickle=False) as arrays:
        return [
            arrays[pick_column(list(arrays), *column, dataset, flag)]
            for column, flag in zip(columns, flags, strict=False)
        ]


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
    input_columns = _input_columns(kind)
    if dataset.endswith(".npz"):
        return list(_arrays(dataset, [(column, input_columns)])[0])
    rows, name = _rows(dataset, split, config, column, kind, input_columns)
    return list(rows[name])


def _rows(
    dataset: str,
    split: str,
    config: str | None,
    column: str | None,
    kind: str,
    input_columns: tuple[str, ...],
) -> tuple[Dataset, str]:
    """And the name of their inputs' column."""
    rows = load_rows(dataset, split, config)
    name = pick_column(rows.column_names, column, input_columns, dataset)
    return (as_images(rows, name) if kind == "image" else rows), name


def _draw(available: int, count: int, spare: int, seed: int, dataset: str) -> list[int]:
    if not 1 <= count <= available:
        raise ValueError(
            f"samples must be from 1 to the {available} that {dataset} has, but is {count}."
        )
    # One permutation whatever the count: more decoys leave the samples as they are.
    order: list[int] = np.random.default_rng(seed).permutation(available).tolist()
    return order[: count + spare]


def _input_columns(kind: str, labels: str | None = None) -> tuple[str, ...]:
    if labels == "token":
        return _WORDS
    return COLUMNS[kind] + (_SOURCES if labels == "text" else ())


def _class_id(label: Any, classes: Mapping[str, int] | None) -> int:
    if isinstance(label, int) and (not classes or label in classes.values()):
        return label
    if classes and label in classes:
        return classes[label]
    raise ValueError(
        f"{label!r} is no class of the model. Its classes are: "
        f"{', '.join(map(str, classes or ['unnamed']))}."
    )


def _class_ids(label: Any, classes: Mapping[str, int] | None) -> list[int]:
    if isinstance(label, str):  # a column of a table
        names = [name.strip() for name in label.split(",") if name.strip()]
        label = [int(name) if name.isdigit() else name for name in names]
    return [_class_id(name, classes) for name in label]


def _class_flags(label: Any, classes: Mapping[str, int] | None) -> list[float]:
    """One 0 or 1 for each class."""
    count = len(classes or ())
    if isinstance(label, list | tuple) and len(label) == count and set(label) <= {0, 1}:
        return [float(flag) for flag in label]
    ids = set(_class_ids(label, classes))
    return [float(number in ids) for number in range(count)]


_CONVERTERS: dict[str, Any] = {
    "class": _class_id,
    "number": lambda label, classes: float(label),
    "several": _class_flags,
    "token": _class_ids,
}
