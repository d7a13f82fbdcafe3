"""Contributions of samples to the gradients of a model's layers.

A layer's gradient is a sum over samples of products of what went into the layer (its features a)
with the loss's derivative by what came out (its slopes δ). One pass that listens to layers so knows
every sample's contribution in factors: its norm, and sums over samples with a factor for each,
without a gradient of every sample in memory.

References: Goodfellow, "Efficient Per-Example Gradient Computations" (2015); Li et al., "Large
Language Models Can Be Strong Differentially Private Learners" (2022), Section 4; Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost" (2023), for sums from what the
norms were computed of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vmap
from torch.func import grad as gradient_function
from torch.nn import grad as layer_gradients
from transformers.pytorch_utils import Conv1D

from .nonsmooth import ActivationPattern
from .replay import differentiate, hooked
from .types import ClientMap, Tensors

LINEAR, CONVOLUTIONS = (nn.Linear, Conv1D), (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LONG_ROW = 8  # of patches of images
ENTRIES = 2**24  # of several samples' gradients, written out at once
CACHED_ENTRIES = 2**20  # likewise on a CPU, whose cache holds them: fresh memory takes longer
ROW_ROUNDING = 2.0**-17
"""How much of its clipping bound what a row adds may follow what stands beside it, by what float32
rounds: 128 roundings. docs/differential_privacy.md has what was measured.
"""
AT_ONCE = 64
"""Rows that are added up in their own precision. The sums of so many are added up in float64."""


@dataclass(frozen=True)
class Layer:
    """A layer whose gradient is a sum of samples' products.

    Args:
        module: A linear layer, a convolution or a layer normalization.
        weight: The name of its weight, if that is shared.
        bias: The name of its bias, if that is shared.
    """

    module: nn.Module
    weight: str | None
    bias: str | None

    def features(self, entered: Tensor) -> Tensor:
        """Return what slopes are multiplied with to give the weight's gradient."""
        m = self.module
        if isinstance(m, nn.LayerNorm):
            return nn.functional.layer_norm(entered, m.normalized_shape, eps=m.eps)
        return entered

    def rows(self, tensor: Tensor, samples: int) -> Tensor | None:
        """Return features or slopes with a first dimension of samples, or `None`.

        They are `(B, T, F)`, for a convolution `(B, F, …)`. The result is `None` if the first
        dimension is something else.
        """
        if isinstance(self.module, CONVOLUTIONS):
            return tensor if len(tensor) == samples and tensor.dim() > 2 else None
        if tensor.dim() < 2 or len(tensor) % samples:
            return None
        return tensor.reshape(samples, -1, tensor.shape[-1])

    def weight_gradients(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Return the weight's gradients `(B, *weight.shape)` from rows of slopes and features."""
        m: Any = self.module
        if isinstance(m, nn.LayerNorm):
            return (slopes * features).sum(1)
        size, samples = m.weight.shape, len(slopes)
        if self.is_product:
            left_factor, right_factor = self.factors(slopes, features)
            return (left_factor.mT @ right_factor).view(samples, *size)
        # A group of channels for each sample keeps samples apart.
        function = getattr(layer_gradients, f"conv{len(size) - 2}d_weight")
        gradients: Tensor = function(
            features.flatten(0, 1)[None],
            (samples * size[0], *size[1:]),
            slopes.flatten(0, 1)[None],
            m.stride, m.padding, m.dilation, m.groups * samples,
        )  # fmt: skip
        return gradients.view(samples, *size)

    @property
    def is_product(self) -> bool:
        """Whether a sample's weight gradient is one product of matrices."""
        m = self.module
        return isinstance(m, LINEAR) or (isinstance(m, nn.Conv2d) and m.groups == 1)

    def factors(self, slopes: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the weight's gradient, `(B, n, rows)` and `(B, n, columns)`.

        They are made of rows of slopes and features.
        """
        m: Any = self.module
        if isinstance(self.module, nn.Conv2d):  # what the kernel covers at each of n places
            return slopes.flatten(2).mT, _patches(features, self.module).mT
        # Conv1D is (in, out), where nn.Linear has (out, in).
        return (features, slopes) if isinstance(m, Conv1D) else (slopes, features)

    def bias_gradients(self, slopes: Tensor) -> Tensor:
        """Return the bias's gradients `(B, *bias.shape)` from rows of slopes."""
        if isinstance(self.module, CONVOLUTIONS):
            return slopes.flatten(2).sum(2)
        return slopes.sum(1)


def _patches(features: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Return the features that each place of the kernel covers, `(B, covered entries, places)`.

    Long rows of places are copied, in a seventh of `unfold`'s time.
    """
    m: Any = convolution
    windows = features
    if any(m.padding):
        windows = nn.functional.pad(features, (m.padding[1],) * 2 + (m.padding[0],) * 2)
    for dimension in (0, 1):
        extent = m.dilation[dimension] * (m.kernel_size[dimension] - 1) + 1
        windows = windows.unfold(2 + dimension, extent, m.stride[dimension])
    if windows.shape[3] < _LONG_ROW:
        return nn.functional.unfold(features, m.kernel_size, m.dilation, m.padding, m.stride)
    windows = windows[..., :: m.dilation[0], :: m.dilation[1]]
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)


def layers_of(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Layer]:
    """Return the layers with shared parameters that no other module holds, by modules' names."""
    names = {parameter: name for name, parameter in parameters.items()}
    modules = dict(model.named_modules())
    holders = Counter(p for m in modules.values() for p in m.parameters(recurse=False))
    layers = {}
    for name, module in modules.items():
        if type(module) not in (*LINEAR, *CONVOLUTIONS, nn.LayerNorm):
            continue
        plain = getattr(module, "padding_mode", "zeros") == "zeros"
        if not plain or isinstance(getattr(module, "padding", None), str):
            continue
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            continue
        weight, bias = (
            names.get(p) if p is not None and holders[p] == 1 else None
            for p in (module.weight, module.bias)
        )
        if weight or bias:
            layers[name] = Layer(module, weight, bias)
    return layers


@dataclass
class Pass:
    """One evaluation of a map: layers' inputs, the loss's slopes there, and other gradients.

    With layers it also has the loss and its slope at the input. If derivatives jump, it also has
    the activation pattern, for passes that keep it.
    """

    layers: Mapping[str, Layer]
    features: dict[str, list[Tensor]] = field(default_factory=dict)
    slopes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    unsplit: Tensors = field(default_factory=dict)
    loss: Tensor | None = None
    slope: Tensor | None = None
    pattern: ActivationPattern | None = None

    @classmethod
    def evaluate(
        cls,
        gmap: ClientMap,
        x: Tensor,
        layers: Mapping[str, Layer],
        pattern: ActivationPattern | None = None,
        needs_slope: bool = True,
    ) -> Pass:
        """Evaluate a map at an input x, with the map's own random draws.

        If an activation pattern is given, it is kept. Without `needs_slope` the backward pass ends
        at the layers' outputs.
        """
        evaluated = cls(layers, pattern=pattern)
        if not layers:
            with gmap.replay.full_precision(), evaluated.pattern_kept():
                evaluated.unsplit = gmap.gradient_at(x.detach())
            return evaluated
        split = {name for layer in layers.values() for name in (layer.weight, layer.bias)}
        unsplit = {name: p for name, p in gmap.parameters.items() if name not in split}
        outputs: list[GradientEdge] = []
        with gmap.replay.run(), gmap.replay.full_precision():
            x = x.detach().requires_grad_()
            with evaluated.listening(outputs), evaluated.pattern_kept():
                loss = gmap.evaluate(x)
            leaves = {**unsplit, "": x} if needs_slope or not outputs else unsplit
            evaluated.unsplit = differentiate(loss, leaves, outputs)
        evaluated.loss, evaluated.slope = loss.detach(), evaluated.unsplit.pop("", None)
        return evaluated

    def pattern_kept(self) -> AbstractContextManager[None]:
        """Keep units on the sides that they have in this pass, which the first one notes."""
        return nullcontext() if self.pattern is None else self.pattern.kept()

    def rows(
        self, name: str, samples: int, calls: Collection[int] | None = None
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return slopes and features of each call of a layer that reached the loss.

        `calls` selects some calls. They are rows of samples; `None` if the layer does not separate
        samples.
        """
        layer, rows = self.layers[name], []
        for number, features in enumerate(self.features.get(name, [])):
            slopes = self.slopes[name].get(number)
            if slopes is None or (calls is not None and number not in calls):
                continue
            pair = layer.rows(slopes, samples), layer.rows(features, samples)
            if pair[0] is None or pair[1] is None:
                return None
            rows.append((pair[0], pair[1]))
        return rows

    @contextmanager
    def listening(self, outputs: list[GradientEdge] | None = None) -> Iterator[None]:
        """Record what layers take in, where in the graph they put it out, and then their slopes."""
        with hooked(
            layer.module.register_forward_hook(self._hook(name, layer, outputs), prepend=True)
            for name, layer in self.layers.items()
        ):
            yield

    def _hook(self, name: str, layer: Layer, outputs: list[GradientEdge] | None) -> Any:
        def called(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            calls = self.features.setdefault(name, [])
            slopes, number = self.slopes.setdefault(name, {}), len(calls)
            calls.append(layer.features(args[0].detach()))
            if output.requires_grad:
                output.register_hook(lambda slope: slopes.__setitem__(number, slope))
                if outputs is not None:
                    outputs.append(get_gradient_edge(output))

        return called


class Contribution(ABC):
    """A contribution holds what samples add to the gradient of some parameters."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return squared norms of what each adds, `(B,)` in float64, by rounding never less."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensors:
        """Return Σ_b factor_b · (what b adds), by parameter."""

    @abstractmethod
    def with_zeros(self, left_out: Tensor) -> Contribution:
        """Return the same, where some samples add zeros.

        What they hold may be no number, which no factor of zero would take away.

        Args:
            left_out: Which samples, `(B,)` bools.
        """

    @abstractmethod
    def inner_products(self, message: Mapping[str, Tensor]) -> Tensors:
        """Return inner products of what each adds with a message's tensor, `(B,)` in float64.

        Args:
            message: The message's tensors, by parameter. A parameter that it lacks has no product.
        """

    @abstractmethod
    def weighted_squares(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Return Σ_i W_i g_i² of what each adds, `(B,)` in float64 by parameter.

        Args:
            weights: W by parameter, in its shape or one number; 1 where there is none.
        """


class WrittenContribution(Contribution):
    """Gradients of every sample, written out some at a time.

    Args:
        write_gradients: The function that yields gradients of b samples at a time, `(b, *shape)` by
            parameter, from the first sample to the last.
    """

    def __init__(self, write_gradients: Callable[[], Iterator[Tensors]]) -> None:
        self._write_gradients = write_gradients

    def squared_norms(self) -> Tensor:
        squares = [
            torch.stack(
                [gradients.flatten(1).double().square().sum(1) for gradients in chunk.values()]
            ).sum(0)
            for chunk in self._write_gradients()
        ]
        return torch.cat(squares)

    def weighted_sum(self, factors: Tensor) -> Tensors:
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

    def with_zeros(self, left_out: Tensor) -> Contribution:
        def write_gradients() -> Iterator[Tensors]:
            start = 0
            for chunk in self._write_gradients():
                count = len(next(iter(chunk.values())))
                rows = left_out[start : start + count]
                yield {name: _zeroed(gradients, rows) for name, gradients in chunk.items()}
                start += count

        return WrittenContribution(write_gradients)

    def inner_products(self, message: Mapping[str, Tensor]) -> Tensors:
        products: dict[str, list[Tensor]] = {}
        for chunk in self._write_gradients():
            for name, gradients in chunk.items():
                if name in message:
                    target = message[name].flatten().to(gradients)
                    products.setdefault(name, []).append(gradients.flatten(1) @ target)
        return {name: torch.cat(chunks).double() for name, chunks in products.items()}

    def weighted_squares(self, weights: Mapping[str, Tensor]) -> Tensors:
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
class LayerContribution(Contribution):
    """A linear layer, a convolution or a layer normalization.

    Args:
        layer: Which.
        rows: Slopes and features of each of its calls, rows of samples as `Layer.rows` gives them,
            at least in float32.
    """

    layer: Layer
    rows: Sequence[tuple[Tensor, Tensor]]

    def squared_norms(self) -> Tensor:
        squares: Tensor | float = 0.0
        if self.layer.bias is not None:
            bias = torch.stack([self.layer.bias_gradients(slopes) for slopes, _ in self.rows])
            squares = bias.sum(0).double().square().sum(1)
        if self.layer.weight is None:
            assert isinstance(squares, Tensor)
            return squares
        if isinstance(self.layer.module, LINEAR):
            slopes, features = self.joined()
            tokens, out, into = slopes.shape[1], slopes.shape[2], features.shape[2]
            # Two T × T products, or one weight written out: whatever is smaller.
            if 2 * tokens**2 <= out * into:
                return squares + ghost_squares(slopes, features)
        squares = squares + WrittenContribution(self.written).squared_norms()
        return squares + self._rounding().square()

    def _rounding(self) -> Tensor:
        """Bound how far tokens that cancel may leave a weight's gradient off zero, `(B,)`.

        Sums over one sample's tokens, and over all samples', are rounded in different orders. A
        sample that was clipped by what is left in one could add more than its bound in the other.
        """
        m: Any = self.layer.module
        if isinstance(m, nn.LayerNorm):  # whose sums are of one sample in both
            return self.rows[0][0].new_zeros(len(self.rows[0][0]), dtype=torch.float64)
        covered = 1 if isinstance(m, LINEAR) else m.weight[0, 0].numel()
        sizes = [s.flatten(1).norm(dim=1) * f.flatten(1).norm(dim=1) for s, f in self.rows]
        precision = torch.finfo(sizes[0].dtype).eps / torch.finfo(torch.float32).eps
        return torch.stack(sizes).sum(0).double() * (ROW_ROUNDING * precision * covered**0.5)

    def weighted_sum(self, factors: Tensor) -> Tensors:
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

    def with_zeros(self, left_out: Tensor) -> Contribution:
        rows = [(_zeroed(slopes, left_out), _zeroed(f, left_out)) for slopes, f in self.rows]
        return replace(self, rows=rows)

    def inner_products(self, message: Mapping[str, Tensor]) -> Tensors:
        products = self._bias().inner_products(message)
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
        """Return what the layer would give back without a bias if this were its weight.

        Its inner product with slopes is that of the weight with the gradient.
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

    def weighted_squares(self, weights: Mapping[str, Tensor]) -> Tensors:
        squares, name = self._bias().weighted_squares(weights), self.layer.weight
        if name is None:
            return squares
        weight = weights.get(name, torch.ones(()))
        if isinstance(self.layer.module, LINEAR) and weight.numel() == 1:
            slopes, features = self.joined()
            if 2 * slopes.shape[1] ** 2 <= slopes.shape[2] * features.shape[2]:
                ghost = ghost_squares(slopes, features, bounds=False)
                return squares | {name: ghost * weight.to(ghost)}
        return squares | WrittenContribution(self.written).weighted_squares(weights)

    def _bias(self) -> WrittenContribution:
        """Samples' gradients of the bias, if that is shared."""
        if self.layer.bias is None:
            return WrittenContribution(lambda: iter(()))
        gradients = torch.stack([self.layer.bias_gradients(slopes) for slopes, _ in self.rows])
        written = {self.layer.bias: gradients.sum(0)}
        return WrittenContribution(lambda: iter([written]))

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

    def joined(self) -> tuple[Tensor, Tensor]:
        """Stack calls one after the other, as if the layer had had their tokens at once."""
        if len(self.rows) == 1:
            return self.rows[0]
        slopes, features = zip(*self.rows, strict=True)
        return torch.cat(slopes, 1), torch.cat(features, 1)

    def written(self) -> Iterator[Tensors]:
        """Return samples' gradients of the weight, `(b, *shape)`, some samples at a time."""
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
class TableContribution(Contribution):
    """An embedding, whose rows each sample looks up by ids.

    Args:
        name: The name of the table's weight.
        table: The weight.
        ids: `(B, T)`.
        slopes: `(B, T, H)`, zero where nothing is learned (the padding).
    """

    name: str
    table: Tensor
    ids: Tensor
    slopes: Tensor

    def squared_norms(self) -> Tensor:
        samples, _, rows = self._by_sample()
        return self._added(samples, rows.square().sum(1))

    def weighted_sum(self, factors: Tensor) -> Tensors:
        scaled = self.slopes.double() * factors.double()[:, None, None]
        used, rows = self._looked_up(self.ids, scaled.flatten(0, 1))
        total = self.slopes.new_zeros(self.table.shape)
        return {self.name: total.index_copy_(0, used, rows.to(total.dtype))}

    def with_zeros(self, left_out: Tensor) -> Contribution:
        return replace(self, slopes=_zeroed(self.slopes, left_out))

    def inner_products(self, message: Mapping[str, Tensor]) -> Tensors:
        if self.name not in message:
            return {}
        products = message[self.name].to(self.slopes)[self.ids] * self.slopes
        return {self.name: products.flatten(1).sum(1, dtype=torch.float64)}

    def weighted_squares(self, weights: Mapping[str, Tensor]) -> Tensors:
        weight = weights.get(self.name, torch.ones(()))
        if weight.numel() == 1:
            squares = self.squared_norms()
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
        """Return which rows are looked up, and their gradients.

        Of a word that comes twice the slopes add up.
        """
        used, places = ids.unique(return_inverse=True)
        rows = slopes.new_zeros(len(used), slopes.shape[-1]).index_add_(0, places.flatten(), slopes)
        return used, rows


def module_contribution(
    module: nn.Module, names: Mapping[str, str], calls: Sequence[tuple[Sequence[Any], Tensor]]
) -> Contribution:
    """Differentiate each row's call of a module by itself, vectorized over rows.

    The module may be of any kind that treats rows alike.

    Args:
        module: Without random draws, and without side effects.
        names: The names of the module's own parameters in the model, by their names in the module.
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

    return WrittenContribution(write_gradients)


def _each_row(
    module: nn.Module, shared: Tensors, fixed: Tensors, args: Sequence[Any], slopes: Tensor,
    chosen: slice,
) -> Tensors:  # fmt: skip
    tensors = [arg[chosen] for arg in args if isinstance(arg, Tensor)]

    def product(parameters: Tensors, slope: Tensor, *rows: Tensor) -> Tensor:
        row_tensors = iter(rows)
        call = tuple(next(row_tensors)[None] if isinstance(arg, Tensor) else arg for arg in args)
        output = functional_call(module, {**fixed, **parameters}, call)
        return (output[0] * slope).sum()

    dims = (None, 0, *[0] * len(tensors))
    each_row = vmap(gradient_function(product), in_dims=dims)
    gradients: Tensors = each_row(shared, slopes[chosen], *tensors)
    return gradients


def ghost_squares(slopes: Tensor, features: Tensor, bounds: bool = True) -> Tensor:
    """Return ‖Σ_t δ_t a_tᵀ‖² of every sample, from products of its tokens.

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


def sum_of_rows(rows: int, sum_of: Callable[[slice], Tensor]) -> Tensor:
    """Add up what some rows add, so that one row more moves the sum by that row and few last bits.

    A sum of a thousand rows in float32 is rounded after each addition, by a part of all that was
    added before. Kernels cut long sums into blocks by how many terms there are. So one row more
    than fills a block changes how all others are rounded, and rows that are alike are all rounded
    in one direction. Here `AT_ONCE` rows are added in their own precision, and their sums in
    float64.

    Args:
        rows: How many there are.
        sum_of: Adds up what the rows of a slice add.

    Example:
        >>> tenths = torch.full((2000,), 0.1)
        >>> total = sum_of_rows(2000, lambda chosen: tenths[chosen].sum())
        >>> torch.testing.assert_close(total, torch.tensor(200.0), rtol=1e-6, atol=0)
    """
    if rows <= AT_ONCE:
        return sum_of(slice(0, rows))
    first_rows = sum_of(slice(0, AT_ONCE))
    total = first_rows.double()
    for start in range(AT_ONCE, rows, AT_ONCE):
        total += sum_of(slice(start, start + AT_ONCE))
    return total.to(first_rows.dtype)


class NotApartError(RuntimeError):
    """An error: what each sample adds to a parameter's gradient cannot be told apart."""


@dataclass
class _Call:
    """One call of a module.

    It says what entered, where its output's slope is found, and how often its first argument had
    been written to.
    """

    args: tuple[Any, ...]
    output: GradientEdge
    versions: list[int]


@dataclass
class Listener:
    """Listens to the modules of a model that hold shared parameters.

    Layers with products for gradients, and embeddings, keep what entered and what slope came out.
    Other modules without parts are differentiated row by row from that. A module with parts that
    holds parameters of its own (a class token) is given one copy of them for each sample.

    Args:
        model: The model.
        parameters: The shared parameters, by name.
        batch: The batch that the model is evaluated on.
        samples: How many there are in it.
        is_exact: Whether numbers of half precision are refused, by `NotApartError`.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    batch: Mapping[str, Any]
    samples: int
    is_exact: bool = False
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _copies: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {parameter: name for name, parameter in self.parameters.items()}
        modules = dict(self.model.named_modules())
        holders = Counter(p for m in modules.values() for p in m.parameters(recurse=False))
        # A tied tensor's gradient is a sum over modules, of which each sees its own part alone.
        if tied := [name for parameter, name in names.items() if holders[parameter] > 1]:
            raise NotApartError(f"{tied[0]} is used by several modules")
        self._layers: dict[str, Layer] = layers_of(self.model, self.parameters)
        self._shared_names: dict[str, dict[str, str]] = {}
        for name, module in modules.items():
            own = module.named_parameters(recurse=False)
            shared_names = {local_name: names[p] for local_name, p in own if p in names}
            if shared_names:
                self._shared_names[name] = shared_names
        self._modules = modules
        self._lengths = {
            value.shape[1]
            for value in self.batch.values()
            if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the loss is evaluated inside."""
        handles, replaced = [], {}
        for name, shared_names in self._shared_names.items():
            module = self._modules[name]
            # What happens between its parts is not seen, so the parameter itself is given apart.
            if name not in self._layers and any(module.children()):
                replaced[name] = {n: module._parameters[n] for n in shared_names}
                handles.append(module.register_forward_pre_hook(self._give_copies(name)))
                handles.append(module.register_forward_hook(self._take_back(name, replaced[name])))
            else:
                hook = self._listen(name, type(module) is nn.Embedding)
                handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        try:
            with hooked(handles):
                yield
        finally:
            for name, parameters in replaced.items():
                self._modules[name]._parameters.update(parameters)

    def contributions(self, loss: Tensor, scale: float = 1.0) -> dict[str, Contribution]:
        """Return what samples add, after one backward pass, by modules and copied parameters.

        Args:
            loss: The loss that the pass returned.
            scale: What the loss is multiplied by. With as many as its mean is over, slopes of a
                sample are those of the sum, which no other sample decides.

        Raises:
            NotApartError: If samples are not rows in a module. The message names it.
        """
        # One backward pass for all slopes. They come in the order in which they are asked for.
        edges = [call.output for calls in self._calls.values() for call in calls]
        copies = [copy for copies in self._copies.values() for copy in copies]
        heard: list[Any] = [*edges, *copies]
        factor = torch.full_like(loss, scale)
        slopes = list(torch.autograd.grad(loss, heard, factor, allow_unused=True)) if heard else []
        contributions: dict[str, Contribution] = {}
        for name, calls in self._calls.items():
            calls_with_slopes = [(call, slopes.pop(0)) for call in calls]
            reached = [(call, slope) for call, slope in calls_with_slopes if slope is not None]
            if reached:
                contributions[name] = self._contribution(name, reached)
        for name, copies_of_parameter in self._copies.items():
            slopes_of_copies = [slopes.pop(0) for _ in copies_of_parameter]
            reached_slopes = [slope for slope in slopes_of_copies if slope is not None]
            if reached_slopes:
                summed = torch.stack(reached_slopes).sum(0)
                contributions[name] = self._copies_contribution(name, summed)
        return contributions

    def _contribution(self, name: str, calls: list[tuple[_Call, Tensor]]) -> Contribution:
        # Features are kept by reference. One that was written to since is not what entered.
        for call, _ in calls:
            present_versions = [arg._version for arg in call.args if isinstance(arg, Tensor)]
            if present_versions != call.versions:
                raise NotApartError(f"what entered {name} was written to later")
        if name in self._layers:
            layer, rows = self._layers[name], []
            for call, slope in calls:
                features = layer.features(_wide(call.args[0]))
                pair = layer.rows(_wide(slope), self.samples), layer.rows(features, self.samples)
                # Better none than wrong ones: clipping and ε rest on them.
                if pair[0] is None or pair[1] is None or not self._is_by_samples(features):
                    raise NotApartError(f"samples are no rows of what enters {name}")
                rows.append((pair[0], pair[1]))
            return LayerContribution(layer, rows)
        shared_names, module = self._shared_names[name], self._modules[name]
        if type(module) is nn.Embedding:
            return self._table_contribution(name, module, calls)
        for call, slope in calls:
            tensors = [arg for arg in (*call.args, slope) if isinstance(arg, Tensor)]
            if any(not arg.dim() or len(arg) != self.samples for arg in tensors):
                raise NotApartError(f"samples are no rows of what enters {name}")
        wide = [(tuple(map(_wide, call.args)), _wide(slope)) for call, slope in calls]
        return module_contribution(module, shared_names, wide)

    def _is_by_samples(self, entered: Tensor) -> bool:
        """Whether rows are samples, or all samples' tokens with what is padded.

        Of tokens that were picked (without what is padded, by an expert) there may be as many by
        chance.
        """
        per_sample = len(entered) // self.samples
        return entered.dim() > 2 or not self._lengths or per_sample in (1, *self._lengths)

    def _table_contribution(
        self, name: str, module: nn.Embedding, calls: list[tuple[_Call, Tensor]]
    ) -> Contribution:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise NotApartError(f"{name} has a gradient of its own kind (max_norm, sparse)")
        every_ids, every_slopes = [], []
        for call, slope in calls:
            ids = call.args[0]
            if ids.dim() < 2 or len(ids) not in (1, self.samples) or len(slope) != self.samples:
                raise NotApartError(f"samples are no rows of what {name} looks up")
            ids = ids.expand(self.samples, *ids.shape[1:]).flatten(1)
            slopes = _wide(slope).flatten(1, -2)
            if module.padding_idx is not None:
                slopes = slopes.masked_fill((ids == module.padding_idx)[..., None], 0)
            every_ids.append(ids)
            every_slopes.append(slopes)
        weight = self._shared_names[name]["weight"]
        ids, slopes = torch.cat(every_ids, 1), torch.cat(every_slopes, 1)
        return TableContribution(weight, module.weight.detach(), ids, slopes)

    def _copies_contribution(self, name: str, slopes: Tensor) -> Contribution:
        shape = self.parameters[name].shape
        gradients = _wide(slopes).reshape(self.samples, *shape)
        return WrittenContribution(lambda: iter([{name: gradients}]))

    def _listen(self, name: str, is_table: bool) -> Any:
        def called(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Tensor | None:
            if isinstance(output, Tensor) and not output.requires_grad:
                return None
            if self.is_exact and any(map(is_coarse, (*args, output))):
                raise NotApartError(f"{name} computes in half precision")
            if not args or kwargs or not isinstance(output, Tensor):
                raise NotApartError(f"{name} is called with names, or returns no tensor")
            expanded = output
            if is_table and len(output) == 1 < self.samples:  # positions: one row for all samples
                expanded = output.expand(self.samples, *output.shape[1:])
            detached_args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
            versions = [arg._version for arg in detached_args if isinstance(arg, Tensor)]
            call = _Call(detached_args, get_gradient_edge(expanded), versions)
            self._calls.setdefault(name, []).append(call)
            return expanded

        return called

    def _give_copies(self, name: str) -> Any:
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            for local_name, full in self._shared_names[name].items():
                parameter = self.parameters[full]
                shape = self._shape_of_copies(full, parameter, args)
                copy = parameter.detach().expand(shape).requires_grad_()
                self._copies.setdefault(full, []).append(copy)
                module._parameters[local_name] = copy  # type: ignore[assignment]

        return called

    def _take_back(self, name: str, parameters: dict[str, Any]) -> Any:
        def called(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
            module._parameters.update(parameters)

        return called

    def _shape_of_copies(
        self, name: str, parameter: Tensor, args: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """One for each sample, so that it meets what it is combined with as before."""
        if parameter.dim() > 1 and len(parameter) == 1:
            return (self.samples, *parameter.shape[1:])
        entered = args[0] if args else None
        if parameter.dim() == 1 and isinstance(entered, Tensor) and entered.dim() > 1:
            return (self.samples, *[1] * (entered.dim() - 2), *parameter.shape)
        raise NotApartError(f"{name} is held by a module with parts")


def _wide(value: Any) -> Any:
    """Numbers of half precision in float32; all else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(torch.promote_types(value.dtype, torch.float32))
    return value


def listen(
    gmap: ClientMap, batch: Mapping[str, Any], samples: int, scale: float = 1.0
) -> dict[str, Contribution]:
    """Return what each sample of a batch adds to the gradient of its loss times `scale`.

    Call it inside `gmap.replay.run()`.

    Raises:
        NotApartError: If samples cannot be separated in a module. The message names it.
    """
    listener = Listener(gmap.model, gmap.parameters, batch, samples, is_exact=True)
    with listener.listening():
        loss = gmap.loss_fn(gmap.model, dict(batch))
    return listener.contributions(loss, scale)


def is_coarse(tensor: Any) -> bool:
    """Tell whether numbers of a tensor have fewer digits than those of float32.

    Example:
        >>> is_coarse(torch.zeros(1, dtype=torch.bfloat16)), is_coarse(torch.zeros(1))
        (True, False)
    """
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.itemsize < 4
