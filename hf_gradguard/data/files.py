"""Readers of files, folders and the Hub's data sets, which recognize a form or refuse it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models import is_written_as_path
from .tables import COMPRESSIONS, READERS, DataError, format_of, read_table

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

COLUMNS = {
    "text": ("text", "sentence", "content", "review"),
    "image": ("image", "img", "x_train", "x", "images"),
}
"""The usual names of the column that holds the inputs, by the name of their domain."""

_ARROW_FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"
}  # fmt: skip
"""The builder of `datasets` that reads a file, by the file's ending."""
_WAY_OUT = "Give a file, a folder, or a name as the Hub has it, like stanfordnlp/imdb."
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
"""Possible names of the files of a split."""
_SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")
"""Files of which `save_to_disk` writes at least one."""
_IMAGE_NAME = re.compile(r"\.(png|jpe?g|gif|bmp|webp|tiff?|pp?gm|ico)$", re.IGNORECASE)


def load_rows(dataset: str, split: str = "train", config: str | None = None) -> Dataset:
    r"""Load rows of a local file, a folder, or one split of a Hub data set.

    A table's columns hold texts, as they stand in the file; an empty cell is `None`. If a table was
    not read in the plainest way, `rows.info.description` says how.

    Args:
        dataset: A csv, tsv, txt (a text a line), json, jsonl, parquet, arrow or npz file, the first
            five also compressed; a folder of such tables, one a split, of images, or of
            `save_to_disk`; or a Hub name.
        split: The split of a folder or a Hub data set.
        config: The configuration of a Hub data set that has several.

    Raises:
        DataError: If it cannot be read as that: a `ValueError` of one line.
        FileNotFoundError: If it is written like a path and nothing is there.

    Example:
        >>> Path("rows.csv").write_text("sentence;label\na fine film;1")
        28
        >>> rows = load_rows("rows.csv")
        >>> rows[0], rows.info.description
        ({'sentence': 'a fine film', 'label': '1'}, "separated by ';'")
    """
    path = Path(dataset)
    check_data_name(dataset)
    with explain_unreadable(dataset):
        if path.is_file():
            return _read_file(path)
        if splits := _saved(path) or _tables_of(path):
            return _split_of(splits, split, dataset)
        return _load_by_library(dataset, config, split)


def load_splits(dataset: str, config: str | None = None, seed: int = 0) -> DatasetDict:
    r"""Load the splits to train on and to evaluate on, `train` and `validation`.

    Without a validation or test split a tenth of the rows is held out, drawn by the seed.

    Args:
        dataset: A file, a folder or a Hub name, as for `load_rows`.
        config: The configuration of a Hub data set that has several.
        seed: The seed of that draw.

    Raises:
        DataError: If it cannot be read, as for `load_rows`.

    Example:
        >>> written = Path("rows.csv").write_text("text,label\n" + "a film,1\n" * 20)
        >>> {split: len(rows) for split, rows in load_splits("rows.csv").items()}
        {'train': 18, 'validation': 2}
    """
    splits = read_splits(dataset, config)
    return splits if "validation" in splits else hold_out(splits["train"], dataset, seed)


def read_splits(dataset: str, config: str | None = None, split: str = "train") -> DatasetDict:
    """Load splits as `load_splits` does, but hold nothing out: rows are numbered as in the files.

    Args:
        dataset: A file, a folder or a Hub name, as for `load_rows`.
        config: The configuration of a Hub data set that has several.
        split: The split of a folder or a Hub data set that becomes `train`.

    Raises:
        DataError: If it cannot be read, as for `load_rows`.
    """
    # An extra: training needs this room's private files and not this library.
    from datasets import DatasetDict

    path = Path(dataset)
    check_data_name(dataset)
    with explain_unreadable(dataset):
        if path.is_file():
            rows = _read_file(path)
            rows = rows.to_dataset(dataset) if isinstance(rows, Arrays) else rows
            splits: Mapping[str, Any] = {split: rows}
        else:
            splits = _saved(path) or _tables_of(path) or _load_by_library(dataset, config)
        chosen = {"train": _split_of(splits, split, dataset)}
        for name in ("test", "validation"):
            if name in splits and name != split:
                chosen["validation"] = _split_of(splits, name, dataset)
        return DatasetDict(chosen)


