"""Rows of files, folders and the Hub's data sets: how each is recognized, and what is refused."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models import is_written_as_path
from ..registry import need

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

COLUMNS = {
    "text": ("text", "sentence", "content"),
    "image": ("image", "img", "x_train", "x", "images"),
}
"""The usual names of the column that holds the inputs, by the name of their domain."""

_BOMS = {
    b"\xef\xbb\xbf": "utf-8", b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16",
}  # fmt: skip
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_WAY_OUT = "Give a file, a folder, or a name as the Hub has it, like stanfordnlp/imdb."
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
"""What the files of a split may be called."""


class DataError(ValueError):
    """What cannot be read, in one line: the file, the row, the way out. Never what a row says."""


def load_rows(dataset: str, split: str = "train", config: str | None = None) -> Dataset:
    """Rows of a local file, a folder, or one split of a Hub data set.

    A table's columns hold texts, as they stand in the file; an empty cell is `None`. How a table
    was read, where that was not plain, is in `rows.info.description`.

    Args:
        dataset: A csv, tsv, txt (a text a line), json, jsonl, parquet or npz file, the first five
            also compressed; a folder of such tables, one a split, of images, or of
            `save_to_disk`; or a Hub name.
        split: Of a folder or a Hub data set.
        config: Of a Hub data set with several.

    Raises:
        DataError: If it cannot be read as that: a ValueError of one line.
        FileNotFoundError: If it is written like a path and nothing is there.

    Example:
        >>> Path("rows.csv").write_text("sentence;label\\na fine film;1")
        28
        >>> rows = load_rows("rows.csv")
        >>> rows[0], rows.info.description
        ({'sentence': 'a fine film', 'label': '1'}, "separated by ';'")
    """
    need("data", "data", "datasets")
    # An extra: training needs this room's private files and not this library.
    from datasets import load_dataset

    path = Path(dataset)
    check_data_name(dataset)
    with explain_unreadable(dataset):
        if path.is_file():
            return _read_file(path)
        if splits := _saved(path) or _tables_of(path):
            return _split_of(splits, split, dataset)
        return load_dataset(dataset, config, split=split)


def load_splits(dataset: str, config: str | None = None, seed: int = 0) -> DatasetDict:
    """The splits to train on and to judge by, `train` and `validation`.

    Without a validation or test split a tenth of the rows is held out, drawn by the seed.

    Args:
        dataset: As for `load_rows`.
        config: Likewise.
        seed: Of that draw.

    Raises:
        DataError: As `load_rows` does.

    Example:
        >>> written = Path("rows.csv").write_text("text,label\\n" + "a film,1\\n" * 20)
        >>> {split: len(rows) for split, rows in load_splits("rows.csv").items()}
        {'train': 18, 'validation': 2}
    """
    need("data", "data", "datasets")
    from datasets import DatasetDict, load_dataset

    path = Path(dataset)
    check_data_name(dataset)
    with explain_unreadable(dataset):
        if path.is_file():
            splits: Mapping[str, Any] = {"train": _read_file(path)}
        else:
            splits = _saved(path) or _tables_of(path) or load_dataset(dataset, config)
        train = _split_of(splits, "train", dataset)
        judging = next((name for name in ("validation", "test") if name in splits), None)
        if judging is not None:
            return DatasetDict(train=train, validation=_split_of(splits, judging, dataset))
        held_out = train.train_test_split(0.1, seed=seed)
        return DatasetDict(train=held_out["train"], validation=held_out["test"])


def check_data_name(dataset: str) -> None:
    """Refuse what is neither here nor written as a name on the Hub: it would be sent there.

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
    """Around what reads data: one line for whatever the libraries raise.

    Their messages may quote a row. Only what is said of the Hub's names is passed on.

    Raises:
        DataError: With the name and the way out.

    Example:
        >>> written = Path("rows.parquet").write_text("PAR1")
        >>> with explain_unreadable("rows.parquet"):
        ...     raise OSError("'a secret text' cannot be parsed")
        Traceback (most recent call last):
        hf_gradguard.data.files.DataError: rows.parquet cannot be read (OSError): it is cut ...
    """
    try:
        yield
    except (DataError, ImportError, NameError, AttributeError):
        raise
    except Exception as error:
        path = Path(dataset)
        if not path.exists():
            raise _of_hub(dataset, error) from None
        if path.is_dir() and "split" in str(error):  # names the splits that there are
            raise DataError(f"{dataset}: {_one_line(error)} Choose with --split.") from None
        way_out = "cut or damaged: copy it again" if path.is_file() else (
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
    """Loaders of a folder's tables by split; none where it holds no tables."""
    if not folder.is_dir():
        return {}
    files = [f for f in sorted(folder.iterdir()) if _format(f) in _READERS and f.stem != "metadata"]
    tables = {
        split: file
        for split, stems in _SPLITS.items()
        for file in files
        if file.name.lower().split(".")[0] in stems
    }
    if len(files) == 1 and not tables:
        tables = {"train": files[0]}
    if files and not tables and not any(f.is_dir() for f in folder.iterdir()):
        names = ", ".join(file.name for file in files[:5])
        raise DataError(f"{folder} has {names}, and none is called train: name the file itself.")
    return tables


def _saved(folder: Path) -> Mapping[str, Any]:
    """What `save_to_disk` wrote into a folder, by split; none if it is no such folder."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
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


def _format(path: Path) -> str:
    """The ending that says how a file is read, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes] or [""]
    is_compressed = suffixes[-1] in _OPENERS and len(suffixes) > 1
    return suffixes[-2] if is_compressed else suffixes[-1]


