"""The study of who was trained on: its statistics by hand, and all of it in quick mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from recipes.studies.frontier_clients import ImageTask
from recipes.studies.members import (
    ATTACKERS,
    BEST,
    INFERRED,
    QUICK_ROWS,
    TRAINED,
    Owner,
    by_difficulty,
    by_loss,
    log_odds,
    membership_scores,
    write_beside,
)


class Corner(nn.Module):
    """Logits (0, 0, ln of the left upper pixel)."""

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        last = (255 * pixel_values[:, 0, 0, 0]).log()
        return ImageClassifierOutput(logits=torch.stack([0 * last, 0 * last, last], 1))


def test_log_odds_and_loss_are_those_of_each_view():
    pixels = torch.tensor([[2, 6], [6, 2]], dtype=torch.uint8).reshape(2, 1, 1, 2)
    odds = log_odds(Corner(), pixels, torch.tensor([2, 0]))
    # Probabilities are (1, 1, x)/(2 + x), x = 2 and 6: odds of the last x/2, of the first 1/(1 + x)
    by_hand = np.log([[2 / 2, 1 / 7], [6 / 2, 1 / 3]])
    np.testing.assert_allclose(odds, by_hand, atol=1e-6)
    losses = -np.log([(2 / 4) * (6 / 8), (1 / 8) * (1 / 4)]) / 2
    np.testing.assert_allclose(-by_loss(odds), losses, atol=1e-6)


def test_what_an_image_is_worth_to_others_is_taken_off():
    difficulty = np.array([3.0, -1.0, 7.0, 1.0])
    owned = np.array([[True, True, False, False], [False, True, True, False]])
    means = difficulty + 5 * owned + [[0.0], [2.0]]  # one network is surer of everything
    others = np.stack([means - 0.25, means + 0.25], axis=1)
    higher = np.array([0.0, 1.0, 2.0, -1.0])
    found = by_difficulty(np.stack([difficulty + higher] * 2), others, owned)
    np.testing.assert_allclose(found - found[0], higher, atol=1e-12)


def test_members_are_told_despite_what_is_easy():
    """Half of 400 images are owned, and gain 1 in log odds, where images differ by 10."""
    draw = np.random.default_rng(0)
    difficulty = 10 * draw.standard_normal(400)
    owned = np.stack([draw.permutation(400) < 200 for _ in range(4)])
    odds = difficulty + owned + 0.01 * draw.standard_normal((4, 400))
    views = np.stack([odds, odds], axis=1)
    calibrated = membership_scores(by_difficulty(views[0], views[1:], owned[1:]), owned[0])
    assert membership_scores(by_loss(views[0]), owned[0])["area"] < 0.6
    assert calibrated["area"] > 0.9
    assert (
        membership_scores(by_difficulty(views[0], views[1:], owned[1:]), owned[1])["area"] < 0.6
    )  # others'


def test_area_and_share_by_hand():
    """Members at 4, 2.5 and 0, others at 1, 2 and 3: 3 + 2 + 0 of nine pairs in order, and one
    member above all others.
    """
    scores, owned = np.array([4, 2.5, 0, 1, 2, 3]), np.arange(6) < 3
    assert membership_scores(scores, owned) == {
        "area": round(5 / 9, 4),
        "tpr_1%": pytest.approx(1 / 3),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, draw = tmp_path_factory.mktemp("members"), np.random.default_rng(0)
    found = {}
    for split, count in (("train", 40), ("test", 10)):
        pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        rows = {"img": list(map(Image.fromarray, pixels)), "label": [i % 10 for i in range(count)]}
        found[split] = folder / f"{split}.parquet"
        Dataset.from_dict(rows).to_parquet(found[split])
    return found


@pytest.fixture(autouse=True)
def fewer_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageTask, "HELD_OUT", 20)


def test_a_client_owns_half_of_a_pool_that_nobody_else_has(data, tmp_path):
    images = ImageTask(str(data["train"]), str(data["test"]), str(tmp_path))
    first, second = (Owner(images, str(tmp_path), 16, seed) for seed in (0, 1))
    pool = {one.numpy().tobytes() for one in first.pool[0]}
    assert len(pool) == 16
    for one in (first, second):
        rows = one.rows_to_learn()
        own = {pixels.numpy().tobytes() for pixels in rows.pixels}
        assert len(own) == len(rows) == 8
        assert own == {one.pool[0][i].numpy().tobytes() for i in one.owned.nonzero()[:, 0]}
        assert own < pool
    assert not pool & {one.numpy().tobytes() for one in first.held_out()[0]}
    assert 0 < int((first.owned & second.owned).sum()) < 8  # neither the same half, nor the other


def test_quick(data, quick, tmp_path):
    arguments = [part for name, path in data.items() for part in (f"--{name}", path)]
    arguments += ["--models", tmp_path / "models"]
    study = quick("members", *arguments, output=tmp_path / "members")
    assert list(study.figures) == list(QUICK_ROWS)
    for found in study.figures.values():
        for one in found[INFERRED].values():
            assert list(one) == list(ATTACKERS)
            assert all(0 <= figures["area"] <= 1 for figures in one.values())
        assert all(0 <= one["trained_on"] <= 1 for one in found[TRAINED].values())
    undefended = study.figures["none"][INFERRED]["0"]  # for it both are the same networks
    assert undefended[ATTACKERS[1]] == undefended[ATTACKERS[2]]
    assert undefended == again(study.cells["none", INFERRED, "0"], data, tmp_path)
    assert [row[0] for row in study.rows()] == [f"`{row}`" for row in QUICK_ROWS]
    assert [row[0] for row in study.rows("_beside")] == ["`gaussian_noise relative_scale=20`"]
    assert (tmp_path / "members.png").exists()


def again(cell: dict, data: dict[str, Path], folder: Path) -> dict:
    """A cell of undefended networks, from what was kept."""
    images = ImageTask(str(data["train"]), str(data["test"]), str(folder))
    owners = [Owner(images, str(folder / "models"), cell["pool"], seed) for seed in range(3)]
    odds = [
        log_odds(owner.stage(cell | {"seed": seed}, "end").model, *owner.pool)
        for seed, owner in enumerate(owners)
    ]
    owned = np.stack([owner.owned.numpy() for owner in owners])
    beside = membership_scores(by_difficulty(odds[0], np.stack(odds[1:]), owned[1:]), owned[0])
    return dict(
        zip(ATTACKERS, (membership_scores(by_loss(odds[0]), owned[0]), beside, beside), strict=True)
    )


def figures_of(accuracies: list[float], areas: list[float]) -> dict:
    """A row's, of as many seeds; the best attacker tells a tenth of its area."""
    told_of = [{BEST: {"area": area, "tpr_1%": area / 10}} for area in areas]
    learned = [{"accuracy": accuracy} for accuracy in accuracies]
    return {TRAINED: dict(enumerate(learned)), INFERRED: dict(enumerate(told_of))}


