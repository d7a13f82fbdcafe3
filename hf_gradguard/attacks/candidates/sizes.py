"""What samples weigh in a batch's mean loss: in one over tokens, each by its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...defenses.mechanism import Mechanism
from ...gradient_map import Tensors
from ...gradient_map.per_sample.plan import count_items
from ..observation import Observation
from ..span.layer_inputs import is_causal_lm
from .linear import Filtered


def items_of(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """`(P,)`: over how many labels the mean loss of each batch of one is. Of a causal language
    model a text's first token is no label.

    Example:
        >>> text = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 1, 2]])}
        >>> items_of(model, [text]), items_of(model, [{**text, "labels": torch.tensor([1])}])
        (tensor([2.]), tensor([1.]))
    """
    causal = is_causal_lm(model)
    return torch.tensor([float(count_items(batch, causal)) for batch in batches])


def mean_items(seen: Observation, batches: Sequence[Mapping[str, Any]], items: Tensor) -> float:
    """How many labels a sample of the message has on average: as candidates have, or where the
    message's lengths are known, as those nearest to each in length.

    Args:
        seen: What the server saw.
        batches: The candidates, as batches of one.
        items: `(P,)`, how many labels each has.

    Example:
        >>> masks = [torch.ones(1, length) for length in (3, 5)]
        >>> listed, known = [{"attention_mask": mask} for mask in masks], torch.ones(2, 5)
        >>> mean_items(seen, listed, torch.tensor([2.0, 4.0]))
        3.0
        >>> told = Observation(model, shared, (2, 5), attention_mask=known)
        >>> mean_items(told, listed, torch.tensor([2.0, 4.0]))
        4.0
    """
    if seen.attention_mask is None or bool((items == items[0]).all()):
        return float(items.mean())
    lengths = seen.tokens.sum(1, keepdim=True).cpu()
    own = torch.tensor([int(batch["attention_mask"].sum()) for batch in batches])
    away = (own - lengths).abs()
    near = (away == away.amin(1, keepdim=True)).float()
    return float(((near * items / own).sum(1) / near.sum(1) * lengths[:, 0]).mean())


def in_units(
    seen: Observation, mechanism: Mechanism | None, by: float
) -> tuple[Observation, Mechanism | None]:
    """A message and its mechanism, as if gradients were so many times as large.

    Example:
        >>> mechanism = Mechanism(clip_norm=1.0, noise="gaussian", variance=0.5)
        >>> twice, told = in_units(seen, mechanism, 2.0)
        >>> bool((twice.gradient["classifier.bias"] == 2 * shared["classifier.bias"]).all())
        True
        >>> told.clip_norm, told.variance
        (2.0, 2.0)
    """
    if by == 1:
        return seen, mechanism
    if mechanism is not None:
        mechanism = replace(
            mechanism,
            clip_norm=mechanism.clip_norm and mechanism.clip_norm * by,
            clip_coordinate=mechanism.clip_coordinate and mechanism.clip_coordinate * by,
            variance=None if mechanism.variance is None else _times(mechanism.variance, by**2),
            later_messages=tuple(
                {name: g * by for name, g in one.items()} for one in mechanism.later_messages
            ),
        )
    gradient = {name: g * by for name, g in seen.gradient.items()}
    return replace(seen, gradient=gradient, mechanism=mechanism, noise_variance=None), mechanism


def _times(variance: float | Mapping[str, Tensor], by: float) -> float | dict[str, Tensor]:
    if isinstance(variance, Mapping):
        return {name: tensor * by for name, tensor in variance.items()}
    return variance * by


def to_filter(
    seen: Observation,
    mechanism: Mechanism | None,
    center: Tensors,
    weights: Tensors | None,
    variance: float | None,
) -> Filtered:
    """A message in units of what it is on average, where it was not clipped.

    Args:
        seen: What the server saw.
        mechanism: How the message was made.
        center: What it is on average.
        weights: Of coordinates, `None` where all weigh alike.
        variance: Of the noise in these units, `None` where nobody knows it.

    Example:
        >>> twice = {name: 2 * y for name, y in shared.items()}
        >>> to_filter(seen, Mechanism(scale=0.5), shared, None, 1.0).variance
        4.0
        >>> told = to_filter(seen, None, twice, None, None)
        >>> torch.allclose(told.message["classifier.bias"], twice["classifier.bias"])
        True
    """
    heard = center
    if weights is not None and variance is None:
        heard = {name: c * (weights[name] != 0) for name, c in center.items()}
    scaled_alike = (
        mechanism is not None and mechanism.clip_norm is None and not mechanism.has_residual
    )
    scale = mechanism.scale if scaled_alike else _fitted(seen.gradient, heard)  # type: ignore[union-attr]
    message = {name: g / scale for name, g in seen.gradient.items()}
    variance = None if variance is None else variance / scale**2
    return Filtered(message, _clipped(center, mechanism), seen.batch_size, variance)


def _clipped(center: Tensors, mechanism: Mechanism | None) -> Tensors:
    if mechanism is None or mechanism.clip_coordinate is None:
        return center
    return {
        n: c.clamp(-mechanism.clip_coordinate, mechanism.clip_coordinate) for n, c in center.items()
    }


def _fitted(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> float:
    """How large a message is in units of what it is on average: defenses may scale it down."""
    product = sum(float((g.double() * center[name]).sum()) for name, g in message.items())
    square = sum(float(center[name].double().square().sum()) for name in message)
    return product / square if product > 1e-3 * square else 1.0
