"""What lies in the noise's own shape, when it is of the batch itself: `Noise.shape_trace`."""

from __future__ import annotations

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

from hf_gradguard import make_defense

DIRECTIONS = 12


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
    noise = make_defense("optimal_noise", scale=0.1, shape="own")(exact_map(name), rng()).noise
    assert noise is not None
    closed = float((s / g)[free].square().sum() / 2)
    assert noise.shape_trace == pytest.approx(closed, rel=1e-3)

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
