"""Labeled samples: which columns hold them, and which rows a terminal shows first."""

from __future__ import annotations

import numbers
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models import classifier_head
from .class_labels import (
    CONVERTERS,
    check_classes,
    check_counting,
    check_names,
    class_names,
    name_class,
    sorted_classes,
)
from .files import COLUMNS, Arrays, load_rows
from .tables import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Sample = tuple[Any, Any]
"""A text or an image, with its class id, or with another label as its model takes it."""

_LABEL_COLUMNS = {
    "class": ("label", "labels", "y_train", "y", "sentiment"),
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
    r"""Draw samples at random, without replacement.

    Args:
        dataset: A file, a folder or a Hub name, as for `load_rows`; images also as a folder of
            folders, one a class.
        kind: The name of a domain: `"text"` or `"image"`.
        count: The number of samples.
        labels: `"class"`, `"number"`, `"several"` (names, ids, or one 0 or 1 for each class),
            `"token"` (a class for each of a list of words), `"text"`, or `None` for no labels.
        spare: How many more follow them, or as many as there are.
        seed: The seed of the draw.
        classes: The model's `label2id`, for labels that are names.
        column: The column of texts or images. Default: the first usual name that there is.
        label_column: The column of labels. Default: the first usual name that there is.
        split: The split of a Hub data set or a folder.
        config: The configuration of a Hub data set that has several.

    Raises:
        DataError: If there are fewer samples, or no such column, or a label is no class of the
            model. It is a `ValueError` that names the row.

    Example:
        >>> written = (tmp_path / "few.tsv").write_text("sentence\tlabel\na fine film\t1\n")
        >>> load_samples(str(tmp_path / "few.tsv"), kind="text", count=1)
        [('a fine film', 1)]
    """
    source = Labeled(load_rows(dataset, split, config), dataset, kind, labels, column, label_column)
    return source.samples(classes, source.draw(count, spare, seed))


def load_inputs(
    dataset: str,
    *,
    kind: str,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
) -> list[Any]:
    r"""Load all texts or images of a data set, without labels.

    Args:
        dataset: A file, a folder or a Hub name, as for `load_rows`.
        kind: The name of a domain: `"text"` or `"image"`.
        column: The column of texts or images. Default: the first usual name that there is.
        split: The split of a Hub data set or a folder.
        config: The configuration of a Hub data set that has several.

    Raises:
        DataError: If there is no such column, or a row is empty.

    Example:
        >>> written = (tmp_path / "list.csv").write_text("text\na fine film\n")
        >>> load_inputs(str(tmp_path / "list.csv"), kind="text")
        ['a fine film']
    """
    source = Labeled(load_rows(dataset, split, config), dataset, kind, None, column)
    return list(source.inputs(range(len(source))))


def load_texts(
    dataset: str, *, column: str | None = None, split: str = "train", config: str | None = None
) -> list[str]:
    r"""Load all texts of a data set but the empty ones; arguments are those of `load_samples`.

    Raises:
        DataError: If there is no such column, or it holds no text.

    Example:
        >>> written = (tmp_path / "texts.txt").write_text("a fine film\n\nthe plot is long")
        >>> load_texts(str(tmp_path / "texts.txt"))
        ['a fine film', 'the plot is long']
    """
    rows = load_rows(dataset, split, config)
    name = pick_column(rows, column, COLUMNS["text"], dataset)
    texts = [text for text in rows[name] if isinstance(text, str)]
    if not texts:
        raise DataError(f"{dataset}: column {name!r} holds no text. Choose with --column.")
    return texts


def load_images(
    dataset: str,
    *,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
    num_channels: int | None = None,
    image_size: int | None = None,
) -> Any:
    """Load all images of a data set as arrays of bytes.

    Args:
        dataset: A file, a folder or a Hub name, as for `load_rows`.
        column: The column of images. Default: the first usual name that there is.
        split: The split of a Hub data set or a folder.
        config: The configuration of a Hub data set that has several.
        num_channels: 1 or 3: convert images of a column. An npz's array is not converted.
        image_size: Resize images of a column to this many pixels square; needed if they differ in
            size.

    Raises:
        DataError: If there is no such column, or an image is cut.

    Example:
        >>> np.savez(tmp_path / "images.npz", image=np.zeros((4, 28, 28), dtype=np.uint8))
        >>> load_images(str(tmp_path / "images.npz")).shape
        (4, 28, 28)
    """
    from .images import to_pil

    source = Labeled(load_rows(dataset, split, config), dataset, "image", None, column)
    if isinstance(source.rows, Arrays):
        return source.rows[source.input_column]
    mode = "L" if num_channels == 1 else "RGB"
    images = (to_pil(stored, mode) for stored in source.inputs(range(len(source))))
    return [
        np.asarray(image.resize((image_size, image_size)) if image_size else image)
        for image in images
    ]


class Labeled:
    r"""Rows that have inputs in one column and labels in another.

    Args:
        rows: Rows as `load_rows` returns them.
        dataset: The name of the data set, for errors.
        kind: The name of a domain: `"text"` or `"image"`.
        labels: What a label is, as for `load_samples`; `None` for no labels.
        column: The column of inputs. Default: the first usual name that there is.
        label_column: The column of labels. Default: the first usual name that there is.

    Raises:
        DataError: If there is no such column.

    Example:
        >>> written = (tmp_path / "few.csv").write_text("text,label\na fine film,good\n,bad\n")
        >>> source = Labeled(load_rows(str(tmp_path / "few.csv")), "few.csv", "text", "class")
        >>> source.new_head()["label2id"], list(source.inputs([0]))
        ({'bad': 0, 'good': 1}, ['a fine film'])
        >>> list(source.inputs([0, 1]))
        Traceback (most recent call last):
        hf_gradguard.data.tables.DataError: few.csv, row 2: column 'text' is empty. ...
    """

    def __init__(
        self,
        rows: Any,
        dataset: str,
        kind: str,
        labels: str | None,
        column: str | None = None,
        label_column: str | None = None,
    ) -> None:
        self.rows, self.dataset, self.kind, self.labels = rows, dataset, kind, labels
        usual = _WORDS if labels == "token" else COLUMNS[kind]
        usual += _SOURCES if labels == "text" else ()
        feature = "Image" if kind == "image" else ""
        flag = "--column"
        if labels is not None and label_column is None:  # say both unusual names at once
            is_usual = {name.lower() for name in rows.column_names} & {*_LABEL_COLUMNS[labels]}
            flag += "" if is_usual else " and --label_column"
        self.input_column = pick_column(rows, column, usual, dataset, flag, feature)
        self.label_column = ""
        if kind == "image" and self.input_column in rows.features:
            self.rows = as_stored_images(rows, self.input_column, dataset)
        if labels is not None:
            usual = _LABEL_COLUMNS[labels]
            flag = "--label_column"
            feature = "ClassLabel" if labels == "class" else ""
            self.label_column = pick_column(rows, label_column, usual, dataset, flag, feature)
            if self.label_column == self.input_column:
                raise DataError(
                    f"{dataset}: {self.input_column} cannot be input and label. Choose with "
                    "--column and --label_column."
                )

    def __len__(self) -> int:
        return len(self.rows[self.input_column])

    def draw(self, count: int, spare: int, seed: int) -> list[int]:
        """Draw row numbers from one permutation, so that more spare rows do not change the samples.

        Args:
            count: The number of samples.
            spare: How many more follow them, or as many as there are.
            seed: The seed of the permutation.

        Raises:
            DataError: If there are too few rows.
        """
        if not 1 <= count <= len(self):
            raise DataError(
                f"samples must be from 1 to the {len(self)} that {self.dataset} has, but is "
                f"{count}."
            )
        order: list[int] = np.random.default_rng(seed).permutation(len(self)).tolist()
        return order[: count + spare]

    def check(self, rows: Sequence[int] | None = None) -> None:
        """Check rows, but not images, which are read when they are needed.

        Args:
            rows: Row numbers. Default: all.

        Raises:
            DataError: If a text or a label is empty.
        """
        rows = range(len(self)) if rows is None else rows
        if self.kind == "text":
            deque(self.inputs(rows), maxlen=0)
        if self.label_column:
            deque(self._cells(self.label_column, rows), maxlen=0)

    def inputs(self, rows: Sequence[int]) -> Iterator[Any]:
        """Yield the texts or images of rows.

        Raises:
            DataError: If a row has none, or an image is cut.
        """
        for row, stored in zip(rows, self._cells(self.input_column, rows), strict=True):
            row_name = f"{self.dataset}, row {row + 1}"
            if self.kind == "image":
                from .images import read_image

                yield read_image(stored, row_name, Path(self.dataset).parent)
                continue
            is_number = isinstance(stored, numbers.Number)
            is_words = self.labels == "token" and isinstance(stored, list)
            if not (isinstance(stored, str) or is_number or is_words):
                raise DataError(
                    f"{row_name}: column {self.input_column!r} holds {type(stored).__name__} and "
                    "no text. Choose with --column."
                )
            yield str(stored) if is_number else stored

    @property
    def _has_arrays(self) -> bool:
        return isinstance(self.rows, Arrays)

    def _cells(self, column: str, rows: Sequence[int]) -> Iterator[Any]:
        is_array = self._has_arrays
        if is_array and len(self.rows[column]) != len(self):
            raise DataError(
                f"{self.dataset}: {column!r} has {len(self.rows[column])} rows, and "
                f"{self.input_column!r} {len(self)}. Give one label for each."
            )
        cells = self.rows[column][list(rows)] if is_array else self.rows.select(rows)[column][:]
        for row, cell in zip(rows, cells, strict=True):
            is_nan = isinstance(cell, float) and cell != cell
            if cell is None or is_nan or (isinstance(cell, str) and not cell.strip()):
                raise DataError(
                    f"{self.dataset}, row {row + 1}: column {column!r} is empty. Fill it, or "
                    "delete the row."
                )
            yield cell

    def samples(self, classes: Mapping[str, int] | None, rows: Sequence[int]) -> list[Sample]:
        """Return rows with their labels as the model takes them.

        Args:
            classes: The model's `label2id`.
            rows: Row numbers.

        Raises:
            DataError: If a row is empty, or its label is none of the model's.
        """
        return list(zip(self.inputs(rows), self.label_ids(classes, rows), strict=True))

    def label_ids(self, classes: Mapping[str, int] | None, rows: Sequence[int]) -> list[Any]:
        """Return the labels of rows as the model takes them.

        Args:
            classes: The model's `label2id`.
            rows: Row numbers.

        Raises:
            DataError: If a label is empty, or none of the model's.
        """
        if self.labels is None:
            return [None] * len(rows)
        names = class_names(self.rows.features.get(self.label_column))
        # A data set's numbers follow its own order of classes, and the model's another one.
        by_name = check_names(names, classes, self.dataset)
        if self.labels == "class" and not names:
            column, where = self.label_column, f"{self.dataset}: column {self.label_column!r}"
            labels = self.rows[column].tolist() if self._has_arrays else self.rows[column][:]
            check_counting(labels, classes, where)
        converted = []
        for row, label in zip(rows, self._cells(self.label_column, rows), strict=True):
            plain = label.tolist() if isinstance(label, np.ndarray | np.generic) else label
            with _at_row(self.dataset, row, self.label_column):
                plain = name_class(plain, names) if by_name else plain
                converted.append(CONVERTERS[self.labels](plain, classes))
        return converted

    def new_head(self) -> dict[str, Any]:
        """Return settings of a model's configuration for a new head of these labels.

        They follow `run_classification.py` of Transformers: classes are in the order in which a
        data set numbers them, else sorted; numbers with a fraction make a regression; lists make a
        head of several classes.

        Raises:
            DataError: If a label is empty, or there are fewer than two classes, or almost as many
                as rows.
        """
        names = class_names(self.rows.features.get(self.label_column))
        labels = list(self._cells(self.label_column, range(len(self))))
        has_lists = isinstance(labels[0], list)
        if not names:
            names = sorted_classes([x for row in labels for x in row] if has_lists else labels)
            if not names and not has_lists:
                return {"num_labels": 1, "problem_type": "regression"}
            if len(names) > max(20, len(self) / 2):
                raise DataError(
                    f"{self.dataset}: column {self.label_column!r} has {len(names)} different "
                    f"entries in {len(self)} rows, which are no classes. Choose with "
                    "--label_column."
                )
        check_classes(names, f"{self.dataset}: column {self.label_column!r}")
        is_several = has_lists and self.labels == "class"
        problem = {"problem_type": "multi_label_classification"} if is_several else {}
        return classifier_head(names) | problem


@contextmanager
def _at_row(dataset: str, row: int, column: str) -> Iterator[None]:
    """Add the place of a label to an error that its conversion raises, but not what it says."""
    try:
        yield
    except DataError:
        raise
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{dataset}, row {row + 1}: column {column!r} holds no label of the model. {error}"
        ) from None


