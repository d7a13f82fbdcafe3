"""The frontier's part on images: in quick mode on generated images, and what it asks for next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from hf_gradguard import make_defense
from hf_gradguard.leakage import dp_sgd_epsilon
from hf_gradguard.testing.small import small_image_task
from recipes.studies import frontier_attacks, frontier_images
from recipes.studies import frontier_rows as settings
from recipes.studies.frontier_clients import ImageRows, ImageTask, Network, Stage, row_of
from recipes.studies.frontier_heads import ImageHeadTask
from recipes.studies.frontier_images import Elsewhere, ElsewhereTask, Images, ResNet
from recipes.studies.frontier_tables import RATES, fitting
from recipes.studies.lib.images import single_images
from recipes.studies.lib.results import Results
from recipes.studies.patch_features import PatchFeatures

EVEN = np.ones((8, 8, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, cifar10: Path) -> dict[str, Path]:
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    found = {"images": cifar10}
    for split, count in (("train", 40), ("test", 10)):
        coarse = draw.integers(0, 256, (count, 4, 4, 3))
        pixels = [Image.fromarray(np.kron(x, EVEN).astype(np.uint8)) for x in coarse]
        found[split] = folder / f"{split}.parquet"
        rows = {"img": pixels, "label": draw.integers(0, 10, count).tolist()}
        Dataset.from_dict(rows).to_parquet(found[split])
    return found


def test_quick(data, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageTask, "HELD_OUT", 20)
    arguments = [part for name, path in data.items() for part in (f"--{name}", path)]
    arguments += ["--models", tmp_path / "models"]
    study = quick("frontier_images", *arguments, output=tmp_path / "frontier_images")
    assert list(study.figures) == [
        "none",
        "gaussian_noise relative_scale=20",
        "pruning ratio=0.9 error_feedback=True",
    ]
    for found in study.figures.values():
        assert found["accuracy"]["0"]["of"] == 10
        read = found["inverting_gradients, 1, end"]["0"]
        assert len(read["psnr"]) == 1
        assert read["total_variation"] in (1e-3, 1e-2)
        assert len(found["candidates, 4, end"]["0"]["rank"]) == 4
    # Undefended, none of the sixteen others comes before any of the message's four.
    assert study.figures["none"]["candidates, 4, end"]["0"]["rank"] == [1] * 4
    assert (tmp_path / "frontier_images.png").exists()
    assert [row[0] for row in study.rows()] == [f"`{row}`" for row in study.figures]


def test_rows_are_flipped_and_those_held_out_are_not_learned(data, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageTask, "HELD_OUT", 15)
    task = ImageTask(str(data["train"]), str(data["test"]), str(tmp_path))
    learned = {row.numpy().tobytes() for row in task.rows_to_learn().pixels}
    held_out = {row.numpy().tobytes() for row in task.held_out()[0]}
    assert (len(learned), len(held_out)) == (25, 15)
    assert not learned & held_out
    pixels, labels = task.test_rows
    rows, true = ImageRows(pixels, labels), pixels[0].float() / 255
    shown = [rows[0]["pixel_values"] for _ in range(40)]
    flips = sum(bool((one == true.flip(-1)).all()) for one in shown)
    assert flips == 40 - sum(bool((one == true).all()) for one in shown)
    assert 0 < flips < 40  # but for one in 10^12


def test_a_gray_image_is_scored_by_hand(data):
    cell = {"attack": frontier_attacks.GRAY, "messages": 3}
    found = frontier_attacks.attack_images(cell, None, str(data["images"]))["psnr"]
    pixels = [row["pixel_values"].double() for row in single_images(str(data["images"]), 3)]
    by_hand = [-10 * float(((x - 0.5) ** 2).mean().log10()) for x in pixels]
    assert found == pytest.approx(by_hand, abs=0.011)


def test_who_knows_no_covariance_sees_the_same_message_without_it():
    model, batch, *_ = small_image_task()
    stage = Stage(model, make_defense("optimal_noise", relative_scale=1.0))
    asked = {"seed": 0, "attack": settings.INVERTING[0]}
    (aware,) = frontier_attacks.observe_images(asked, stage, [batch])
    unknowing = asked | {"attack": settings.UNAWARE[0]}
    (unaware,) = frontier_attacks.observe_images(unknowing, stage, [batch])
    assert unaware.noise_variance is unaware.mechanism is None
    assert all(torch.equal(unaware.gradient[name], g) for name, g in aware.gradient.items())
    assert any(variance.unique().numel() > 1 for variance in aware.noise_variance.values())

    cell = {"attack": settings.UNAWARE[0], "strength": {}}
    by = {name: cell | {"defense": name} for name in ("gaussian_noise", "optimal_noise")}
    assert list(fitting(by)) == ["optimal_noise"]


def test_rates_come_before_what_takes_the_best(tmp_path):
    class Args:
        quick, all, output = False, False, tmp_path / "frontier_images"

    def asked() -> dict[str, set]:
        found = {}
        for row, kind, _ in Images(Args).cells():
            found.setdefault(row, set()).add(kind)
        return found

    def fill(row: str, scores: tuple[float, ...]) -> None:
        cells = [cell for place, cell in Images(Args).cells().items() if place[:2] == (row, RATES)]
        for score, cell in zip(scores, cells, strict=True):
            Results(Args.output).add(cell, {"held_out": score})

    first, second = (settings_row(number) for number in (0, 1))
    rows = [row for row in asked() if row != frontier_attacks.GRAY]
    assert len(rows) == len(settings.IMAGE_ROWS)
    assert all(asked()[row] == {RATES} for row in rows)
    fill(first, (0.5, 0.6, 0.55))
    found = asked()
    assert {RATES, "accuracy", "inverting_gradients, 1, end", "candidates, 16, end"} <= found[first]
    assert found[second] == {RATES}
    trained = Images(Args).cells()[first, "accuracy", "0"]
    assert trained["learning_rate"] == 0.004
    assert trained["seed"] != settings.RATES_SEED
    fill(second, (0.7, 0.6, 0.55))  # the lowest is best: one below it is asked for
    assert asked()[second] == {RATES}


def settings_row(number: int) -> str:
    return row_of(*settings.IMAGE_ROWS[number])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("images") / "tiny.npz"
    sizes = {"train": 40, "val": 7}
    pixels = {f"x_{of}": draw.integers(0, 256, (n, 32, 32, 3), "uint8") for of, n in sizes.items()}
    labels = {"y_train": np.arange(40) % 12, "y_val": np.arange(7)}
    np.savez(path, **pixels, **labels)
    return path


def test_quick_elsewhere(data, mnist, tiny, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageTask, "HELD_OUT", 20)
    monkeypatch.setattr(Elsewhere, "QUICK_ROWS", settings.QUICK_ROWS[:2])
    monkeypatch.setattr(Network, "WIDTHS", (8, 8, 8))
    monkeypatch.setattr(ResNet, "WIDTHS", (8, 8, 8, 8))
    monkeypatch.setitem(frontier_images.VIT, "hidden_size", 16)
    arguments = [part for name, path in data.items() for part in (f"--{name}", path)]
    arguments += ["--mnist", mnist, "--tiny_imagenet", tiny, "--models", tmp_path / "models"]
    study = quick("frontier_elsewhere", *arguments, output=tmp_path / "frontier_elsewhere")
    tested = [10, 10, 10, 7]
    assert dict(zip(settings.ELSEWHERE, tested, strict=True)) == {
        name: found["none"]["accuracy"]["0"]["of"] for name, found in study.figures.items()
    }
    for found in study.figures.values():
        assert found["none"]["candidates, 4, end"]["0"]["rank"] == [1] * 4
    for ending in ("_resnet", "_vit", "_digits", "_200_classes"):
        rows = ["`none`", "`gaussian_noise relative_scale=20`"]
        assert [row[0] for row in study.rows(ending)] == rows
    assert (tmp_path / "frontier_elsewhere.png").exists()


@pytest.mark.parametrize("place", settings.ELSEWHERE)
def test_networks_fit_their_images_and_see_each_image_alone(place, data, mnist, tiny, tmp_path):
    names = {"cifar10": "train", "mnist": mnist, "tiny_imagenet": tiny}
    files = {name: (str(data.get(of, of)),) * 2 for name, of in names.items()}
    here = ElsewhereTask(place, files, str(tmp_path))
    pixels, labels = here.train_rows
    model, x = here.start(0).eval(), pixels[:3].float() / 255
    with torch.no_grad():
        logits, alone = (model(pixel_values=some).logits for some in (x, x[:1]))
    assert logits.shape == (3, int(labels.max()) + 1)
    torch.testing.assert_close(logits[:1], alone)
    again = here.start(0).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_digits_are_not_flipped(mnist, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageTask, "HELD_OUT", 20)
    digits = ElsewhereTask("digits", {"mnist": (str(mnist),) * 2}, str(tmp_path))
    rows = digits.rows_to_learn()
    true = digits.train_rows[0][20].float() / 255
    assert all(torch.equal(rows[0]["pixel_values"], true) for _ in range(40))


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("public") / "public.npz", np.random.default_rng(1)
    np.savez(
        path,
        x_train=draw.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8),
        y_train=np.zeros(30, dtype=np.uint8),
    )
    return path


@pytest.fixture
def small_heads(monkeypatch):
    monkeypatch.setattr(ImageTask, "HELD_OUT", 20)
    for name, value in (("FILTERS", 4), ("PUBLIC", 20)):
        monkeypatch.setattr(ImageHeadTask, name, value)


def test_quick_heads(data, public, quick, small_heads, tmp_path):
    arguments = [part for name, path in data.items() for part in (f"--{name}", path)]
    arguments += ["--public", public, "--models", tmp_path / "models"]
    study = quick("frontier_image_heads", *arguments, output=tmp_path / "image_heads")
    plain, alone, private, gray = study.figures.values()
    attacked = {
        f"{name}, {size}, {stage}"
        for (name, size), (_, _, stages) in settings.QUICK_IMAGE_HEAD_ATTACKS.items()
        for stage in stages
    }
    assert plain.keys() == private.keys() == {"learning rate", "accuracy", *attacked}
    assert list(gray) == ["inverting_gradients, 1, end"]
    assert alone.keys() == {place for place in attacked if place.startswith("candidates, ")}
    assert plain["candidates, 4, end"]["0"]["rank"] == [1] * 4
    (spent,) = (run["epsilon"] for run in private["accuracy"].values())
    assert spent == pytest.approx(dp_sgd_epsilon(2.0, 4 / 20, 2, 1e-5))
    assert [row[0] for row in study.rows()] == list(study.figures)
    # What was kept is the head alone.
    (kept,) = (tmp_path / "models").glob("*/dp_sgd*/end.safetensors")
    assert set(load_file(kept)) == {"head.weight", "head.bias"}


def test_features_made_before_give_the_same_logits(data, public, small_heads, tmp_path):
    task = ImageHeadTask(str(data["train"]), str(data["test"]), str(tmp_path), str(public))
    model, pixels = task.start(0), ImageTask(str(data["train"]), "", "").train_rows[0]
    kept = task.held_out()["embeddings"]
    with torch.no_grad():
        here = model(pixel_values=pixels[:20].float() / 255).logits
        torch.testing.assert_close(model(embeddings=kept).logits, here, rtol=1e-4, atol=1e-4)
    learned = task.rows_to_learn()
    assert len(learned) == 20
    assert torch.equal(learned[3]["embeddings"], task.train_rows["embeddings"][23])


def test_patch_features_are_those_of_each_patch():
    """Patch by patch: normalized, whitened, times whitened patches of unit length."""
    draw = torch.Generator().manual_seed(0)
    public = torch.rand(30, 3, 12, 12, generator=draw, dtype=torch.float64)
    features = PatchFeatures(public, 4, torch.Generator().manual_seed(1))
    # The same patches, drawn anew.
    again = torch.Generator().manual_seed(1)
    patches = torch.nn.functional.unfold(public, 6).transpose(1, 2)
    places = torch.rand(patches.shape[:2], generator=again).topk(20).indices

    def normalized(some: Tensor) -> Tensor:
        centered = some - some.mean(-1, keepdim=True)
        return centered / (centered.square().sum(-1, keepdim=True) / 107 + 0.015).sqrt()

    drawn = normalized(torch.stack([patches[i, j] for i in range(30) for j in places[i]]))
    covariance, center = torch.cov(drawn.T), drawn.mean(0)
    values, vectors = torch.linalg.eigh(covariance)
    whitening = vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
    filters = (drawn[torch.randperm(600, generator=again)[:4]] - center) @ whitening
    filters = filters / filters.norm(dim=1, keepdim=True)
    images = torch.rand(2, 3, 12, 12, generator=draw, dtype=torch.float64)
    every = torch.nn.functional.unfold(images, 6).transpose(1, 2)
    responses = (normalized(every) - center) @ whitening @ filters.T  # (2, 49, 4)
    signs = torch.cat([responses, -responses], 2).view(2, 7, 7, 8)
    strong = (signs - 0.5).clamp(min=0)
    # Quarters of seven places overlap in the middle one.
    parts = (slice(0, 4), slice(3, 7))
    quarters = [strong[:, rows, columns].mean((1, 2)) for rows in parts for columns in parts]
    expected = torch.stack(quarters, 2).flatten(1)
    found = features.double()(images) * features.deviation + features.mean
    torch.testing.assert_close(found, expected)
    on_public = features(public)
    assert on_public.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(on_public.std(0), torch.ones(32).double(), rtol=1e-5, atol=1e-5)
