"""Scripts that set every defense against every attack, in quick mode on generated data."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch

from hf_gradguard import DEFENSES
from hf_gradguard.networks import ImageEvaluationNetwork, ImageEvaluationNetworkConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "recipes" / "reproductions"


def figures_of(output: Path) -> dict:
    return json.loads(Path(f"{output}.json").read_text())["figures"]


def test_all_defenses_are_in_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    strengths = importlib.import_module("every_defense").strengths(
        (0.1, 0.5, 2.0), alphas=(0.3, 0.6, 0.9)
    )
    assert set(strengths) == set(DEFENSES)
    assert {len(some) for name, some in strengths.items() if name != "none"} == {3}


def adaptive(row: dict) -> set[str]:
    return {column for column in row if column.endswith(", adaptive")}


def test_texts(encoder, sst2, quick, tmp_path):
    output = tmp_path / "text"
    quick("text_defenses.py", "--tokenizer", encoder, "--data_dir", sst2, "--output", output)
    figures = figures_of(output)
    tuned = {"tag", "inverting_gradients", "lamp"}
    for row, cells in figures.items():
        assert set(cells) - adaptive(cells) == {"span", *tuned}, row
        assert all(
            low <= mean <= high for scores in cells.values() for mean, low, high in scores.values()
        ), row
    # Undefended, span reads off everything.
    assert figures["none"]["span"]["token_f1"] == [1, 1, 1]
    knowing = {row.split()[0]: adaptive(cells) for row, cells in figures.items()}
    assert knowing["none"] == knowing["quantization"] == set()
    assert (
        knowing["optimal_noise"]
        == knowing["pruning"]
        == {f"{name}, adaptive" for name in {"span", *tuned}}
    )
    assert knowing["soteria"] == knowing["refiner"] == {f"{name}, adaptive" for name in tuned}
    header, _, *rows = [line.split(" | ") for line in Path(f"{output}.md").read_text().splitlines()]
    (none,) = (row for row in rows if row[0] == "| none")
    assert none[header.index("span")] == "1.00 [1.00, 1.00]"


def test_images(cifar10, quick, tmp_path, capsys):
    torch.manual_seed(0)
    ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[4, 4, 4])).save_pretrained(
        tmp_path / "network"
    )
    output = tmp_path / "images"
    arguments = [
        "--images",
        cifar10,
        "--evaluation_network",
        tmp_path / "network",
        "--output",
        output,
    ]
    quick("image_defenses.py", *arguments)
    figures = figures_of(output)
    for row in ("none", "quantization bits=8"):
        assert adaptive(figures[row]) == {"inverting_gradients, adaptive"}
    assert adaptive(figures["soteria ratio=0.5"]) == {
        "inverting_gradients, adaptive",
        "idlg, adaptive",
    }

    # What is there is shown, and not computed again.
    figures["none"]["idlg"]["psnr"] = [12.25, 11.0, 13.0]
    stored = json.loads(Path(f"{output}.json").read_text())
    Path(f"{output}.json").write_text(json.dumps(stored | {"figures": figures}))
    capsys.readouterr()
    quick("image_defenses.py", *arguments)
    assert "| 12.2 [11.0, 13.0] |" in capsys.readouterr().out
    assert figures_of(output) == figures
