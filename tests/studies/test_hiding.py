"""The picture of what is hidden and what is learned, from figures written by hand."""

from __future__ import annotations

from recipes.studies.lib.results import Results
from recipes.studies.privacy_and_utility import SPAN, accuracy_cells


def test_figures_of_two_parts_side_by_side(quick, tmp_path):
    tokens = {
        "MiniLM, batch 1": {"share": 1.0, "interval": [1.0, 1.0]},
        "pruning ratio=0.9": {"share": 0.5, "interval": [0.4, 0.6]},
        "pruning ratio=0.9, completed": {"share": 0.75, "interval": [0.7, 0.8]},
        "refiner iterations=10": {"share": 0.25, "interval": [0.2, 0.3]},  # its accuracy is missing
    }
    accuracies = {
        name: {"accuracy": 0.8, "eval_sentences": 100}
        for name in ("none", "pruning-0.9", "pruning-0.99")
    }
    for name, cells, figures in (
        ("tokens", {(name,): row for name, row in SPAN.items()}, tokens),
        ("accuracies", accuracy_cells("accuracy"), accuracies),
    ):
        for row, found in figures.items():
            Results(tmp_path / name).add(cells[row,], found)
    data = ["--tokens", tmp_path / "tokens", "--accuracies", tmp_path / "accuracies"]
    study = quick("hiding_and_learning", *data, output=tmp_path / "picture")
    assert study.rows() == [
        ["`none`", "100% [100%, 100%]", "0.800 ± 0.078"],
        ["`pruning ratio=0.9`", "75% [70%, 80%]", "0.800 ± 0.078"],
    ]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
