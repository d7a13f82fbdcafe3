"""Fits in the span of samples' gradients, and J δ by differences, against dense computations."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import TASKS, flat, make_task, small_convolution
from torch import Tensor

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.per_sample.span import SampleSpan, scaled, vjp_by_difference


def random_like(gmap: GradientMap, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in gmap.parameters.items()
    }


def basis(gmap: GradientMap, batch: dict[str, Tensor], rest: set[str]) -> Tensor:
    """Each sample's gradient by a map of its own, without `rest`; and `rest` of the whole batch."""
    rows = []
    for row in range(len(gmap.input)):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        gradient = GradientMap(gmap.model, one, second_order=False).gradient()
        rows.append(flat({n: 0 * g if n in rest else g for n, g in gradient.items()}))
    rows.append(flat({n: g if n in rest else 0 * g for n, g in gmap.gradient().items()}))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("task", ["bert", "gpt2", "t5", "bert_lora", "vit", "convnext"])
def test_the_nearest_point_is_that_of_dense_least_squares(task: str) -> None:
    model, batch = make_task(task, batch_size=3)
    gmap = GradientMap(model, batch, second_order=False)
    wanted = random_like(gmap)
    span = SampleSpan(gmap)
    fit = span.fit(wanted)
    vectors = basis(gmap, batch, set(span.unsplit))
    weights = torch.linalg.lstsq(vectors, flat(wanted)[:, None], driver="gelsd").solution
    nearest = (vectors @ weights)[:, 0]
    assert float((flat(fit.nearest) - nearest).norm() / nearest.norm()) < 1e-4  # the ridge
    assert fit.cosine == pytest.approx(float(nearest.norm() / flat(wanted).norm()), rel=1e-6)
    # What is left is orthogonal to what was found: a contraction.
    left = float((flat(wanted) - flat(fit.nearest)).norm() / flat(wanted).norm())
    assert left**2 == pytest.approx(1 - fit.cosine**2, rel=1e-9)
    assert SampleSpan(gmap).fit(gmap.gradient()).cosine == pytest.approx(1, abs=1e-6)


def test_each_parameter_by_itself() -> None:
    """As the dense fits of one parameter after the other."""
    model, batch = make_task("bert", batch_size=3)
    gmap = GradientMap(model, batch, second_order=False)
    wanted = random_like(gmap)
    span = SampleSpan(gmap)
    rows = [
        GradientMap(model, {n: v[i : i + 1] for n, v in batch.items()}).gradient() for i in range(3)
    ]
    fit = span.fit_each(wanted)
    for name, v in wanted.items():
        if name in span.unsplit or name.endswith("key.bias"):  # which is rounding
            continue
        vectors = torch.stack([row[name].flatten() for row in rows], 1)
        weights = torch.linalg.lstsq(vectors, v.flatten()[:, None], driver="gelsd").solution
        nearest = (vectors @ weights)[:, 0]
        assert float((fit.nearest[name].flatten() - nearest).norm()) < 1e-3 * float(v.norm())
    assert fit.cosine > span.fit(wanted).cosine


def test_a_convolution_and_a_layer_that_does_not_run() -> None:
    model, batch = small_convolution(batch_size=4)
    gmap = GradientMap(model, batch, second_order=False)
    fit = SampleSpan(gmap).fit(gmap.gradient())
    torch.testing.assert_close(fit.nearest, gmap.gradient(), rtol=1e-4, atol=1e-6)
    wanted = random_like(gmap)
    assert not SampleSpan(gmap).fit(wanted).nearest["unused"].any()


def test_activation_checkpointing_changes_nothing() -> None:
    found = []
    for checkpointed in (False, True):
        model, batch = make_task("bert", batch_size=3)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        gmap = GradientMap(model, batch, second_order=False)
        found.append(SampleSpan(gmap).fit(random_like(gmap)))
    torch.testing.assert_close(found[0].nearest, found[1].nearest)
    assert found[0].cosine > 0.01


@pytest.mark.parametrize("zero", ["direction", "target"])
def test_nothing_is_nearest_to_nothing(zero: str) -> None:
    pair = {"direction": {"w": torch.ones(2)}, "target": {"w": torch.ones(2)}}
    pair[zero] = {"w": torch.zeros(2)}
    fit = scaled(**pair)
    assert fit.cosine == 0
    assert not fit.nearest["w"].any()


def test_a_factor_by_hand() -> None:
    fit = scaled({"w": torch.tensor([-2.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])})
    assert fit.nearest["w"].tolist() == [3.0, 0.0]
    assert (fit.cosine, float(fit.factors)) == (pytest.approx(0.6), -1.5)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"convnext", "t5"}))
def test_differences_of_slopes_are_products_with_the_jacobian(task: str) -> None:
    model, batch = make_task(task)
    gmap = GradientMap(model, batch)
    before = [p.clone() for p in model.parameters()]
    # These compute a part in float32, whatever the weights are.
    tolerance = 0.02 if task in ("gpt2_lm", "llama") else 1e-4
    some = dict(list(random_like(gmap, 1).items())[:3])
    for delta in (gmap.gradient(), random_like(gmap), some):
        exact = gmap.vjp(delta)
        error = vjp_by_difference(gmap, gmap.input, delta) - exact
        assert float(error.norm() / exact.norm()) < tolerance
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not any(p.grad is not None for p in model.parameters())


def test_differences_hold_in_float32_and_under_dropout() -> None:
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    delta = random_like(gmap)
    exact = gmap.vjp(delta)
    error = float((vjp_by_difference(gmap, gmap.input, delta) - exact).norm() / exact.norm())
    assert error < 0.01
    assert not vjp_by_difference(gmap, gmap.input, {"classifier.bias": torch.zeros(3)}).any()
    assert math.isfinite(error)
