"""What each sample adds to the gradient of a layer's parameters, kept in factors: its norm, and
sums over samples with a factor for each, without a gradient of every sample in memory.

References: Goodfellow, "Efficient Per-Example Gradient Computations" (2015); Li et al., "Large
Language Models Can Be Strong Differentially Private Learners" (2022), Section 4; Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost" (2023), for sums from what the
norms were computed of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import grad as layer_gradients

from ..differences.changes import LINEAR, Layer

if TYPE_CHECKING:
    from ..map import Tensors

ENTRIES = 2**24  # of several samples' gradients, written out at once


class Share(ABC):
    """What samples add to the gradient of some parameters."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared norms of what each adds, `(B,)` in float64, and never too small by rounding."""

    @abstractmethod
    def total(self, factors: Tensor) -> Tensors:
        """Σ_b factor_b · (what b adds), by parameter."""


class Written(Share):
    """Gradients of every sample, written out some at a time.

    Args:
        parts: Gives them from the first sample to the last: by parameter `(b, *shape)`.
    """

    def __init__(self, parts: Callable[[], Iterator[Tensors]]) -> None:
        self._parts = parts

    def squares(self) -> Tensor:
        found = [
            torch.stack([each.flatten(1).double().square().sum(1) for each in part.values()]).sum(0)
            for part in self._parts()
        ]
        return torch.cat(found)

    def total(self, factors: Tensor) -> Tensors:
        sums: Tensors = {}
        first = 0
        for part in self._parts():
            count = len(next(iter(part.values())))
            some = factors[first : first + count]
            for name, each in part.items():
                added = torch.tensordot(some.to(each.dtype), each, 1)
                sums[name] = sums[name] + added if name in sums else added
            first += count
        return sums


@dataclass
class OfLayer(Share):
    """A linear layer, a convolution or a layer normalization.

    Args:
        layer: Which.
        rows: Slopes and features of each of its calls, rows of samples as `Layer.rows` gives them,
            at least in float32.
    """

    layer: Layer
    rows: Sequence[tuple[Tensor, Tensor]]

    def squares(self) -> Tensor:
        squares: Tensor | float = 0.0
        if self.layer.bias is not None:
            bias = torch.stack([self.layer.bias_gradients(slopes) for slopes, _ in self.rows])
            squares = bias.sum(0).double().square().sum(1)
        if self.layer.weight is None:
            assert isinstance(squares, Tensor)
            return squares
        if isinstance(self.layer.module, LINEAR):
            slopes, features = self._joined()
            tokens, out, into = slopes.shape[1], slopes.shape[2], features.shape[2]
            if 2 * tokens**2 <= out * into:
                return squares + _ghost_squares(slopes, features)
        return squares + Written(self.written).squares()

    def total(self, factors: Tensor) -> Tensors:
        found: Tensors = {}
        for slopes, features in self.rows:
            scaled = slopes * factors.to(slopes.dtype).view(-1, *[1] * (slopes.dim() - 1))
            if self.layer.weight is not None:
                _add(found, self.layer.weight, self._weight(scaled, features))
            if self.layer.bias is not None:
                _add(found, self.layer.bias, self.layer.bias_gradients(scaled).sum(0))
        return found

    def _weight(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Of all samples together."""
        m: Any = self.layer.module
        if isinstance(m, LINEAR):
            slopes, features = slopes.flatten(0, 1)[None], features.flatten(0, 1)[None]
        if isinstance(m, (*LINEAR, nn.LayerNorm)):
            return self.layer.weight_gradients(slopes, features).sum(0)
        function = getattr(layer_gradients, f"conv{m.weight.dim() - 2}d_weight")
        found: Tensor = function(
            features, m.weight.shape, slopes, m.stride, m.padding, m.dilation, m.groups
        )
        return found

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Calls one after the other, as if the layer had had their tokens at once."""
        if len(self.rows) == 1:
            return self.rows[0]
        slopes, features = zip(*self.rows, strict=True)
        return torch.cat(slopes, 1), torch.cat(features, 1)

    def written(self) -> Iterator[Tensors]:
        """Samples' gradients of the weight, `(b, *shape)`, some samples at a time."""
        assert self.layer.weight is not None
        size = self.layer.module.weight.numel()  # type: ignore[operator]
        for some in _slices(len(self.rows[0][0]), size):
            parts = [self.layer.weight_gradients(s[some], f[some]) for s, f in self.rows]
            yield {self.layer.weight: torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]}


