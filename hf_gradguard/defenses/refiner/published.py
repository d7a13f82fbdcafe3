"""Refiner as published: robust data whose gradient stays near the true one where that counts.

    x* = argmin UM(x*) - β D(x*)
    UM(x*) = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²,   w_l = |g_l(x) ⊙ θ_l| τ^l

UM, the utility metric, is small where the gradient stays what it was; l = 1 is the layer nearest
the input. D in [0, 1] is an evaluation network's prediction of how much of its input is noise.

Reference: "Refiner" (2025), Eq. 2 to 5 and Appendices F and J. As printed, UM holds |g θ|² and is
many orders of magnitude below β D, so β = 1 would ignore it; by default it is divided by Σ_l ‖w_l ⊙
g_l(x)‖², which makes it a relative error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.parameters import layer_numbers
from ..message import norm
from .inputs import Pixels, Words


@dataclass
class RobustData:
    """What refining a batch found.

    Args:
        input: x*, in the shape of the map's input; of synthetic samples in theirs.
        gradient: g(x*); of synthetic samples fitted to what is wanted.
        utility_metric: UM at the start and after every iteration; of synthetic samples 1 - cos.
        noise_ratio: D likewise, averaged over the batch; nothing without an evaluation network.
        movable_share: Of the batch's content, the share that was hidden.
    """

    input: Tensor
    gradient: Tensors
    utility_metric: list[float]
    noise_ratio: list[float]
    movable_share: float


@dataclass
class Descent:
    """Adam on UM - β D.

    Args:
        gmap: The batch's map.
        gradient: g.
        inputs: What may move.
        network: The evaluation network.
        beta: β.
        weights: w.
    """

    gmap: GradientMap
    gradient: Tensors
    inputs: Words | Pixels
    network: Any
    beta: float
    weights: Tensors

    def run(self, x: Tensor, iterations: int, rate: float) -> RobustData:
        """From a start, which is written to."""
        gmap, inputs = self.gmap, self.inputs
        optimizer = torch.optim.Adam([x.requires_grad_()], lr=rate)
        metrics, ratios = [], []
        for _ in range(iterations):
            metric = self._distance(gmap.gradient_at(x, create_graph=True))
            ratio = inputs.noise_ratio(self.network, x)
            (slope,) = gmap.input_gradient(metric - self.beta * ratio, x)
            x.grad = slope * inputs.free
            metrics.append(float(metric.detach()))
            ratios.append(float(ratio.detach()))
            with torch.no_grad():
                optimizer.step()
                inputs.project_(x)
        x = x.detach()
        there = gmap.gradient_at(x)
        with torch.no_grad():
            metrics.append(float(self._distance(there)))
            ratios.append(float(inputs.noise_ratio(self.network, x)))
        return RobustData(x, there, metrics, ratios, inputs.movable_share)

    def _distance(self, there: Tensors) -> Tensor:
        """UM = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²."""
        return torch.stack(
            [
                (self.weights[name] * (there[name] - g)).square().sum()
                for name, g in self.gradient.items()
            ]
        ).sum()


def utility_weights(
    gmap: GradientMap, gradient: Tensors, tau: float, element_wise: bool, normalize: bool
) -> Tensors:
    """w, divided by ‖w ⊙ g‖ if UM is to be relative."""
    layers = layer_numbers(gmap.parameters)
    weights = {}
    for name, g in gradient.items():
        weight = (g * gmap.parameters[name].detach()).abs() if element_wise else torch.ones_like(g)
        weights[name] = weight * tau ** layers[name]
    size = 1.0
    if normalize:
        size = norm({name: weights[name] * g for name, g in gradient.items()}, None)
    return {name: weight / (size or 1.0) for name, weight in weights.items()}


def brought_near(gradient: Tensors, shared: Tensors, bound: float | None) -> Tensors:
    """g + ε (g(x*) - g)/‖g(x*) - g‖ where `shared`, g(x*), is farther than ε, `bound`, from g.
    (Appendix J.)
    """
    distance = norm({name: shared[name] - g for name, g in gradient.items()}, None)
    if bound is None or distance <= bound:
        return shared
    return {name: g + (shared[name] - g) * (bound / distance) for name, g in gradient.items()}
