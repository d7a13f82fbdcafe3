"""Tables in files: their text, and the columns in it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .encodings import has_shifted_letters, is_windows_1252

_BOMS = {
    b"\xef\xbb\xbf": "utf-8", b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16",
}  # fmt: skip
COMPRESSIONS = (".gz", ".bz2", ".xz")
_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress,
}  # fmt: skip
"""Functions that decompress a file, by the bytes that such a file begins with, whatever its name.
"""
_NO_TEXT = {
    b"PK\3\4": "a zip archive or a workbook: unpack it, or save its table as csv",
    b"\xd0\xcf\x11\xe0": "an old workbook: save its table as csv",
    b"PAR1": "a parquet file: call it .parquet",
    b"ARROW1": "an arrow file: call it .arrow",
    b"SQLite format 3": "a database: save its table as csv",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull`",
    b"<!doctype": "a web page: download the file itself",
    b"<html": "a web page: download the file itself",
    b"<?xml": "XML: save its table as csv",
}


class DataError(ValueError):
    """A file cannot be read; the message is one line with the row and the way out.

    It never quotes a row.
    """


def format_of(path: Path) -> str:
    """Return the ending that says how a file is read, without that of its compression.

    Example:
        >>> format_of(Path("ROWS.CSV.gz")), format_of(Path("rows"))
        ('.csv', '')
    """
    suffixes = [suffix.lower() for suffix in path.suffixes] or [""]
    is_compressed = suffixes[-1] in COMPRESSIONS and len(suffixes) > 1
    return suffixes[-2] if is_compressed else suffixes[-1]


def read_table(path: Path) -> tuple[Mapping[str, Sequence[Any]], str]:
    r"""Return a table's columns, and a note on how it was read if that was not plain.

    Args:
        path: A file in one of the formats `READERS`, compressed or not.

    Raises:
        DataError: If its content has another form.
        OSError: If it cannot be opened.

    Example:
        >>> written = (tmp_path / "few.csv").write_text("text;label\na fine film;\n")
        >>> read_table(tmp_path / "few.csv")
        ({'text': ['a fine film'], 'label': [None]}, "separated by ';'")
    """
    name, content = str(path), path.read_bytes()
    for start, unpack in _UNPACKERS.items():
        if content.startswith(start):
            content = unpack(content)
    text, encoding = _decode(name, content)
    columns, separator = READERS[format_of(path)](name, text)
    if not any(map(len, columns.values())):
        raise DataError(f"{name} has no rows.")
    if len(lengths := set(map(len, columns.values()))) > 1:
        raise DataError(f"{name}: its columns differ in length, from {min(lengths)} rows to "
                        f"{max(lengths)}. Complete them.")  # fmt: skip
    notes = [encoding, separator and f"separated by {separator!r}"]
    return columns, ", ".join(filter(None, notes))


def _decode(name: str, content: bytes) -> tuple[str, str]:
    """Return a file's text, and a note on how it was read if it is not UTF-8."""
    if not content.strip():
        raise DataError(f"{name} is empty.")
    begins = content[:100].lstrip().lower()
    for start, explanation in _NO_TEXT.items():
        if begins.startswith(start.lower()):
            raise DataError(f"{name} is {explanation}.")
    encoding = next((code for bom, code in _BOMS.items() if content.startswith(bom)), None)
    encoding = encoding or _unmarked_unicode(content)
    try:
        # UTF-8 drops the mark that others need to know their order of bytes.
        text = content.decode("utf-8-sig" if encoding in (None, "utf-8") else encoding)
    except UnicodeDecodeError as error:
        if encoding is not None:
            raise DataError(
                f"{name} is not the {encoding} that it begins as: copy it again."
            ) from None
        if not is_windows_1252(content):
            raise _unknown_encoding(name, content.count(b"\n", 0, error.start) + 1) from None
        text, encoding = content.decode("cp1252"), "Windows-1252 (Latin-1), as it is not UTF-8"
    else:
        if has_shifted_letters(content):
            raise _unknown_encoding(name, 1)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{name}, line {line}: a zero byte, which no text has. Mend the line.")
    return text, "" if encoding in (None, "utf-8") else f"read as {encoding}"


def _unmarked_unicode(content: bytes) -> str | None:
    """Return the UTF-16 or UTF-32 of a file without a mark, known by the zeros of Latin letters."""
    start = content[:16]
    for encoding, size, place in _UNMARKED:
        zeros = bytes(byte for n, byte in enumerate(start) if n % size != place)
        if len(content) % size == 0 and zeros and not any(zeros):
            return encoding
    return None


