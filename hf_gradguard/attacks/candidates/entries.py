"""Candidates as batches of one, with the labels that each may have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...gradient_map.domain import IMAGE, TEXT
from ...models.tasks import label_kind
from ..labels import recover_labels
from ..observation import Observation
from ..span.layer_inputs import is_causal_lm
from .sizes import items_of, mean_items

ALL_CLASSES = 8
"""Unknown labels are tried out where there are so many classes at most, and else read off."""
MOST = 200_000
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
        inputs: One a candidate: `(1, T)` ids or `(1, C, H, W)` pixels.
        values: The labels, each `(1, ...)`; none where each candidate has its own, token by token.
        items: `(P,)`, over how many labels the mean loss of each pair is.
        mean_items: How many a sample of the message has on average.
        likely: `(K,)`, log prior of each candidate by its length, where the message's are known.
    """

    batches: list[dict[str, Any]]
    candidate: Tensor
    label: list[int]
    prior: Tensor
    counts: dict[int, float]
    inputs: list[Tensor]
    values: list[Tensor]
    items: Tensor
    mean_items: float
    likely: Tensor


def make_entries(
    seen: Observation, candidates: Sequence[Any], labels: Sequence[Any] | None
) -> Entries:
    """The candidates of the observation's domain, each with every label that it may have.

    Raises:
        ValueError: If there is none of that domain, or the labels are not one per candidate.
    """
    inputs, counts = _INPUTS[seen.domain.name](seen, candidates)
    if not inputs:
        raise ValueError(
            f"The list of candidates holds none for {seen.domain.content}: give texts or token ids "
            "for a text, and tensors (C, H, W) of pixels for images."
        )
    if labels is not None and len(labels) != len(inputs):
        raise ValueError(f"There are {len(labels)} labels for {len(inputs)} candidates.")
    own = [_own_labels(seen, batch) for batch in inputs]
    if labels is not None:
        own = [torch.as_tensor(labels[k])[None].to(seen.device) for k in range(len(inputs))]
    values, shares, prior = _classes(seen, own)
    batches, candidate, label, priors = [], list[int](), list[int](), list[float]()
    for number, (batch, fixed) in enumerate(zip(inputs, own, strict=True)):
        choices = range(len(values)) if fixed is None else [place_of(values, fixed)]
        for place in choices:
            value = fixed if fixed is not None else values[place]
            batches.append({**batch, "labels": value})
            candidate.append(number)
            label.append(place)
            priors.append(max(prior.get(place, 1.0), _RARE))
    items = items_of(seen.model, batches)
    return Entries(
        batches=batches,
        candidate=torch.tensor(candidate, device=seen.device),
        label=label,
        prior=torch.tensor(priors, dtype=torch.float64, device=seen.device),
        counts=shares,
        inputs=[seen.domain.main_input(batch) for batch in inputs],
        values=values,
        items=items,
        mean_items=mean_items(seen, batches, items),
        likely=_by_length(seen, counts),
    )


def at_places(
    seen: Observation, text: Any, places: Sequence[int], words: Sequence[Any] | None
) -> list[dict[str, Tensor]]:
    """One text with every word of a list, or of the whole vocabulary, at some of its places.

    Args:
        seen: Whose tokenizer and vocabulary it is.
        text: The text, or its ids.
        places: Positions among its tokens, special ones included.
        words: Tokens or ids. Default: all that are not special.

    Raises:
        ValueError: If a place is none of the text's, or there would be too many candidates.
    """
    (ids,) = (seen.domain.main_input(batch) for batch in _texts(seen, [text])[0])
    if not places or not all(0 <= place < ids.shape[1] for place in places):
        raise ValueError(f"places must be from 0 to {ids.shape[1] - 1}, but are {list(places)}.")
    if words is None:
        size = len(TEXT.embedding(seen.model).weight)  # type: ignore[arg-type]
        special = set(seen.tokenizer.all_special_ids) if seen.tokenizer is not None else set()
        words = [token for token in range(size) if token not in special]
    tokens = [
        word if isinstance(word, int) else seen.tokenizer.convert_tokens_to_ids(word)
        for word in words
    ]
    if len(tokens) ** len(places) > MOST:
        raise ValueError(
            f"{len(tokens)} words at {len(places)} places make more than {MOST:,} candidates. Name "
            "fewer words, or ask for one place after the other."
        )
    made = []
    for filled in product(tokens, repeat=len(places)):
        one = ids.clone()
        one[0, list(places)] = torch.tensor(filled, device=ids.device)
        made.append({TEXT.key: one})
    return made