def test_rows_stand_beside_what_learned_as_much_seed_by_seed(tmp_path):
    figures = {
        "none": figures_of([0.5, 0.6], [0.9, 0.8]),
        "none, 40 messages": figures_of([0.3, 0.4], [0.5, 0.6]),
        "gaussian_noise relative_scale=20": figures_of([0.4, 0.5], [0.8, 0.9]),
        "gradient_sketch": figures_of([0.45, 0.45], [0.9, 0.9]),
        "pruning ratio=0.99": figures_of([0.1, 0.2], [0.5, 0.5]),
    }
    write_beside(figures, tmp_path / "members")
    lines = (tmp_path / "members_beside.md").read_text().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {row: cells for row, *cells in rows}
    # Undefended, as much is learned halfway between the two trainings, where the area is 0.7: 0.1
    # and 0.2 less than here, a tenth of that of what is told. Student's t of one degree is 12.7.
    assert found["`gaussian_noise relative_scale=20`"] == ["0.150 ± 0.635", "0.015 ± 0.064", "", ""]
    # Undefended 0.8 and 0.65; noise halfway from 0.8 to 0.9, and where all of it learned more, 0.9
    assert found["`gradient_sketch`"][0].startswith(f"{(0.1 + 0.25) / 2:.3f} ± ")
    assert found["`gradient_sketch`"][2].startswith(f"{(0.05 + 0.0) / 2:.3f} ± ")
    assert found["`pruning ratio=0.99`"] == [""] * 4  # learned less than all there is
