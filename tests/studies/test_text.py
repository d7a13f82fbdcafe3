"""Studies of text, in quick mode on generated sentences and a random encoder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import save_encoder
from safetensors.torch import load_file
from transformers import AutoTokenizer

from recipes.studies.frontier_clients import TextTask
from recipes.studies.frontier_rows import QUICK
from recipes.studies.lib.results import Results
from recipes.studies.privacy_and_utility import UNDEFENDED, accuracy_cells, write_span_tables
from recipes.studies.refiner_texts import (
    FINE_TUNED,
    QUICK_SAMPLES,
    FineTuned,
    FirstHalf,
    SecondHalf,
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """As the common one, but wider than a batch has tokens, which the span attack asks for."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    folder = tmp_path_factory.mktemp("data") / "encoder"
    return save_encoder(folder, tokenizer, hidden_size=96)


def table(output: Path) -> list[list[str]]:
    """Cells of OUTPUT.md, its header left out."""
    lines = Path(f"{output}.md").read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_span_attack(encoder, network, sst2, quick, tmp_path):
    output = tmp_path / "span_attack"
    data = ("--model", encoder, "--data_dir", sst2, "--evaluation_network", network)
    study = quick("span_attack", *data, output=output)
    found = study.figures
    # Every token of a lone sentence lies in the span of its own gradient, and adding no noise
    # changes nothing.
    undefended = {key: value for key, value in found["MiniLM, batch 1"].items() if key != "seconds"}
    assert (undefended["share"], undefended["exact"]) == (1, undefended["texts"])
    for unit in ("each matrix's own", "the whole gradient's"):
        assert found[f"0.0% of {unit} RMS"].items() >= undefended.items()
        assert found[f"150.0% of {unit} RMS"]["share"] < 1
    # Here so much pruning takes the whole first block: only the two special tokens are known.
    assert found["pruning ratio=0.99"]["hits"] == 2
    for row, one in found.items():
        assert one["hits"] <= one["distinct"] <= one["tokens"], row
        assert one["interval"][0] <= one["share"] <= one["interval"][1], row

    # Rows that are missing are made, the others stay; a table has dashes until then.
    kept = found["gaussian_noise relative_scale=0.1"]["exact"] = 77
    lost = found.pop("pruning ratio=0.9, completed")
    study.overwrite(found)
    study.again()
    again = study.figures
    assert again["gaussian_noise relative_scale=0.1"]["exact"] == kept
    assert again["pruning ratio=0.9, completed"]["hits"] == lost["hits"]
    defenses = {tuple(row[:2]): row for row in table(tmp_path / "span_attack_defenses")}
    assert defenses["`gaussian_noise`", "`relative_scale=0.1`"][3] == "77 of 1"
    assert defenses["`pruning`", "`ratio=0.9`"][4].startswith(f"{100 * lost['share']:.0f} % [")
    assert defenses["`gaussian_noise`", "`relative_scale=0.1`"][4] == ""
    assert len(table(tmp_path / "span_attack_noise")) == 6


def test_span_attack_shows_what_is_there(tmp_path):
    row = {
        "share": 0.5,
        "interval": [0.25, 1.0],
        "exact": 1,
        "texts": 2,
        "tokens": 9,
        "seconds": 0.1,
    }
    write_span_tables(tmp_path / "part", {"optimal_pruning ratio=0.5, completed": row})
    assert table(tmp_path / "part") == []
    rows = {tuple(cells[:2]): cells[2:] for cells in table(tmp_path / "part_defenses")}
    assert rows["`optimal_pruning`", "`ratio=0.5`"] == ["–", "–", "50 % [25, 100]"]
    assert rows["`refiner`", "`iterations=1`"] == ["–", "–", ""]


def test_refiner_on_sentences(encoder, network, sst2, quick, tmp_path):
    output = tmp_path / "sentences"
    data = ("--model", encoder, "--data_dir", sst2, "--evaluation_network", network)
    study = quick("refiner_sentences", *data, output=output)
    found = study.figures
    # Projection: at most ε away, and no change where it was nearer.
    free, tight, loose = (
        found[row]
        for row in ("no projection (our default)", "`epsilon=0.05`", "`relative_epsilon=0.5`")
    )
    assert tight["distance"]["mean"] == pytest.approx(0.05, abs=1e-4)
    assert tight["distance"]["mean"] < free["distance"]["mean"] < 0.5 * free["norm"]["mean"]
    assert tight["cosine"]["mean"] > free["cosine"]["mean"]
    assert loose == free
    # No noise in the start: nothing is lost at first, and UM cannot fall below that.
    start = found["alpha=0.0, learning_rate=0.003"]
    assert start["metric_start"]["mean"] == pytest.approx(0, abs=1e-6)
    assert start["fell"]["mean"] == 0
    # More noise in the start leaves fewer words where they were.
    same = [
        found[f"alpha={alpha}, learning_rate=0.003"]["same_tokens"]["mean"] for alpha in (0.0, 0.9)
    ]
    assert same[0] == 1 > same[1]

    kept = found["defaults"]["cosine"]["mean"] = -0.5
    lost = found.pop("`epsilon=0.05`")
    study.overwrite(found)
    study.again()
    assert study.figures["defaults"]["cosine"]["mean"] == kept
    assert study.figures["`epsilon=0.05`"] == lost
    assert table(output)[-1][2].startswith("-0.500 ± ")
    assert table(tmp_path / "sentences_projection")[1][2] == "0.050 ± 0.000"