def _texts(seen: Observation, candidates: Sequence[Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """And how many tokens clients have of each: of ids all, of a text what its tokenizer leaves."""
    found, counts = [], list[int]()
    longest = seen.input_shape[1]
    for one in candidates:
        extra: dict[str, Any] = {}
        if isinstance(one, str):
            if seen.tokenizer is None:
                raise ValueError("Texts need a tokenizer: give it to the Observation, or give ids.")
            ids = seen.tokenizer(
                one, truncation=True, max_length=longest, add_special_tokens=seen.special_tokens
            )["input_ids"]
        elif isinstance(one, Mapping) and TEXT.key in one:
            ids = one[TEXT.key]
            extra = {k: v for k, v in one.items() if k != TEXT.key}
        elif isinstance(one, Sequence):
            ids = one
        else:
            continue
        row = torch.as_tensor(ids, device=seen.device).reshape(1, -1)
        extra = {k: v.to(seen.device) for k, v in extra.items() if isinstance(v, Tensor)}
        counts.append(int(extra.get("attention_mask", torch.ones_like(row)).sum()))
        if not extra:
            row = row[:, :longest]
        found.append({TEXT.key: row, "attention_mask": torch.ones_like(row), **extra})
    return found, counts


def _by_length(seen: Observation, counts: Sequence[int]) -> Tensor:
    """`(K,)`, of candidates of so many tokens. Where none is as long as one of the message's texts,
    clients cut them otherwise, and lengths say nothing.
    """
    lengths = set() if seen.attention_mask is None else set(seen.tokens.sum(1).tolist())
    fits = torch.tensor([count in lengths for count in counts], device=seen.device)
    rare = ~fits if bool(fits.any()) else torch.zeros_like(fits)
    return rare.double() * math.log(_RARE)


def _images(seen: Observation, candidates: Sequence[Any]) -> tuple[list[dict[str, Any]], list[int]]:
    dtype = next(p.dtype for p in seen.model.parameters() if torch.is_floating_point(p))
    found = []
    for one in candidates:
        extra: dict[str, Any] = {}
        pixels = one
        if isinstance(one, Mapping) and IMAGE.key in one:
            pixels = one[IMAGE.key]
            extra = {k: v.to(seen.device) for k, v in one.items() if k != IMAGE.key}
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            continue
        row = pixels.to(seen.device, dtype).reshape(1, *pixels.shape[-3:])
        if tuple(row.shape[1:]) != tuple(seen.input_shape[1:]):
            raise ValueError(
                f"A candidate has shape {tuple(pixels.shape)}, where the message's images have "
                f"{tuple(seen.input_shape[1:])}: prepare it as the client's processor does."
            )
        found.append({IMAGE.key: row, **extra})
    return found, [0] * len(found)


_INPUTS = {TEXT.name: _texts, IMAGE.name: _images}


def _own_labels(seen: Observation, batch: dict[str, Any]) -> Tensor | None:
    """Labels that come with a candidate: its own entry, or of a language model its tokens."""
    if "labels" in batch:
        labels: Tensor = batch["labels"]
        return labels.reshape(1, *labels.shape[1:]) if labels.dim() else labels[None]
    if is_causal_lm(seen.model):
        ids: Tensor = seen.domain.main_input(batch)
        return ids
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