@dataclass
class OfTable(Share):
    """An embedding, whose rows each sample looks up by ids.

    Args:
        name: Of its weight.
        table: The weight.
        ids: `(B, T)`.
        slopes: `(B, T, H)`, zero where nothing is learned (the padding).
    """

    name: str
    table: Tensor
    ids: Tensor
    slopes: Tensor

    def squares(self) -> Tensor:
        found = []
        for ids, slopes in zip(self.ids, self.slopes, strict=True):
            used, places = ids.unique(return_inverse=True)
            rows = slopes.new_zeros(len(used), slopes.shape[-1]).index_add_(0, places, slopes)
            found.append(rows.double().square().sum())
        return torch.stack(found)

    def total(self, factors: Tensor) -> Tensors:
        scaled = (self.slopes * factors.to(self.slopes.dtype)[:, None, None]).flatten(0, 1)
        rows = self.slopes.new_zeros(self.table.shape).index_add_(0, self.ids.flatten(), scaled)
        return {self.name: rows}


def of_module(
    module: nn.Module, names: Mapping[str, str], calls: Sequence[tuple[Sequence[Any], Tensor]]
) -> Share:
    """A module of any kind that treats rows alike: each row's call is differentiated by itself,
    vectorized over rows.

    Args:
        module: Without random draws, and without side effects.
        names: Of its own parameters to what they are called in the model.
        calls: Arguments, tensors with a first dimension of samples, and slopes of the output.
    """
    held = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32))
            for n, p in module.named_parameters(recurse=False)}  # fmt: skip
    wanted = {own: held.pop(own) for own in names}

    def parts() -> Iterator[Tensors]:
        size = sum(p.numel() for p in wanted.values())
        for some in _slices(len(calls[0][1]), size):
            found: Tensors = {}
            for args, slopes in calls:
                each = _each_row(module, wanted, held, args, slopes, some)
                for own, value in each.items():
                    _add(found, names[own], value.to(slopes.dtype))
            yield found

    return Written(parts)


def _each_row(
    module: nn.Module, wanted: Tensors, held: Tensors, args: Sequence[Any], slopes: Tensor,
    some: slice,
) -> Tensors:  # fmt: skip
    tensors = [arg[some] for arg in args if isinstance(arg, Tensor)]

    def inner(parameters: Tensors, slope: Tensor, *rows: Tensor) -> Tensor:
        given = iter(rows)
        call = tuple(next(given)[None] if isinstance(arg, Tensor) else arg for arg in args)
        output = functional_call(module, {**held, **parameters}, call)
        return (output[0] * slope).sum()

    dims = (None, 0, *[0] * len(tensors))
    found: Tensors = vmap(grad(inner), in_dims=dims)(wanted, slopes[some], *tensors)
    return found


def _ghost_squares(slopes: Tensor, features: Tensor) -> Tensor:
    """‖Σ_t δ_t a_tᵀ‖² of every sample, from products of its tokens.

    Where tokens' products nearly cancel, rounding could make the sum too small: what it can be off
    by is added.
    """
    samples, tokens = slopes.shape[:2]
    found = []
    for some in _slices(samples, tokens**2):
        left, right = slopes[some], features[some]
        found.append(((left @ left.mT) * (right @ right.mT)).double().sum((1, 2)))
    sizes = (slopes.norm(dim=2) * features.norm(dim=2)).double().sum(1)
    return torch.cat(found).clamp(min=0) + torch.finfo(slopes.dtype).eps * sizes.square()


def _slices(samples: int, size: int) -> Iterator[slice]:
    several = max(1, ENTRIES // max(size, 1))
    return (slice(first, first + several) for first in range(0, samples, several))


def _add(found: Tensors, name: str, value: Tensor) -> None:
    found[name] = found[name] + value if name in found else value