def show_rows(source: Labeled, classes: Mapping[str, int] | None = None, count: int = 3) -> None:
    r"""Show on the terminal what was read and its first rows, so that the user can check them.

    Rows go only to a terminal, and into no file or log.

    Args:
        source: The rows that were read.
        classes: The model's `label2id`.
        count: The number of rows to show.

    Example:
        >>> written = (tmp_path / "few.csv").write_text("text,label\na fine film,good\n")
        >>> source = Labeled(load_rows(str(tmp_path / "few.csv")), "few.csv", "text", "class")
        >>> show_rows(source, {"bad": 0, "good": 1})
    """
    note = "" if isinstance(source.rows, Arrays) else source.rows.info.description
    note = f" ({note})" if 0 < len(note) < 80 else ""
    labels = f", labels: {source.label_column}" if source.label_column else ""
    facts = f"{source.dataset}{note}: {len(source):,} rows, inputs: {source.input_column}{labels}"
    if not sys.stderr.isatty():
        print(f"{facts}. A terminal shows the first rows.", file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns - 1
    names = {number: name for name, number in (classes or {}).items()}
    samples = source.samples(classes, range(min(count, len(source))))
    print(f"{facts}. The first as read:", file=sys.stderr)
    for content, label in samples:
        size = getattr(content, "size", None) or getattr(content, "shape", None)
        text = str(content) if size is None else f"{getattr(content, 'mode', 'pixels')} {size}"
        named = names.get(label, label) if isinstance(label, int) else label
        end = "" if label is None else f" -> {named}"[:40]
        line = f"  {' '.join(text.split())[: width - 2 - len(end)]}{end}"
        # Nothing that a terminal would take for a command.
        print("".join(mark for mark in line if mark.isprintable()), file=sys.stderr)


def as_stored_images(rows: Dataset, column: str, dataset: str) -> Dataset:
    """Return rows whose images are read when they are asked for, by `read_image`.

    Raises:
        DataError: If the column holds none.
    """
    from datasets import Image

    try:
        return rows.cast_column(column, Image(decode=False))
    except Exception:
        raise DataError(f"{dataset}: column {column!r} holds no images.") from None


def has_class_labels(rows: Any) -> bool:
    r"""Return whether rows have a column that would be taken for class labels.

    Args:
        rows: Rows as `load_rows` returns them.

    Example:
        >>> written = (tmp_path / "few.csv").write_text("text,Label\na fine film,1\n")
        >>> has_class_labels(load_rows(str(tmp_path / "few.csv")))
        True
    """
    try:
        pick_column(rows, None, _LABEL_COLUMNS["class"], "", feature="ClassLabel")
    except DataError:
        return False
    return True


def pick_column(
    rows: Any,
    column: str | None,
    usual: tuple[str, ...],
    dataset: str,
    flag: str = "--column",
    feature: str = "",
) -> str:
    """Return the column asked for, or the first usual one that exists, or the only one of a type.

    Args:
        rows: Rows with `column_names`.
        column: The column asked for, if any.
        usual: Usual names, in order.
        dataset: The rows' name, for errors.
        flag: The flag that names a column, for errors.
        feature: The type of which there may be only one column.

    Raises:
        DataError: If there is none; the message names the columns that exist.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_dict({"idx": [0], "sentence": ["a fine film"]})
        >>> pick_column(rows, None, ("text", "sentence"), "train.tsv")
        'sentence'
    """
    names = rows.column_names
    columns = usual if column is None else (column,)
    for name in columns:
        if name in names:
            return name
        in_any_case = [other for other in names if other.lower() == name.lower()]
        if len(in_any_case) == 1:
            return in_any_case[0]
    typed = [name for name, kind in rows.features.items() if type(kind).__name__ == feature]
    if column is None and len(typed) == 1:
        return typed[0]
    # A table without a line of names has its first row there, which is nobody's business.
    is_header = all(re.fullmatch(r"(?!\d+$)[\w.-]{1,30}( [\w.-]{1,20})?", name) for name in names)
    way_out = f"It has: {', '.join(names)}. Choose with {flag}."
    if not is_header:
        way_out = f"Its first line looks like a row: name the columns there. Choose with {flag}."
    elif len(names) == 1 and flag == "--label_column":
        way_out = f"It has {names[0]} alone. Add labels; images also as a folder for each class."
    raise DataError(f"{dataset} has no {' or '.join(columns)}. {way_out}")
