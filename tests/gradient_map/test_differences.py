"""Products with J by differences against second derivatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import TASKS, make_task

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.differences import by_differences


def random_like(gmap: GradientMap, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in gmap.parameters.items()
    }


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


# These compute a part in float32, whatever the weights are.
COARSE = ("gpt2_lm", "llama", "t5")


@pytest.mark.parametrize("task", sorted(TASKS))
def test_both_products_equal_the_exact_ones(task: str) -> None:
    model, batch = make_task(task, dtype=torch.float32 if task in COARSE else torch.float64)
    gmap = GradientMap(model, batch)
    before = [p.clone() for p in model.parameters()]
    quick = by_differences(gmap)
    assert quick is not None
    assert quick.product_error < 0.1
    tolerance = 0.03 if task in COARSE else 1e-4
    some = dict(list(random_like(gmap, 1).items())[:3])
    for delta in (gmap.gradient(), random_like(gmap), some):
        exact = gmap.vjp(delta)
        assert relative(quick.vjp(delta), exact) < tolerance
        assert relative(flat(quick.jvp(exact)), flat(gmap.jvp(exact))) < tolerance
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("second_order", [True, False])
def test_in_float32_under_dropout_and_autocast(second_order: bool) -> None:
    """Autocast is left for the passes that are compared, so that errors stay those of float32."""
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.2)
    model.train()
    exact = GradientMap(model, batch)
    delta = random_like(exact)
    b = exact.vjp(delta)
    u, w = exact.jvp(b), exact.vjp(exact.jvp(b))
    state = torch.get_rng_state()
    for autocast in (False, True):
        torch.set_rng_state(state)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            gmap = GradientMap(model, batch, second_order=second_order)
            gmap.replay._state = exact.replay._state  # the same dropout
            quick = by_differences(gmap)
            assert quick is not None
            assert relative(quick.vjp(delta), b) < 0.02
            assert relative(flat(quick.jvp(b)), flat(u)) < 0.02
            assert relative(quick.vjp(u), w) < 0.02
            assert quick.product_error < 0.1


def test_what_is_told_of_the_error_holds() -> None:
    """A product that disagrees with the one from the other side says by how much."""
    model, batch = make_task("bert", dtype=torch.float32)
    quick = by_differences(GradientMap(model, batch))
    assert quick is not None
    told = quick.product_error
    v = torch.randn(quick.input.shape, generator=torch.Generator().manual_seed(0))
    u = quick.jvp(v)
    quick.vjp(u)
    assert quick.product_error < max(told, 0.02)
    for tensor in u.values():  # as if the other side had found twice as much
        tensor.mul_(2)
    quick.vjp(u)
    assert quick.product_error > 0.1


def test_refused_where_differences_mean_nothing() -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    gmap = GradientMap(model, batch)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in gmap.parameters.items()}
    assert by_differences(gmap.masked(masks)) is None
    half, batch = make_task("bert", dtype=torch.bfloat16)
    assert by_differences(GradientMap(half, batch)) is None
    recomputing, batch = make_task("distilbert", dtype=torch.float32)  # with a ReLU
    recomputing.gradient_checkpointing_enable()
    assert by_differences(GradientMap(recomputing.train(), batch)) is None
    quick = by_differences(gmap)
    assert quick is not None
    with pytest.raises(ValueError, match=r"'nothing' is no shared parameter"):
        quick.vjp({"nothing": torch.zeros(1)})
    assert not quick.vjp({}).any()
    assert not flat(quick.jvp(torch.zeros_like(gmap.input))).any()


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_layers_that_run_again_run_at_the_same_weights(name: str) -> None:
    """Under activation checkpointing they do in the backward pass, where weights are others."""
    model, batch = make_task(name, dtype=torch.float32)
    plain = by_differences(GradientMap(model, batch, second_order=False))
    assert plain is not None
    gradient = GradientMap(model, batch).gradient()
    expected = plain.vjp(gradient)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = by_differences(GradientMap(model, batch, second_order=False))
    assert again is not None
    torch.testing.assert_close(again.vjp(gradient), expected, rtol=1e-3, atol=1e-6)


def test_a_loss_in_float32_of_a_float64_model_has_steps_of_its_own_type() -> None:
    """Steps of float64's length would cancel in it: products were off by a tenth."""
    model, batch = make_task("bert")

    def loss_fn(module: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        rest = {name: entry for name, entry in inputs.items() if name != "labels"}
        return torch.nn.functional.cross_entropy(module(**rest).logits.float(), inputs["labels"])

    gmap = GradientMap(model, batch, loss_fn=loss_fn)
    assert (gmap.input.dtype, gmap.loss.dtype) == (torch.float64, torch.float32)
    differences = by_differences(gmap)
    assert differences is not None
    v = torch.randn(gmap.input.shape, dtype=torch.float64, generator=torch.manual_seed(1))
    delta = {name: torch.randn_like(p) for name, p in gmap.parameters.items()}
    exact, found = flat(gmap.jvp(v)), flat(differences.jvp(v))
    assert float((found - exact).norm() / exact.norm()) < 5e-3
    exact, found = gmap.vjp(delta), differences.vjp(delta)
    assert float((found - exact).norm() / exact.norm()) < 5e-3
