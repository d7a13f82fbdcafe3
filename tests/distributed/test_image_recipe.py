"""`recipes/image_classification.py` as a user runs it on two ranks, and in this process, on a
folder of images.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from helpers import write_images
from launcher import run
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_gradguard.models  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.distributed

VIT = {
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
CONVNEXT = {"patch_size": 2, "num_stages": 2, "hidden_sizes": [4, 8], "depths": [1, 1]}


SCRIPT = "recipes/image_classification.py"
BATCHES = ["--use_cpu", "--per_device_train_batch_size", "6"]


def metrics_of(out: Path, printed: str, ranks: int) -> dict[str, object]:
    assert f"ranks: {ranks}\n" in printed
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["ranks"] == ranks
    return metrics


@pytest.fixture
def on_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., dict[str, object]]:
    """The recipe in this process, which has imported all that it needs."""

    def recipe(data: Path, out: Path, *flags: str) -> dict[str, object]:
        script = [SCRIPT, *BATCHES, "--num_ranks", "1"]
        monkeypatch.setattr(
            sys, "argv", [*script, "--dataset", str(data), "--output_dir", str(out), *flags]
        )
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")
        said = capsys.readouterr()
        if ended.value.code:
            raise ValueError(said.err)
        return metrics_of(out, said.out, ranks=1)

    return recipe


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "colors"
    write_images(folder / "train", 20)
    write_images(folder / "test", 7)
    return folder


@pytest.mark.parametrize(
    ("kind", "config", "defense", "settings"),
    [
        ("vit", VIT, "optimal_noise", {"relative_scale": 0.3, "strength": "own", "num_probes": 2}),
        ("resnet", RESNET, "gaussian_noise", {"relative_scale": 0.3, "strength": "own"}),
    ],
)
def test_two_ranks_learn_and_the_model_loads(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    kind: str, config: dict, defense: str, settings: dict,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_DATASETS_CACHE", str(images.parent / "cache"))
    flags = [
        *BATCHES, "--num_ranks", "2", "--dataset", str(images), "--output_dir", str(tmp_path),
        "--from_scratch", kind, "--model_config", json.dumps(config), "--learning_rate", "1e-2",
        "--defense", defense, "--defense_kwargs", json.dumps(settings), "--num_train_epochs", "6",
        "--logging_steps", "5", "--lr_scheduler_type", "constant",
    ]  # fmt: skip
    # Under accelerate's own command, which imports everything three times, runs `test_recipe.py`.
    done = run("recipe_worker.py", tmp_path, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    metrics = metrics_of(tmp_path, done.stdout, ranks=2)
    assert (metrics["defense"], metrics["steps"], metrics["eval_images"]) == (defense, 30, 21)
    assert metrics["accuracy"] > 0.6  # chance is a third
    assert metrics["defense/relative_error"] == pytest.approx(0.3, rel=0.1)
    model = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    with Image.open(images / "test" / "red" / "0.png") as image:
        pixels = processor(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 12, 12)
    assert -1 <= pixels.min() < pixels.max() <= 1
    assert torch.isfinite(model(pixel_values=pixels).logits).all()
    assert "image-classification" in (tmp_path / "README.md").read_text()


def test_a_trained_model_is_taken_up_again_with_another_head(
    images: Path, tmp_path: Path, on_one_rank: Callable[..., dict[str, object]]
) -> None:
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "gray"
    scratch = ["--from_scratch", "convnext", "--model_config", json.dumps(CONVNEXT)]
    on_one_rank(images, first, *scratch, "--defense", "none", "--max_steps", "1")
    write_images(other, 10, mode="L")  # no test split: a tenth is held out
    (other / "red").rename(other / "crimson")
    (other / "violet").mkdir()
    for number in range(10):
        Image.new("L", (9, 9), 9 * number).save(other / "violet" / f"{number}.png")
    flags = ["--model_name_or_path", str(first), "--defense", "soteria", "--max_steps", "1"]
    metrics = on_one_rank(other, second, *flags)
    assert (metrics["steps"], metrics["eval_images"]) == (1, 4)
    model = AutoModelForImageClassification.from_pretrained(second)
    assert list(model.config.label2id) == ["blue", "crimson", "green", "violet"]
    assert (model.config.num_channels, model.config.model_type) == (3, "convnext")


def listed(folder: Path, **splits: tuple[object, ...]) -> Path:
    """An image for every label, and the labels in each split's metadata.csv."""
    for split, labels in splits.items():
        (folder / split).mkdir(parents=True)
        rows = ["file_name,kind"]
        for number, label in enumerate(labels):
            Image.new("RGB", (12, 10), (9 * number,) * 3).save(folder / split / f"{number}.png")
            rows.append(f"{number}.png,{label}")
        (folder / split / "metadata.csv").write_text("\n".join(rows))
    return folder


SMALL = ["--from_scratch", "convnext", "--model_config", json.dumps(CONVNEXT), "--max_steps", "1"]
SMALL += ["--defense", "none", "--label_column", "kind"]


@pytest.mark.parametrize("labels", [(10, 9), ("b", "a")])
def test_labels_of_a_table_become_classes(
    tmp_path: Path, on_one_rank: Callable[..., dict[str, object]], labels: tuple[object, object]
) -> None:
    high, low = labels
    data = listed(tmp_path / "data", train=(high, low, low), test=(high, high))
    assert on_one_rank(data, tmp_path / "out", *SMALL)["eval_images"] == 2
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: str(low), 1: str(high)}


def test_labels_without_a_class_are_refused(
    tmp_path: Path, on_one_rank: Callable[..., dict[str, object]]
) -> None:
    out = tmp_path / "out"
    other = listed(tmp_path / "other", train=("a", "b"), validation=("a", "c"), test=("d",))
    with pytest.raises(ValueError, match=r"row 2: column 'kind' holds no label of the model"):
        on_one_rank(other, out, *SMALL)
    one = listed(tmp_path / "one", train=("a", "a"), test=("a",))
    with pytest.raises(ValueError, match="has one class alone"):
        on_one_rank(one, out, *SMALL)
    folder = tmp_path / "folder" / "red"
    folder.mkdir(parents=True)
    for index in range(10):
        Image.new("RGB", (12, 10)).save(folder / f"{index}.png")
    with pytest.raises(ValueError, match="has one class alone"):
        on_one_rank(folder.parent, out, *SMALL[:-2])
    assert not out.exists()


def test_a_papers_network_on_gray_images(
    tmp_path: Path, on_one_rank: Callable[..., dict[str, object]]
) -> None:
    model_type = "gradguard_leaky_convnet"
    images = write_images(tmp_path / "gray", 8, mode="L")
    out = tmp_path / "out"
    flags = ["--from_scratch", model_type, "--defense", "optimal_pruning", "--max_steps", "2"]
    on_one_rank(images, out, *flags)
    model = AutoModelForImageClassification.from_pretrained(out)
    config = model.config
    assert (config.model_type, config.num_channels, config.image_size, config.num_labels) == (
        model_type,
        1,
        12,
        3,
    )
