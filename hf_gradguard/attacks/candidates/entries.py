"""Candidates as batches of one, with the labels that each may have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models import label_kind
from ..labels import recover_labels
from ..observation import Observation
from ..span.layer_inputs import is_causal_lm
from .inputs import IGNORED, labels_tokens, make_inputs, shown
from .sizes import items_of, mean_items

ALL_CLASSES = 8
"""Unknown labels are tried out where there are so many classes at most, and else read off."""
_RARE = 1e-6  # what is as good as excluded still has a finite logarithm


@dataclass(frozen=True)
class Entries:
    """P pairs of a candidate and a label, as batches of one.

    Args:
        batches: One a pair.
        candidate: `(P,)`, which of the K candidates a pair is of.
        label: Which label it has, one of a few: gradients of one label have a mean in common.
        prior: `(P,)`, of a pair by its label: how often the batch has it. Those of one candidate
            add up to 1.
        counts: The share of each label in the batch.
        inputs: One a candidate: `(1, T)` ids without padding or `(1, C, H, W)` pixels.
        places: `(K,)`, where each candidate stands in the list.
        listed: How long the list is, with what is passed over.
        values: The labels, each `(1, ...)`; none where each candidate has its own, token by token.
        items: `(P,)`, over how many labels the mean loss of each pair is.
        mean_items: How many a sample of the message has on average.
        likely: `(K,)`, log prior of each candidate by its length, where the message's are known,
            and by whether the message has its label.
    """

    batches: list[dict[str, Any]]
    candidate: Tensor
    label: list[int]
    prior: Tensor
    counts: dict[int, float]
    inputs: list[Tensor]
    places: Tensor
    listed: int
    values: list[Tensor]
    items: Tensor
    mean_items: float
    likely: Tensor


def make_entries(
    seen: Observation, candidates: Sequence[Any], labels: Sequence[Any] | None
) -> Entries:
    """The candidates of the observation's domain, each with every label that it may have.

    Raises:
        ValueError: As `make_inputs` does, or if labels are needed that nobody gave.
    """
    made = make_inputs(seen, candidates, labels)
    own = [_own_labels(seen, batch) for batch in made.batches]
    values, shares, prior = _classes(seen, own)
    batches, candidate, label, priors, best = [], list[int](), list[int](), list[float](), []
    for number, (batch, fixed) in enumerate(zip(made.batches, own, strict=True)):
        choices = range(len(values)) if fixed is None else [place_of(values, fixed)]
        for place in choices:
            value = fixed if fixed is not None else values[place]
            if labels_tokens(seen.model):
                _check_tokens(value, seen.domain.main_input(batch), made.places[number])
            batches.append({**batch, "labels": value})
            candidate.append(number)
            label.append(place)
        likely = [max(prior.get(place, 1.0), _RARE) for place in choices]
        priors += likely
        best.append(max(likely, default=0.0))
    items = items_of(seen.model, batches)
    return Entries(
        batches=batches,
        candidate=torch.tensor(candidate, device=seen.device),
        label=label,
        prior=torch.tensor(priors, dtype=torch.float64, device=seen.device),
        counts=shares,
        inputs=[shown(seen.domain, batch) for batch in made.batches],
        places=torch.tensor(made.places, device=seen.device),
        listed=len(candidates),
        values=values,
        items=items,
        mean_items=mean_items(seen, batches, items),
        likely=_by_length(seen, made.counts) + _by_label(seen, best),
    )


def _by_length(seen: Observation, counts: Sequence[int]) -> Tensor:
    """`(K,)`, of candidates of so many tokens. Where none is as long as one of the message's texts,
    clients cut them otherwise, and lengths say nothing.
    """
    lengths = set() if seen.attention_mask is None else set(seen.tokens.sum(1).tolist())
    fits = torch.tensor([count in lengths for count in counts], device=seen.device)
    rare = ~fits if bool(fits.any()) else torch.zeros_like(fits)
    return rare.double() * math.log(_RARE)


def _by_label(seen: Observation, priors: Sequence[float]) -> Tensor:
    """`(K,)`, of candidates whose labels are so likely at most. Those of labels that the message
    does not have are as good as excluded.
    """
    rare = torch.tensor([prior <= _RARE for prior in priors], device=seen.device)
    return rare.double() * math.log(_RARE)


def _check_tokens(labels: Tensor, ids: Tensor, place: int) -> None:
    if labels.shape != ids.shape:
        raise ValueError(
            f"Candidate {place} has {ids.shape[1]} tokens, and there are {labels.numel()} labels "
            "for it: they belong to the words of a text. Give labels with each candidate."
        )


def _own_labels(seen: Observation, batch: dict[str, Any]) -> Tensor | None:
    """Labels that come with a candidate: its own entry, or of a language model its tokens."""
    if "labels" in batch:
        labels: Tensor = batch["labels"]
        return labels
    if is_causal_lm(seen.model):
        ids: Tensor = seen.domain.main_input(batch)
        return ids.masked_fill(batch["attention_mask"] == 0, IGNORED)
    return None


def _classes(
    seen: Observation, own: Sequence[Tensor | None]
) -> tuple[list[Tensor], dict[int, float], dict[int, float]]:
    """The labels that there may be, each `(1, ...)`; the share of each in the batch; and what a
    candidate is likely to have.
    """
    if any(one is not None and one.dim() > 1 for one in own):  # token by token: of each its own
        return [], {0: 1.0}, {0: 1.0}
    labels, sure = seen.labels, True
    if labels is None:
        labels, sure = _recovered(seen), False
    count = getattr(getattr(seen.model, "config", None), "num_labels", None)
    values = [] if labels is None else list(torch.unique(labels, dim=0)[:, None])
    if labels is None and label_kind(seen.model) != "class":
        count = None  # no ids to try
    if not sure and count is not None and (count <= ALL_CLASSES or labels is None):
        values = list(torch.arange(count, device=seen.device)[:, None])
    for one in own:
        if one is not None and place_of(values, one) == len(values):
            values.append(one)
    if not values:
        raise ValueError("The labels are not known, and cannot be read off. Give labels.")
    if labels is None:
        shares = {place: 1 / len(values) for place in range(len(values))}
        return values, shares, dict(shares)
    found = Counter(place_of(values, row[None]) for row in labels)
    shares = {place: found[place] / len(labels) for place in range(len(values))}
    smooth = 0.0 if sure else 1.0  # labels that were read off may be wrong
    total = len(labels) + smooth * len(values)
    prior = {place: (found[place] + smooth) / total for place in range(len(values))}
    return values, shares, prior


def _recovered(seen: Observation) -> Tensor | None:
    try:
        return recover_labels(seen)
    except ValueError:
        return None


def place_of(values: Sequence[Tensor], label: Tensor) -> int:
    """Which of these it is; after the last if it is none."""
    if label.dim() > 1 and not values:
        return 0
    return next((i for i, v in enumerate(values) if torch.equal(v, label.to(v))), len(values))
