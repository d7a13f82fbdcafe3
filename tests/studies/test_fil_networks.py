"""The study of networks trained by private SGD: its information against dense Jacobians in float64,
its accounts against closed forms, and all of it in quick mode.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import torch_rng
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.leakage import (
    dfil,
    mse_bound_from_rdp,
    smoothly_clipped,
    subsampling_factor,
)
from hf_gradguard.randomness import Stream
from recipes.small_networks import TanhConvNetConfig, TanhConvNetForImageClassification
from recipes.studies import private_sgd_runs
from recipes.studies.fil_networks import GRIDS, PRIVATE
from recipes.studies.private_sgd_runs import (
    SampleInformation,
    information_of,
    poisson_factor,
    random_directions,
    rdp,
    rdp_replacing,
)

IMAGES = 6
CELL = {
    "noise_multiplier": 0.5, "clip": 1.0, "learning_rate": 0.5, "momentum": 0.5, "batch": 3,
    "steps": [2, 3], "stretches": [1, 1, 1], "probes": 1, "delta": 1e-5,
}  # fmt: skip


def small() -> nn.Module:
    config = TanhConvNetConfig(
        image_size=6, convolutions=[[2, 3, 2, 1]], pooling=[[1, 1]], hidden_size=3, num_labels=3
    )
    torch.manual_seed(0)
    return TanhConvNetForImageClassification(config).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(IMAGES, 1, 6, 6, generator=torch_rng(1), dtype=torch.float64)
    return x, torch.arange(IMAGES) % 3


def clipped_gradient(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """Of one sample, as a differentiable function of it."""
    loss = nn.functional.cross_entropy(model(pixel_values=x[None]).logits, y[None])
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    g = torch.cat([part.flatten() for part in parts])
    return g * (clip / g.norm()).clamp(max=1)


def dense_traces(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """Tr J̃J̃ᵀ of every sample, by the whole Jacobian."""
    found = []
    for one, label in zip(x, y, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda pixels, label=label: clipped_gradient(model, pixels, label, clip), one
        )
        found.append(jacobian.square().sum())
    return torch.stack(found)


def units(model: nn.Module) -> list[dict[str, Tensor]]:
    """One direction for each parameter: summed over them, what is random otherwise is exact."""
    sizes = dict(model.named_parameters())
    found = []
    for name, parameter in sizes.items():
        for at in range(parameter.numel()):
            zeros = {n: torch.zeros_like(p, requires_grad=False) for n, p in sizes.items()}
            zeros[name].view(-1)[at] = 1
            found.append(zeros)
    return found


def exactly(model: nn.Module, x: Tensor, y: Tensor) -> SampleInformation:
    seen = information_of(model, x, y, units(model))
    return seen._replace(across=seen.across.sum(0, keepdim=True))


# ---------------------------------------------------------------------------------------
# what a step tells


def test_traces_are_those_of_dense_jacobians() -> None:
    model, (x, y) = small(), data()
    seen = exactly(model, x, y)
    clip = float(seen.norms.median()) * 1.001  # half of the samples are clipped
    assert 0 < (seen.norms > clip).sum() < IMAGES
    torch.testing.assert_close(seen.hard(clip)[0], dense_traces(model, x, y, clip))
    for at in range(IMAGES):
        one = GradientMap(model, {"pixel_values": x[at : at + 1], "labels": y[at : at + 1]})
        exact = dfil(smoothly_clipped(one, clip), noise_variance=1.0, num_probes=None).value
        assert float(seen.smooth(clip)[0, at]) == pytest.approx(36 * float(exact), rel=1e-6)


def test_random_directions_are_right_on_average() -> None:
    model, (x, y) = small(), data()
    clip = 1.0
    drawn = random_directions(model, 400, Stream.from_seeds(5))
    drawn = [{name: t.double() for name, t in w.items()} for w in drawn]
    values = information_of(model, x, y, drawn).hard(clip)
    error = values.std(0) / math.sqrt(len(values))
    exact = dense_traces(model, x, y, clip)
    assert ((values.mean(0) - exact).abs() <= 4 * error + 1e-9).all()
    assert (error < 0.1 * exact).all()


# ---------------------------------------------------------------------------------------
# accounts


def test_rdp_is_that_of_closed_forms() -> None:
    # order 2 without sampling: αT/(2σ²); with it ln(1 + q²(e^{1/σ²} - 1)) a step
    assert rdp(1.5, 1.0, 7) == pytest.approx(7 / 1.5**2)
    for sigma, q in ((0.5, 0.05), (2.0, 0.05), (1.0, 0.3)):
        closed = 400 * math.log1p(q**2 * math.expm1(1 / sigma**2))
        assert rdp(sigma, q, 400) == pytest.approx(closed)


def test_rdp_of_a_replaced_sample() -> None:
    # without sampling 4 times as much as of one removed, and 9/8 of it by the inequality
    assert rdp_replacing(1.5, 1.0, 7) == pytest.approx(4.5 * rdp(1.5, 1.0, 7))
    # one step, from one end of the line to the other, by summing over a grid
    grid, q = torch.linspace(-12, 12, 20_001, dtype=torch.float64), 0.05
    out, one, other = (torch.exp(-((grid - at) ** 2) / 2) for at in (0.0, 1.0, -1.0))
    p, r = (1 - q) * out + q * one, (1 - q) * out + q * other
    true = math.log(float((p.square() / r).sum() / r.sum()))
    assert rdp(1.0, q, 1) < true < rdp_replacing(1.0, q, 1) < 3 * true


def mixture_information(s: float, q: float, along: bool) -> float:
    """Of q N(v, I) + (1-q) N(0, I) in the plane about v, ‖v‖ = s, by summing over a grid."""
    grid = torch.linspace(-9, 9 + s, 1501, dtype=torch.float64)
    step = float(grid[1] - grid[0])
    a, b = grid[:, None], grid[None, :]
    inside = torch.exp(-((a - s) ** 2 + b**2) / 2) / (2 * math.pi)
    outside = torch.exp(-(a**2 + b**2) / 2) / (2 * math.pi)
    slope = q * inside * ((a - s) if along else b)
    return float((slope.square() / (q * inside + (1 - q) * outside)).sum()) * step**2


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.05), (1.0, 0.2), (2.0, 0.05)])
def test_factor_without_delta_is_that_of_the_mixture(sigma: float, q: float) -> None:
    """Eq. 3 with its expectation over batches: a step's information is at most κ q that of a batch
    which holds the sample.
    """
    kappa = poisson_factor(sigma, q)
    ratios = [
        mixture_information(share / sigma, q, along) / q
        for along in (False, True)
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    assert max(ratios) <= kappa * (1 + 1e-6)
    assert max(ratios) >= kappa * 0.98  # 0.98: the maximum lies between four strengths
    assert q < kappa < subsampling_factor(q, sigma, 1e-5 / 400)


def test_factor_without_delta_at_its_ends() -> None:
    assert poisson_factor(1.0, 1.0) == pytest.approx(1)
    assert poisson_factor(1e6, 0.05) == pytest.approx(0.05)


def test_an_update_is_of_clipped_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any noise the first step is the drawn rows' clipped gradients over the expected
    number.
    """
    monkeypatch.setattr(private_sgd_runs, "network", lambda x: small())
    x, y = data()
    cell = CELL | {"noise_multiplier": 1e-7, "clip": 0.5}
    steps = private_sgd_runs.training(cell, 0, x, y)
    before = {name: p.detach().clone() for name, p in next(steps).named_parameters()}
    model = small()
    each = torch.stack([clipped_gradient(model, a, b, 0.5) for a, b in zip(x, y, strict=True)])
    after = next(steps)
    moved = torch.cat(
        [((before[n] - p.detach()) / 0.5 * 3).flatten() for n, p in after.named_parameters()]
    )
    chosen = torch.linalg.lstsq(each.detach().T, moved).solution
    torch.testing.assert_close(chosen.round(), chosen, atol=1e-4, rtol=0)
    assert set(chosen.round().tolist()) == {0.0, 1.0}


