"""The study of Refiner's second form, in quick mode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(sst2: Path, tmp_path: Path) -> Path:
    """As SST-2 is laid out, with enough rows to hold 500 out."""
    made = Path(shutil.copytree(sst2, tmp_path / "sst2"))
    header, *rows = (made / "train.tsv").read_text().splitlines()
    many = (rows * (600 // len(rows) + 1))[:600]
    (made / "train.tsv").write_text("\n".join([header, *many]) + "\n")
    shutil.copy(made / "dev.tsv", made / "test_labelled_sst.tsv")
    return made


@pytest.mark.slow
def test_second_form(encoder: Path, folder: Path, quick, tmp_path: Path) -> None:
    data = ("--model", encoder, "--data_dir", folder, "--models", tmp_path / "models")
    study = quick("refiner", "second_form", *data, output=tmp_path / "second_form")
    found = study.figures
    assert list(found) == ["none", "a factor by token", "pruning 0.99, feedback"]
    plain = found["none"]["read"]["0"]
    assert plain["cosine"] == [pytest.approx(1, abs=1e-3)]
    assert plain["rank"] == [0]
    for row in found.values():
        (trained,), (read,) = row["accuracy"].values(), row["read"].values()
        assert 0 <= trained["accuracy"] <= 1
        assert 0 <= read["token_f1"][0] <= 1
    assert [row for row in found if "told" in found[row]] == ["a factor by token"]
    told = found["a factor by token"]["told"]["0"]
    assert list(told) == [
        f"1 {when} {who}" for when in ("first", "later") for who in ("plain", "informed")
    ]
    assert all(rank in (0, 1) for ranks in told.values() for rank in ranks)
    word = found["a factor by token"]["word"]["0"]
    assert list(word) == [name.replace("1 ", "word ") for name in told]
    assert all(rank in (0, 1, 2) for ranks in word.values() for rank in ranks)
    rows = study.rows()
    assert rows[0][:3] == ["none", f"{found['none']['accuracy']['0']['accuracy']:.3f}",
                           "0.000 [0.000, 0.000] (1 seed)"]  # fmt: skip
