"""Benchmarks in quick mode: they run, and their tables hold their figures. How fast anything is, no
test says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_gradguard.randomness import Stream
from recipes.benchmarks.exact_noise import float_noise
from recipes.benchmarks.growth import _exponents, _slope
from recipes.benchmarks.measuring import run as run_benchmark


@pytest.fixture
def measure(encoder, tmp_path):
    """Runs a benchmark; its report, and the cells of its table below the header."""

    def run(name: str, *arguments: object) -> tuple[dict, list[list[str]]]:
        output = tmp_path / "measured"
        flags = ["--model", encoder, "--output", output, "--quick", *arguments]
        run_benchmark(name, list(map(str, flags)))
        lines = Path(f"{output}.md").read_text().splitlines()[2:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return json.loads(Path(f"{output}.json").read_text()), rows

    return run


def cells(ratio: dict, digits: int) -> list[str]:
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    return [
        f"{ratio['median']:.{digits}f}",
        f"{ratio['min']:.{digits}f} to {ratio['max']:.{digits}f}",
    ]


def test_meter(measure):
    report, rows = measure("meter")
    assert list(report["samples"]) == ["2"]
    found = report["samples"]["2"]
    assert list(found) == ["gaussian_noise", "optimal_noise", "trying out"]
    assert rows == [["2", label, *cells(ratio, 1)] for label, ratio in found.items()]


def test_defenses(measure):
    report, rows = measure("defenses")
    gradients, steps = report["in plain gradients"], report["in plain steps, AdamW included"]
    assert [row[0] for row in rows] == [
        "**in plain gradients**",
        *gradients,
        "**in plain steps, AdamW included**",
        *steps,
    ]
    shown = {row[0]: row[1:] for row in rows}
    for label, ratio in (gradients | steps).items():
        assert shown[label] == cells(ratio, 2)
    for settings in ("refresh_every=10", "shape=own"):
        assert any("optimal_pruning" in label and settings in label for label in steps)
    assert "squared_sensitivity, k=1" in gradients


def test_kinks(measure):
    report, rows = measure("kinks")
    models = report["models"]
    assert [row[0] for row in rows] == list(models)
    assert {"DistilBERT", "ResNet-18", "LeNet with ReLU"} < set(models)
    for row, found in zip(rows, models.values(), strict=True):
        assert row[1:5] == [*cells(found["difference"], 2), *cells(found["exact"], 2)]
        assert found["error"] < 0.03
        assert row[5] == f"{found['error']:.1%}"


def test_randomness(measure):
    report, rows = measure("randomness")
    draws, steps = report["in torch.randn"], report["in steps without a defense"]
    assert [row[1:] for row in rows if row[1]] == [
        cells(ratio, 2) for ratio in (draws | steps).values()
    ]
    assert [row[0] for row in rows] == [
        "**1,000 numbers, in torch.randn**",
        *draws,
        f"**steps of {report['tensors']} tensors, in those without**",
        *steps,
    ]
    assert report["tensors"] > 30


def test_exact_noise(measure):
    report, rows = measure("exact_noise")
    assert list(report["ratios"]) == ["2 x 4 tokens"]
    for row, (label, ratio) in zip(rows, report["ratios"].items(), strict=True):
        low, high = ratio["interval"]
        assert ratio["min"] <= low <= ratio["median"] <= high <= ratio["max"]
        assert row == [label, *cells(ratio, 2), f"{low:.2f} to {high:.2f}"]


def test_noise(measure):
    pytest.importorskip("numba", reason="compiled loops need the extra fast: Numba")
    report, rows = measure("noise", "--without_others")
    found = report["nanoseconds"]
    assert [row[0] for row in rows] == [*found, "compiling, once for each process"]
    for row, times in zip(rows, found.values(), strict=False):
        assert row[1:3] == cells(times, 1)
        assert row[3] == f"{times['in torch.randn']:.2f}"
    assert found["torch.randn"]["in torch.randn"] == 1


def test_the_unit_of_exact_noise_is_a_float_times_the_deviation():
    zeros, std = torch.zeros(1000), torch.tensor(0.3, dtype=torch.float64)
    exact = Stream.from_seeds(0).noisy(zeros, std, 1000)
    with float_noise():
        former = Stream.from_seeds(0).noisy(zeros, std, 1000)
    assert torch.equal(former, Stream.from_seeds(0).normal((1000,)) * 0.3)
    assert not torch.equal(former, exact)
    assert torch.equal(Stream.from_seeds(0).noisy(zeros, std, 1000), exact)  # put back
    assert float(former.std() / exact.std()) == pytest.approx(1, abs=0.1)


def test_memory(measure):
    report, rows = measure("memory")
    assert len(rows) == len(report["gradients"]) + 1 + len(report["messages"])
    assert report["messages"]["gaussian_noise"] > report["messages"]["none"]
    peaks = report["gradients"]
    assert min(peaks.values()) > 1  # the sum over probes is as large as a gradient


def test_refiner(measure, network):
    report, rows = measure("refiner", "--evaluation_network", network)
    ratios = report["in plain gradients"]
    assert rows == [[label, *cells(ratio, 1), floor] for (label, ratio), floor in zip(
        ratios.items(), ["25.3", "13.7", "13.7"], strict=True)]  # fmt: skip
    memory = report["peak memory in gradients"]
    assert memory["refiner"] > memory["plain"] >= 1


def test_attacks(measure):
    report, rows = measure("attacks")  # compares both implementations' objectives itself
    for (label, one), row in zip(report["cases"].items(), rows, strict=True):
        speed = one["steps a second and sentence"]
        assert row == [label, *cells(one["times as fast as plain"], 2), f"{speed:.1f}"]
        assert speed > 0


def test_leakage(measure):
    report, rows = measure("leakage")
    assert rows == [[label, *cells(ratio, 1)] for label, ratio in report["ratios"].items()]
    found = report["eigenvalue"]
    # J Jᵀ and JᵀJ have the same largest eigenvalue.
    assert found["input space"]["value"] == pytest.approx(
        found["parameter space"]["value"], rel=1e-3
    )
    assert f"({found['parameter space']['products']} products)" in rows[0][0]


def test_wire(measure):
    pytest.importorskip("flwr")
    report, rows = measure("wire")  # compares the averaged weights itself
    for (label, case), row in zip(report["cases"].items(), rows, strict=True):
        assert row[:3] == [label, f"{case['whole']:,}", f"{case['packed']:,}"]
        assert row[3] == f"{case['packed'] / case['whole']:.2%}"
        assert case["whole"] > 4 * report["entries"]


@pytest.mark.distributed
@pytest.mark.slow
def test_exchange(measure):
    report, rows = measure("exchange")
    found = report["ranks"]["3"]
    assert found["bytes"]["plain"] == 4 * report["entries"]
    # the votes of each exchange: four words
    assert found["bytes"]["secure"] == 4 * report["entries"] + 16
    shown = {row[0]: row[1:] for row in rows}
    assert shown["secure in plain"] == cells(found["ratio"], 1)
    assert shown["secure, s"][0] == f"{found['seconds']['secure']['median']:.2f}"
    assert shown["masks for each peer, s"][0] == f"{report['alone']['masks']['median']:.3f}"


@pytest.mark.slow
@pytest.mark.distributed
def test_mesh(measure):
    report, rows = measure("mesh")
    whole, sharded = report["whole"], report["sharded"]
    assert sharded["weights"] == pytest.approx(whole["weights"] / 2, abs=0.002)  # rounded
    shown = {row[0]: row[1:] for row in rows}
    assert shown["protect, none"] == [f"{found['protect, none']:.1f}" for found in (whole, sharded)]
    assert whole["plain backward"] > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_shards(measure):
    """Two clients of two devices end where two of one device do, to rounding."""
    report, rows = measure("shards")
    assert [row[0] for row in rows] == list(report["cases"])
    for row, kinds in zip(rows, report["cases"].values(), strict=True):
        for place, apart in enumerate(kinds.values()):
            counts = f"{apart['farther']:,} of {apart['entries']:,}"
            assert row[1 + 2 * place : 3 + 2 * place] == [f"{apart['largest']:.1e}", counts]
    ours = {label: kinds["`none`"]["largest"] for label, kinds in report["cases"].items()}
    assert ours.pop("encoder, AdamW, float64") < 1e-12
    for label, largest in ours.items():
        assert largest < 1e-6, label


def test_growth(measure):
    report, rows = measure("growth")
    assert list(report["axes"]) == ["tokens of a text", "clients"]
    shown = iter(rows)
    for axis, measured in report["axes"].items():
        assert next(shown)[0].startswith(f"**{axis}**")
        for row, found in measured["exponents"].items():
            (label, exponent, _, above, _, memory) = next(shown)
            assert label == row
            assert exponent == f"{found['exponent']['median']:.2f}"
            assert above == ("" if row == "stock" else f"{found['above stock']['median']:.2f}")
            assert memory == f"{measured['memory'][row]:.2f}"
        assert len(measured["seconds"]["stock"]) == len(measured["sizes"]) == 2


def test_slopes_are_those_of_powers():
    sizes = [2, 4, 8]
    assert _slope(sizes, [3 * n**1.5 for n in sizes]) == 1.5
    found = _exponents(sizes, {"stock": [[n] for n in sizes], "own": [[n**2] for n in sizes]})
    assert found["own"]["above stock"]["median"] == 1


def test_models(measure):
    report, rows = measure("models")
    assert len(report["models"]) == 6
    shown = iter(rows)
    for label, model in report["models"].items():
        assert next(shown)[0].startswith(f"**{label}**")
        for row, figures in model["rows"].items():
            beyond = f"{figures['beyond_mib']:+.1f}", f"{figures['beyond_gradients']:+.2f}"
            assert next(shown) == [row, *cells(figures["steps"], 2), *beyond]
    # Queries 4096 to 4096 and values 4096 to 1024, in 32 layers: two factors of 16 each.
    entries = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    # Measuring keeps of every token what four factors took in, 4096 and 16 twice, and their slopes,
    # 16 twice, 4096 and 1024; of two passes.
    kept = 2 * 32 * 2048 * (2 * (4096 + 16) + 2 * 16 + 4096 + 1024)
    assert report["8 billion"] == {
        "parameters": entries,
        "gradient_mib": round(4 * entries / 2**20, 1),
        "measuring_mib": round(4 * kept / 2**20, 1),
    }
    assert next(shown)[0].startswith("**LoRA of rank 16 on 8 billion**")
    assert next(shown)[3] == f"{4 * kept / 2**20:+.1f}"
    again, _ = measure("models", "--only", "ResNet-18's, 8 images at 32")
    same = [label for label, model in again["models"].items() if model == report["models"][label]]
    assert same == [label for label in report["models"] if not label.startswith("ResNet")]


def test_training(measure, sst2):
    report, rows = measure("training", "--data_dir", sst2, "--without_opacus")
    assert list(report["in stock steps"]) == ["none", "gaussian_noise"]
    rates = report["tokens a second"]
    assert rows[0][:3] == ["stock Trainer", f"{rates['stock Trainer']:.0f}", "1"]
    assert rows[1:] == [
        [name, f"{rates[name]:.0f}", *cells(ratio, 2)]
        for name, ratio in report["in stock steps"].items()
    ]


def test_training_says_that_opacus_is_missing(measure, sst2, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Opacus is not installed"):
        measure("training", "--data_dir", sst2)
