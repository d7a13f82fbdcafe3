"""`recipes/image_head.py` as a user runs it, in this process."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from helpers import write_images
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from hf_gradguard.data.images import read_image, to_pil
from hf_gradguard.leakage import dp_sgd_epsilon, membership_power
from recipes import compare
from recipes.head import SHRINKAGE, Head, whitening_of
from recipes.image_head import Encoder, public_images

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "image_head.py"
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TRANSFORMER |= {"intermediate_size": 16}
VIT = ViTConfig(image_size=12, patch_size=4, **TRANSFORMER)
RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
CPU = torch.device("cpu")


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.manual_seed(0)
    models = {
        "vit": ViTModel(VIT),
        "classifier": ViTForImageClassification(VIT),
        "resnet": ResNetModel(RESNET),
    }
    folder = tmp_path_factory.mktemp("encoders")
    return {name: saved(model, folder / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "colors" / "train", 20)
    write_images(folder / "colors" / "test", 7)
    write_images(folder / "public", 12)
    return folder


@pytest.fixture
def recipe(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(encoder: str, *flags: str) -> dict:
        argv = [str(SCRIPT), "--model_name_or_path", encoder, "--dataset", str(images / "colors")]
        argv += ["--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "5"]
        argv += ["--per_device_train_batch_size", "16", "--report_to", "none", *flags]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(images / "cache"))
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return json.loads((tmp_path / "metrics.json").read_text())

    return run


def pictures(folder: Path) -> tuple[Sequence[Image.Image], torch.Tensor]:
    rows = load_dataset(str(folder), split="train")
    return list(rows["image"]), torch.tensor(rows["label"])


def judged(folder: Path, whitening: nn.Module, encoder: str, test: Path) -> tuple[Head, float]:
    """What was saved, and its accuracy."""
    model, (inputs, labels) = Head(16, 3, whitening), pictures(test)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        found = model(Encoder(encoder, CPU)(inputs))["logits"].argmax(1)
    return model, float((found == labels).double().mean())


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_what_is_saved_gives_the_accuracy_and_what_is_said_is_proved(
    recipe, encoders: dict[str, str], kind: str, images: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    public = images / "public"
    found = recipe(encoders[kind], "--public_images", str(public))
    model, accuracy = judged(
        tmp_path, nn.Linear(16, 16), encoders[kind], images / "colors" / "test"
    )
    assert (found["accuracy"], found["eval_images"]) == (pytest.approx(accuracy, abs=1e-6), 21)
    assert found["classes"] == ["blue", "green", "red"]

    embeddings = Encoder(encoders[kind], CPU)(pictures(public)[0])
    expected = whitening_of(embeddings, SHRINKAGE)
    torch.testing.assert_close(model.whitening.weight, expected.weight, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        mean = model.whitening(embeddings).mean(0)
    torch.testing.assert_close(mean, torch.zeros(16), atol=1e-2, rtol=0)

    epsilon = dp_sgd_epsilon(2.0, 16 / 60, 5, 1e-5)
    assert (found["steps"], found["epsilon"]) == (5, pytest.approx(epsilon, rel=1e-6))
    assert found["members_found_in_a_message_at_most"] == membership_power(2.0)
    assert "of a message at most 3.4% of the members" in capsys.readouterr().out
    card = (tmp_path / "README.md").read_text()
    assert "noise multiplier 2" in card
    assert "image-classification" in card
    compare.main([str(tmp_path / "metrics.json")])
    assert "| dp_sgd " in capsys.readouterr().out


def test_an_encoder_that_masks_at_random_is_refused(recipe, tmp_path: Path) -> None:
    config = ViTMAEConfig(image_size=12, patch_size=4, **TRANSFORMER)
    with pytest.raises(SystemExit, match="other embeddings each time"):
        recipe(saved(ViTMAEModel(config), tmp_path / "encoder"))


def test_a_head_learns_without_public_images_or_proof(
    recipe, encoders: dict[str, str], images: Path, tmp_path: Path
) -> None:
    flags = ["--defense", "none", "--learning_rate", "0.3", "--max_steps", "30"]
    found = recipe(encoders["classifier"], *flags)
    assert found["accuracy"] > 0.6  # chance is a third
    assert "epsilon" not in found
    assert set(load_file(tmp_path / "model.safetensors")) == {"head.weight", "head.bias"}
    test = images / "colors" / "test"
    _, accuracy = judged(tmp_path, nn.Identity(), encoders["classifier"], test)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_an_embedding_is_what_is_pooled_or_a_mean(
    encoders: dict[str, str], images: Path, tmp_path: Path
) -> None:
    inputs = pictures(images / "public")[0][:3]
    pixels = ViTImageProcessor(size={"height": 12, "width": 12})(inputs, return_tensors="pt")
    clip = CLIPModel(
        CLIPConfig(
            text_config=TRANSFORMER | {"vocab_size": 9},
            vision_config=TRANSFORMER | {"image_size": 12, "patch_size": 4},
        )
    )
    names = encoders | {"clip": saved(clip, tmp_path / "clip")}
    with torch.no_grad():
        vit, resnet = (
            kind.from_pretrained(encoders[name]).eval()(**pixels)
            for kind, name in ((ViTModel, "vit"), (ResNetModel, "resnet"))
        )
        # The classifier was saved without what a ViT pools by.
        bare = ViTModel.from_pretrained(encoders["classifier"], add_pooling_layer=False).eval()
        expected = {
            "vit": vit.pooler_output,
            "classifier": bare(**pixels).last_hidden_state.mean(1),
            "resnet": resnet.last_hidden_state.mean((2, 3)),
            "clip": clip.vision_model.eval()(**pixels).pooler_output,
        }
    for name, rows in expected.items():
        torch.testing.assert_close(Encoder(names[name], CPU)(inputs), rows)


def test_what_cannot_be_meant_is_refused_before_images_are_embedded(
    recipe, encoders: dict[str, str], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetDict, "map", None)
    vit, missing = encoders["vit"], str(tmp_path / "no")
    with pytest.raises(SystemExit, match=r"There is no file or folder .*no\."):
        recipe(vit, "--dataset", missing)
    with pytest.raises(SystemExit, match=r"--public_images .*no is no folder and no file"):
        recipe(vit, "--public_images", missing)
    train = str(images / "colors" / "train")
    with pytest.raises(SystemExit, match=r"60 of the 60 images .* it is not public"):
        recipe(vit, "--public_images", train)
    half = {name: part for name, part in ViTModel(VIT).state_dict().items() if "layernorm" in name}
    folder = tmp_path / "half"
    saved(ViTModel(VIT), folder)
    ViTModel(VIT).save_pretrained(folder, state_dict=half)
    with pytest.raises(SystemExit, match=r"was saved without embeddings\.cls_token.* random"):
        recipe(str(folder))


def test_public_images_may_be_a_table_or_an_array(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 8, 3), dtype=np.uint8)
    wanted = [Image.fromarray(one) for one in pixels]
    table, array, gray = tmp_path / "t.parquet", tmp_path / "a.npz", tmp_path / "gray.npz"
    rows = Dataset.from_dict({"img": wanted}).cast_column("img", datasets.Image())
    rows.to_parquet(str(table))
    np.savez(array, x_train=pixels)
    np.savez(gray, x=pixels[..., :1])
    for path, expected in ((table, pixels), (array, pixels), (gray, pixels[..., 0])):
        found = public_images(str(path), [])
        mode = "RGB" if expected.ndim == 4 else "L"
        images = [to_pil(read_image(found[place], "here"), mode) for place in range(5)]
        np.testing.assert_array_equal([np.asarray(image) for image in images], expected)
    with pytest.raises(SystemExit, match=r"3 of the 5 images of --public_images .* not public"):
        public_images(str(array), wanted[:3])
    assert len(public_images(str(array), wanted[:2])) == 5  # leaving two out would name them


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((3, 9, 8, 3), np.uint8)},
        {"x": np.zeros((3, 9, 8))},
        {"x": np.zeros((3, 3, 9, 8), np.uint8)},
        {"pixels": np.zeros((3, 9, 8), np.uint8)},
    ],
)
def test_public_images_that_cannot_whiten_are_refused(tmp_path: Path, arrays: dict) -> None:
    np.savez(tmp_path / "few.npz", **arrays)
    with pytest.raises(SystemExit, match=r"gives [01] different.*\.parquet.*\.npz"):
        public_images(str(tmp_path / "few.npz"), [])
