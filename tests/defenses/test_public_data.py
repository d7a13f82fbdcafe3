"""Theorem 3.5 in its global form: `public_data`, against dense Jacobians in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import flat, rng, small_convolution
from torch import Tensor, nn

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.noise import OptimalNoise
from hf_gradguard.defenses.public_data import PublicData, ShapeProduct

COUNT, PROBES, FEW = 6, 400, 20


def batches(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    _, first = small_convolution()
    shape, classes = first["pixel_values"].shape, int(first["labels"].max()) + 1
    return [
        {
            "pixel_values": torch.rand(shape, generator=generator, dtype=torch.float64),
            "labels": torch.randint(classes, first["labels"].shape, generator=generator),
        }
        for _ in range(count)
    ]


def dense_squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """g, and the diagonal of Jᵀ J, by torch's own dense Jacobian."""
    shared = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def gradient(x: Tensor) -> Tensor:
        loss = model(pixel_values=x, labels=batch["labels"])["loss"]
        gradients = torch.autograd.grad(
            loss, list(shared.values()), create_graph=True, materialize_grads=True
        )
        return torch.cat([g.flatten() for g in gradients])

    x = batch["pixel_values"]
    jacobian = torch.autograd.functional.jacobian(gradient, x).flatten(1)
    return gradient(x.clone().requires_grad_()).detach(), jacobian.square().sum(1)


def learned(
    public: list[dict[str, Tensor]], probes: int = FEW, **settings: Any
) -> tuple[Any, GradientMap]:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch)
    defense: Any = make_defense(
        "optimal_noise", public_data=public, num_probes=probes, floor=0.0, scale=1.0, **settings
    )
    defense(gmap, rng())
    return defense, gmap


@pytest.mark.long
def test_expectations_are_those_of_dense_jacobians() -> None:
    """E s_i² and E g_i² over the batches, of matrices their sums over rows and columns."""
    public = batches(COUNT)
    defense, gmap = learned(public, PROBES)
    dense = [dense_squares(gmap.model, batch) for batch in public]
    sizes = [p.numel() for p in gmap.parameters.values()]
    for kind, place in (("powers", 0), ("squares", 1)):
        summed = sum(pair[place] if kind == "squares" else pair[place].square() for pair in dense)
        scale = 1 / PROBES if kind == "squares" else 1.0
        assert isinstance(summed, Tensor)
        for name, expected in zip(gmap.parameters, summed.split(sizes), strict=True):
            sums = defense._measured.averages.sums[kind][name]
            matrix = expected.reshape(len(sums[0]), -1)
            found = (
                sums[0] * scale
                if kind == "squares" and sums[0].sum() > 10 * matrix.sum()
                else sums[0]
            )
            torch.testing.assert_close(found, matrix.sum(1), rtol=0.15, atol=1e-6)


def test_the_product_is_that_of_dense_jacobians() -> None:
    """(E Tr J_F)(-E U₂) of a shape over that of uniform noise."""
    public = batches(COUNT, seed=3)
    model, _ = small_convolution()
    dense = [dense_squares(model, batch) for batch in public]
    shape = torch.rand(len(dense[0][0]), generator=torch.Generator().manual_seed(1)).double() + 0.1
    product = ShapeProduct()
    for g, squares in dense:
        product = product.with_batch({"all": squares}, {"all": g}, {"all": shape})
    s = sum(squares for _, squares in dense) / COUNT
    p = sum(g.square() for g, _ in dense) / COUNT
    expected = (s / shape).sum() * (p * shape).sum() / (s.sum() * p.sum())  # type: ignore[union-attr]
    assert product.over_uniform == pytest.approx(float(expected), rel=1e-9)
    best = ShapeProduct()
    for g, squares in dense:
        best = best.with_batch(
            {"all": squares}, {"all": g}, {"all": ((s + 1e-9) / (p + 1e-9)).sqrt()}
        )  # type: ignore[union-attr]
    assert best.over_uniform < min(product.over_uniform, 1.0)


def test_the_shape_is_better_than_uniform_noise_on_data_like_it() -> None:
    """On batches that it never saw, by dense Jacobians."""
    defense, gmap = learned(batches(COUNT))
    assert defense._measured.product.over_uniform < 1
    message = defense(gmap, rng())
    variance = flat(dict(message.noise.added))
    assert variance.std() > 0
    product = ShapeProduct()
    for batch in batches(6, seed=9):
        g, squares = dense_squares(gmap.model, batch)
        product = product.with_batch({"all": squares}, {"all": g}, {"all": variance})
    assert product.over_uniform < 1


def test_it_is_uniform_where_that_does_as_well(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the shape's leakage times cost is said to be twice that of uniform noise."""
    monkeypatch.setattr(ShapeProduct, "over_uniform", 2.0)
    defense, gmap = learned(batches(COUNT))
    variance = flat(dict(defense(gmap, rng()).noise.added))
    torch.testing.assert_close(variance, torch.ones_like(variance))
    assert "2.00 times the leakage times cost of uniform noise" in caplog.text


def test_a_later_batch_is_tried_before_it_is_learned() -> None:
    defense, gmap = learned(batches(COUNT), refresh_every=1)
    before = defense._measured.product.sums
    defense(gmap, rng())
    assert (defense._measured.product.sums > before).all()


def test_a_resumed_client_goes_on_as_it_was() -> None:
    public = batches(COUNT)
    defense, gmap = learned(public, refresh_every=2)
    other, _ = learned(batches(COUNT, seed=5), refresh_every=2)
    other.public_data = defense.public_data
    other.load_state_dict(defense.state_dict())
    for _ in range(3):
        assert torch.equal(flat(defense(gmap, rng(1))), flat(other(gmap, rng(1))))


def test_rows_are_collated_and_clients_share_them() -> None:
    rows = [{k: v[0] for k, v in batch.items()} for batch in batches(20)]
    data = PublicData(rows)
    data.prepare(None)
    assert [len(batch["labels"]) for batch in data.batches] == [8, 8, 4]
    assert copy.deepcopy(data) is data
    defense = make_defense("optimal_noise", public_data=rows)
    assert isinstance(defense, OptimalNoise)
    assert defense.settings()["public_data"] == "<20 public entries>"
    assert defense.facts.sharded_refusal is not None


def test_what_public_data_needs_is_said() -> None:
    with pytest.raises(ValueError, match="shape='public'"):
        make_defense("optimal_noise", shape="past", public_data=batches(2))
    with pytest.raises(ValueError, match="two batches at least"):
        learned(batches(1))
