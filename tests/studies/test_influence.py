"""Studies of inversion influence, in quick mode on generated images and sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.leakage import smallest_directions
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification
from recipes.studies.influence_epochs import Epochs, Unfairness


def rows_of(study) -> dict[str, list[str]]:
    """The table by its first column."""
    return {row[0]: row[1:] for row in study.rows()}


def first_image(path: Path, side: int) -> dict[str, torch.Tensor]:
    with np.load(path) as file:
        image, label = (
            (file["x_train"], file["y_train"]) if "x_train" in file else (file["x"], file["y"])
        )
    pixels = torch.tensor(image[:1] / 255.0, dtype=torch.float32).reshape(1, *image.shape[1:3], -1)
    return {
        "pixel_values": pixels.permute(0, 3, 1, 2)[..., :side, :side],
        "labels": torch.tensor(label[:1]).long(),
    }


def spectrum_before_training(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of J Jᵀ, on LeNet as seed 0 starts it."""
    set_seed(0)
    _, channels, side, _ = batch["pixel_values"].shape
    model = LeakageLeNetForImageClassification(
        LeakageLeNetConfig(num_channels=channels, image_size=side)
    ).eval()
    return smallest_directions(GradientMap(model, batch), batch["pixel_values"].numel()).eigenvalues


def test_whether_influence_predicts_attacks(mnist, cifar10, sst2, encoder, quick, tmp_path) -> None:
    data = ["--mnist", mnist, "--cifar10", cifar10, "--sst2", sst2, "--tokenizer", encoder]
    study = quick("influence_predicts_attacks", *data, output=tmp_path / "predicts")
    figures = study.figures
    for data, samples in figures.items():
        assert list(samples) == ["0", "1"], data
        for (points,) in map(dict.values, samples.values()):
            weak, strong, few, many = points
            assert (weak["defense"], many["defense"]) == ("gaussian_noise", "pruning")
            # Norms of δ: of noise √d times its scale, of pruning the more the more is cut.
            assert strong["size"] / weak["size"] == pytest.approx(
                strong["strength"] / weak["strength"], rel=0.1
            )
            assert few["size"] < many["size"]
            # The eigenvalues of (J Jᵀ + 1e-3 λ_max)⁻¹ are from 1 / 1.001 λ_max to 1000 / λ_max.
            for point in points:
                assert point["bound"] / 1.001 <= 1.02 * point["influence"], data
                assert point["influence"] <= 1020 * point["bound"], data
    assert figures["MNIST"]["0"]["0"][0]["coordinates"] == 6 * 6
    assert set(figures["SST-2"]["0"]["0"][0]) > {"rougeL", "google_bleu"}

    # A sample that is there is not run again: ranks follow its figures, here in the order of I_lb.
    mnist_points = [point for sample in figures["MNIST"].values() for point in sample["0"]]
    for point in mnist_points:
        point["rmse"] = 1e-6 * point["bound"]
    lost = figures["CIFAR-10"].pop("1")
    study.overwrite(figures)
    study.again()
    assert study.figures["CIFAR-10"] == figures["CIFAR-10"] | {"1": lost}
    row = rows_of(study)["MNIST, RMSE"]
    assert row[:4] == ["**1.00** [1.00, 1.00]", "1.00", "1.00", "1.00"]
    unhurt = sum(point["bound"] == 0 for point in mnist_points)
    assert row[-1] == f"{unhurt} of 8"


def test_directions(mnist, cifar10, quick, tmp_path) -> None:
    data = ("--mnist", mnist, "--cifar10", cifar10)
    study = quick("influence_directions", *data, output=tmp_path / "directions")
    figures = study.figures
    for data, path in (("MNIST", mnist), ("CIFAR-10", cifar10)):
        eigenvalues = [point["eigenvalue"] for point in figures[data]["0"]]
        found = spectrum_before_training(first_image(path, 6))
        assert eigenvalues[0] == pytest.approx(float(found[-1]), rel=1e-3)
        for points in figures[data].values():
            assert [point["eigenvalue"] for point in points] == sorted(
                (p["eigenvalue"] for p in points), reverse=True
            )
            assert all(
                point["clipped"] <= point["mse"] for point in points
            )  # the image lies in the range
            assert len({point["undefended"] for point in points}) == 1

    for points in figures["MNIST"].values():
        for point in points:
            point |= {"undefended": 0.5 * point["predicted"], "mse": 4 * point["predicted"]}
    lost = figures["CIFAR-10"].pop("0")
    study.overwrite(figures)
    study.again()
    assert study.figures["CIFAR-10"] == figures["CIFAR-10"] | {"0": lost}
    row = rows_of(study)["MNIST"]  # an RMSE of twice what is predicted
    assert (row[0], row[2], row[3]) == ("-1.00", "8 of 8", "2.00 (2.00 to 2.00)")


def test_small_directions(cifar10, quick, tmp_path) -> None:
    study = quick("influence_small_directions", "--cifar10", cifar10, output=tmp_path / "small")
    for samples in study.figures.values():
        for figures in samples.values():
            # What has no noise is exact, so that no strength hides the image; I² says it did.
            assert [figures[f"small directions, {r}"] for r in (1, 20, 1000)] == [1, 1, 1]
            assert figures["influence"] > 1
    row = rows_of(study)["1"]
    assert row[-1].startswith("2 of 2, 1.00")


