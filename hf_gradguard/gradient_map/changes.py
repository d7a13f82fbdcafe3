"""The change of each sample's contribution to the gradient where the input changes.

No second derivative is taken. Jᵀv = d/dα g(x + αv) is the difference of two plain gradients, over a
small step. And what a layer's weight has as its gradient is a sum over samples of products of
features a and slopes δ (see `layers.py`). Both passes' a and δ give the difference sample by
sample,

    δ'ᵀa' - δᵀa = (δ' - δ)ᵀ a' + δᵀ (a' - a),

with what nearly cancels taken before any sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import LINEAR, Layer, Pass

_ENTRIES = 2**24  # of several samples' weight gradients, written out at once
_CACHED_ENTRIES = 2**19  # of patches of images
_SMALL_WEIGHT = 2**14  # entries, of which calls take longer than arithmetic


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