_UNMARKED = ("utf-32-le", 4, 0), ("utf-32-be", 4, 3), ("utf-16-le", 2, 0), ("utf-16-be", 2, 1)
"""Encodings, their bytes a letter, and which of these is not zero for a Latin letter."""


def _unknown_encoding(name: str, line: int) -> DataError:
    return DataError(
        f"{name} is not UTF-8 (line {line}), and what it is cannot be told for sure: save it as "
        "UTF-8 with the program that wrote it, or convert it by `iconv -f ENCODING -t utf-8`, "
        "where ENCODING is what that program calls its own."
    )


def _separated(name: str, text: str, usual: str = ",") -> tuple[dict[str, list[Any]], str]:
    """Return columns of a table with a line of names, and the separator if it is unusual."""
    separator, is_quoted, skipped = usual, usual == ",", 0
    if is_quoted and (named := re.match(r"sep=(.)\r?\n", text)):  # as Excel writes
        separator, text, skipped = named[1], text[named.end() :], 1
    elif is_quoted:
        header_line = re.match(r"[^\r\n]*", text.lstrip("\r\n"))
        unquoted = re.sub('"[^"]*"', "", header_line[0] if header_line else "")
        separator = max(",;\t|", key=unquoted.count)
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        # Data sets in .tsv files hold bare quotation marks, so quoting is off there.
        quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE,
        strict=True,
    )
    longest_field = csv.field_size_limit(len(text) + 1)
    header: list[str] = []
    rows: list[list[str]] = []
    try:
        for fields in lines:
            if not fields or (len(fields) > 1 and not any(fields)):
                continue
            if not header:
                header = _header(name, fields)
            elif len(fields) == len(header):
                rows.append(fields)
            else:
                line_number = lines.line_num + skipped
                raise DataError(_other_count(name, len(rows) + 1, line_number, fields, header))
    except csv.Error:
        raise DataError(
            f"{name}, row {len(rows) + 1} (to line {lines.line_num + skipped}): a field that "
            'begins with a quotation mark must end with one, and inner ones are doubled ("").'
        ) from None
    finally:
        csv.field_size_limit(longest_field)
    columns = zip(*rows, strict=True) if rows else [[] for _ in header]
    cells = {name: [cell or None for cell in c] for name, c in zip(header, columns, strict=True)}
    return cells, separator if separator != usual else ""


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
    # Not splitlines: a text may hold what Unicode takes for a line's end.
    return {"text": [line for line in re.split("\r\n|\r|\n", text) if line.strip()]}, ""


def _objects(name: str, text: str) -> tuple[dict[str, list[Any]], str]:
    """Return columns of one JSON document, or of one object a line."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        document = _object_lines(name, text)
    if isinstance(document, dict):
        columns = _columns_of(document)
        if columns is not None:
            return columns, ""
        tables = [v for v in document.values() if isinstance(v, list) and v and _are_objects(v)]
        document = tables[0] if tables else [document]
    if not isinstance(document, list) or not _are_objects(document):
        raise DataError(f"{name} holds no rows: give a list of objects, or an object a line.")
    names = dict.fromkeys(key for row in document for key in row)
    return {key: [row.get(key) for row in document] for key in names}, ""


def _columns_of(document: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """Return a document's columns if it holds columns, and not rows.

    Each is a list, or has the form that pandas writes.
    """
    rows = document.get("data")
    if isinstance(names := document.get("columns"), list) and isinstance(rows, list):
        return {name: [row[number] for row in rows] for number, name in enumerate(names)}
    columns = list(document.values())
    if columns and all(isinstance(column, dict) for column in columns):
        if all(column.keys() == columns[0].keys() for column in columns):  # numbers of rows
            return {name: list(column.values()) for name, column in document.items()}
        return None
    if all(
        isinstance(column, list) and not (column and _are_objects(column)) for column in columns
    ):
        return dict(document)
    return None


def _are_objects(document: Sequence[Any]) -> bool:
    return all(isinstance(row, dict) for row in document)


def _object_lines(name: str, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
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


READERS: dict[str, Callable[[str, str], tuple[dict[str, list[Any]], str]]] = {
    ".csv": _separated, ".tsv": _tabbed, ".txt": _lines, ".json": _objects, ".jsonl": _objects,
    ".ndjson": _objects,
}  # fmt: skip
"""Functions that turn a file's text into columns, by the file's ending."""
