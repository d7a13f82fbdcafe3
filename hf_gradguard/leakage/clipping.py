"""Smooth clipping: a bound on a sample's gradient that still has a Jacobian everywhere.

    g̃ = g φ(‖g‖),   φ(n) = 1 / (GELU(n/C - 1) + 1),   ‖g̃‖ ≤ 1.115 C

Reference: Guo et al. (2022), Algorithm 1 and Section 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.factors import Factors

SMOOTH_CLIP_NORM = 1.115
"""The largest norm that a smoothly clipped gradient can have, in units of C."""


def smooth_clip(gradient: Tensors, clip: float) -> Tensors:
    """g / (GELU(‖g‖/C - 1) + 1).

    Args:
        gradient: One tensor per shared parameter.
        clip: C > 0.

    Raises:
        ValueError: If `clip` is not above 0.

    Example:
        >>> clipped = smooth_clip({"weight": torch.tensor([30.0, 40.0])}, clip=1.0)
        >>> bool(clipped["weight"].norm() <= SMOOTH_CLIP_NORM)
        True
    """
    factor = 1 / (torch.nn.functional.gelu(_norm(gradient) / _checked(clip) - 1) + 1)
    return {name: tensor * factor.to(tensor.dtype) for name, tensor in gradient.items()}


def smoothly_clipped(gmap: GradientMap, clip: float) -> GradientMap:
    """The map x ↦ g̃(x), for every estimator: `gradient`, `gradient_at`, `jvp`, `vjp` and
    sensitivities are those of g̃.

    Private SGD clips each sample's gradient, so the map must be of one sample. With noise σC on the
    *sum* of a batch, dFIL of a sample is
    `dfil(smoothly_clipped(gmap, C), noise_variance=(σ * C) ** 2)`; the paper's Eq. 1 leaves C out.

    Args:
        gmap: A map that differentiates twice, of a batch of one.
        clip: C > 0.

    Raises:
        ValueError: If the batch holds several samples, or `clip` is not above 0.

    Example:
        >>> from hf_gradguard.leakage import dfil
        >>> sample = GradientMap(model, {name: entry[:1] for name, entry in batch.items()})
        >>> clipped = smoothly_clipped(sample, clip=0.1)
        >>> dfil(clipped, noise_variance=0.01, num_probes=4).value.shape
        torch.Size([1])
    """
    if len(gmap.input) != 1:
        raise ValueError(
            f"Clipping is per sample, but this map's batch holds {len(gmap.input)}. Make one "
            "GradientMap per sample."
        )
    return _ClippedMap(gmap, _checked(clip))


class _ClippedMap(GradientMap):
    """J̃ = J D with D = φ I + (φ'/n) g gᵀ, which is symmetric: apply D before J, and after Jᵀ."""

    def __init__(self, gmap: GradientMap, clip: float) -> None:
        self.__dict__.update(gmap.__dict__)  # a view of the same graphs, as `after` makes
        self._clip, self._raw = clip, gmap
        gradient = gmap.gradient()
        self._clipped = smooth_clip(gradient, clip)
        norm = float(_norm(gradient))
        u = norm / clip - 1
        below = (1 + math.erf(u / math.sqrt(2))) / 2
        self._factor = 1 / (u * below + 1)
        slope = below + u * math.exp(-u * u / 2) / math.sqrt(2 * math.pi)  # GELU'(u)
        self._coupling = -(self._factor**2) * slope / (clip * norm) if norm else 0.0

    def gradient(self) -> Tensors:
        return self._clipped

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        return smooth_clip(self._raw.gradient_at(x, create_graph, **entries), self._clip)

    def slopes_at(
        self,
        function: Callable[[Mapping[str, Tensor | Factors], Tensors], Tensor],
        xs: Tensor,
        extras: Tensors,
        *,
        factored: bool = False,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor, Tensors]:
        # Never in factors: all of it is scaled by its norm.
        def clipped(gradient: Any, extras: Tensors) -> Tensor:
            return function(smooth_clip(gradient, self._clip), extras)

        return self._raw.slopes_at(clipped, xs, extras, factored=False, **entries)

    def vjp(self, delta: Tensors) -> Tensor:
        gradient = self._raw.gradient()
        inner = sum(float((gradient[name] * tensor).sum()) for name, tensor in delta.items())
        # δ may leave parameters out, the part along g may not.
        part: Tensors = {name: self._coupling * inner * g for name, g in gradient.items()}
        return self._raw.vjp(
            part | {name: part[name] + self._factor * tensor for name, tensor in delta.items()}
        )

    def _jvps(self, directions: Tensor) -> Sequence[Tensor]:
        products = self._raw._jvps(directions)
        gradients = list(self._raw.gradient().values())
        inner = torch.stack(
            [(p * g).flatten(1).sum(1) for p, g in zip(products, gradients, strict=True)]
        ).sum(0)
        return [
            self._factor * p + self._coupling * inner.view(-1, *[1] * g.dim()) * g
            for p, g in zip(products, gradients, strict=True)
        ]


def _norm(gradient: Tensors) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in gradient.values()]).sum().sqrt()


def _checked(clip: float) -> float:
    if not 0 < clip < math.inf:
        raise ValueError(f"clip must be a finite number above 0, but is {clip!r}.")
    return clip