def test_initializations(mnist, cifar10, quick, tmp_path) -> None:
    data = ("--mnist", mnist, "--cifar10", cifar10)
    study = quick("influence_initializations", *data, output=tmp_path / "initializations")
    figures = study.figures
    for data, found in figures["attacked"].items():
        for name, row in found.items():
            # λ_max by Lanczos, over two images, and that of the first by a dense J Jᵀ.
            top, values = (
                figures["spectrum"][data][name]["1"],
                list(figures["spectrum"][data][name].values()),
            )
            assert row["median λ_max"] >= 0.49 * top, name
            assert values == sorted(values, reverse=True)
        # Uniform weights are about as wide as Xavier's are narrow: all of a small network's
        # gradients show it.
        assert found["uniform ±0.5"]["median λ_max"] > 10 * found["Xavier"]["median λ_max"]

    figures["attacked"]["MNIST"]["uniform ±0.5"]["mse"] = [0.1, 0.2]
    figures["attacked"]["MNIST"]["Xavier"]["mse"] = [0.4, 0.15]
    lost = figures["spectrum"]["CIFAR-10"].pop("Kaiming")
    study.overwrite(figures)
    study.again()
    assert study.figures["spectrum"]["CIFAR-10"]["Kaiming"] == lost
    row = rows_of(study)["MNIST, MSE: mean, range"]
    assert (row[0], row[3]) == ("0.150 (0.100 to 0.200)", "0.275 (0.150 to 0.400)")
    assert row[4].startswith("1 of 2, p = ")


def test_unfairness(mnist, quick, tmp_path) -> None:
    study = quick("influence_unfairness", "--mnist", mnist, output=tmp_path / "unfairness")
    figures = study.figures
    with np.load(mnist) as file:
        classes = sorted(set(file["y_test"].tolist()))
    assert [point["label"] for point in figures["attacked"].values()] == classes
    for one in figures["spectra"].values():  # Σ 1/λ over m eigenvalues
        assert 36 / one["λ_max"] <= one["E I²"] / Unfairness.VARIANCE <= 36 * 1e6 / one["λ_max"]

    for point in figures["attacked"].values():
        point["mse"] = 0.5
    figures["attacked"]["0"]["mse"] = 0.1
    figures["accuracy"] = 0.25
    study.overwrite(figures)
    study.again(mnist=None)
    rows, n = rows_of(study), len(classes)
    assert rows["test accuracy"] == ["25.0%"]
    assert rows["MSE: mean"] == [f"{(0.5 * (n - 1) + 0.1) / n:.2f}"]
    assert rows["samples below half the mean"] == [f"1 of {n}"]
    assert rows["share of the variance between classes"] == ["100%"]  # one image a class


def smaller(path: Path, folder: Path) -> Path:
    """A file of images, cut to 12 x 12 pixels."""
    with np.load(path) as file:
        cut = {name: a[:, :12, :12] if a.ndim > 1 else a for name, a in file.items()}
    np.savez(folder / path.name, **cut)
    return folder / path.name


def test_epochs(mnist, cifar10, quick, tmp_path) -> None:
    mnist, cifar10 = (smaller(path, tmp_path) for path in (mnist, cifar10))
    draw = np.random.default_rng(0)
    images = [Image.fromarray(x) for x in draw.integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)]
    rows = {"img": images, "label": draw.integers(0, 10, 20).tolist()}
    Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    data = ["--mnist", mnist, "--cifar10", cifar10, "--train", tmp_path / "train.parquet"]
    study = quick("influence_epochs", *data, output=tmp_path / "epochs")
    figures = study.figures
    for data, noises in figures.items():
        absolute, relative = (noises[name] for name in Epochs.NOISES)
        assert list(absolute) == ["0", "1"], data
        sizes = [one["norm"][i] * one["noise"][i] for one in absolute.values() for i in range(2)]
        # √d times the standard deviation, whatever the gradient
        assert sizes == pytest.approx([np.mean(sizes)] * 4, rel=0.05), data
        for one in relative.values():
            assert one["noise"] == pytest.approx([0.15] * 2, rel=0.05), data
        assert absolute["0"]["norm"] == relative["0"]["norm"] != absolute["1"]["norm"]
        # Half the noise moves the input half as far: I_lb is linear in it, per unit of noise.
        at_start = [one["0"] for one in (absolute, relative)]
        per_unit = [np.divide(one["bound"], one["noise"]) for one in at_start]
        assert per_unit[0] == pytest.approx(per_unit[1], rel=1e-2), data

    first, last = figures["MNIST"]["variance 1e-3"].values()
    first |= {"dlg": [0.2, 0.3], "bound": [1.0, 2.0], "accuracy": 0.1}
    last |= {"dlg": [0.5, 0.6], "bound": [4.0, 8.0]}
    lost = figures["CIFAR-10"]["variance 1e-3"].pop("1")
    study.overwrite(figures)
    study.again()
    assert study.figures["CIFAR-10"]["variance 1e-3"]["1"] == lost
    start, _, less = study.rows()[:3]
    assert start[2:4] == ["0", "0.100"]
    assert start[6] == "1.5 [1, 2]"
    assert less[6:8] == ["times 4", "0.30 ± 0.00"]
