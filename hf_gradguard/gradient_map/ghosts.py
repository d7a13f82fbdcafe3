"""What every sample of a batch adds to a quadratic form in its gradient, from a few passes for all.

A linear layer's share of ⟨J_bᵀv, J_bᵀw⟩ is that of two short factors, (LᵀR)·(L'ᵀR') =
Σ (L L'ᵀ) ⊙ (R R'ᵀ): the gradient itself is never written out.

Reference: Li et al., "Large Language Models Can Be Strong Differentially Private Learners" (2022),
Section 4, for norms of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .per_sample import LINEAR, Change, Layer, Pass
from .plans import TOLERANCE, plan_of, step_size
from .shifted import DifferencedMap

if TYPE_CHECKING:
    from .map import GradientMap, Tensors

_CACHED = 2**20
"""Entries of samples' weight gradients that are written out at once."""


def sample_gram(gmap: GradientMap, probes: Tensor, weights: Tensors) -> Tensor | None:
    """⟨J_bᵀv_b, D J_bᵀw_b⟩ for every sample b, v and w among the probes, by differences.

    Args:
        gmap: A client's own map. One that is seen by differences has its first pass already.
        probes: `(k, *input.shape)`.
        weights: The diagonal D, of the parameters' shapes or broadcast to them. With one number for
            a linear layer nothing is written out.

    Returns:
        `(B, k, k)` in float64. Of parameters whose samples are not known apart, all samples
        together count in full for each: never too little. `None` where differences are not to be
        used, or samples are coupled.
    """
    seen = gmap if isinstance(gmap, DifferencedMap) else None
    own = seen.base if seen else gmap
    if own.undefended is not own:
        return None
    plan = seen.plan if seen else plan_of(own)
    layers = plan.layers_of(own)
    if not plan.error <= TOLERANCE or not layers:
        return None
    x, step = own.input, plan.shrink * step_size(own.input)
    start = seen.start if seen else Pass.of(own, x, layers)
    ends = [Pass.of(own, x + step * probe, layers) for probe in probes]
    count, samples = len(ends), len(x)
    gram = torch.zeros(samples, count, count, dtype=torch.float64, device=x.device)
    for name, rest in start.rest.items():
        moved = torch.stack([((end.rest[name] - rest) / step).flatten() for end in ends]).double()
        weight = weights[name].expand_as(rest).flatten()
        gram += (moved * weight) @ moved.T
    for name, layer in layers.items():
        changes = [Change.between(start, end, name, step, samples) for end in ends]
        if any(change is None for change in changes):
            return None
        several = [change for change in changes if change is not None and change.slopes]
        if len(several) == count:  # a layer that did not run has nothing to say
            gram += _of_layer(layer, several, weights)
    return gram


def _of_layer(layer: Layer, changes: list[Change], weights: Tensors) -> Tensor | float:
    total: Tensor | float = 0.0
    if layer.bias is not None:
        total = total + _inner([change.bias(layer) for change in changes], weights[layer.bias])
    if layer.weight is None:
        return total
    weight = weights[layer.weight]
    if weight.numel() == 1 and isinstance(layer.module, LINEAR):
        return total + float(weight) * _of_factors(changes)
    parts = zip(*(change.weight(layer, _CACHED) for change in changes), strict=True)
    return total + torch.cat([_inner(several, weight) for several in parts])


def _inner(moved: Sequence[Tensor], weight: Tensor) -> Tensor:
    """`(B, k, k)` from `(B, *weight.shape)` of each probe, sample by sample: a processor's cache
    holds one.
    """
    root, grams = weight.sqrt(), []
    for sample in zip(*moved, strict=True):
        rows = torch.stack([one * root for one in sample]).flatten(1)
        grams.append(rows @ rows.T)
    return torch.stack(grams).double()


def _of_factors(changes: list[Change]) -> Tensor:
    factors = [
        (
            torch.cat([*change.slopes, *change.mean_slopes], 1),
            torch.cat([*change.mean_features, *change.features], 1),
        )
        for change in changes
    ]
    count = len(factors)
    gram = factors[0][0].new_zeros(len(factors[0][0]), count, count)
    for i, (left, right) in enumerate(factors):
        for j, (other, last) in enumerate(factors[: i + 1]):
            gram[:, i, j] = ((left @ other.mT) * (right @ last.mT)).sum((1, 2))
            gram[:, j, i] = gram[:, i, j]
    return gram.double()
