"""What lies in the noise's own shape and strength, when it is of the batch itself:
`Noise.shape_trace`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    WITHHELD,
    dense_reference,
    exact_map,
    flat,
    make_task,
    reference_input,
    reference_loss,
    rng,
    torch_rng,
)
from torch import Tensor

from hf_gradguard import make_defense
from hf_gradguard.defenses import Noise

DIRECTIONS = 12


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt2", pytest.param("vit", marks=pytest.mark.slow)])
def test_a_changing_s_is_left_out_with_little_loss(name: str) -> None:
    """½ Σ_i ‖∂ log Σ_ii/∂x‖² of Σ_ii ∝ s_i/|g_i|: the package holds s_i. Here log Σ_ii is
    differentiated as it is, s_i of the dense Jacobian included, by central differences in float64.
    Over all directions BERT's is 0.9996 of the closed form and GPT-2's 0.996; without the hundredth
    of all coordinates that make up most of it, 1.005 and 0.976.
    """
    model, batch = make_task(name, attn_implementation="eager")
    x = reference_input(name, model, batch)
    shared = [p for n, p in model.named_parameters() if p.requires_grad and n not in WITHHELD[name]]
    unit = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)

    def shape(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = at.clone().requires_grad_()
        loss = reference_loss(name, model, batch, at)
        g = torch.autograd.grad(loss, [at, *shared], create_graph=True, materialize_grads=True)
        rows = torch.autograd.grad(
            g[0], shared, grad_outputs=unit, is_grads_batched=True, materialize_grads=True
        )
        squares = torch.cat([part.flatten(1) for part in rows], 1).square().sum(0)
        return squares.log() / 2, torch.cat([part.flatten() for part in g[1:]]).detach()

    gradient, jacobian = dense_reference(name)
    s, g = jacobian.square().sum(0).sqrt(), flat(gradient)
    free = (g.abs() > 1e-8) & (s < 1e6 * g.abs()) & (s > 1e-6 * s.max())
    assert free.double().mean() > 0.9

    step = 1e-5 if name != "vit" else 1e-4  # ViT's softmax is in float32
    whole = held = torch.zeros_like(s)
    for seed in range(DIRECTIONS):
        v = torch.randn(x.shape, generator=torch_rng(seed), dtype=x.dtype)
        (plus, one), (minus, other) = shape(x + step * v), shape(x - step * v)
        of_g = (one - other) / (2 * step) / g
        whole = whole + ((plus - minus) / (2 * step) - of_g).square()
        held = held + of_g.square()
    assert float(whole[free].sum() / held[free].sum()) == pytest.approx(1, abs=0.02)
    few = held[free].argsort()[: -len(g) // 100]
    assert float(whole[free][few].sum() / held[free][few].sum()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "strength", [{"scale": 0.1}, {"relative_scale": 2.0}, {"utility_budget": 0.3}], ids=str
)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_strength_follows_the_input_too(name: str, strength: dict[str, float]) -> None:
    """½ Σ_i ‖∂ log(λ w_i)/∂x‖² from the dense Jacobian, w = s/|g| with s held, λ as the strength
    has it.
    """
    gradient, jacobian = dense_reference(name)
    s, g = jacobian.square().sum(0).sqrt(), flat(gradient)
    w = (s / g.abs().clamp(min=1e-8)).clamp(max=1e6)
    follows = (w < 1e6) & (g.abs() >= 1e-8)
    slopes = torch.where(follows, -jacobian / g, 0.0)  # of log w
    if "utility_budget" in strength:
        each = g.square() * w
        of_factor = -((2 * jacobian / g + slopes) * each).nan_to_num().sum(1) / each.sum()
    else:
        of_factor = -(slopes * w).sum(1) / w.sum()
        if "relative_scale" in strength:
            of_factor = of_factor + 2 * jacobian @ g / g.square().sum()
    noisy = w > 0
    expected = float((slopes + of_factor[:, None])[:, noisy].square().sum() / 2)
    noise = make_defense("optimal_noise", shape="own", strength="own", **strength)(
        exact_map(name), rng()
    ).noise
    assert noise is not None
    assert noise.shape_trace == pytest.approx(expected, rel=1e-3)
    by_layer: Any = {"shape": "own", "strength": "own", "granularity": "layer"}
    coarse = make_defense("optimal_noise", **by_layer, **strength)(exact_map(name), rng()).noise
    assert coarse is not None
    assert coarse.shape_trace > 0


def test_one_ratio_per_tensor_is_bounded_from_above() -> None:
    """By the dense Jacobian: w = ‖s‖/‖g‖ of a tensor, s held."""
    gradient, jacobian = dense_reference("bert")
    sizes = [g.numel() for g in gradient.values()]
    parts = list(zip(jacobian.split(sizes, 1), flat(gradient).split(sizes), strict=True))
    norms = [(J.square().sum().sqrt(), g.norm(), -(J @ g) / g.square().sum()) for J, g in parts]
    ratios = torch.stack([(s / g).clamp(max=1e6) for s, g, _ in norms])
    slopes = torch.stack([d if float(s / g) < 1e6 else 0 * d for s, g, d in norms], 1)
    counts = torch.tensor(sizes, dtype=ratios.dtype)
    of_factor = -(slopes * ratios * counts).sum(1) / (ratios * counts).sum()
    exact = float(((slopes + of_factor[:, None]).square().sum(0) * counts).sum() / 2)
    defense = make_defense("optimal_noise", scale=0.1, shape="own", granularity="layer")
    noise = defense(exact_map("bert"), rng()).noise
    assert noise is not None
    assert exact <= noise.shape_trace


def relative_noise(name: str, **settings: Any) -> tuple[Noise, Tensor, Tensor]:
    """Of a message with strength="own", with the dense gradient and Jacobian."""
    gradient, jacobian = dense_reference(name)
    defense = make_defense(settings.pop("defense", "gaussian_noise"), strength="own", **settings)
    noise = defense(exact_map(name), rng()).noise
    assert noise is not None
    return noise, flat(gradient), jacobian


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("relative", [1.0, 1_000.0])
def test_the_strength_of_uniform_noise_tells_of_the_batch(name: str, relative: float) -> None:
    """2d ‖∂ log ‖g‖/∂x‖², whatever the strength: by the dense Jacobian in float64."""
    noise, g, jacobian = relative_noise(name, relative_scale=relative)
    expected = 2 * len(g) * float((jacobian @ g / g.square().sum()).square().sum())
    assert noise.shape_trace == pytest.approx(expected, rel=1e-3)
    budget, _, _ = relative_noise(name, utility_budget=relative)
    assert budget.shape_trace == pytest.approx(expected, rel=1e-3)  # λ is 1/‖g‖², and not ‖g‖²


@pytest.mark.long
def test_a_strength_of_others_tells_nothing_of_the_batch() -> None:
    for settings in ({"relative_scale": 2.0}, {"utility_budget": 2.0}, {"scale": 1.0}):
        noise = make_defense("gaussian_noise", **settings)(exact_map("bert"), rng()).noise
        assert noise is not None
        assert noise.shape_trace == 0
    public = make_defense("optimal_noise", relative_scale=2.0)(exact_map("bert"), rng()).noise
    own, g, jacobian = relative_noise("bert", defense="optimal_noise", relative_scale=2.0)
    assert public is not None
    assert public.shape_trace == 0
    expected = 2 * len(g) * float((jacobian @ g / g.square().sum()).square().sum())
    assert own.shape_trace == pytest.approx(expected, rel=1e-3)


def test_the_strength_of_what_is_clipped_does_not_move() -> None:
    _, g, jacobian = relative_noise("bert", relative_scale=1.0)
    clip = float(g.norm())
    expected = 2 * len(g) * float((jacobian @ g / g.square().sum()).square().sum())
    for bound, trace in ((2 * clip, expected), (0.5 * clip, 0.0)):
        noise, _, _ = relative_noise("bert", defense="dp_sgd", clip=bound, relative_scale=1.0)
        assert noise.shape_trace == pytest.approx(trace, rel=1e-3)
    bound = float(g.abs().quantile(0.9))
    clipped, moving = g.clamp(-bound, bound), g.where(g.abs() < bound, 0)
    slope = jacobian @ moving / clipped.square().sum()
    settings = {"clip": bound, "clip_by": "coordinate", "relative_scale": 1.0}
    noise, _, _ = relative_noise("bert", defense="dp_sgd", **settings)
    assert noise.shape_trace == pytest.approx(2 * len(g) * float(slope.square().sum()), rel=1e-3)


def test_the_information_is_that_of_the_score() -> None:
    """E ‖∂ log p(y | x)/∂x‖² over messages y = g(x) + σ(x) n, σ = r ‖g‖/√d: autograd differentiates
    the log-density through g and σ.
    """
    torch.manual_seed(0)
    mixed = torch.randn(6, 40, dtype=torch.float64)
    x, relative, draws = torch.randn(6, dtype=torch.float64), 0.7, 200_000

    def gradient(at: Tensor) -> Tensor:
        return torch.tanh(at @ mixed) + 0.3 * (at @ mixed)

    g, size = gradient(x), mixed.shape[1]
    std = relative * g.norm() / math.sqrt(size)
    y = g + std * torch.randn(draws, size, dtype=torch.float64)

    def log_density(at: Tensor, message: Tensor) -> Tensor:
        g_at = gradient(at)
        std_at = relative * g_at.norm() / math.sqrt(size)
        return -(message - g_at).square().sum() / (2 * std_at**2) - size * std_at.log()

    scores = torch.func.vmap(torch.func.grad(log_density), in_dims=(None, 0))(x, y)
    squares = scores.square().sum(1)
    jacobian = torch.autograd.functional.jacobian(gradient, x).T
    of_strength = 2 * size * (jacobian @ g / g.square().sum()).square().sum()
    expected = jacobian.square().sum() / std**2 + of_strength
    error = float(squares.std()) / math.sqrt(draws)
    assert float(of_strength) > 20 * error  # without it the test fails
    assert abs(float(squares.mean()) - float(expected)) < 4 * error