def test_an_account_is_the_sum_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step measured, in all directions: κ q Σ Tr FIM/m, with dense Jacobians."""
    monkeypatch.setattr(private_sgd_runs, "network", lambda x: small())
    scale = len(units(small())) ** 0.5
    monkeypatch.setattr(
        private_sgd_runs,
        "random_directions",
        lambda model, *_: [{n: scale * t for n, t in w.items()} for w in units(model)],
    )
    x, y = data()
    cell = CELL | {"noise_multiplier": 5.0}  # κ is 1 with less noise
    found = private_sgd_runs.one_run(cell, 0, x, y, x, y)
    q, expected = 0.5, torch.zeros(IMAGES, dtype=torch.float64)
    for step, model in enumerate(private_sgd_runs.training(cell, 0, x, y)):
        if step in cell["steps"]:
            kappa = subsampling_factor(q, 5.0, 1e-5 / step)
            account = kappa * q * expected / (36 * 5.0**2)
            assert found["dfil"][step] == pytest.approx(account.numpy(), rel=1e-6)
            right = (model(pixel_values=x).logits.argmax(1) == y).double().mean()
            assert found["accuracy"][step] == pytest.approx(float(right), abs=1e-4)
        expected += dense_traces(model, x, y, cell["clip"])
    assert step == 3


def test_a_stretch_is_measured_once() -> None:
    lengths = PRIVATE["stretches"]
    assert sum(lengths) == PRIVATE["steps"][-1]
    starts = np.cumsum([0, *lengths])
    assert set(PRIVATE["steps"]) <= set(starts.tolist())  # none goes over a read-out
    for seed in range(20):
        chosen = private_sgd_runs.stretches(PRIVATE, seed)
        assert list(chosen.values()) == lengths
        assert all(a <= at < b for at, a, b in zip(chosen, starts[:-1], starts[1:], strict=True))
    steps = [list(private_sgd_runs.stretches(PRIVATE, seed)) for seed in range(2000)]
    assert np.mean(steps, 0)[0] == pytest.approx(12, abs=1)  # the middle of the first 25


# ---------------------------------------------------------------------------------------
# all of it


def test_private_networks(mnist: Path, cifar10: Path, quick, tmp_path: Path) -> None:
    output, data = tmp_path / "fil", ("--mnist", mnist, "--cifar10", cifar10)
    study = quick("fil_networks", *data, output=output)
    figures = study.figures
    assert figures.keys() == GRIDS.keys()
    for settings in figures.values():
        for found in settings.values():
            two, four = found["accounts"]["2"], found["accounts"]["4"]
            assert four["epsilon"] == pytest.approx(2 * two["epsilon"], rel=1e-3)
            assert all(a < b for a, b in zip(two["largest"], four["largest"], strict=True))
            for one in (two, four):
                assert one["epsilon"] < one["replacing"]
                assert one["without delta"] < one["factor"] <= 1
                assert one["mean over runs"]["median"] < one["mean over runs"]["largest"]
            ends = [found["images"][end] for end in ("highest", "lowest")]
            assert ends[0][0][1] == pytest.approx(four["mean over runs"]["largest"])
            assert ends[1][0][1] == found["images"]["quantiles"][0]
            for one, other in zip(*ends, strict=True):
                assert one[1] > other[1]
    assert Path(f"{output}.png").read_bytes().startswith(b"\x89PNG")

    # Without its data, another run makes only the tables, of the figures that are there.
    name = next(iter(figures["MNIST"]))
    account = figures["MNIST"][name]["accounts"]["2"]
    account |= {"epsilon": 0.25, "largest": [0.5, 0.5], "accuracy": [0.5, 0.7]}
    account["mean over runs"] |= {"largest": 0.5, "median": 0.125, "safe": 0.75}
    study.overwrite(figures)
    study.again(mnist=None, cifar10=None)
    row = next(row for row in study.rows() if row[:2] == [f"MNIST, {name}", "2"])
    assert row[3:5] == ["0.25", f"{mse_bound_from_rdp(0.25):.2g}"]
    assert row[6:10] == ["2", "2 to 2", "8", "75.0%"]
    assert row[10] == f"{2 / mse_bound_from_rdp(0.25):.2g}"
    # 0.5 is the largest dFIL of every run at this point: its bound is above RDP's, as elsewhere
    verdict = {row[0]: row for row in study.rows("_verdict")}
    points = [
        1 / one["mean over runs"]["largest"] > mse_bound_from_rdp(one["epsilon"])
        for found in figures["MNIST"].values()
        for one in found["accounts"].values()
    ]
    assert verdict["MNIST"][1:3] == [str(len(points)), str(sum(points))]
    assert 0 < sum(points) < len(points)
    assert verdict["MNIST"][10] == "0.600"  # the accuracy there, the best
    assert len(study.rows("_images")) == sum(map(len, figures.values()))
