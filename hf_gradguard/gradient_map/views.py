"""Maps of another gradient: clipped smoothly, or computed elsewhere, without the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .map import GradientMap, View
from .types import Tensors
from .vectorized import Factors

SMOOTH_CLIP_NORM = 1.115
"""The largest norm that a smoothly clipped gradient can have, in units of C."""


class ClippedMap(View):
    """The map x ↦ g̃(x) of smoothly clipped gradients (see `smooth_clip`), of one sample.

    J̃ = J D with D = φ I + (φ'/n) g gᵀ, which is symmetric: apply D before J, and after Jᵀ.

    Args:
        base: A map that differentiates twice, of a batch of one.
        clip: C > 0.

    Raises:
        ValueError: If the batch holds several samples, or `clip` is not above 0.
    """

    is_clipped = True

    def __init__(self, base: GradientMap, clip: float) -> None:
        super().__init__(base)
        if len(base.input) != 1:
            raise ValueError(
                f"Clipping is per sample, but this map's batch holds {len(base.input)}. Make one "
                "GradientMap per sample."
            )
        gradient = base.gradient()
        self._clip, self._clipped = clip, smooth_clip(gradient, clip)
        norm = float(_norm(gradient))
        u = norm / clip - 1
        below = (1 + math.erf(u / math.sqrt(2))) / 2
        self._factor = 1 / (u * below + 1)
        slope = below + u * math.exp(-u * u / 2) / math.sqrt(2 * math.pi)  # GELU'(u)
        self._coupling = -(self._factor**2) * slope / (clip * norm) if norm else 0.0

    def gradient(self) -> Tensors:
        return self._clipped

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        return smooth_clip(self.base.gradient_at(x, create_graph, **entries), self._clip)

    def slopes_at(
        self,
        function: Callable[[Mapping[str, Tensor | Factors], Tensors], Tensor],
        xs: Tensor,
        extras: Tensors,
        *,
        factored: bool = False,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor, Tensors]:
        # Never in factors: all of a gradient is scaled by its norm.
        def clipped(gradient: Any, extras: Tensors) -> Tensor:
            return function(smooth_clip(gradient, self._clip), extras)

        return self.base.slopes_at(clipped, xs, extras, factored=False, **entries)

    def vjp(self, delta: Tensors) -> Tensor:
        gradient = self.base.gradient()
        inner = sum(float((gradient[name] * tensor).sum()) for name, tensor in delta.items())
        # δ may leave parameters out, the part along g may not.
        along_gradient: Tensors = {name: self._coupling * inner * g for name, g in gradient.items()}
        return self.base.vjp(
            along_gradient
            | {name: along_gradient[name] + self._factor * tensor for name, tensor in delta.items()}
        )

    def twice(self) -> GradientMap:
        return self

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        products = self.base.jvps(directions)
        gradients = list(self.base.gradient().values())
        inner = torch.stack(
            [(p * g).flatten(1).sum(1) for p, g in zip(products, gradients, strict=True)]
        ).sum(0)
        return [
            self._factor * p + self._coupling * inner.view(-1, *[1] * g.dim()) * g
            for p, g in zip(products, gradients, strict=True)
        ]


def smooth_clip(gradient: Tensors, clip: float) -> Tensors:
    """Clip a sample's gradient smoothly, so that the result still has a Jacobian everywhere.

        g̃ = g φ(‖g‖),   φ(n) = 1 / (GELU(n/C - 1) + 1),   ‖g̃‖ ≤ 1.115 C

    Reference: Guo et al. (2022), Algorithm 1 and Section 6.2.

        g̃ = g φ(‖g‖),   φ(n) = 1 / (GELU(n/C - 1) + 1),   ‖g̃‖ ≤ 1.115 C

    Reference: Guo et al. (2022), Algorithm 1 and Section 6.2.

    Args:
        gradient: One tensor per shared parameter.
        clip: C > 0.

    Raises:
        ValueError: If `clip` is not above 0.

    Example:
        >>> clipped = smooth_clip({"weight": torch.full((4,), 10.0)}, clip=1.0)
        >>> bool(clipped["weight"].norm() <= 1.115)
        True
    """
    if not 0 < clip < math.inf:
        raise ValueError(f"clip must be a finite number above 0, but is {clip!r}.")
    factor = 1 / (torch.nn.functional.gelu(_norm(gradient) / clip - 1) + 1)
    return {name: tensor * factor.to(tensor.dtype) for name, tensor in gradient.items()}


def smoothly_clipped(gmap: GradientMap, clip: float) -> GradientMap:
    """Return the map x ↦ g̃(x) of smoothly clipped gradients, for every estimator.

    Its `gradient`, `gradient_at`, `jvp`, `vjp` and sensitivities are those of g̃. Private SGD clips
    each sample's gradient, so the map must be of one sample. With noise σC on the *sum* of a batch,
    dFIL of a sample is `dfil(smoothly_clipped(gmap, C), noise_variance=(σ * C) ** 2)`; the paper's
    Eq. 1 leaves C out.

    Args:
        gmap: A map that differentiates twice, of a batch of one.
        clip: C > 0.

    Raises:
        ValueError: If the batch holds several samples, or `clip` is not above 0.

    Example:
        >>> one = GradientMap(model, {name: entry[:1] for name, entry in batch.items()})
        >>> smoothly_clipped(one, clip=1.0).gradient().keys() == one.gradient().keys()
        True
    """
    return ClippedMap(gmap, clip)


def _norm(gradient: Tensors) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in gradient.values()]).sum().sqrt()


class PrecomputedGradient(GradientMap):
    """A map of tensors that somebody else computed: their values, without the data behind them.

    Defenses of values work on it (noise of one size, clipping, pruning by size, quantization). What
    asks for the data, as sensitivities do, is refused.

    Args:
        tensors: The tensors by name.

    Example:
        >>> given = PrecomputedGradient({"w": torch.tensor([3.0, 0.1])})
        >>> make_defense("pruning", ratio=0.5)(given)["w"]
        tensor([3., 0.])
        >>> make_defense("optimal_noise", scale=0.1)(given)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: This defense asks for the client's data...
    """

    _why = (
        "here only the outcome of its training is known. Take gaussian_noise, dp_sgd, pruning or "
        "quantization, or protect where the data is, by protect_update"
    )

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._gradient = dict(tensors)
        self.model: Any = _Unknown(self._why)
        self.replay: Any = _Unknown(self._why)

    def versions(self) -> dict[str, int]:
        if self._base is not None:
            return super().versions()
        return {f"the update of {name!r}": t._version for name, t in self.gradient().items()}

    @property
    def undefended(self) -> GradientMap:
        _refuse("undefended", self._why)

    @property
    def input(self) -> Tensor:
        _refuse("input", self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name, self._why)


class ZeroGradient(PrecomputedGradient):
    """A map of a batch in which nothing counts: a gradient of zeros, and no data behind it.

    Args:
        parameters: The shared parameters, by name.

    Example:
        >>> alone = ZeroGradient({"w": torch.ones(1000)})
        >>> 0.4 < float(make_defense("gaussian_noise", scale=0.5)(alone)["w"].std()) < 0.6
        True
    """

    _why = (
        "a batch in which nothing counts has none. Let its `protect` do without, or filter rows "
        "without labels"
    )

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__({name: torch.zeros_like(p.detach()) for name, p in parameters.items()})


class _Unknown:
    """In the place of a model that is not there."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name, self._why)


def _refuse(attribute: str, why: str) -> NoReturn:
    raise RuntimeError(f"This defense asks for the client's data ({attribute}), and {why}.")