def hold_out(rows: Dataset, dataset: str, seed: int) -> DatasetDict:
    """Split rows into `train` and `validation`, which gets a tenth of them.

    Raises:
        DataError: If there is only one row.
    """
    from datasets import DatasetDict

    if len(rows) < 2:
        raise DataError(f"{dataset} has 1 row, of which none can be held out: give two or more.")
    parts = rows.train_test_split(0.1, seed=seed)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def check_data_name(dataset: str) -> None:
    """Refuse a name that is neither a file here nor a Hub name: it would be sent to the Hub.

    Raises:
        FileNotFoundError: If it has the form of a path, or no organization before it.

    Example:
        >>> check_data_name("stanfordnlp/imdb")
        >>> check_data_name("trian.csv")
        Traceback (most recent call last):
        FileNotFoundError: There is no file or folder trian.csv. Give a file, ...
    """
    if not Path(dataset).exists() and (is_written_as_path(dataset) or "/" not in dataset):
        raise FileNotFoundError(f"There is no file or folder {dataset}. {_WAY_OUT}")


@contextlib.contextmanager
def explain_unreadable(dataset: str) -> Iterator[None]:
    """Turn whatever libraries raise while reading data inside the context into one line.

    Their messages may quote a row. Only what they say of the Hub's names is passed on.

    Raises:
        DataError: If anything was raised; the message has the data set's name and the way out.

    Example:
        >>> written = Path("rows.parquet").write_text("PAR1")
        >>> with explain_unreadable("rows.parquet"):
        ...     raise OSError("'a secret text' cannot be parsed")
        Traceback (most recent call last):
        hf_gradguard.data.tables.DataError: rows.parquet cannot be read (OSError): it is cut ...
    """
    try:
        yield
    except (DataError, ImportError, NameError, AttributeError):
        raise
    except Exception as error:
        path = Path(dataset)
        if isinstance(error, PermissionError):
            raise DataError(
                f"{dataset} may not be read by you: ask for the right, or copy it."
            ) from None
        if not path.exists():
            raise _of_hub(dataset, error) from None
        if path.is_dir() and "split" in str(error):  # names the splits that there are
            raise DataError(f"{dataset}: {_one_line(error)} Choose with --split.") from None
        is_whole = path.is_dir() and not any((path / name).is_file() for name in _SAVED)
        way_out = "cut or damaged: copy it again" if not is_whole else (
            "neither tables called train, images, nor what save_to_disk wrote: name a file"
        )  # fmt: skip
        kind = type(error).__name__
        raise DataError(f"{dataset} cannot be read ({kind}): it is {way_out}.") from None


