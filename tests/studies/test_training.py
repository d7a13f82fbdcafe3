"""Studies that train on SST-2, in quick mode on generated sentences and a random encoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import save_encoder
from transformers import AutoTokenizer

from recipes.studies.frontier import rates, shown, text
from recipes.studies.frontier.client import row_of
from recipes.studies.frontier.settings import GRID, QUICK_ATTACKS, QUICK_ROWS, STAGES
from recipes.studies.lib.tables import interval
from recipes.studies.private import accuracy


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory, sst2: Path) -> Path:
    """The common folder, with a test set."""
    folder = shutil.copytree(sst2, tmp_path_factory.mktemp("data") / "sst2")
    shutil.copy(folder / "dev.tsv", folder / "test_labelled_sst.tsv")
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    folder = tmp_path_factory.mktemp("data") / "encoder"
    return save_encoder(folder, tokenizer, hidden_size=96)


def test_frontier(encoder, sentences, quick, tmp_path, monkeypatch):
    for part in (rates, text):
        monkeypatch.setattr(f"{part.__name__}.QUICK_ROWS", QUICK_ROWS[:2])
    monkeypatch.setattr("recipes.studies.frontier.training.HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences)
    study = quick("frontier", "rates", *data, output=tmp_path / "frontier_rates")
    found = {row: list(tried) for row, tried in study.figures.items()}
    assert found == {
        row_of(*row): [f"{rate:g}" for rate in rates.rates(*row, 0)] for row in QUICK_ROWS[:2]
    }
    models = tmp_path / "models"
    study = quick("frontier", "text", *data, "--models", models, output=tmp_path / "frontier_text")
    assert {place for row in study.figures.values() for place in row} == {
        "accuracy",
        *(f"{attack}, {size}, {stage}" for attack, size in QUICK_ATTACKS for stage in STAGES),
    }
    plain = study.figures["none"]
    assert plain["span, 1, start"]["0"]["token_f1"] == [1.0]  # a lone sentence, undefended
    told = plain["candidates, 4, start"]["0"]
    assert len(told["rank"]) == 4  # one of each of the message's sentences
    assert shown.read({"0": told}) == interval(told["tpr_1%"], 2)
    assert shown.lost(plain["accuracy"], plain["accuracy"]) == "0.000 [0.000, 0.000]"
    assert (tmp_path / "frontier_text.png").exists()

    study = quick(
        "frontier", "lists", *data, "--models", models, output=tmp_path / "frontier_lists"
    )
    (found,) = study.figures.values()
    assert len(found["rank"]) == 4
    (row,) = study.rows()
    assert row[:2] == ["20", f"{(found['parameters'] / 4) ** 0.5 / 20:.2g}"]


def test_the_rate_is_searched_beyond_the_ends(tmp_path):
    """Of three equal steps up the last is best: one more is asked for, until one is worse."""
    common = {"defense": "none", "strength": {}}
    tried = list(GRID[:3])

    class Found(dict):
        def __contains__(self, cell):
            return super().__contains__(cell["learning_rate"])

        def __getitem__(self, cell):
            return {"held_out": super().__getitem__(cell["learning_rate"])}

    results = Found(zip(GRID, (0.5, 0.6, 0.7, 0.8, 0.75), strict=False))
    assert rates._next(results, common, tried) == GRID[3]
    assert rates._next(results, common, [*tried, GRID[3]]) == GRID[4]
    assert rates._next(results, common, list(GRID[:5])) is None


def test_private_accuracy(encoder, sentences, quick, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.studies.frontier.training.HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences)
    output = tmp_path / "private_accuracy"
    found = quick("private", "accuracy", *data, output=output).figures
    assert set(found) == {"rates", "no privacy", "dp_sgd, ε = 8"}
    spent = found["dp_sgd, ε = 8"]["0"]["epsilon"]
    assert 7.9 < spent <= 8
    assert found["no privacy"]["0"]["epsilon"] is None


def test_private_accuracy_asks_for_both_once_a_rate_is_chosen(tmp_path):
    class Args:
        quick, output = False, tmp_path / "private_accuracy"

    first = accuracy.cells(Args)
    assert [place[0] for place in first] == ["rates"] * len(accuracy.RATES)
