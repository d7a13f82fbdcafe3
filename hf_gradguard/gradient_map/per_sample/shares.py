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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import grad as layer_gradients

from ..layers import LINEAR, Layer
from ..types import Tensors
from .sums import ROW_ROUNDING, sum_of_rows

ENTRIES = 2**24  # of several samples' gradients, written out at once
CACHED_ENTRIES = 2**20  # likewise on a CPU, whose cache holds them: fresh memory takes longer


class Share(ABC):
    """What samples add to the gradient of some parameters."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared norms of what each adds, `(B,)` in float64, and never too small by rounding."""

    @abstractmethod
    def total(self, factors: Tensor) -> Tensors:
        """Σ_b factor_b · (what b adds), by parameter."""

    @abstractmethod
    def without(self, left_out: Tensor) -> Share:
        """The same, where some samples, `(B,)` bools, add zeros: what they hold may be no number,
        which no factor of zero would take away.
        """

    @abstractmethod
    def inner(self, message: Mapping[str, Tensor]) -> Tensors:
        """Inner products of what each adds with a message's tensor, `(B,)` in float64 by parameter;
        of those that the message has.
        """

    @abstractmethod
    def squares_of(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Σ_i W_i g_i² of what each adds, `(B,)` in float64 by parameter.

        Args:
            weights: W by parameter, in its shape or one number; 1 where there is none.
        """


class Written(Share):
    """Gradients of every sample, written out some at a time.

    Args:
        write_gradients: Gives them from the first sample to the last: by parameter `(b, *shape)`.
    """

    def __init__(self, write_gradients: Callable[[], Iterator[Tensors]]) -> None:
        self._write_gradients = write_gradients

    def squares(self) -> Tensor:
        squares = [
            torch.stack(
                [gradients.flatten(1).double().square().sum(1) for gradients in chunk.values()]
            ).sum(0)
            for chunk in self._write_gradients()
        ]
        return torch.cat(squares)

    def total(self, factors: Tensor) -> Tensors:
        sums: Tensors = {}
        types: dict[str, torch.dtype] = {}
        start = 0
        for chunk in self._write_gradients():
            count = len(next(iter(chunk.values())))
            chunk_factors = factors[start : start + count]
            for name, gradients in chunk.items():
                added = _weighted(chunk_factors.to(gradients.dtype), gradients)
                sums[name] = sums[name] + added if name in sums else added.double()
                types[name] = added.dtype
            start += count
        return {name: total.to(types[name]) for name, total in sums.items()}

    def without(self, left_out: Tensor) -> Share:
        def write_gradients() -> Iterator[Tensors]:
            start = 0
            for chunk in self._write_gradients():
                count = len(next(iter(chunk.values())))
                rows = left_out[start : start + count]
                yield {name: _zeroed(gradients, rows) for name, gradients in chunk.items()}
                start += count

        return Written(write_gradients)

    def inner(self, message: Mapping[str, Tensor]) -> Tensors:
        products: dict[str, list[Tensor]] = {}
        for chunk in self._write_gradients():
            for name, gradients in chunk.items():
                if name in message:
                    target = message[name].flatten().to(gradients)
                    products.setdefault(name, []).append(gradients.flatten(1) @ target)
        return {name: torch.cat(chunks).double() for name, chunks in products.items()}

    def squares_of(self, weights: Mapping[str, Tensor]) -> Tensors:
        squares: dict[str, list[Tensor]] = {}
        for chunk in self._write_gradients():
            for name, gradients in chunk.items():
                square = gradients.flatten(1).square()
                if name in weights:
                    square *= weights[name].flatten().to(square)
                # Pairwise sums are exact enough in float32. Float64 would copy all entries first.
                squares.setdefault(name, []).append(square.sum(1))
        return {name: torch.cat(chunks).double() for name, chunks in squares.items()}


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
            # Two T × T products, or one weight written out: whatever is smaller.
            if 2 * tokens**2 <= out * into:
                return squares + ghost_squares(slopes, features)
        return squares + Written(self.written).squares() + self._rounding().square()

    def _rounding(self) -> Tensor:
        """How far tokens that cancel may leave a weight's gradient off zero, `(B,)`: sums over one
        sample's tokens, and over all samples', are rounded in different orders. A sample that was
        clipped by what is left in one could add more than its bound in the other.
        """
        m: Any = self.layer.module
        if isinstance(m, nn.LayerNorm):  # whose sums are of one sample in both
            return self.rows[0][0].new_zeros(len(self.rows[0][0]), dtype=torch.float64)
        covered = 1 if isinstance(m, LINEAR) else m.weight[0, 0].numel()
        sizes = [s.flatten(1).norm(dim=1) * f.flatten(1).norm(dim=1) for s, f in self.rows]
        precision = torch.finfo(sizes[0].dtype).eps / torch.finfo(torch.float32).eps
        return torch.stack(sizes).sum(0).double() * (ROW_ROUNDING * precision * covered**0.5)

    def total(self, factors: Tensor) -> Tensors:
        totals: Tensors = {}
        for slopes, features in self.rows:
            if self.layer.bias is not None:
                gradients = self.layer.bias_gradients(slopes)
                _add(totals, self.layer.bias, _exactly_weighted(factors, gradients))
            if self.layer.weight is None:
                continue
            if isinstance(self.layer.module, nn.LayerNorm):
                gradients = self.layer.weight_gradients(slopes, features)
                _add(totals, self.layer.weight, _exactly_weighted(factors, gradients))
            else:
                scaled = slopes * factors.to(slopes.dtype).view(-1, *[1] * (slopes.dim() - 1))
                _add(totals, self.layer.weight, self._weight(scaled, features))
        return totals

    def without(self, left_out: Tensor) -> Share:
        rows = [(_zeroed(slopes, left_out), _zeroed(f, left_out)) for slopes, f in self.rows]
        return replace(self, rows=rows)

    def inner(self, message: Mapping[str, Tensor]) -> Tensors:
        products = self._bias().inner(message)
        name = self.layer.weight
        if name is None or name not in message:
            return products
        products[name] = torch.zeros(len(self.rows[0][0]), dtype=torch.float64)
        for slopes, features in self.rows:
            outputs = self._apply(message[name].to(features), features)
            # A row is short enough for float32. All entries in float64 would be copied first.
            by_sample = (outputs * slopes).sum(-1).flatten(1).sum(1, dtype=torch.float64)
            products[name] = products[name].to(by_sample) + by_sample
        return products

    def _apply(self, weight: Tensor, features: Tensor) -> Tensor:
        """What the layer would give back without a bias if this were its weight: its inner product
        with slopes is that of the weight with the gradient.
        """
        m: Any = self.layer.module
        if isinstance(m, nn.LayerNorm):
            return features * weight
        if isinstance(m, LINEAR):
            return features @ (weight.T if isinstance(m, nn.Linear) else weight)
        convolve = getattr(nn.functional, f"conv{m.weight.dim() - 2}d")
        outputs: Tensor = convolve(
            features, weight, None, m.stride, m.padding, m.dilation, m.groups
        )
        return outputs

    def squares_of(self, weights: Mapping[str, Tensor]) -> Tensors:
        squares, name = self._bias().squares_of(weights), self.layer.weight
        if name is None:
            return squares
        weight = weights.get(name, torch.ones(()))
        if isinstance(self.layer.module, LINEAR) and weight.numel() == 1:
            slopes, features = self._joined()
            if 2 * slopes.shape[1] ** 2 <= slopes.shape[2] * features.shape[2]:
                ghost = ghost_squares(slopes, features, bounds=False)
                return squares | {name: ghost * weight.to(ghost)}
        return squares | Written(self.written).squares_of(weights)

    def _bias(self) -> Written:
        """Samples' gradients of the bias, if that is shared."""
        if self.layer.bias is None:
            return Written(lambda: iter(()))
        gradients = torch.stack([self.layer.bias_gradients(slopes) for slopes, _ in self.rows])
        written = {self.layer.bias: gradients.sum(0)}
        return Written(lambda: iter([written]))

    def _weight(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Of all samples together."""
        m: Any = self.layer.module

        def product(rows: slice) -> Tensor:
            tokens = slopes[rows].flatten(0, 1)[None], features[rows].flatten(0, 1)[None]
            return self.layer.weight_gradients(*tokens)[0]

        def convolution(rows: slice) -> Tensor:
            function = getattr(layer_gradients, f"conv{m.weight.dim() - 2}d_weight")
            gradient: Tensor = function(
                features[rows], m.weight.shape, slopes[rows],
                m.stride, m.padding, m.dilation, m.groups,
            )  # fmt: skip
            return gradient

        return sum_of_rows(len(slopes), product if isinstance(m, LINEAR) else convolution)

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
        for chosen in _slices(self.rows[0][0], size):
            gradients = [self.layer.weight_gradients(s[chosen], f[chosen]) for s, f in self.rows]
            yield {
                self.layer.weight: torch.stack(gradients).sum(0)
                if len(gradients) > 1
                else gradients[0]
            }


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
        samples, _, rows = self._by_sample()
        return self._added(samples, rows.square().sum(1))

    def total(self, factors: Tensor) -> Tensors:
        scaled = self.slopes.double() * factors.double()[:, None, None]
        used, rows = self._looked_up(self.ids, scaled.flatten(0, 1))
        total = self.slopes.new_zeros(self.table.shape)
        return {self.name: total.index_copy_(0, used, rows.to(total.dtype))}

    def without(self, left_out: Tensor) -> Share:
        return replace(self, slopes=_zeroed(self.slopes, left_out))

    def inner(self, message: Mapping[str, Tensor]) -> Tensors:
        if self.name not in message:
            return {}
        products = message[self.name].to(self.slopes)[self.ids] * self.slopes
        return {self.name: products.flatten(1).sum(1, dtype=torch.float64)}

    def squares_of(self, weights: Mapping[str, Tensor]) -> Tensors:
        weight = weights.get(self.name, torch.ones(()))
        if weight.numel() == 1:
            squares = self.squares()
            return {self.name: squares * weight.to(squares)}
        samples, used, rows = self._by_sample()
        weighed = rows.square() * weight.to(rows)[used]
        return {self.name: self._added(samples, weighed.sum(1))}

    def _by_sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Samples, the rows that they look up, and what each adds to them."""
        words = len(self.table)
        samples = torch.arange(len(self.ids), device=self.ids.device)
        keys, rows = self._looked_up(
            self.ids + words * samples[:, None], self.slopes.double().flatten(0, 1)
        )
        return keys // words, keys % words, rows

    def _added(self, samples: Tensor, squares: Tensor) -> Tensor:
        """What each sample's rows add up to."""
        return squares.new_zeros(len(self.ids)).index_add_(0, samples, squares)

    def _looked_up(self, ids: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are looked up, and their gradients: of a word that comes twice the slopes add
        up.
        """
        used, places = ids.unique(return_inverse=True)
        rows = slopes.new_zeros(len(used), slopes.shape[-1]).index_add_(0, places.flatten(), slopes)
        return used, rows


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
    fixed = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32))
            for n, p in module.named_parameters(recurse=False)}  # fmt: skip
    shared = {local_name: fixed.pop(local_name) for local_name in names}

    def write_gradients() -> Iterator[Tensors]:
        size = sum(p.numel() for p in shared.values())
        for chosen in _slices(calls[0][1], size):
            gradients: Tensors = {}
            for args, slopes in calls:
                row_gradients = _each_row(module, shared, fixed, args, slopes, chosen)
                for local_name, value in row_gradients.items():
                    _add(gradients, names[local_name], value.to(slopes.dtype))
            yield gradients

    return Written(write_gradients)


def _each_row(
    module: nn.Module, shared: Tensors, fixed: Tensors, args: Sequence[Any], slopes: Tensor,
    chosen: slice,
) -> Tensors:  # fmt: skip
    tensors = [arg[chosen] for arg in args if isinstance(arg, Tensor)]

    def inner(parameters: Tensors, slope: Tensor, *rows: Tensor) -> Tensor:
        row_tensors = iter(rows)
        call = tuple(next(row_tensors)[None] if isinstance(arg, Tensor) else arg for arg in args)
        output = functional_call(module, {**fixed, **parameters}, call)
        return (output[0] * slope).sum()

    dims = (None, 0, *[0] * len(tensors))
    gradients: Tensors = vmap(grad(inner), in_dims=dims)(shared, slopes[chosen], *tensors)
    return gradients


def ghost_squares(slopes: Tensor, features: Tensor, bounds: bool = True) -> Tensor:
    """‖Σ_t δ_t a_tᵀ‖² of every sample, from products of its tokens.

    Where tokens' products nearly cancel, rounding could make the sum too small: what it can be off
    by is added, if the sum is to bound the norm.
    """
    squares = []
    for chosen in _slices(slopes, slopes.shape[1] ** 2):
        left_rows, right_rows = slopes[chosen], features[chosen]
        squares.append(
            ((left_rows @ left_rows.mT) * (right_rows @ right_rows.mT)).double().sum((1, 2))
        )
    if not bounds:
        return torch.cat(squares).clamp(min=0)
    sizes = (slopes.norm(dim=2) * features.norm(dim=2)).double().sum(1)
    return torch.cat(squares).clamp(min=0) + torch.finfo(slopes.dtype).eps * sizes.square()


def _weighted(factors: Tensor, gradients: Tensor) -> Tensor:
    """Σ_b factor_b g_b of gradients that are written out."""
    return sum_of_rows(
        len(gradients), lambda rows: torch.tensordot(factors[rows], gradients[rows], 1)
    )


def _exactly_weighted(factors: Tensor, gradients: Tensor) -> Tensor:
    """The same of short ones, from the very numbers that norms were computed of."""
    return torch.tensordot(factors.double(), gradients.double(), 1).to(gradients.dtype)


def _slices(samples: Tensor, size: int) -> Iterator[slice]:
    """So many samples at once, if each takes so many entries."""
    entries = CACHED_ENTRIES if samples.device.type == "cpu" else ENTRIES
    at_once = max(1, entries // max(size, 1))
    return (slice(start, start + at_once) for start in range(0, len(samples), at_once))


def _zeroed(rows: Tensor, left_out: Tensor) -> Tensor:
    """Rows of samples `(B, ...)`, of which some are zeros."""
    return rows.masked_fill(left_out.view(-1, *[1] * (rows.dim() - 1)), 0)


def _add(totals: Tensors, name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value
