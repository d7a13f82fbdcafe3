"""Maps with their dense Jacobians, which share no code with the package."""

from __future__ import annotations

import functools

import torch
from helpers import dense_reference, flat, make_task, small_convolution, split_like, torch_rng
from torch import Tensor, nn

from hf_gradguard import GradientMap

DENSE = ("bert", "gpt2", "vit", "convolution")


@functools.cache
def dense_convolution(batch_size: int = 2, clip: float | None = None) -> Tensor:
    """J[a, i] of `small_convolution(batch_size)`, with its gradient clipped smoothly on request."""
    model, batch = small_convolution(batch_size)
    parameters = list(model.parameters())

    def gradient(x: Tensor) -> Tensor:
        loss = model(x, batch["labels"])["loss"]
        g = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        vector = torch.cat([tensor.reshape(-1) for tensor in g])
        return (
            vector if clip is None else vector / (nn.functional.gelu(vector.norm() / clip - 1) + 1)
        )

    jacobian = torch.autograd.functional.jacobian(gradient, batch["pixel_values"], vectorize=True)
    return jacobian.reshape(len(jacobian), -1).T.contiguous()


def dense_case(name: str) -> tuple[GradientMap, Tensor]:
    """A map and its Jacobian, `(m, d)`."""
    if name == "convolution":
        return GradientMap(*small_convolution()), dense_convolution()
    return GradientMap(*make_task(name)), dense_reference(name)[1]


def perturbation(gmap: GradientMap, seed: int = 3) -> dict[str, Tensor]:
    size = sum(p.numel() for p in gmap.parameters.values())
    return split_like(
        torch.randn(size, generator=torch_rng(seed), dtype=torch.float64), gmap.gradient()
    )


def uneven_variance(gmap: GradientMap) -> dict[str, Tensor]:
    """Variances between 1e-4 and 1e-2, another for every coordinate."""
    return {
        name: 10
        ** (-2 - 2 * torch.rand(g.shape, generator=torch_rng(len(name)), dtype=torch.float64))
        for name, g in gmap.gradient().items()
    }


def fisher(jacobian: Tensor, variance: dict[str, Tensor]) -> Tensor:
    return (jacobian / flat(variance)) @ jacobian.T


class Linear(nn.Module):
    """L = xᵀJθ, whose shared gradient Jᵀx has any Jacobian that one likes."""

    def __init__(self, jacobian: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((jacobian.shape[1],), 0.5, dtype=jacobian.dtype))
        self.jacobian = jacobian

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"loss": (pixel_values.flatten() @ self.jacobian * self.theta).sum()}


def linear_map(jacobian: Tensor, batch_size: int = 1) -> GradientMap:
    """A map with this Jacobian, `(m, d)`, whose coordinates are shared out evenly among the
    samples.
    """
    pixels = torch.ones(batch_size, 1, 1, len(jacobian) // batch_size, dtype=jacobian.dtype)
    return GradientMap(Linear(jacobian), {"pixel_values": pixels})


def by_hand(a: list[float]) -> GradientMap:
    """One shared parameter: J is the column a."""
    return linear_map(torch.tensor(a, dtype=torch.float64)[:, None])


def random_jacobian(seed: int, rows: int = 6, columns: int = 9) -> Tensor:
    """Singular values fall from 1 by up to three orders of magnitude."""
    generator = torch_rng(seed)
    u, _, vh = torch.linalg.svd(
        torch.randn(rows, columns, generator=generator, dtype=torch.float64), full_matrices=False
    )
    span = 3 * torch.rand((), generator=generator, dtype=torch.float64)
    s = 10 ** (-span * torch.linspace(0, 1, len(u.T), dtype=torch.float64))
    return u * s @ vh
