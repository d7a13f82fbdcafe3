"""What has no second derivative: own kernels, fused attention, activation checkpointing. Defenses
that differentiate once are right there, and what differentiates twice says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flat, image_batch, make_task, rng
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_gradguard import GradientMap, make_defense

FIRST_ORDER = ("gaussian_noise", "optimal_noise", "optimal_pruning", "pruning", "quantization")


class OwnTanh(torch.autograd.Function):
    """A kernel whose backward pass is not differentiable, as fused ones are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return slope * (1 - y * y)


class Vectorized(OwnTanh):
    """The same, for functions that are vectorized."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)


class Small(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(192, 7), nn.Linear(7, 3)
        self.activation = activation

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.activation(self.first(pixel_values.flatten(1)))
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


def small_maps() -> tuple[GradientMap, GradientMap]:
    """With an own kernel, and with torch's."""
    models = Small(OwnTanh.apply).double(), Small(torch.tanh).double()
    own, plain = (GradientMap(m, image_batch(), second_order=False) for m in models)
    return own, plain


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_kernels_that_differentiate_once(name: str) -> None:
    own, plain = small_maps()
    settings = {"shape": "past"} if name.startswith("optimal") else {}
    defenses = [make_defense(name, **settings) for _ in range(2)]
    for _ in range(2):  # the second is shaped by the first
        pairs = zip(defenses, (own, plain), strict=True)
        messages = [flat(dict(defense(gmap, rng(3)).items())) for defense, gmap in pairs]
        torch.testing.assert_close(*messages, rtol=1e-5, atol=1e-9)


def test_sensitivities_of_such_kernels_are_the_exact_ones() -> None:
    own, plain = small_maps()
    exact = GradientMap(plain.model, plain.batch).squared_sensitivity(3, rng(), method="exact")
    found = own.squared_sensitivity(3, rng(), split=False)
    torch.testing.assert_close(flat(found), flat(exact), rtol=1e-4, atol=1e-12)


def test_what_is_once_differentiable_is_not_left_out() -> None:
    """Autograd passes over such a kernel in silence: here all but the first layer would have no
    sensitivity, and vjp would be off.
    """
    own, plain = small_maps()
    whole = own.twice()
    for ask in (
        lambda: own.squared_sensitivity(1, rng(), method="exact"),
        lambda: whole.jvp(whole.input),
        lambda: whole.vjp(whole.gradient()),
    ):
        with pytest.raises(RuntimeError, match=r"once_differentiable.*method='difference'"):
            ask()
    assert plain.twice().vjp(plain.gradient()).any()


@pytest.mark.parametrize("kernel", [OwnTanh.apply, Vectorized.apply, torch.tanh])
@pytest.mark.parametrize("candidates", [0, 1, 2])
def test_neither_do_attackers_leave_it_out(kernel: Any, candidates: int) -> None:
    """Of no candidates the gradient with its graph alone is asked for."""
    gmap = GradientMap(Small(kernel).double(), image_batch())
    xs = gmap.input.expand(max(candidates, 1), *gmap.input.shape)

    def ask() -> Tensor:
        if not candidates:
            x = gmap.input.requires_grad_()
            return gmap.input_gradient(power(gmap.gradient_at(x, create_graph=True)), x)[0]
        return gmap.slopes_at(lambda g, _: power(g), xs, {})[1][0]

    if kernel is torch.tanh:
        torch.testing.assert_close(ask(), 2 * gmap.vjp(gmap.gradient()))
    else:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            ask()


def power(tensors: Any) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_runs_as_it_is(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is taken away from a first-order map, and squares are the exact ones."""
    model, batch = make_task("bert", dtype=torch.float32)
    exact = flat(GradientMap(model, batch).squared_sensitivity(2, rng(), method="exact"))
    model.set_attn_implementation(kernel)
    calls = []
    real = nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(torch.backends.cuda.flash_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    gmap = GradientMap(model, batch, second_order=False)
    found = flat(gmap.squared_sensitivity(2, rng(), split=False))
    assert bool(calls) is (kernel == "sdpa")
    assert all(calls)
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_activation_checkpointing(name: str) -> None:
    """Layers that run again in the backward pass, with dropout: the same messages, up to
    rounding. Their samples are not told apart, since they would be heard twice.
    """
    model, batch = make_task(name, **({"dropout": 0.2} if name != "llama" else {}))
    model.train()
    torch.manual_seed(4)
    plain = GradientMap(model, batch, second_order=False)
    expected = flat(plain.squared_sensitivity(2, rng(), split=False))
    noise = flat(dict(make_defense("gaussian_noise")(plain, rng(3)).items()))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(4)
    gmap = GradientMap(model, batch, second_order=False)
    torch.testing.assert_close(flat(gmap.gradient()), flat(plain.gradient()))
    found = flat(gmap.squared_sensitivity(2, rng()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9 * float(expected.max()))
    message = make_defense("gaussian_noise")(gmap, rng(3))
    torch.testing.assert_close(flat(dict(message.items())), noise)
    message = make_defense("optimal_noise", shape="public")(gmap, rng(3))
    assert torch.isfinite(flat(dict(message.items()))).all()


def test_ligers_modules_are_not_differentiated_twice() -> None:
    """Their second derivatives would be wrong without a word; once they are right."""

    class Fused(nn.Tanh):
        __module__ = "liger_kernel.transformers.fused"

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(x)

    forward.__module__ = "liger_kernel.transformers.patched"
    patched = nn.Tanh()
    patched.forward = forward.__get__(patched)  # as Liger changes a model that is there
    for activation in (Fused(), patched):
        model = Small(activation).double()
        gmap = GradientMap(model, image_batch(), second_order=False)
        expected = GradientMap(Small(torch.tanh).double(), image_batch(), second_order=False)
        found = [flat(m.squared_sensitivity(2, rng())) for m in (gmap, expected)]
        torch.testing.assert_close(*found)
        for ask in (
            lambda model=model: GradientMap(model, image_batch()),
            lambda gmap=gmap: gmap.squared_sensitivity(1, rng(), method="exact"),
            gmap.twice,
        ):
            with pytest.raises(NotImplementedError, match=r"silently wrong.*second_order=False"):
                ask()
