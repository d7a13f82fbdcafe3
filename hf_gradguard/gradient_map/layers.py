"""The change of each sample's gradient with the input, without second derivatives.

Jᵀv = d/dα g(x + αv) is the difference of two plain gradients, over a small step. The gradient of a
layer's weight is a sum over samples of products of the layer's input (its features a) with the
loss's derivative by the layer's output (its slopes δ). The a and δ of both passes give the
difference sample by sample,

    δ'ᵀa' - δᵀa = (δ' - δ)ᵀ a' + δᵀ (a' - a),

where the subtraction of nearly equal terms comes before any sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import grad
from transformers.pytorch_utils import Conv1D

from .kinks import Sides
from .replay import differentiate, hooked
from .types import ClientMap, Tensors

LINEAR, _CONVOLUTIONS = (nn.Linear, Conv1D), (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENTRIES = 2**24  # of several samples' weight gradients, written out at once
_CACHED_ENTRIES, _LONG_ROW = 2**19, 8  # of patches of images
_SMALL_WEIGHT = 2**14  # entries, of which calls take longer than arithmetic


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
        if isinstance(self.module, _CONVOLUTIONS):
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
        function = getattr(grad, f"conv{len(size) - 2}d_weight")
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
        if isinstance(self.module, _CONVOLUTIONS):
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
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = dict(model.named_modules())
    holders = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    layers = {}
    for name, module in modules.items():
        if type(module) not in (*LINEAR, *_CONVOLUTIONS, nn.LayerNorm):
            continue
        plain = getattr(module, "padding_mode", "zeros") == "zeros"
        if not plain or isinstance(getattr(module, "padding", None), str):
            continue
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            continue
        weight, bias = (
            names.get(id(p)) if p is not None and holders[id(p)] == 1 else None
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
    sides: Sides | None = None

    @classmethod
    def evaluate(
        cls,
        gmap: ClientMap,
        x: Tensor,
        layers: Mapping[str, Layer],
        sides: Sides | None = None,
        needs_slope: bool = True,
    ) -> Pass:
        """Evaluate a map at an input x, with the map's own random draws.

        If an activation pattern is given, it is kept. Without `needs_slope` the backward pass ends
        at the layers' outputs.
        """
        evaluated = cls(layers, sides=sides)
        if not layers:
            with gmap.replay.full_precision(), evaluated.kept_sides():
                evaluated.unsplit = gmap.gradient_at(x.detach())
            return evaluated
        split = {name for layer in layers.values() for name in (layer.weight, layer.bias)}
        unsplit = {name: p for name, p in gmap.parameters.items() if name not in split}
        outputs: list[GradientEdge] = []
        with gmap.replay.run(), gmap.replay.full_precision():
            x = x.detach().requires_grad_()
            with evaluated.listening(outputs), evaluated.kept_sides():
                loss = gmap.evaluate(x)
            leaves = {**unsplit, "": x} if needs_slope or not outputs else unsplit
            evaluated.unsplit = differentiate(loss, leaves, outputs)
        evaluated.loss, evaluated.slope = loss.detach(), evaluated.unsplit.pop("", None)
        return evaluated

    def kept_sides(self) -> AbstractContextManager[None]:
        """Keep this pass's activation pattern inside the context; the first time, it is noted."""
        return nullcontext() if self.sides is None else self.sides.kept()

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


