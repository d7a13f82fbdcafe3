"""Row and column sums of s², of which averages are made, without s² itself.

Of a sample's share of a linear layer, LᵀR with few rows, the squares' row sums are the diagonal of
Lᵀ(R Rᵀ)L: products as large as the sample is long, where squares are as many as the weight has
entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .devices import devices
from .inputs import Batch
from .per_sample import LINEAR, Change, Layer, Pass
from .plans import TOLERANCE, known_plan
from .sensitivity import layer_squares, probe_squares

if TYPE_CHECKING:
    from .map import GradientMap

GRAM_AT_MOST = 1.5
"""How many products Gram matrices may take, in those of the sample's gradient itself."""

Sums = tuple[Tensor, ...]
"""Of a matrix, or of what is flattened to one, its rows' and its columns' sums; else the tensor."""


def sums_of(tensor: Tensor) -> Sums:
    """The sums of a tensor that is there.

    Args:
        tensor: Of any shape.
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
    """The sums of an estimate of s_i² from each probe: as those of `probe_squares`, up to rounding.

    Args:
        gmap: The map.
        num_probes: At least 1.
        generator: Of the probes.
        start: What the map's own passes told, from `heard`.

    Raises:
        ValueError: If there are no probes.
        RuntimeError: If no method works for this model.
    """
    for name, found in probe_squares(gmap, num_probes, generator, start=start, of=_layer_sums):
        yield name, found if isinstance(found, tuple) else sums_of(found)


def heard(gmap: GradientMap, batch: Batch) -> tuple[GradientMap, Pass | None]:
    """A map of another batch, with its gradient; and what layers took in and which slopes they got
    in the same two passes. `None` where it is not known yet which layers to listen to.
    """
    plan = known_plan(gmap)
    if devices().any(plan is None or not plan.error <= TOLERANCE) or plan is None:
        return gmap.of_batch(batch), None
    start = Pass(plan.layers_of(gmap))
    with gmap.replay.full_precision():
        with start.listening():
            other = gmap.of_batch(batch)
        gradient = other.gradient()
    split = {name for layer in start.layers.values() for name in (layer.weight, layer.bias)}
    start.rest = {name: g for name, g in gradient.items() if name not in split}
    return other, start


def _layer_sums(layer: Layer, change: Change) -> Iterator[tuple[str, Tensor | Sums]]:
    """As `layer_squares`, with a matrix's sums in its place where they are cheaper."""
    if layer.weight is None or not isinstance(layer.module, LINEAR) or not change.slopes:
        yield from layer_squares(layer, change)
        return
    left = torch.cat([*change.slopes, *change.mean_slopes], 1)  # (B, n, out)
    right = torch.cat([*change.mean_features, *change.features], 1)  # (B, n, in)
    length, outputs, inputs = left.shape[1], left.shape[2], right.shape[2]
    if 2 * length * (outputs + inputs) > GRAM_AT_MOST * outputs * inputs:
        yield from layer_squares(layer, change)
        return
    by_output, by_input = _gram_sums(left, right), _gram_sums(right, left)
    plain = isinstance(layer.module, nn.Linear)  # Conv1D's rows are inputs
    yield layer.weight, (by_output, by_input) if plain else (by_input, by_output)
    if layer.bias is not None:
        yield layer.bias, change.bias(layer).square().sum(0)


def _gram_sums(factor: Tensor, other: Tensor) -> Tensor:
    """Σ_b Σ_j (factor_bᵀ other_b)_ij², `(i,)`."""
    gram = other @ other.mT
    return ((gram @ factor) * factor).sum((0, 1)).clamp_(min=0)  # not below zero by rounding
