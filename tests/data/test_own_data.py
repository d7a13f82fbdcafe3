"""Data and models as users have them: commands read them rightly, or say in a line what to do."""

from __future__ import annotations

import bz2
import datetime
import gzip
import io
import json
import lzma
import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from peft import LoraConfig, get_peft_model
from PIL import Image
from pyarrow import ipc, parquet
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

from hf_gradguard.cli import main
from hf_gradguard.data.class_labels import number_classes
from hf_gradguard.data.files import load_splits
from hf_gradguard.data.images import read_image, to_pil
from hf_gradguard.data.tables import DataError
from hf_gradguard.testing.small import small_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SECRET = "word1 word2"
TABLE = f"text,label\n{SECRET},1\nword3 word4,0\n"
ROWS = {(SECRET, 1), ("word3 word4", 0)}
NAMED = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "intermediate_size": 16}  # fmt: skip


def save_text(folder: Path, kind: Any = BertForSequenceClassification, **config: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    kind(BertConfig(vocab_size=len(tokenizer), **SIZES, **config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_image(folder: Path, kind: Any = ViTForImageClassification, **config: Any) -> Path:
    kind(ViTConfig(image_size=8, patch_size=4, **SIZES, **config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_text(folder / "plain")
    save_text(folder / "named", **NAMED)
    save_text(folder / "encoder", BertModel)
    save_image(folder / "images", **NAMED)
    save_image(folder / "image-encoder", ViTModel)
    return folder


Read = dict[str, Any]


@pytest.fixture
def read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Read]:  # fmt: skip
    """What a command hands to its work; or the line that it ends with."""
    got: Read = {}

    def audit(model: Any, processing_class: Any, samples: Any, *_: Any, **settings: Any) -> None:
        got.update(model=model, samples=samples)
        folder = Path(settings["output"])
        folder.mkdir(exist_ok=True)
        (folder / "table.md").write_text("done")
        (folder / "recommend.md").write_text("done")

    monkeypatch.setattr("hf_gradguard.audit.command.audit", audit)
    monkeypatch.setattr("hf_gradguard.audit.command.summarize", lambda _: None)
    monkeypatch.setattr("hf_gradguard.audit.command.terminal_summary", lambda *_: "done")
    monkeypatch.setattr("hf_gradguard.recommend.recommendation.recommend", audit)
    monkeypatch.setattr("hf_gradguard.train.load_model", lambda *_: pytest.fail("it was read"))
    monkeypatch.chdir(tmp_path)

    def run(
        model: str | Path, dataset: str, count: int = 2, *flags: str, command: str = "audit"
    ) -> Read:
        got.clear()
        path = models / model if (models / model).exists() else model
        size = ["--samples", str(count), "--decoys", "0"] if command == "audit" else []
        size += ["--defense", "none", "--use_cpu"] if command == "train" else []
        arguments = ["--model", str(path), "--dataset", dataset, *size, *flags, "--output", "out"]
        try:
            code = main([command, *arguments])
        except SystemExit as ended:
            code = ended.code
        got["shown"] = capsys.readouterr().err
        got["error"] = got["shown"].splitlines()[-1] if code else ""
        assert code == (1 if got["error"] else 0)
        assert not code or got["error"].startswith(f"gradguard {command}: ")
        assert SECRET not in got["error"]
        return got

    return run


def write(content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def dataset(path: Path) -> Dataset:
    return Dataset.from_dict({"text": [SECRET, "word3 word4"], "label": [1, 0]})


def write_arrow(path: Path, writer: Any) -> None:
    table = dataset(path).data.table
    with pa.OSFile(str(path), "wb") as file, writer(file, table.schema) as stream:
        stream.write_table(table)


# Each reads as ROWS, by a model with the classes "bad" and "good".
READS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "csv": ("a.csv", write(TABLE)),
    "an ending in capitals": ("A.CSV", write(TABLE)),
    "semicolons": ("a.csv", write(TABLE.replace(",", ";"))),
    "tabs in a csv": ("a.csv", write(TABLE.replace(",", "\t"))),
    "tsv": ("a.tsv", write(TABLE.replace(",", "\t"))),
    "lines as Windows ends them": ("a.csv", write(TABLE.replace("\n", "\r\n"))),
    "a byte order mark": ("a.csv", write(TABLE.encode("utf-8-sig"))),
    "UTF-16": ("a.csv", write(TABLE.encode("utf-16"))),
    "UTF-16 without its mark": ("a.csv", write(TABLE.encode("utf-16-le"))),
    "gzip": ("a.csv.gz", write(gzip.compress(TABLE.encode()))),
    "bzip2": ("a.tsv.bz2", write(bz2.compress(TABLE.replace(",", "\t").encode()))),
    "xz": ("a.jsonl.xz", write(lzma.compress(b'{"text": "word1 word2", "label": 1}\n'
                                             b'{"text": "word3 word4", "label": 0}\n'))),
    "empty lines": ("a.csv", write(TABLE.replace("\n", "\n\n"))),
    "Excel's separator": ("a.csv", write("sep=;\n" + TABLE.replace(",", ";"))),
    "names of columns in capitals": ("a.csv", write(TABLE.replace("text,label", "Text,LABEL"))),
    "names of IMDB's columns": ("a.csv", write(TABLE.replace("text,label", "review,sentiment"))),
    "rows of separators alone": ("a.csv", write(TABLE + ",\n,\n")),
    "gzip that no ending says": ("a.csv", write(gzip.compress(TABLE.encode()))),
    "an ending of gzip alone": ("a.csv.gz", write(TABLE)),
    "words for truth": ("a.csv", write(TABLE.replace(",1", ",True").replace(",0", ",False"))),
    "ndjson": ("a.ndjson", write('{"text": "word1 word2", "label": 1}\n'
                                 '{"text": "word3 word4", "label": 0}\n')),
    "json as pandas has it": (
        "a.json", write('{"text": {"0": "word1 word2", "1": "word3 word4"},'
                        ' "label": {"0": 1, "1": 0}}')
    ),
    "json of pandas by split": (
        "a.json", write('{"columns": ["text", "label"], "index": [0, 1],'
                        ' "data": [["word1 word2", 1], ["word3 word4", 0]]}')
    ),
    "arrow": ("a.arrow", lambda path: write_arrow(path, ipc.new_stream)),
    "feather": ("a.feather", lambda path: write_arrow(path, ipc.new_file)),
    "an index as pandas has it": (
        "a.csv", write(f",text,label\n0,{SECRET},1\n1,word3 word4,0\n")
    ),
    "names in another case": ("a.csv", write(f"text,label\n{SECRET},Good\nword3 word4,BAD\n")),
    "numbers as texts": ("a.json", write('[{"text": "word1 word2", "label": "1"},'
                                         '{"text": "word3 word4", "label": "0.0"}]')),
    "jsonl": ("a.jsonl", write('{"text": "word1 word2", "label": 1}\n\n'
                               '{"text": "word3 word4", "label": 0}')),
    "texts that are numbers": (
        "1984.json", write('[{"text": 1984, "label": 1}, {"text": 2001, "label": 0}]')
    ),
    "json by columns": (
        "a.json", write('{"text": ["word1 word2", "word3 word4"], "label": [1, 0]}')
    ),
    "parquet": ("a.parquet", lambda path: dataset(path).to_parquet(str(path))),
    "save_to_disk": ("saved", lambda path: dataset(path).save_to_disk(str(path))),
    "save_to_disk of splits": (
        "saved", lambda path: DatasetDict(train=dataset(path)).save_to_disk(str(path))
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_what_is_read(kind: str, read: Callable[..., Read], tmp_path: Path) -> None:
    name, create = READS[kind]
    create(tmp_path / name)
    got = read("named", name)
    texts = {("1984", 1), ("2001", 0)} if name == "1984.json" else ROWS
    assert set(got["samples"]) == texts, got["error"]
    assert f"{name}" in got["shown"]
    assert SECRET not in got["shown"]  # no terminal


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
def test_texts_that_hold_the_separator(
    between: str, read: Callable[..., Read], tmp_path: Path
) -> None:
    text = f'word1{between} "word2"'
    quoted = text.replace('"', '""')
    (tmp_path / "a.csv").write_text(f'text{between}label\n"{quoted}"{between}1\n')
    assert read("named", "a.csv", 1)["samples"] == [(text, 1)]


def test_latin_letters(read: Callable[..., Read], tmp_path: Path) -> None:
    texts = "Noël fut une fête ratée à côté", "où un garçon très naïf a été déçu à l'hôpital"
    table = f"text,label\n{texts[0]},0\n{texts[1]},1\n"
    (tmp_path / "a.csv").write_bytes(table.encode("latin-1"))
    got = read("named", "a.csv")
    assert set(got["samples"]) == {(texts[0], 0), (texts[1], 1)}
    assert "Latin-1" in got["shown"]


def test_marks_of_windows(read: Callable[..., Read], tmp_path: Path) -> None:
    """No letter says which language it is, and a detector takes them for Chinese."""
    (tmp_path / "a.csv").write_bytes(
        "text,label\nit’s a film…,0\n“fine” – good,1\n".encode("cp1252")
    )
    assert set(read("named", "a.csv")["samples"]) == {("it’s a film…", 0), ("“fine” – good", 1)}


# Content, and what the line says beside the file's name.
TABLES: dict[str, tuple[str, str | bytes, str]] = {
    "a comma in one row": (
        "a.csv", f"{TABLE}word5, word6,1\n", r", row 3 \(line 4\): 3 fields for 2 .*quotation"
    ),
    "a comma in every row": ("a.csv", f"text,label\nword5,{SECRET},1\n", r", row 1 \(line 2\)"),
    "a row cut short": ("a.csv", f"{TABLE}{SECRET}\n", r", row 3 \(line 4\): 1 fields for 2"),
    "an open quotation": ("a.csv", f'text,label\n"{SECRET},1\n', ", row 1 .*quotation mark"),
    "an empty text": ("a.csv", "text,label\n,1\nword1,0\n", ", row 1: column 'text' is empty"),
    "an empty label": ("a.csv", "text,label\na,1\nb,\n", ", row 2: column 'label' is empty"),
    "an empty file": ("a.csv", "", " is empty"),
    "a header alone": ("a.csv", "text,label\n", " has no rows"),
    "no header": ("a.csv", f"{SECRET},1\nword1,0\n", " has no .*looks like a row"),
    "a long first row": ("a.csv", f"{SECRET} {SECRET} word7\nword1\n", " has no .*like a row"),
    "other columns": ("a.csv", "words,label\nword1,0\n", " has no text .* It has: words, label"),
    "two other columns": (
        "a.csv", "opinion,verdict\nword1,0\n", " has no text .* --column and --label_column"
    ),
    "Cyrillic of Windows": (
        "a.csv", (
            "text,label\nхороший и очень добрый фильм,1\nплохой и скучный сюжет,0\n"
            "актёры играют прекрасно и музыка тоже,1\nничего интересного я не увидел,0\n"
        ).encode("cp1251"),
        r" is not UTF-8 \(line 2\).* convert it by `iconv -f ENCODING",
    ),
    "a broken line": (
        "a.jsonl", f'{{"text": "word1"}}\n{{"text": "{SECRET}\n', r", row 2 \(line 2\): no JSON"
    ),
    "no objects": ("a.json", f'["{SECRET}"]', " holds no rows"),
    "two kinds in a column": (
        "a.json", f'[{{"text": "a", "label": 1}}, {{"text": "a", "label": "{SECRET}"}}]',
        ", row 2: column 'label' holds str there and int",
    ),
    "another format": ("a.xlsx", "PK", r" is none of \.csv"),
    "a cut archive": ("a.csv.gz", gzip.compress(TABLE.encode() * 99)[:40], " .*cut or damaged"),
    "a cut parquet": ("a.parquet", f"PAR1 {SECRET}", " .*cut or damaged"),
    "a cut npz": ("a.npz", b"PK\3\4word1 word2", " .*cut or damaged"),
    "a text as a label": (
        "a.csv", f"text,label\nword1,{SECRET}\nword1,1\n", ", row 1: column 'label'.* bad, good"
    ),
    "a zero byte": ("a.csv", "text,label\nword1\0word2,1\n", ", line 2: a zero byte"),
    "a web page": ("a.csv", "<!DOCTYPE html><html>", " is a web page"),
    "a workbook": ("a.csv", b"PK\3\4\24\0", " is a zip archive or a workbook"),
    "a pointer": ("a.csv", "version https://git-lfs.github.com/spec/v1\n", " .* `git lfs pull`"),
    "columns of two lengths": ("a.json", '{"text": ["a", "b"], "label": [1]}', ": .* 1 rows to 2"),
    "a number beyond all": (
        "a.json", '[{"text": "a", "label": 99999999999999999999999}]', ": column 'label' holds int"
    ),
    "a text that is none": (
        "a.json", f'[{{"text": {{"en": "{SECRET}"}}, "label": 1}}, {{"text": null, "label": 1}}]',
        ", row 1: column 'text' holds dict",
    ),
    "a text of NaN": (
        "a.json", '[{"text": NaN, "label": 1}, {"text": NaN, "label": 0}]', ".*'text' is empty"
    ),
    "a label of NaN": (
        "a.json", '[{"text": "a", "label": NaN}, {"text": "b", "label": 1}]',
        ", row 1: .*'label' is empty",
    ),
    "an empty parquet": ("a.parquet", b"", " .*cut or damaged"),
    "two columns of a name": ("a.csv", "text,label,text\na,1,b\n", ": two columns of its first"),
    "a class too many": ("a.csv", "text,label\nword1,5\nword1,0\n", ", row 1: .*no class of the"),
}  # fmt: skip


def parquet_of(columns: dict[str, Any]) -> bytes:
    """May have two columns of a name: `text2` is written as `text`."""
    table = pa.Table.from_arrays(
        [pa.array(values) for values in columns.values()], [name.rstrip("2") for name in columns]
    )
    parquet.write_table(table, buffer := io.BytesIO())
    return buffer.getvalue()


DAYS = [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]
TABLES |= {
    "days as texts": (
        "a.parquet", parquet_of({"text": DAYS, "label": [1, 0]}),
        ", row 1: column 'text' holds date and no text",
    ),
    "two columns of a name in parquet": (
        "a.parquet", parquet_of({"text": [SECRET, "a"], "text2": ["b", "c"], "label": [1, 0]}),
        ": two columns have one name",
    ),
}  # fmt: skip


OF_LABELS = ("a text as a label", "a class too many")  # `train` makes a head of these classes


@pytest.mark.parametrize("command", ["audit", "recommend", "train"])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_that_are_refused(
    kind: str, command: str, read: Callable[..., Read], tmp_path: Path
) -> None:
    if command == "train" and kind in OF_LABELS:
        return
    name, content, line = TABLES[kind]
    write(content)(tmp_path / name)
    error = read("named", name, command=command)["error"]
    assert re.search(re.escape(name) + line, error), error


def test_folders_of_tables(read: Callable[..., Read], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "folder cannot be read" in read("named", "folder")["error"]
    (tmp_path / "folder" / "dev.csv").write_text(TABLE)
    (tmp_path / "folder" / "train.tsv").write_text(TABLE.replace(",", "\t"))
    assert set(read("named", "folder")["samples"]) == ROWS
    assert set(read("named", "folder", 2, "--split", "validation")["samples"]) == ROWS
    assert "It has: train, validation" in read("named", "folder", 2, "--split", "test")["error"]
    (tmp_path / "other").mkdir()
    for name in "ab":
        (tmp_path / "other" / f"{name}.csv").write_text(TABLE)
    assert "a.csv, b.csv, and none is called train" in read("named", "other")["error"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("C:/rows/data", "no file or folder C:/rows"),
        ("my data/rows", "no file or folder my data/rows"),
        ("rows/", "no file or folder rows/"),
        ("me/trian.feather", "no file or folder me/trian.feather"),
        ("trian.csv", r"no file or folder trian\.csv\. Give a file, a folder, or a name"),
        ("data/rows", "no file or folder data/rows"),  # data is a folder here
        ("rows", "no file or folder rows"),
        ("~/rows", "no file or folder ~/rows"),
        ("org/rows", r"and the Hub gave no data set .*gated.*hf auth login"),
    ],
)
def test_names_that_lead_nowhere(
    name: str, line: str, read: Callable[..., Read], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "data").mkdir()
    asked: list[str] = []

    def hub(path: str, *_: Any, **__: Any) -> None:
        asked.append(path)
        raise ConnectionError("offline\nand more")

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert re.search(line, read("named", name)["error"])
    assert asked == (["org/rows"] if name == "org/rows" else [])


# --- classes


def test_names_of_classes_are_matched_and_never_by_place(
    read: Callable[..., Read], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write_names(*names: str) -> None:
        features = Features(text=Value("string"), label=ClassLabel(names=list(names)))
        Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features).to_parquet("a.parquet")

    write_names("GOOD", "Bad")
    assert set(read("named", "a.parquet")["samples"]) == {("a", 1), ("b", 0)}
    write_names("pos", "neg")
    error = read("named", "a.parquet")["error"]
    assert "class 0 of its 2 has a name that the model has not" in error
    write_names("good", "GOOD")
    assert "two of its classes" in read("named", "a.parquet")["error"]
    write_names("3", "1")  # names that could be numbers: in the data set's own order
    got = read("encoder", "a.parquet")
    assert got["model"].config.label2id == {"3": 0, "1": 1}
    assert set(got["samples"]) == {("a", 0), ("b", 1)}


THREE = "text,label\nword1,so so\nword2,bad\nword3,good\nword4,bad\n"


@pytest.mark.parametrize(
    ("content", "names", "labels"),
    [
        (THREE, ["bad", "good", "so so"], [2, 0, 1, 0]),
        ("text,label\na,5\nb,1\nc,3\nd,1\n", ["1", "3", "5"], [2, 0, 1, 0]),
        ("text,label\na,0.5\nb,1.5\nc,2\nd,1\n", None, [0.5, 1.5, 2.0, 1.0]),
    ],
)
def test_an_encoder_gets_a_head_for_the_data(
    content: str, names: list[str] | None, labels: list[Any], read: Callable[..., Read],
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "a.csv").write_text(content)
    got = read("encoder", "a.csv", 4)
    config, texts = got["model"].config, [line.split(",")[0] for line in content.split()[1:]]
    assert [label for _, label in sorted(got["samples"])] == labels, texts
    assert config.num_labels == (len(names) if names else 1)
    if names:
        assert [config.id2label[number] for number in range(len(names))] == names
    else:
        assert config.problem_type == "regression"
    assert read("named", "a.csv", 4)["error"]  # has a head of its own, of other classes


def test_an_encoder_of_images_gets_a_head_too(read: Callable[..., Read], tmp_path: Path) -> None:
    for name in ("cat", "dog", "eel"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pets" / name / "0.png")
    got = read("image-encoder", "pets", 3)
    assert got["model"].config.label2id == {"cat": 0, "dog": 1, "eel": 2}
    assert sorted(label for _, label in got["samples"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (("1", "NaN", "0"), r"rows without a value \(NaN\)"),
        (("1", "NA", "0"), r"rows without a value \(NaN\)"),
        (("good", "nan", "bad"), r"rows without a value \(NaN\)"),
        (("good", "Good", "bad"), "two classes that differ in nothing but case"),
        (("0,5", "1,5", "2,5"), "numbers with a comma"),
    ],
)
@pytest.mark.parametrize("command", ["audit", "recommend"])
def test_labels_that_are_no_classes(
    command: str, labels: tuple[str, ...], line: str, read: Callable[..., Read], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(
        "".join(f"word;{x}\n" for x in ("label", *labels)).replace("word", "text", 1)
    )
    assert re.search(
        rf"a\.csv: column 'label' .*{line}", read("encoder", "a.csv", command=command)["error"]
    )
    splits = load_splits("a.csv")
    with pytest.raises(DataError, match=line):
        number_classes(DatasetDict(train=Dataset.from_dict({"label": list(labels)})), "label")
    assert splits


def test_a_row_without_a_class_is_not_trained_on() -> None:
    features = Features(label=ClassLabel(names=["bad", "good"]))
    splits = DatasetDict(train=Dataset.from_dict({"label": [0, 1, -1]}, features))
    with pytest.raises(DataError, match="row 3: no class"):
        number_classes(splits, "label")


def test_what_is_no_class_makes_no_head(read: Callable[..., Read], tmp_path: Path) -> None:
    texts = "\n".join(f"word{n},{SECRET} {n}" for n in range(40))
    (tmp_path / "a.csv").write_text(f"text,label\n{texts}\n")
    assert "40 different entries in 40 rows" in read("encoder", "a.csv")["error"]
    (tmp_path / "a.csv").write_text("text,label\nword1,1\nword2,1\n")
    assert "has one class alone" in read("encoder", "a.csv")["error"]


# --- images


def test_images_of_16_bits(read: Callable[..., Read], tmp_path: Path) -> None:
    (tmp_path / "scans" / "bad").mkdir(parents=True)
    (tmp_path / "scans" / "good").mkdir()
    pixels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for name in ("bad", "good"):
        Image.fromarray(pixels).save(tmp_path / "scans" / name / "0.png")
    (image, _), _ = read("images", "scans")["samples"]
    scaled = np.asarray(to_pil(image, "RGB"))[..., 0]
    np.testing.assert_allclose(scaled, pixels / 257, atol=0.51)
    np.testing.assert_array_equal(np.asarray(to_pil(pixels, "L")), scaled)
    np.savez(tmp_path / "scans.npz", image=pixels[None].repeat(2, 0), label=[0, 1])
    (image, _), _ = read("images", "scans.npz")["samples"]
    np.testing.assert_array_equal(np.asarray(to_pil(image, "L")), scaled)


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_a_cut_image(form: str, read: Callable[..., Read], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for name in ("bad", "good"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(noise).save(folder / name / "0.jpg")
    content = (folder / "good" / "0.jpg").read_bytes()
    (folder / "good" / "0.jpg").write_bytes(content[: len(content) // 2])
    if form == "parquet":
        stored = [{"bytes": (folder / n / "0.jpg").read_bytes()} for n in ("bad", "good")]
        Dataset.from_dict({"image": stored, "label": [0, 1]}).to_parquet("photos.parquet")
    name = "photos.parquet" if form == "parquet" else "photos"
    where = r"" if form == "parquet" else r" \(0\.jpg\)"
    assert re.search(rf"{name}, row 2{where}: no image .* whole", read("images", name)["error"])


def save_classes(folder: Path, save: Callable[[Path], object], *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        save(folder / name / "0.png")


def test_images_of_one_class(read: Callable[..., Read], tmp_path: Path) -> None:
    save_classes(tmp_path / "photos", Image.new("RGB", (8, 8)).save, "good")
    assert [label for _, label in read("images", "photos", 1)["samples"]] == [1]
    assert "one class alone" in read("image-encoder", "photos", 1)["error"]


def test_other_files_among_images(read: Callable[..., Read], tmp_path: Path) -> None:
    save_classes(tmp_path / "photos", Image.new("RGB", (8, 8)).save, "bad", "good")
    (tmp_path / "photos" / "labels.csv").write_text("a,b\n1,2\n")
    (tmp_path / "photos" / "bad" / "notes.txt").write_text(SECRET)
    (tmp_path / "photos" / "good" / ".DS_Store").write_bytes(b"\0")
    assert [label for _, label in read("images", "photos")["samples"]] == [0, 1]


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK", "LAB", "YCbCr", "HSV"])
def test_images_of_other_modes(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.tif" if mode in ("CMYK", "LAB", "YCbCr") else "a.png")
    colors = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(colors)
    image = Image.fromarray(colors, "LAB") if mode == "LAB" else image.convert(mode)
    if mode == "HSV":
        path = tmp_path / "a.gif"
        image = image.convert("RGB")
    image.save(path)
    assert read_image({"path": str(path)}, "row 1").mode == ("L" if mode in ("1", "LA") else "RGB")


def test_a_table_that_names_images(read: Callable[..., Read], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / f"{name}.png")
    table = tmp_path / "photos" / "labels.csv"
    table.write_text("image,label\na.png,good\nb.png,bad\n")
    assert {label for _, label in read("images", "photos/labels.csv")["samples"]} == {0, 1}
    table.write_text(f"image,label\n{SECRET},good\n")
    assert "row 1: no such image" in read("images", "photos/labels.csv", 1)["error"]


PIXELS = np.zeros((4, 8, 8), dtype=np.uint8)


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"image": PIXELS, "label": [0, 1]}, "'label' has 2 rows, and 'image' 4"),
        ({"image": PIXELS / 255, "label": [0] * 4}, "row .*: .* whole numbers of 8 or 16 bits"),
        ({"image": PIXELS[0], "label": [0] * 8}, "row .*: .* whole numbers of 8 or 16 bits"),
        ({"image": np.array(["a", None]), "label": [0, 1]}, "holds objects"),
        ({"image": np.uint8(3), "label": [0]}, "has no image"),
    ],
)
def test_arrays_that_are_refused(
    arrays: dict[str, Any], line: str, read: Callable[..., Read], tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    assert re.search(rf"a\.npz.*{line}", read("images", "a.npz")["error"])


def test_arrays_whose_labels_are_a_column(read: Callable[..., Read], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=PIXELS, y_train=[[1]] * 4, x_test=PIXELS[:2])
    assert [label for _, label in read("images", "a.npz")["samples"]] == [1, 1]


def test_images_without_classes(read: Callable[..., Read], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "0.png")
    assert "It has image alone" in read("images", "photos")["error"]


# --- models


def break_model(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    if how == "no tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "a pointer for weights":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif how == "no weights":
        weights.unlink()
    elif how in ("a pickle", "a pickle of code", "no pickle"):
        torch.save(
            {"code": Path} if how == "a pickle of code" else {}, folder / "pytorch_model.bin"
        )
        weights.unlink()
        if how == "no pickle":
            (folder / "pytorch_model.bin").write_text("hi")
    elif how == "a broken tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif how == "other sizes":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    elif how == "a size of letters":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "a"}))
    elif how == "code of its own":
        code = {"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}
        (folder / "config.json").write_text(json.dumps(config | code))
    elif how == "an unknown type":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "xyz"}))
    elif how == "a broken configuration":
        (folder / "config.json").write_text("{")
    elif how == "no configuration":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("no tokenizer", "broken has no tokenizer: save it there"),
        ("cut weights", r"broken/model\.safetensors is cut or damaged"),
        ("a pointer for weights", r"broken/model\.safetensors is cut or damaged"),
        ("no weights", "broken cannot be loaded: it has no weights"),
        ("code of its own", r"brings code of its own \(trust_remote_code\)"),
        ("an unknown type", "model type `xyz`"),
        ("a broken configuration", r"broken/config\.json is cut or damaged"),
        ("no configuration", "broken.*config"),
        ("a pickle of code", "broken has pickled weights that could run code"),
        ("no pickle", r"broken/pytorch_model\.bin is cut or damaged"),
        ("a broken tokenizer", r"broken/tokenizer\.json is cut or damaged"),
        ("other sizes", "broken cannot be loaded: config.json and the weights are of different"),
        ("a size of letters", "broken cannot be loaded: .*hidden_size"),
    ],
)
@pytest.mark.parametrize("command", ["audit", "recommend"])
def test_models_that_are_broken(
    how: str, line: str, command: str, models: Path, read: Callable[..., Read], tmp_path: Path
) -> None:
    shutil.copytree(models / "named", tmp_path / "broken")
    break_model(tmp_path / "broken", how)
    (tmp_path / "a.csv").write_text(TABLE)
    error = read("./broken", "a.csv", command=command)["error"]
    assert re.search(line, error), error


@pytest.mark.parametrize(
    "name", ["model.safetensors", "models/nemed", "./nemed", "runs\\m", "C:/m", "my m/o"]
)
def test_models_that_are_not_there(
    name: str, read: Callable[..., Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "a.csv").write_text(TABLE)
    monkeypatch.setattr("hf_gradguard.models.AutoConfig", None)  # asks the Hub
    assert f"There is no folder {name}." in read(name, "a.csv")["error"]


def test_devices_and_settings_that_are_not_there(read: Callable[..., Read], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    (tmp_path / "broken.yaml").write_text("seed: [")
    assert (
        "--device nowhere cannot be used"
        in read("named", "a.csv", 2, "--device", "nowhere")["error"]
    )
    assert "broken.yaml is no YAML" in read("named", "a.csv", 2, "--config", "broken.yaml")["error"]
    assert "none.yaml cannot be read" in read("named", "a.csv", 2, "--config", "none.yaml")["error"]


def test_a_file_that_may_not_be_read(
    read: Callable[..., Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(TABLE)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # which root never meets

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "a.csv may not be read by you" in read("named", "a.csv")["error"]


def test_an_extra_that_is_missing(
    models: Path, read: Callable[..., Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BertForSequenceClassification.from_pretrained(models / "named")
    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    adapted.save_pretrained(tmp_path / "adapters")
    (tmp_path / "a.csv").write_text(TABLE)
    assert set(read("./adapters", "a.csv")["samples"]) == ROWS
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install 'hf-gradguard[peft]'" in read("./adapters", "a.csv")["error"]


# --- the command itself


def run_command(arguments: list[str], folder: Path, **settings: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hf_gradguard", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=240, check=False, **settings
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "line"), [("a.csv", "row 3"), ("b.csv", "no file or folder")], ids=["row", "name"]
)
def test_one_line_and_no_traceback(name: str, line: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{TABLE}word5, word6,1\n")
    arguments = ["audit", "--model", str(models / "named"), "--dataset", name, "--output", "out"]
    done = run_command(arguments, tmp_path, capture_output=True)
    assert done.returncode == 1
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.long
def test_a_terminal_shows_the_first_rows_and_no_file_has_them(models: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE.replace(",", ";") + "word5 " * 40 + ";1\n")
    arguments = ["audit", "--model", str(models / "named"), "--dataset", "a.csv", "--samples", "2"]
    arguments += ["--decoys", "0", "--attack", "tag:steps=1", "--output", "out"]
    ours, theirs = pty.openpty()
    done = run_command(arguments, tmp_path, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    assert "a.csv (separated by ';'): 3 rows, inputs: text, labels: label" in shown
    assert f"  {SECRET} -> good" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "-> " in line)
    assert SECRET not in done.stdout
    assert "separated by" not in (tmp_path / "out" / "audit.json").read_text()


def test_recipes_read_by_the_same_door(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = str(ROOT / "recipes" / "sst2.py")
    flags = ["--model_name_or_path", str(models / "encoder"), "--dataset", "rows.csv"]
    flags += ["--use_cpu", "--defense", "none", "--max_steps", "1", "--report_to", "none"]
    flags += ["--output_dir", "out"]
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(THREE.replace(",", ";") + "word1;bad\n" * 16)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1, "so so": 2}
    assert "rows.csv (separated by ';')" in capsys.readouterr().err
    (tmp_path / "rows.csv").write_text(f"{TABLE}word5, {SECRET},1\n")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 1
    assert "gradguard train: rows.csv, row 3 (line 4)" in capsys.readouterr().err
