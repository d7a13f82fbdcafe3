"""Row and column sums of s² and of g², of which averages are made, without s² itself.

A sample adds LᵀR to the gradient of a linear layer, with few rows. The row sums of its squares are
the diagonal of Lᵀ(R Rᵀ)L: products as large as the sample is long, where squares are as many as the
weight has entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..randomness import Stream
from .changes import Change
from .layers import LINEAR, Layer, LayerContribution, Pass
from .map import GradientMap
from .sensitivity import (
    TOLERANCE,
    first_pass,
    known_plan,
    layer_squares,
    plan_of,
    probe_squares,
    split_layers,
)
from .types import Batch, Tensors

GRAM_AT_MOST = 1.0
"""How many products Gram matrices may take, in those of the sample's gradient itself."""

Sums = tuple[Tensor, ...]
"""Of a matrix, or of what is flattened to one, its rows' and its columns' sums; else the tensor."""


def sums_of(tensor: Tensor) -> Sums:
    """Return the row and column sums of a tensor, or the tensor itself if it is a vector.

    Args:
        tensor: A tensor of any shape.
    """
    if tensor.dim() < 2:
        return (tensor,)
    matrix = tensor.flatten(1)
    return matrix.sum(1), matrix.sum(0)


def probe_sums(
    gmap: GradientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None = None,
    start: Pass | None = None,
) -> Iterator[tuple[str, Sums]]:
    """Yield the sums of an estimate of s_i² from each probe, as those of `probe_squares`.

    Args:
        gmap: The map.
        num_probes: The number of probes, at least 1.
        generator: The source of the probes.
        start: What the map's own passes told, from `heard`.

    Raises:
        ValueError: If there are no probes.
        RuntimeError: If no method works for this model.
    """
    for name, squares in probe_squares(
        gmap, num_probes, generator, start=start, layer_estimate=_layer_sums
    ):
        yield name, squares if isinstance(squares, tuple) else sums_of(squares)


def heard(gmap: GradientMap, batch: Batch) -> tuple[GradientMap, Pass | None]:
    """Return a map of another batch, with its gradient, and what layers took in and their slopes.

    All come from the same two passes. The second value is `None` where it is not known yet which
    layers to listen to.
    """
    plan = known_plan(gmap)
    # Making a map may take several passes, of which sides cannot be those of one.
    is_unknown = plan is None or not plan.error <= TOLERANCE or plan.keeps_pattern
    if gmap.shards is not None:  # all devices listen, or none
        is_unknown = gmap.shards.any(is_unknown)
    if is_unknown or plan is None:
        return gmap.of_batch(batch), None
    start = Pass(split_layers(gmap, plan))
    with gmap.replay.full_precision():
        with start.listening():
            other_map = gmap.of_batch(batch)
        gradient = other_map.gradient()
    split = {name for layer in start.layers.values() for name in (layer.weight, layer.bias)}
    start.unsplit = {name: g for name, g in gradient.items() if name not in split}
    return other_map, start


def own_pass(gmap: GradientMap) -> Pass | None:
    """Return what layers take in at the map's own input, and their slopes, or `None`.

    It is `None` if samples are not separated.
    """
    plan = known_plan(gmap) or plan_of(gmap)
    if plan.error > TOLERANCE or not plan.split_layers:
        return None
    return first_pass(gmap, split_layers(gmap, plan), plan, needs_slope=False)


def power_sums(
    gradient: Tensors, samples: int = 1, start: Pass | None = None
) -> Iterator[tuple[str, Sums]]:
    """Yield the sums of E g_i², as far as one batch tells it.

    Samples that are drawn independently add g_bi, of which only the means add up:
    E g_i² = Σ_b E g_bi² + what their means have in common. Where layers know samples apart, Σ_b
    g_bi² estimates the first, from as many squares as there are samples; g_i², of a single one,
    errs by as much as it is large.

    Args:
        gradient: g.
        samples: B.
        start: A pass at the batch; `None` if samples are not known apart.
    """
    unsplit = dict(gradient)
    if start is not None:
        for name, layer in start.layers.items():
            if rows := start.rows(name, samples):
                for parameter, sums in _sample_sums(layer, rows):
                    del unsplit[parameter]
                    yield parameter, sums
    for parameter, g in unsplit.items():
        yield parameter, sums_of(g.to(torch.promote_types(g.dtype, torch.float32)).square())


def _sample_sums(layer: Layer, rows: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Sums]]:
    """Of Σ_b g_b² of a layer's parameters."""
    if layer.bias is not None:
        gradients = torch.stack([layer.bias_gradients(slopes) for slopes, _ in rows]).sum(0)
        yield layer.bias, sums_of(gradients.square().sum(0))
    if layer.weight is None:
        return
    sums = None
    if isinstance(layer.module, LINEAR):
        left_factors, right_factors = zip(*(layer.factors(*pair) for pair in rows), strict=True)
        sums = _sums_of_products(torch.cat(left_factors, 1), torch.cat(right_factors, 1))
    if sums is None:
        sample_gradients = (
            gradients[layer.weight] for gradients in LayerContribution(layer, rows).written()
        )
        sums = sums_of(
            torch.stack([gradients.square().sum(0) for gradients in sample_gradients]).sum(0)
        )
    yield layer.weight, sums


def _layer_sums(layer: Layer, change: Change) -> Iterator[tuple[str, Tensor | Sums]]:
    """As `layer_squares`, with a matrix's sums in its place where they are cheaper."""
    if layer.weight is None or not isinstance(layer.module, LINEAR) or not change.slopes:
        yield from layer_squares(layer, change)
        return
    sums = _sums_of_products(*change.factors(layer))
    if sums is None:
        yield from layer_squares(layer, change)
        return
    yield layer.weight, sums
    if layer.bias is not None:
        yield layer.bias, change.bias(layer).square().sum(0)


def _sums_of_products(left_factor: Tensor, right_factor: Tensor) -> Sums | None:
    """Return the row and column sums of Σ_b (left_bᵀ right_b)².

    The factors have the shapes `(B, n, rows)` and `(B, n, columns)`. The result is `None` where
    writing the products out is cheaper.
    """
    length, rows, columns = left_factor.shape[1], left_factor.shape[2], right_factor.shape[2]
    if 2 * length * (rows + columns) > GRAM_AT_MOST * rows * columns:
        return None
    return _gram_sums(left_factor, right_factor), _gram_sums(right_factor, left_factor)


def _gram_sums(factor: Tensor, other_factor: Tensor) -> Tensor:
    """Σ_b Σ_j (factor_bᵀ other_b)_ij², `(i,)`."""
    gram = other_factor @ other_factor.mT
    return ((gram @ factor) * factor).sum((0, 1)).clamp_(min=0)  # not below zero by rounding