def _read_file(path: Path) -> Any:
    kind, name = _format(path), str(path)
    if kind in (".parquet", ".npz") or kind not in _READERS:
        return _read_binary(path, kind)
    opener = _OPENERS.get(path.suffix.lower(), open)
    with explain_unreadable(name), opener(path, "rb") as file:
        text, note = _decode(name, file.read())
        columns, separator = _READERS[kind](name, text)
    notes = [note, separator and f"separated by {separator!r}"]
    return _rows_of(name, columns, ", ".join(filter(None, notes)))


def _read_binary(path: Path, kind: str) -> Any:
    if kind == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return Arrays(dict(arrays))
    if kind != ".parquet":
        raise DataError(
            f"{path} is none of {', '.join(_READERS)} (also with {', '.join(_OPENERS)}), .parquet "
            "and .npz (images). Save it as one of them."
        )
    from datasets import load_dataset

    rows = load_dataset("parquet", data_files=str(path), split="train")
    if not len(rows):
        raise DataError(f"{path} has no rows.")
    return rows


class Arrays:
    """The arrays of an npz file, as far as a data set is read: its columns, by name.

    Args:
        arrays: By name.

    Example:
        >>> Arrays({"x": np.zeros((2, 4, 4))}).column_names
        ['x']
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays, self.column_names = arrays, list(arrays)
        self.features: dict[str, Any] = {}

    def __getitem__(self, column: str) -> Any:
        return self._arrays[column]


def _rows_of(name: str, columns: Mapping[str, Sequence[Any]], note: str) -> Dataset:
    from datasets import Dataset, DatasetInfo

    if not any(map(len, columns.values())):
        raise DataError(f"{name} has no rows.")
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
        raise


def _decode(name: str, content: bytes) -> tuple[str, str]:
    """A file's text, and how it was read where it is not UTF-8."""
    if not content.strip():
        raise DataError(f"{name} is empty.")
    encoding = next((code for bom, code in _BOMS.items() if content.startswith(bom)), None)
    if encoding is None and b"\0" in content[:1000]:  # UTF-16 that does not say so
        encoding = "utf-16-le" if content[1:2] == b"\0" else "utf-16-be"
    try:
        # UTF-8 drops the mark that others need to know their order of bytes.
        text = content.decode("utf-8-sig" if encoding in (None, "utf-8") else encoding)
        return text, "" if encoding in (None, "utf-8") else f"read as {encoding}"
    except UnicodeDecodeError as error:
        if encoding is not None:
            raise DataError(f"{name} is not the {encoding} that it begins as.") from None
        line = content.count(b"\n", 0, error.start) + 1
    from charset_normalizer import from_bytes

    lines = [line_of for line_of in content.split(b"\n") if not line_of.isascii()]
    matches = from_bytes(b"\n".join(lines)[:100_000])
    if {"cp1252", "latin_1"} & {c for m in matches for c in (m.encoding, *m.could_be_from_charset)}:
        with contextlib.suppress(UnicodeDecodeError):
            return content.decode("cp1252"), "read as Windows-1252 (Latin-1), as it is not UTF-8"
    best = matches.best()
    source = best.encoding if best is not None else "ENCODING"
    raise DataError(
        f"{name} is not UTF-8 (line {line}), perhaps {source}: convert it by "
        f"`iconv -f {source} -t utf-8`."
    )


