"""Texts and images to train evaluation networks on: local files or the Hub's data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..registry import need

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = {
    "text": ("text", "sentence", "content"),
    "image": ("image", "img", "x_train", "x", "images"),
}
"""The usual names of the column that holds the inputs, by the name of their domain."""
_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
}


def load_texts(
    dataset: str, *, column: str | None = None, split: str = "train", config: str | None = None
) -> list[str]:
    """Texts of a Hub data set or of a txt (one per line), tsv, csv, json or parquet file.

    Args:
        dataset: A file, a folder or a Hub name.
        column: The column to read. Default: the first of text, sentence and content that there is.
        split: Of a Hub data set.
        config: Of a Hub data set with several, such as "wikitext-2-raw-v1".

    Raises:
        ValueError: If there is no such column, or it holds no text.

    Example:
        >>> Path("texts.txt").write_text("a fine film\\nthe plot is long")
        28
        >>> load_texts("texts.txt")
        ['a fine film', 'the plot is long']
    """
    rows = load_rows(dataset, split, config)
    texts = list(rows[pick_column(rows.column_names, column, COLUMNS["text"], dataset)])
    if not any(isinstance(text, str) for text in texts):
        raise ValueError(
            f"Column {column!r} of {dataset} holds no text. Its columns: "
            f"{', '.join(rows.column_names)}."
        )
    return [text for text in texts if isinstance(text, str)]


def load_images(
    dataset: str,
    *,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
    num_channels: int | None = None,
    image_size: int | None = None,
) -> Any:
    """Images of a Hub data set, of a parquet file with an image column, or of an npz file with an
    array.

    Args:
        dataset: A file, a folder or a Hub name.
        column: The column or array to read. Default: the first of image, img, x_train, x and images
            that there is.
        split: Of a Hub data set.
        config: Of a Hub data set with several.
        num_channels: 1 or 3: convert images of a column. An array is taken as it is.
        image_size: Resize images of a column to so many pixels square; needed if they differ in
            size.

    Raises:
        ValueError: If there is no such column.

    Example:
        >>> np.savez("images.npz", image=np.zeros((4, 28, 28), dtype=np.uint8))
        >>> load_images("images.npz").shape
        (4, 28, 28)
    """
    if dataset.endswith(".npz"):
        with np.load(dataset, allow_pickle=False) as arrays:
            return arrays[pick_column(list(arrays), column, COLUMNS["image"], dataset)]
    rows = load_rows(dataset, split, config)
    name = pick_column(rows.column_names, column, COLUMNS["image"], dataset)
    images = as_images(rows, name, "L" if num_channels == 1 else "RGB")[name]
    return [
        np.asarray(image.resize((image_size, image_size)) if image_size else image)
        for image in images
    ]


def load_rows(dataset: str, split: str = "train", config: str | None = None) -> Dataset:
    """A Hub data set's split, a folder that `datasets` can read, or a local file.

    Example:
        >>> Path("rows.tsv").write_text("sentence\\tlabel\\na fine film\\t1")
        28
        >>> load_rows("rows.tsv").column_names
        ['sentence', 'label']
    """
    need("data", "data", "datasets")
    # An extra: training needs this room's private files and not this library.
    from datasets import load_dataset

    path = Path(dataset)
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise ValueError(f"{dataset} is none of {', '.join(_FORMATS)} and .npz (images).")
        # Tab-separated data sets hold bare quotation marks, so quoting is off (csv.QUOTE_NONE)
        # there.
        tabs: dict[str, Any] = {"delimiter": "\t", "quoting": 3} if path.suffix == ".tsv" else {}
        if path.suffix in (".csv", ".tsv"):  # else a text "NA" or "None" were no text
            tabs |= {"keep_default_na": False, "na_values": [""]}
        return load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train", **tabs)
    return load_dataset(dataset, config, split=split)


def as_images(rows: Dataset, column: str, mode: str | None = None) -> Dataset:
    """Rows whose column holds PIL images, of that mode if one is given."""
    from datasets import Image

    return rows.cast_column(column, Image(mode=mode))


def pick_column(
    names: list[str],
    column: str | None,
    usual: tuple[str, ...],
    dataset: str,
    flag: str = "--column",
) -> str:
    """The column asked for, or the first of the usual ones that there is.

    Raises:
        ValueError: If there is none, naming those there are.

    Example:
        >>> pick_column(["idx", "sentence"], None, ("text", "sentence"), "train.tsv")
        'sentence'
    """
    columns = usual if column is None else (column,)
    for name in columns:
        if name in names:
            return name
    raise ValueError(
        f"{dataset} has no {' or '.join(columns)}. It has: {', '.join(names)}. Choose with {flag}."
    )
