"""Spans that a message itself names, and several samples' gradients in their coordinates.

A message that was fitted in the span of few synthetic texts' gradients holds these texts as any
gradient holds its batch: the span attack reads them, and who has them computes the span. U of it is
an orthonormal basis, and y = UᵀM = Uᵀ(g + e): exact entries, in other coordinates. So a message of
several samples is regressed on the list there (linear.py), with precisions of groups.

What it leaves out waits, and the client's next messages bring the rest: of what the messages before
it left, each has the part in its own span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...defenses.mechanism import Fitted
from ...gradient_map import GradientMap, Tensors
from ...gradient_map.domain import text_keys
from ...gradient_map.per_sample.span import Powers, SampleSpan
from ..observation import Observation
from ..span.attack import Span, first_readers
from ..span.layer_inputs import find_readers
from .entries import ALL_CLASSES
from .fitted import ROUNDED, made_up, sizes_of

INSIDE = 0.99
"""Of a message's power, group by group: so much of it lies in no span but its own."""
MOST = 0.9
"""Of factors: so many must be of groups in which it does. Signs of samples' gradients matter only
where these share a factor: in what no layer has, of which two classes' labels change no other.
"""
SWEEPS = 2  # over samples, of each of which all labels are tried
LATER = 3  # messages that are read beside a first one: most of it is in these


def spans_of(
    seen: Observation, mechanism: Fitted, batch: Mapping[str, Any], generator: torch.Generator
) -> list[Powers]:
    """The spans of a message and of the client's next ones, as long as they can be read.

    Args:
        seen: The message, of a model that draws nothing.
        mechanism: Of its samples.
        batch: Any of the clients' kind.
        generator: Of the search. Left as it is.
    """
    found: list[Powers] = []
    if seen.domain.name != "text":
        return found
    drawn = generator.clone_state()
    made = made_up(mechanism, batch, seen.model, list(seen.gradient), drawn)
    later = (
        ()
        if seen.mechanism is None or seen.batch_size == 1
        else seen.mechanism.later_messages[:LATER]
    )
    for message in (seen.gradient, *later):
        span = _span_of(message, seen, mechanism, made, drawn.clone_state())
        if span is None:
            break
        found.append(span)
    return found


def _span_of(
    message: Mapping[str, Tensor],
    seen: Observation,
    mechanism: Fitted,
    made: GradientMap,
    generator: torch.Generator,
) -> Powers | None:
    ids = _texts(message, seen, made, generator)
    if ids is None:
        return None
    samples = {**made.batch, text_keys(made.batch)[0]: ids}
    classes = _classes(samples, seen)
    rows = iter([*range(len(ids))] * SWEEPS if len(classes) else [])
    span = SampleSpan(made.of_batch(samples)).powers(mechanism.factors)
    while held(span, message) < MOST:
        if (row := next(rows, None)) is None:
            return None
        tried = [_labeled(samples, row, one) for one in classes]
        spans = [SampleSpan(made.of_batch(one)).powers(mechanism.factors) for one in tried]
        within = [float(one(_alone(message)).sum()) for one in spans]
        best = within.index(max(within))
        samples, span = tried[best], spans[best]
    return span


def held(span: Powers, message: Mapping[str, Tensor]) -> float:
    """The share of a span's factors that are of groups in which a message lies.

    Example:
        >>> round(held(SampleSpan(gmap).powers("token"), gmap.gradient()), 1)
        1.0
    """
    groups = _groups(span, message, sizes_of(message))
    inside = sum(len(y) for y, power in groups if _lies(y, power))
    return inside / sum(len(y) for y, _ in groups)


def _groups(
    span: Powers, message: Mapping[str, Tensor], sizes: Mapping[str, float]
) -> list[tuple[Tensor, float]]:
    """A message's coordinates in each group of a span, and its power there."""
    powers = [sum(sizes[name] for name in names) for names in span.names]
    return [
        (y, power) for (y,), power in zip(span.coordinates(_alone(message)), powers, strict=True)
    ]


def _lies(y: Tensor, power: float) -> bool:
    """Whether what has so much power lies in the span where these are its coordinates."""
    return float(y.square().sum()) >= INSIDE * power


def _alone(message: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: y[None] for name, y in message.items()}


def _texts(
    message: Mapping[str, Tensor], seen: Observation, made: GradientMap, generator: torch.Generator
) -> Tensor | None:
    """Ids `(samples, T)` of the synthetic texts; `None` where the span attack finds no such."""
    keys = text_keys(made.batch)
    if len(keys) != 1 or not any(y.any() for y in message.values()):
        return None
    ids = made.batch[keys[0]]
    told = Observation(
        seen.model, message, tuple(ids.shape), attention_mask=torch.ones_like(ids),
        tokenizer=seen.tokenizer, special_tokens=seen.special_tokens,
    )  # fmt: skip
    first = first_readers(find_readers(told))
    if first is None or ids.numel() >= first.size[0]:
        return None  # they span everything
    found = torch.tensor(Span()(told, generator=generator).token_ids).to(ids)
    return found if found.shape == ids.shape and bool((found >= 0).all()) else None


def _classes(samples: Mapping[str, Any], seen: Observation) -> Tensor:
    """Those that a text may be of, to be tried; none where labels are no few classes."""
    labels = samples.get("labels")
    count = getattr(getattr(seen.model, "config", None), "num_labels", None) or 1
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or count > ALL_CLASSES:
        return torch.empty(0)
    return torch.arange(count).to(labels)


def _labeled(samples: Mapping[str, Any], row: int, label: Tensor) -> dict[str, Any]:
    labels = samples["labels"].clone()
    labels[row] = label
    return {**samples, "labels": labels}


class InSpan:
    """A client's messages in coordinates of the spans that each was fitted in, and what gradients
    of the first one's batch are there.

    Args:
        messages: The first one, and those that came next, or some of these.
        spans: Of each.

    Example:
        >>> span = SampleSpan(gmap).powers("token")
        >>> inside = InSpan([gmap.gradient()], [span])
        >>> one = inside({name: g[None] for name, g in gmap.gradient().items()})
        >>> torch.allclose(one["fitted"][0], inside.message["fitted"])
        True
    """

    def __init__(self, messages: Sequence[Mapping[str, Tensor]], spans: Sequence[Powers]) -> None:
        self._spans = list(spans)
        self._across = {
            (late, early): self._spans[late].across(self._spans[early])
            for late in range(len(spans))
            for early in range(late)
        }
        heard, weights = [], []
        for message, span in zip(messages, spans, strict=False):
            sizes = sizes_of(message)
            least = ROUNDED * sum(sizes.values())
            for y, power in _groups(span, message, sizes):
                told = power > least and _lies(y, power)
                heard.append(y)
                weights.append(torch.full_like(y, (len(y) / power) ** 0.5 if told else 0.0))
        self.message, self.weights = {"fitted": torch.cat(heard)}, {"fitted": torch.cat(weights)}

    def __call__(self, gradients: Tensors) -> Tensors:
        """`(K, coordinates)` of gradients `(K, *parameter.shape)`, linear in these."""
        left: list[list[Tensor]] = []
        for late, span in enumerate(self._spans):
            own = span.coordinates(gradients)
            for early, before in enumerate(left):
                across = self._across[late, early]
                own = [c - b @ x.T for c, b, x in zip(own, before, across, strict=True)]
            left.append(own)
        return {"fitted": torch.cat([c for own in left for c in own], 1)}
