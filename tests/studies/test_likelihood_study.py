"""The study of the search by likelihood, in quick mode on generated sentences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from recipes.studies.likelihood_search import GUESS, LikelihoodSearches, _better


@pytest.fixture
def sentences(tmp_path: Path, sst2: Path) -> Path:
    """Of 9 words that the encoder knows."""
    words = sorted(set((sst2 / "train.tsv").read_text().split()) - {"sentence", "label"})
    words = [word for word in words if not word.isdigit()]
    stream = random.Random(0)
    for split, count in (("train", 60), ("dev", 4)):
        rows = [f"{' '.join(stream.choices(words, k=9))}\t{number % 2}" for number in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return tmp_path


def test_sentences_are_searched_and_summarized(encoder, sentences, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sentences, "--sentences", 2)
    study = quick("likelihood_search", *data, output=tmp_path / "s")
    found = study.figures["start"]["20"]
    assert list(found) == ["00", "01"]
    scores = [cell["token_f1"] for cell in found.values()]
    guessed = study.figures[GUESS[0]][GUESS[1]][GUESS[2]]["guessed"]
    assert len(guessed) == 2
    assert all(0 <= score < 1 for score in guessed)
    row, several, guess = study.rows()
    assert guess[0] == GUESS[0]
    assert guess[3] == f"{sum(guessed) / 2:.2f}"
    assert several[:3] == ["start, 4 in a message", "5", "1"]
    assert study.figures["start, 4 in a message"]["5"]["00"]["evaluated"] <= 800
    assert row[:3] == ["start", "20", "2"]
    assert row[3].startswith(f"{sum(scores) / 2:.2f} [{min(scores):.2f}, {max(scores):.2f}]")
    assert all(cell["evaluated"] <= 300 for cell in found.values())


def test_all_cells_are_strengths_of_both_models():
    flags = ["--all", "--model", "m", "--data_dir", "d", "--output", "o", "--sentences", "7"]
    cells = LikelihoodSearches.parse(flags).cells()
    # Both models with one population and with six, four other strengths and two other defenses of
    # five sentences each, two other efforts, the end by the whole likelihood, three messages of
    # several sentences, and the guess.
    assert len(cells) == 2 * 7 + 2 * 7 + 6 * 5 + 2 * 7 + 7 + 3 + 1
    assert {state for state, _, _ in cells} == {
        "start", "trained", "start, 4 in a message", "start, 16 in a message",
        "start, ends by the whole likelihood", "start, 6 populations", "trained, 6 populations",
        "start, 2,000 texts", "start, 12 populations", GUESS[0],
    }  # fmt: skip
    assert {strength for state, strength, _ in cells if state == "start"} == {
        "1", "5", "20", "100", "1000", "pruning of 99 %", "refiner, 4 samples"
    }  # fmt: skip


def test_the_better_of_two_searches_is_the_one_that_scores_higher():
    few = {"score": 5.0, "token_f1": 0.9, "evaluated": 10, "processor_seconds": 2.0}
    most = {"score": 6.0, "token_f1": 0.4, "evaluated": 30, "processor_seconds": 5.0}
    assert _better(few, most) == most | {"evaluated": 40, "processor_seconds": 7.0}