class Change(NamedTuple):
    """The change of a layer's calls over a step, and its factors, as rows of samples.

    Args:
        slopes: δ' - δ over the step, of each call.
        later_features: a'.
        earlier_slopes: δ.
        features: a' - a over the step.
    """

    slopes: list[Tensor]
    later_features: list[Tensor]
    earlier_slopes: list[Tensor]
    features: list[Tensor]

    @classmethod
    def between(cls, start: Pass, end: Pass, name: str, step: float, samples: int) -> Change | None:
        """Return a layer's change between two passes; `None` if it does not separate samples."""
        # A start that was asked for all gradients also has slopes of calls that do not see x.
        start_rows = start.rows(name, samples, end.slopes.get(name, {}).keys())
        end_rows = end.rows(name, samples)
        if start_rows is None or end_rows is None or len(start_rows) != len(end_rows):
            return None
        change = cls([], [], [], [])
        for (slopes, features), (later_slopes, later_features) in zip(
            start_rows, end_rows, strict=True
        ):
            if slopes.shape != later_slopes.shape or features.shape != later_features.shape:
                return None
            change.slopes.append(torch.sub(later_slopes, slopes).div_(step))
            change.later_features.append(later_features)
            change.earlier_slopes.append(slopes)
            change.features.append(torch.sub(later_features, features).div_(step))
        return change

    def bias(self, layer: Layer) -> Tensor:
        """Return J_bᵀv of the bias, `(B, *bias.shape)`."""
        return torch.stack([layer.bias_gradients(slopes) for slopes in self.slopes]).sum(0)

    def factors(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return all calls' matrices whose product is J_bᵀv of the weight; see `Layer.factors`."""
        left_factors, right_factors = zip(*self._pairs(layer), strict=True)
        return torch.cat(left_factors, 1), torch.cat(right_factors, 1)

    def _pairs(self, layer: Layer) -> list[tuple[Tensor, Tensor]]:
        """Those of one product for each call and each of its two changes."""
        return [
            *map(layer.factors, self.slopes, self.later_features),
            *map(layer.factors, self.earlier_slopes, self.features),
        ]

    def weight_squares(self, layer: Layer) -> Tensor:
        """Return Σ_b (J_bᵀv)² of the weight, over samples b."""
        module: Any = layer.module
        squares = torch.zeros_like(module.weight, requires_grad=False)
        with torch.autocast(squares.device.type, enabled=False):
            rows = sum(slopes.shape[1] for slopes in self.slopes)
            if rows == 1 and isinstance(module, LINEAR):
                return _squares_of_pairs(*self.factors(layer))
            for products in self.weight(layer):  # stay in a processor's cache
                if len(products) == 1:
                    squares.addcmul_(products[0], products[0])
                else:
                    squares += products.square_().sum(0)
        return squares

    def weight(self, layer: Layer) -> Iterator[Tensor]:
        """Yield J_bᵀv of the weight, `(n, *weight.shape)`, for one sample or a few after the other.

        Each is freed when the next is asked for.
        """
        if not self.slopes:
            return
        size: torch.Size = layer.module.weight.shape  # type: ignore[assignment]
        if not layer.is_product:
            for chunk in self._chunks(_ENTRIES // size.numel()):
                yield chunk._written_out(layer)
        elif isinstance(layer.module, nn.Conv2d):  # what a kernel covers is much, written out
            places = sum(slopes[0, 0].numel() for slopes in self.slopes)
            for chunk in self._chunks(_CACHED_ENTRIES // (2 * places * size.numel() // size[0])):
                yield from _products(chunk._pairs(layer), size)
        else:
            yield from _products(self._pairs(layer), size)

    def _chunks(self, samples: int) -> Iterator[Change]:
        """Of so many samples at a time, of one at least."""
        samples = max(samples, 1)
        for start in range(0, len(self.slopes[0]), samples):
            yield Change(*([t[start : start + samples] for t in tensors] for tensors in self))

    def _written_out(self, layer: Layer) -> Tensor:
        """J_bᵀv of the weight, `(B, *weight.shape)`."""
        total = torch.zeros((), dtype=self.slopes[0].dtype, device=self.slopes[0].device)
        for slopes, later_features, earlier_slopes, features in zip(*self, strict=True):
            total = total + layer.weight_gradients(slopes, later_features)
            total = total + layer.weight_gradients(earlier_slopes, features)
        return total


def _squares_of_pairs(lefts: Tensor, rights: Tensor) -> Tensor:
    """Σ_b (l_b1 r_b1ᵀ + l_b2 r_b2ᵀ)², multiplied out: three products over samples."""
    (left, other_left), (right, other_right) = lefts.unbind(1), rights.unbind(1)
    squares = left.square().T @ right.square() + other_left.square().T @ other_right.square()
    squares += 2 * (left * other_left).T @ (right * other_right)
    return squares.clamp_(min=0)


def _products(pairs: list[tuple[Tensor, Tensor]], size: torch.Size) -> Iterator[Tensor]:
    """Yield sums of the products of each sample's factors.

    Large ones have the shape `(1, *size)` and share one memory. Small ones come at once, as `(B,
    *size)`.
    """
    left, right = pairs[0]
    if size.numel() <= _SMALL_WEIGHT and len(left) * size.numel() <= _CACHED_ENTRIES:
        products = left.mT @ right
        for later_left, later_right in pairs[1:]:
            products.baddbmm_(later_left.mT, later_right)
        yield products.view(-1, *size)
        return
    product = left.new_empty(left.shape[2], right.shape[2])
    length = sum(left.shape[1] for left, _ in pairs)
    if length * sum(product.shape) < product.numel():  # written once: factors are joined instead
        lefts, rights = zip(*pairs, strict=True)
        pairs = [(torch.cat(lefts, 1), torch.cat(rights, 1))]
    for sample in range(len(left)):
        for number, (lefts_of, rights_of) in enumerate(pairs):
            factors = lefts_of[sample].mT, rights_of[sample]
            torch.addmm(product, *factors, beta=min(number, 1), out=product)
        yield product.view(1, *size)
