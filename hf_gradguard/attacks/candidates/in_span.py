"""Spans that a message itself names, and several samples' gradients in their coordinates.

A message that was fitted in the span of few synthetic texts' gradients holds these texts as any
gradient holds its batch: the span attack reads them, and who has them computes the span. U of it is
an orthonormal basis, and y = UᵀM = Uᵀ(g + e): exact entries, in other coordinates. So a message of
several samples is regressed on the list there (linear.py), with precisions of groups.

What it leaves out waits, and the client's next messages bring the rest: of what the messages before
it left, each has the part in its own span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.batch.texts import text_keys
from ...gradient_map.law import Fitted
from ...gradient_map.per_sample.span import Powers, SampleSpan
from ..observation import Observation
from ..span.attack import Span, first_readers
from ..span.layer_inputs import find_readers
from .entries import ALL_CLASSES
from .fitted import ROUNDED, made_up

INSIDE = 0.99
"""Of a message's power, group by group: so much of it lies in no span but its own."""
MOST = 0.9
"""Of factors: so many must be of groups in which it does. Signs of samples' gradients matter only
where these share a factor: in what no layer has, of which two classes' labels change no other.
"""
SWEEPS = 2  # over samples, of each of which all labels are tried
LATER = 3  # messages that are read beside a first one: most of it is in these


def spans_of(
    seen: Observation, law: Fitted, batch: Mapping[str, Any], generator: torch.Generator
) -> list[Powers]:
    """The spans of a message and of the client's next ones, as long as they can be read.

    Args:
        seen: The message, of a model that draws nothing.
        law: Of its samples.
        batch: Any of the clients' kind.
        generator: Of the search. Left as it is.
    """
    found = []
    later = () if seen.law is None or seen.batch_size == 1 else seen.law.later[:LATER]
    for message in (seen.gradient, *later):
        span = _span_of(message, seen, law, batch, generator.clone_state())
        if span is None:
            break
        found.append(span)
    return found


def _span_of(
    message: Mapping[str, Tensor],
    seen: Observation,
    law: Fitted,
    batch: Mapping[str, Any],
    generator: torch.Generator,
) -> Powers | None:
    made = made_up(law, batch, seen.model, list(message), generator)
    ids = _texts(message, seen, made, generator)
    if ids is None:
        return None
    samples = {**made.batch, text_keys(made.batch)[0]: ids}
    span = SampleSpan(made.of_batch(samples)).powers(law.factors)
    for row in [*range(len(ids))] * SWEEPS:
        if held(span, message) >= MOST:
            break
        tried = _labeled(samples, row, seen)
        spans = [SampleSpan(made.of_batch(one)).powers(law.factors) for one in tried]
        within = [float(one(_alone(message)).sum()) for one in spans]
        best = within.index(max(within))
        samples, span = tried[best], spans[best]
    return span if held(span, message) >= MOST else None


def held(span: Powers, message: Mapping[str, Tensor]) -> float:
    """The share of a span's factors that are of groups in which a message lies.

    Example:
        >>> round(held(SampleSpan(gmap).powers("token"), gmap.gradient()), 1)
        1.0
    """
    inside, factors = span(_alone(message))[0], span.factors
    within = [float(p) >= INSIDE * _power(message, names) for p, names in
              zip(inside, span.names, strict=True)]  # fmt: skip
    return float(factors[within].sum() / factors.sum())


def _alone(message: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: y[None] for name, y in message.items()}


def _power(message: Mapping[str, Tensor], names: Iterable[str]) -> float:
    return sum(float(message[name].double().square().sum()) for name in names)


def _texts(
    message: Mapping[str, Tensor], seen: Observation, made: GradientMap, generator: torch.Generator
) -> Tensor | None:
    """Ids `(samples, T)` of the synthetic texts; `None` where the span attack finds no such."""
    keys = text_keys(made.batch)
    if seen.domain.name != "text" or len(keys) != 1 or not any(y.any() for y in message.values()):
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


def _labeled(samples: Mapping[str, Any], row: int, seen: Observation) -> list[dict[str, Any]]:
    """With each label that a text may have, where that is one of few classes."""
    labels = samples.get("labels")
    count = getattr(getattr(seen.model, "config", None), "num_labels", None) or 1
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or count > ALL_CLASSES:
        return [dict(samples)]
    classes = torch.arange(count).to(labels)
    return [
        {**samples, "labels": torch.cat([labels[:row], one[None], labels[row + 1 :]])}
        for one in classes
    ]


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
            least = ROUNDED * _power(message, message)
            for names, (y,) in zip(span.names, span.coordinates(_alone(message)), strict=True):
                power = _power(message, names)
                lies = power > least and float(y.square().sum()) >= INSIDE * power
                heard.append(y)
                weights.append(torch.full_like(y, (len(y) / power) ** 0.5 if lies else 0.0))
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