def _of_hub(name: str, error: Exception) -> DataError:
    why = _one_line(error)
    if isinstance(error, ValueError):  # of its configurations or splits, which it names
        return DataError(f"{name}: {why} Choose with --dataset_config and --split.")
    return DataError(
        f"There is no file or folder {name}, and the Hub gave no data set of that name ({why}). "
        f"{_WAY_OUT} For a gated one accept its terms on its page, and run `hf auth login`."
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# --- folders


def _tables_of(folder: Path) -> dict[str, Any]:
    """Return loaders of a folder's tables by split; none if it holds no tables."""
    if not folder.is_dir():
        return {}
    files = [f for f in sorted(folder.iterdir()) if format_of(f) in READERS]
    files = [f for f in files if f.stem != "metadata"]  # of images
    tables = {
        split: file
        for split, stems in _SPLITS.items()
        for file in files
        if file.name.lower().split(".")[0] in stems
    }
    if len(files) == 1 and not tables and len(_image_classes(folder)) < 2:
        tables = {"train": files[0]}
    if files and not tables and not any(f.is_dir() for f in folder.iterdir()):
        names = ", ".join(file.name for file in files[:5])
        raise DataError(f"{folder} has {names}, and none is called train: name the file itself.")
    return tables


def _image_classes(folder: Path) -> list[Path]:
    """Return the subfolders that hold images."""
    folders = [f for f in sorted(folder.iterdir()) if f.is_dir() and f.name[0] not in "._"]
    return [f for f in folders if any(_IMAGE_NAME.search(file.name) for file in f.iterdir())]


def _load_by_library(dataset: str, config: str | None, split: str | None = None) -> Any:
    """Load a folder of another form, or a Hub data set: one split, or all by name."""
    from datasets import load_dataset

    path = Path(dataset)
    if path.is_dir() and not any(_IMAGE_NAME.search(file.name) for file in path.iterdir()):
        classes = _image_classes(path)
        # The library takes one subfolder for no class.
        if len(classes) == 1 and classes[0].name.lower() not in sum(_SPLITS.values(), ("val",)):
            return load_dataset("imagefolder", data_dir=dataset, split=split, drop_labels=False)
    return load_dataset(dataset, config, split=split)


def _saved(folder: Path) -> Mapping[str, Any]:
    """Return what `save_to_disk` wrote into a folder, by split; nothing if it is no such folder."""
    if not any((folder / name).is_file() for name in _SAVED):
        return {}
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(str(folder))
    return {"train": loaded} if isinstance(loaded, Dataset) else loaded


def _split_of(splits: Mapping[str, Any], split: str, dataset: str) -> Any:
    if split not in splits:
        raise DataError(
            f"{dataset} has no split {split!r}. It has: {', '.join(splits)}. Choose with --split."
        )
    rows = splits[split]
    return _read_file(rows) if isinstance(rows, Path) else rows


# --- files


def _read_file(path: Path) -> Any:
    kind, name = format_of(path), str(path)
    if kind in READERS:
        with explain_unreadable(name):
            return _rows_of(name, *read_table(path))
    if kind == ".npz":
        return _read_arrays(path)
    if kind not in _ARROW_FORMATS or path.suffix.lower() in COMPRESSIONS:
        raise DataError(
            f"{path} is none of {', '.join(READERS)} (also with {', '.join(COMPRESSIONS)}), "
            f"{', '.join(_ARROW_FORMATS)} and .npz (images). Save it as one of them."
        )
    with explain_unreadable(name):
        if not _count_arrow_rows(path, _ARROW_FORMATS[kind]):
            raise DataError(f"{path} has no rows.")
        from datasets import load_dataset

        return load_dataset(_ARROW_FORMATS[kind], data_files=str(path), split="train")


def _count_arrow_rows(path: Path, builder: str) -> int:
    """Return the number of rows, before `datasets` reads the file and logs what it cannot read."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    if builder == "parquet":
        file = parquet.ParquetFile(path)
        if len(set(names := file.schema_arrow.names)) < len(names):
            raise DataError(f"{path}: two columns have one name. Rename one.")
        return int(file.metadata.num_rows)
    with pa.memory_map(str(path)) as file:
        try:
            reader = ipc.open_stream(file)
            return sum(batch.num_rows for batch in reader)
        except pa.ArrowInvalid:
            stored = ipc.open_file(file)
            batches = range(stored.num_record_batches)
            return sum(stored.get_batch(number).num_rows for number in batches)


def _read_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        try:
            return Arrays(dict(arrays))
        except ValueError:
            raise DataError(
                f"{path} holds objects, which may run code: save arrays of numbers."
            ) from None


class Arrays:
    """The arrays of an npz file with the part of a data set's interface that is read here.

    Args:
        arrays: Arrays by name. Those without rows are left out.

    Example:
        >>> Arrays({"x": np.zeros((2, 4, 4)), "y": np.zeros((2, 1))})["y"].shape
        (2,)
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        # Keras keeps labels as a column.
        self._arrays = {
            name: array[:, 0] if array.shape[1:] == (1,) else array
            for name, array in arrays.items()
            if array.ndim
        }
        self.column_names = list(self._arrays)
        self.features: dict[str, Any] = {}

    def __getitem__(self, column: str) -> Any:
        return self._arrays[column]

    def to_dataset(self, name: str) -> Dataset:
        """Return the same columns as rows of `datasets`, with images as PNG.

        Raises:
            DataError: If columns differ in length, or pixels are no image's.
        """
        from .images import read_image

        return _rows_of(name, {
            column: array.tolist() if array.ndim == 1 else
            [read_image(x, f"{name}, row {row}") for row, x in enumerate(array, 1)]
            for column, array in self._arrays.items()
        }, "")  # fmt: skip


def _rows_of(name: str, columns: Mapping[str, Sequence[Any]], note: str) -> Dataset:
    from datasets import Dataset, DatasetInfo

    try:
        return Dataset.from_dict(dict(columns), info=DatasetInfo(description=note))
    except Exception:
        for column, cells in columns.items():
            kinds = {r: type(c).__name__ for r, c in enumerate(cells, 1) if c is not None}
            usual_kind = next(iter(kinds.values()), "")
            for row, kind in kinds.items():
                if kind != usual_kind:
                    raise DataError(
                        f"{name}, row {row}: column {column!r} holds {kind} there and {usual_kind} "
                        "before. Give all rows the same."
                    ) from None
            try:
                Dataset.from_dict({column: cells})
            except Exception as error:
                raise DataError(
                    f"{name}: column {column!r} holds {usual_kind} that is no column "
                    f"({type(error).__name__}). Correct it, or leave it out."
                ) from None
        raise