def _separated(name: str, text: str, separator: str = "") -> tuple[dict[str, list[Any]], str]:
    """Columns of a table with a line of names, and the separator if it is not the usual one."""
    counts = {mark: text.partition("\n")[0].count(mark) for mark in ",;\t|"}
    between = separator or max(counts, key=lambda mark: counts[mark])
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=between,
        # Data sets in .tsv files hold bare quotation marks, so quoting is off there.
        quoting=csv.QUOTE_NONE if separator else csv.QUOTE_MINIMAL,
        strict=True,
    )
    longest_field = csv.field_size_limit(len(text) + 1)
    header: list[str] = []
    rows: list[list[str]] = []
    try:
        for fields in lines:
            if not fields:
                continue
            if not header:
                header = _header(name, fields)
            elif len(fields) == len(header):
                rows.append(fields)
            else:
                raise DataError(_other_count(name, len(rows) + 1, lines.line_num, fields, header))
    except csv.Error:
        raise DataError(
            f"{name}, row {len(rows) + 1} (to line {lines.line_num}): a field that begins with a "
            'quotation mark must end with one, and inner ones are doubled ("").'
        ) from None
    finally:
        csv.field_size_limit(longest_field)
    columns = zip(*rows, strict=True) if rows else [[] for _ in header]
    cells = {name: [cell or None for cell in c] for name, c in zip(header, columns, strict=True)}
    return cells, between if between != (separator or ",") else ""


def _header(name: str, fields: Sequence[str]) -> list[str]:
    header = [field.strip() or f"column{number}" for number, field in enumerate(fields, 1)]
    if len(set(header)) < len(header):
        raise DataError(f"{name}: two columns of its first line have one name. Rename one.")
    return header


def _other_count(
    name: str, row: int, line: int, fields: Sequence[str], header: Sequence[str]
) -> str:
    row_name = f"{name}, row {row} (line {line}): {len(fields)} fields for {len(header)} columns. "
    if len(fields) < len(header):
        return row_name + "Complete the row, or delete it."
    return row_name + 'Put texts that hold the separator in quotation marks ("...").'


def _tabbed(name: str, text: str) -> tuple[dict[str, list[Any]], str]:
    return _separated(name, text, "\t")


def _lines(name: str, text: str) -> tuple[dict[str, list[Any]], str]:
    return {"text": [line for line in text.splitlines() if line.strip()]}, ""


def _objects(name: str, text: str) -> tuple[dict[str, list[Any]], str]:
    """Columns of one JSON document, or of one object a line."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        document = _object_lines(name, text)
    if isinstance(document, dict):
        tables = [v for v in document.values() if isinstance(v, list) and v and _are_objects(v)]
        if not tables and all(isinstance(v, list) for v in document.values()):
            return document, ""  # a list a column
        document = tables[0] if tables else [document]
    if not isinstance(document, list) or not _are_objects(document):
        raise DataError(f"{name} holds no rows: give a list of objects, or an object a line.")
    names = dict.fromkeys(key for row in document for key in row)
    return {key: [row.get(key) for row in document] for key in names}, ""


def _are_objects(document: Sequence[Any]) -> bool:
    return all(isinstance(row, dict) for row in document)


def _object_lines(name: str, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}, row {len(rows) + 1} (line {number}): no JSON from character {error.pos} "
                "on. Mend the line, or delete it."
            ) from None
    return rows


_READERS: dict[str, Callable[[str, str], tuple[dict[str, list[Any]], str]]] = {
    ".csv": _separated, ".tsv": _tabbed, ".txt": _lines, ".json": _objects, ".jsonl": _objects,
}  # fmt: skip
