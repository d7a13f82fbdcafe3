"""Refiner's second form: the gradient of synthetic samples, nearest to the one that is wanted.

    share Σ_b c_b g_b(x*),   c = argmin ‖v - Σ_b c_b g_b(x*)‖²,   ‖v - shared‖² = (1 - cos²) ‖v‖²

x* is drawn at random, labels too, and holds nothing of the batch: neither the number of its texts
nor their lengths. Of v, a message holds as many numbers as there are factors c. Adam can bring x*
nearer to v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.differences import vjp_by_difference
from ...gradient_map.per_sample.span import Fit, Granularity, SampleSpan, scaled

Slope = Callable[[Tensor], Tensor]


@dataclass
class SyntheticSamples:
    """Synthetic samples, and how they are fitted.

    Args:
        gmap: Their map.
        wanted: v.
        factors: How many, as `Granularity` says.
    """

    gmap: GradientMap
    wanted: Tensors
    factors: Granularity

    def fit(self, x: Tensor) -> Fit:
        """At an input x*."""
        if self.factors == "message":
            return scaled(self.gmap.gradient_at(x), self.wanted)
        return SampleSpan(self.gmap, x).fit_by(self.wanted, self.factors)

    def slope(self, x: Tensor, fit: Fit) -> Tensor:
        """∂(1 - cos)/∂x* where the factors are best, so that their own change changes nothing:
        -Σ_b c_b J_b(v - shared)/(‖shared‖ ‖v‖). Parameters that no layer has count with the same
        factors.
        """
        if not fit.cosine:
            return torch.zeros_like(x)
        left = {name: v - fit.nearest[name] for name, v in self.wanted.items()}
        product = vjp_by_difference(self.gmap, x, left)
        factors = fit.factors.to(product).view(-1, *[1] * (x.dim() - 1))
        power = sum(float(v.double().square().sum()) for v in self.wanted.values())
        return -factors * product / (fit.cosine * power)

    def descend(
        self, iterations: int, rate: float, free: Tensor, penalty: Slope | None = None
    ) -> tuple[Tensor, Fit, list[float]]:
        """Steps of Adam from where the samples are.

        Args:
            iterations: How many.
            rate: Of the first step, in units of the input's root mean square; it falls to 0.
            free: Mask of what moves, broadcast to the input.
            penalty: The slope of what is added to 1 - cos.

        Returns:
            x*, the fit there, and cosines at the start and after every step.
        """
        x = self.gmap.input.clone()
        size = float(x.square().mean().sqrt())
        optimizer = torch.optim.Adam([x], lr=rate * size)
        fit = self.fit(x)
        cosines = [fit.cosine]
        for step in range(iterations):
            slope = self.slope(x, fit)
            x.grad = free * (slope if penalty is None else slope + penalty(x))
            optimizer.param_groups[0]["lr"] = rate * size * (1 - step / iterations)
            optimizer.step()
            fit = self.fit(x)
            cosines.append(fit.cosine)
        return x, fit, cosines
