"""The study of logistic regression's Fisher information, in quick mode on generated images of
zeros and ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_gradguard.leakage import mse_bound_from_dfil
from recipes.studies.fil_logistic import QUICK_LOGISTIC


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ones are bright on the right, zeros on the left, and twos, which are not to be used,
    nowhere.
    """
    draw, path, arrays = (
        np.random.default_rng(0),
        tmp_path_factory.mktemp("data") / "digits.npz",
        {},
    )
    for split, n in (("train", 60), ("test", 20)):
        labels = arrays[f"y_{split}"] = draw.integers(0, 3, n, dtype=np.uint8)
        levels = (
            np.where(np.arange(28) < 14, labels[:, None] == 0, labels[:, None] == 1)[:, None] * 150
            + 50
        )
        arrays[f"x_{split}"] = (levels + draw.integers(-50, 50, (n, 28, 28))).astype(np.uint8)
    np.savez(path, **arrays)
    return path


def test_logistic_regression(digits: Path, quick, tmp_path: Path) -> None:
    output, pictures = tmp_path / "fil", ("--pictures", tmp_path / "figure4.png")
    study = quick("fil_logistic_mnist", "--data", digits, *pictures, output=output)
    figures = study.figures
    found = figures["regression"]
    with np.load(digits) as file:
        images, labels = file["x_train"], file["y_train"]
    x = torch.tensor(images[labels < 2] / 255.0).flatten(1)
    y = torch.tensor(labels[labels < 2].astype(float))
    assert found["dfil_bounds"]["count"] == sum(found["histogram"]["counts"]) == len(x)
    assert found["accuracy"] == 1  # noise of 1e-2 does not turn halves about
    assert found["norms"] == pytest.approx([1, float(x.norm(dim=1).max())], rel=1e-4)

    # The least bound once more: a fit by another optimizer, and the information of one release by
    # autograd.
    weights = torch.zeros(784, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss(w: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        fit = torch.nn.functional.binary_cross_entropy_with_logits(images @ w, y)
        return fit + QUICK_LOGISTIC["regularization"] / 2 * w.square().sum()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(weights, x)
        value.backward()
        return value

    optimizer.step(closure)
    w = weights.detach()
    inverse = torch.linalg.inv(torch.func.hessian(loss)(w, x))
    bounds = []
    for at in range(len(x)):

        def gradient(image: torch.Tensor, at: int = at) -> torch.Tensor:
            p = torch.sigmoid(image @ w)
            return (p - y[at]) * image / len(x)

        moved = inverse @ torch.func.jacrev(gradient)(x[at])
        bounds.append(
            float(
                mse_bound_from_dfil(
                    float(moved.square().sum()) / (784 * QUICK_LOGISTIC["std"] ** 2)
                )
            )
        )
    least, median = found["dfil_bounds"]["least, median"]
    assert [least, median] == pytest.approx(
        [min(bounds), sorted(bounds)[(len(bounds) - 1) // 2]], rel=1e-3
    )
    # The attacked model has σ a thousandth as large: bounds a millionth. The first and the last of
    # the attacked are the ends.
    ratio = (QUICK_LOGISTIC["attacked_std"] / QUICK_LOGISTIC["std"]) ** 2
    assert found["attacked"]["bound"][0] == pytest.approx(ratio * min(bounds), rel=1e-3)
    assert found["attacked"]["bound"][15] == pytest.approx(ratio * max(bounds), rel=1e-3)
    assert found["attacked"]["mse"][0] < 1e-3  # an informed adversary reads such a record off
    for picture in (Path(f"{output}.png"), tmp_path / "figure4.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")

    # Figures that are there stay: without its data, another run makes only the table anew.
    found["attacked"]["mse"][0], found["epsilons"][0] = 0.0, 1.25
    study.overwrite(figures)
    study.again(data=None, pictures=None)
    table = Path(f"{output}.md").read_text()
    assert "| ε₂, norms at most 1 | 1.250 | 2.49 |" in table
    below = sum(bound < 1 for bound in found["attacked"]["bound"])
    assert f"MSE above it | {below - 1} of {below} | all |" in table
