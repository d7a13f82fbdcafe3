"""Studies of Refiner's price and worth, in quick mode on generated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import set_seed

from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification
from recipes.studies.frontier_clients import Network
from recipes.studies.lib.images import single_images
from recipes.studies.refiner_gradients import (
    integrated,
    layers_of,
    noisy,
    pruned,
    shapley_values,
)
from recipes.studies.refiner_parts import FewImages
from recipes.studies.refiner_pictures import OF_EQUAL, centered, change, places_in_list

EVEN = np.ones((8, 8, 1))


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, cifar10: Path, image_network: Path
) -> list[object]:
    """The arguments: images to train and test on, images to attack, a small network."""
    folder, draw = tmp_path_factory.mktemp("federation"), np.random.default_rng(0)
    for split, count in (("train", 400), ("test", 50)):
        coarse = draw.integers(0, 256, (count, 4, 4, 3))  # smooth: noise would be refused
        images = [Image.fromarray(np.kron(x, EVEN).astype(np.uint8)) for x in coarse]
        labels = draw.integers(0, 10, count).tolist()
        Dataset.from_dict({"img": images, "label": labels}).to_parquet(folder / f"{split}.parquet")
    data = [
        "--train",
        folder / "train.parquet",
        "--test",
        folder / "test.parquet",
        "--images",
        cifar10,
    ]
    return [*data, "--evaluation_network", image_network]


def test_ablations(federation, quick, tmp_path, capsys):
    study = quick("refiner_ablations", *federation, output=tmp_path / "ablations")
    figures = study.figures
    assert list(figures) == ["none", "alpha=0.9", "epsilon=0.05", "beta=1000.0"]
    assert figures["none"]["attack"]["distance"] == 0
    assert figures["epsilon=0.05"]["attack"]["distance"] <= 0.05 * (1 + 1e-5)
    assert figures["alpha=0.9"]["attack"]["distance"] > 0.05
    for row in figures.values():
        assert all(0 <= accuracy <= 1 for accuracy in row["accuracy"].values())
        assert len(row["attack"]["psnr"]) == 2

    # Run again, nothing is computed: what is there is shown.
    for row in figures.values():
        row["accuracy"] = dict.fromkeys(row["accuracy"], 0.5)
    figures["alpha=0.9"]["accuracy"] = {"0": 0.25, "1": 0.375}
    study.overwrite(figures)
    capsys.readouterr()
    study.again()
    # Student's t for two seeds: 12.706 · |75 - 50|/2 and a half of it.
    assert "| alpha=0.9 | 62 ± 159 | 31.2 ± 79.4 | " in capsys.readouterr().out
    assert study.figures == figures


def test_frontier(federation, quick, tmp_path):
    output = tmp_path / "frontier"
    figures = quick("refiner_frontier", *federation, output=output).figures
    assert figures["none"]["attack"]["cosine"] == pytest.approx(1)
    for name, size, spread in (
        ("gaussian_noise relative_scale=0.01", 0.01, 0.1),
        ("optimal_noise relative_scale=0.03", 0.03, 0.3),  # few coordinates have most of it
    ):
        found = figures[name]["attack"]
        assert found["distance"] == pytest.approx(size * found["norm"], rel=spread), name
    for row, found in figures.items():
        soteria = row.startswith("soteria")
        assert set(found) == {"attack", "known", "iid"} | (set() if soteria else {"dirichlet"})
        assert row == "none" or found["known"]["psnr"] != found["attack"]["psnr"]
        assert list(found["iid"]) == (["0"] if soteria else ["0", "1"])
        assert soteria or list(found["dirichlet"]) == ["0", "1"]
    assert Path(f"{output}.png").read_bytes().startswith(b"\x89PNG")
    table = Path(f"{output}.md").read_text().splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:]] == list(figures)
    assert table[-1].endswith("|  |  |")  # Soteria, labels unevenly spread: not trained


def test_pruning_by_three_scores(federation, quick, tmp_path):
    output = tmp_path / "pruning"
    figures = quick("refiner_pruning", *federation[:4], output=output).figures
    # Without any entry nothing is learned: the accuracies are those of the initial weights,
    # whatever the score.
    test = Dataset.from_parquet(str(federation[3]))
    pixels = (
        torch.from_numpy(np.stack([np.asarray(image) for image in test["img"]]))
        .permute(0, 3, 1, 2)
        .float()
        / 255
    )
    for seed in ("0", "1"):
        set_seed(int(seed))
        with torch.no_grad():
            found = LeakageLeNetForImageClassification(LeakageLeNetConfig())(pixels).logits.argmax(
                1
            )
        right = float((found == torch.tensor(test["label"])).float().mean())
        assert [
            figures[name]["1.0"][seed] for name in ("weight", "gradient", "product")
        ] == pytest.approx([right] * 3)
    assert len(Path(f"{output}.md").read_text().splitlines()) == 2 + 1 + 3 * 2 + 2 * 2


def test_pruned_entries_by_hand():
    gradient = {"a": torch.tensor([4.0, -1.0]), "b": torch.tensor([[3.0], [2.0]])}
    weights = {"a": torch.tensor([0.1, -5.0]), "b": torch.tensor([[1.0], [-2.0]])}
    kept = {
        name: torch.cat([t.flatten() for t in pruned(gradient, weights, name, 0.5).values()])
        for name in ("weight", "gradient", "product")
    }
    kept = {name: entries.tolist() for name, entries in kept.items()}
    assert kept == {"weight": [0, -1, 0, 2], "gradient": [4, 0, 3, 0], "product": [0, -1, 0, 2]}


def test_noise_on_one_layer(federation, quick, tmp_path):
    output = tmp_path / "layers"
    figures = quick("refiner_layers", *federation[:4], output=output).figures
    layers = [f"convolutions.{number}" for number in range(4)] + ["classifier"]
    assert list(figures) == ["none", "variance 0.1", "3 times the gradient"]
    assert list(figures["variance 0.1"]) == list(figures["3 times the gradient"]) == layers
    rows = [line.split(" | ") for line in Path(f"{output}.md").read_text().splitlines()[2:]]
    assert len(rows) == 1 + 2 * 5
    # What the paper has stands beside its layers, of which the last is the linear one.
    papers = [row[-1].strip(" |") for row in rows[1:6]]
    assert papers == ["47.56", "49.55", "49.54", "", "51.38"]


def test_noise_is_of_the_size_it_says_and_on_one_layer():
    draw = torch.Generator().manual_seed(0)
    gradient = {
        "a.weight": torch.randn(100, 99, generator=draw),
        "a.bias": torch.full((100,), 2.0),
        "b.weight": torch.ones(3),
    }
    assert layers_of(gradient) == ["a", "b"]
    mine = torch.cat([gradient["a.weight"].flatten(), gradient["a.bias"]]).square().mean().sqrt()
    for noise, expected in (({"variance": 0.01}, 0.1), ({"relative": 3.0}, 3 * float(mine))):
        found = noisy(gradient, {"layer": "a"} | noise, draw)
        assert torch.equal(found["b.weight"], gradient["b.weight"])
        added = torch.cat([(found[name] - gradient[name]).flatten() for name in list(found)[:2]])
        # Of 10,000 draws the standard deviation is known to 0.7 %.
        assert float(added.std()) == pytest.approx(expected, rel=0.04)
        assert float(added[-100:].std()) == pytest.approx(expected, rel=0.4)
    assert noisy(gradient, {"layer": "none"}, draw) is gradient


def test_warm(federation, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(FewImages, "COUNT", 16)
    monkeypatch.setattr(Network, "WIDTHS", (8, 8, 8))
    files = [*federation[2:6], "--models", tmp_path / "models"]
    study = quick("refiner_warm", *files, output=tmp_path / "refiner_warm")
    for row, found in study.figures.items():
        assert len(found["PSNR, start"]["0"]["psnr"]) == 1
        cosines = found["cosine"]["0"]["cosine"]
        assert cosines == [1, 1] if row == "none" else 0 < max(cosines) < 1
    assert [row[0] for row in study.rows()] == list(study.figures)


def test_few_images_are_learned_as_they_are_and_judged_by_the_next_ones(cifar10, monkeypatch):
    monkeypatch.setattr(FewImages, "COUNT", 16)
    task = FewImages(str(cifar10), "", "")
    rows = single_images(str(cifar10), 24)
    learned = task.rows_to_learn()
    assert len(learned) == 16
    assert all(torch.equal(learned[i]["pixel_values"], rows[i]["pixel_values"][0]) for i in (0, 15))
    held_out, labels = task.held_out()
    assert torch.equal(held_out[0].float() / 255, rows[16]["pixel_values"][0])
    assert labels.tolist() == [int(row["labels"]) for row in rows[16:]]


def test_thresholds(cifar10, quick, tmp_path):
    study = quick("refiner_thresholds", "--images", cifar10, output=tmp_path / "thresholds")
    halved = study.figures["scaled by 0.5"][""]
    assert halved["mse"] == pytest.approx(halved[f"{OF_EQUAL}: mse"], rel=0.2)
    half, most = (study.figures[f"noise blended, {r}"][""] for r in (0.5, 0.9))
    assert all(a > b for a, b in zip(half["psnr"], most["psnr"], strict=True))
    sides = {tuple(row[:2]): row[2] for row in study.rows("_bounds")}
    assert len(sides) == 6


def test_changes_of_an_image():
    pixels = torch.rand(1, 3, 5, 5)
    shifted = change(pixels, "shifted", 1, torch.Generator())
    torch.testing.assert_close(shifted[..., :4, :4], pixels[..., 1:, 1:])
    torch.testing.assert_close(shifted[..., 4, :4], pixels[..., 4, 1:])
    likeness = centered(torch.rand(4, 3, 5, 5))
    assert places_in_list(-likeness[:1], likeness) == [4]
    assert places_in_list(likeness, likeness) == [1] * 4


def test_importance_of_channels():
    """The integral is over the way from no weights to all: its sum is the loss's change. Channels
    that a model does not read have no Shapley value.
    """
    set_seed(0)
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig(image_size=8)).eval()
    batch = {"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([1, 2])}
    attributed = integrated(model, batch, 400)
    whole = float(model(**batch).loss.detach())
    with torch.no_grad():
        channels = {"convolutions.3": 12}
        model.convolutions[3].weight[5], model.convolutions[3].bias[5] = 0, 0
        values = shapley_values(model, batch, channels, torch.Generator().manual_seed(0))
        model.classifier.weight.zero_()
        unread = shapley_values(model, batch, channels, torch.Generator().manual_seed(0))
    without = torch.log(torch.tensor(10.0))  # the loss where all logits are 0
    change_of_loss = float(sum(part.sum() for part in attributed.values()))
    assert change_of_loss == pytest.approx(whole - float(without), abs=0.02)
    (found,) = values.values()
    assert found[5] == 0
    assert (found[:5] > 0).all()
    assert not unread["convolutions.3"].any()