def test_refiner_in_training(encoder, network, sst2, quick, tmp_path):
    output = tmp_path / "training"
    data = ("--model", encoder, "--data_dir", sst2, "--evaluation_network", network)
    study = quick("refiner_in_training", *data, output=output)
    found = study.figures
    assert found["before"]["loss"] != found["after"]["loss"]
    for when in ("before", "after"):
        blended = [found[when][f"α = {alpha}, blended only"]["each"] for alpha in (0.1, 0.3, 0.6)]
        assert blended == sorted(blended, reverse=True), "more noise, less of the direction"
        for row, one in found[when].items():
            assert row == "loss" or one["least"] <= one["each"] <= 1
    name = "α = 0.6, learning rate 0.001"
    cells = next(row for row in table(output) if row[0] == name)
    shown = [found[when][name][key] for when in ("before", "after") for key in ("each", "together")]
    assert [float(cell) for cell in cells[1:5]] == shown

    kept, lost = found["before"] | {"loss": 9.0}, found["after"]
    study.overwrite({"before": kept})
    study.again()
    assert study.figures == {"before": kept, "after": lost}


@pytest.mark.distributed
def test_defenses_on_sst2(encoder, sst2, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    data, plain = ("--model", encoder, "--data_dir", sst2), accuracy_cells("quick")["none",]
    known = {"accuracy": 0.75, "eval_sentences": 300, "seconds_per_step": 0.5}
    known |= dict.fromkeys(UNDEFENDED)  # of what no defense shares
    Results(tmp_path / "sst2").add(plain | {"quick": True}, known)
    study = quick("sst2", *data, output=tmp_path / "sst2")
    found = study.figures
    assert list(found) == ["none", "pruning-0.9"]
    assert found["none"] == known  # which is there, and not run
    assert (found["pruning-0.9"]["ranks"], found["pruning-0.9"]["steps"]) == (2, 2)
    # Pruning takes away coordinates: what is left has cosine √(1 - e²) with the whole.
    error, cosine = (
        found["pruning-0.9"][f"defense/{name}"] for name in ("relative_error", "cosine")
    )
    assert 0 < error < 1
    assert cosine == pytest.approx((1 - error**2) ** 0.5, abs=1e-3)
    assert table(tmp_path / "sst2")[0][:3] == ["`none`", "", "0.750 ± 0.049"]
    assert table(tmp_path / "sst2")[0][3:] == ["0.00", "1.00"]
    assert table(tmp_path / "sst2")[1][3:] == [f"{error:.2f}", f"{cosine:.2f}"]

    # What is there is not run again.
    monkeypatch.setattr(sys, "executable", "/nowhere")
    study = quick("sst2_seconds", *data, output=tmp_path / "sst2")
    steps = [one["seconds_per_step"] for one in found.values()]
    assert [row[2:] for row in study.rows()] == [
        [f"{step:.2f}", f"{step / steps[0]:.2f}"] for step in steps
    ]


def test_attacks_on_refiner(encoder, network, sst2, quick, tmp_path):
    rows, accuracies = accuracy_cells("accuracy"), tmp_path / "sst2"
    Results(accuracies).add(rows["none",], {"accuracy": 0.75})
    output = tmp_path / "refiner_text"
    data = ["--model", encoder, "--data_dir", sst2, "--evaluation_network", network]
    study = quick("refiner_text", *data, "--accuracies", accuracies, output=output)
    found = study.figures
    assert set(found) == {row[0] for row in table(output)}
    for row in found.values():
        assert all(
            low <= mean <= high for scores in row.values() for mean, low, high in scores.values()
        )
    known = {attack: {"token_f1": [0.5, 0.25, 0.75]} for attack in found["none"]}
    study.overwrite(found | {"none": known})
    study.again()
    assert table(output)[0] == ["none", "0.750", *["0.50 [0.25, 0.75]"] * 2, ""]


def test_what_a_fine_tuned_model_shares(encoder, network, sst2, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    monkeypatch.setattr(TextTask, "TEST", ("dev",))
    output, folder = tmp_path / "fine_tuned", tmp_path / "models"
    data = ["--model", encoder, "--data_dir", sst2, "--evaluation_network", network]
    study = quick("refiner_fine_tuned", *data, "--models", folder, output=output)
    found = study.figures
    start, *rows = found
    assert rows == ["none", "paper: pruning", "paper: gaussian_noise", "paper: refiner"]
    gradient = found[start]["gradient"]["0"]
    assert len(gradient["norm"]) == QUICK_SAMPLES
    assert all(norm > 0 for norm in gradient["norm"])
    for row in rows:
        assert 0 <= found[row]["accuracy"]["0"]["accuracy"] <= 1
        for attack in FineTuned.ATTACKS:
            read = found[row][attack]["0"]["token_f1"]
            assert len(read) == QUICK_SAMPLES
            assert all(0 <= score <= 1 for score in read)
    # What is undefended, span reads. Who goes on starts at what was fine-tuned.
    assert found["none"]["span"]["0"]["token_f1"] == [1.0] * QUICK_SAMPLES
    half = FirstHalf(str(encoder), str(sst2), folder / "fine_tuned")
    task = SecondHalf(half, FINE_TUNED | QUICK, str(network))
    (kept,) = (folder / "fine_tuned").glob("none-*-0.0001-*")
    tuned = load_file(kept / "end.safetensors")
    model = task.start(0)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tuned.items())
    both = [*half.rows_to_learn(), *task.rows_to_learn()]
    assert both == list(task.train_rows)[20:]

    # By how much more is read than behind Refiner, sentence by sentence
    for row, scores in (("none", [0.5, 0.75]), ("paper: refiner", [0.25, 0.25])):
        found[row]["span"] = {"0": {"token_f1": scores}}
    study.overwrite(found)
    study.again()
    assert [line[3:5] for line in table(output)][1] == ["0.62 [0.00, 1.00]", "0.38 [-1.21, 1.96]"]
