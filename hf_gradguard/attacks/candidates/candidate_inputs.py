"""Candidates as batches of one: texts, ids, pixels, and mappings of a batch's entries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...gradient_map.domain import DOMAINS, IGNORED, IMAGE, TEXT, Domain, is_encoder_decoder
from ...models import label_kind, task_of
from ..base import Observation
from ..label_recovery import recover_labels
from ..layer_inputs import is_causal_lm
from .sample_likelihood import count_labels, mean_items

T = TypeVar("T")
MOST_COMBINATIONS = 200_000
_LABELS = ("labels", "label", "label_ids")  # collators take each for the first
_PER_TOKEN = ("token", "text")  # kinds of labels


@dataclass(frozen=True)
class Inputs:
    """The K candidates of a list, as batches of one.

    Args:
        places: Where each stands in the list, `(K,)`.
        batches: The batches, with `labels` where the list has them.
        counts: How many tokens clients have of each; 0 for an image.
    """

    places: list[int]
    batches: list[dict[str, Any]]
    counts: list[int]


def make_inputs(
    observation: Observation, candidates: Sequence[Any], labels: Sequence[Any] | None = None
) -> Inputs:
    """Return the candidates of the observation's domain.

    Args:
        observation: The observation, whose domain, tokenizer and padding apply.
        candidates: Candidates as `Candidates` takes them.
        labels: One label each, or none.

    Raises:
        ValueError: If there is no candidate of that domain, one is of no domain or does not fit the
            model, or the labels are not one per candidate.

    Example:
        >>> made = make_inputs(observation, [torch.rand(3, 8, 8), "a fine film"])
        >>> made.places, made.batches[0]["input_ids"].shape
        ([1], torch.Size([1, 5]))
    """
    if labels is not None and len(labels) != len(candidates):
        raise ValueError(f"There are {len(labels)} labels for {len(candidates)} candidates.")
    inputs = Inputs([], [], [])
    pads_left = _pads_left(observation)
    for place, candidate in enumerate(candidates):
        entries = _entries(observation, candidate, place)
        if entries is None:
            continue
        if labels is not None:
            entries["labels"] = labels[place]
        batch = _as_batch(observation, entries, place)
        mask = batch.get("attention_mask")
        inputs.places.append(place)
        inputs.batches.append(_fit_length(observation, batch, pads_left))
        inputs.counts.append(0 if mask is None else int(mask.sum()))
    if not inputs.places:
        raise ValueError(
            f"The list of candidates holds none for {observation.domain.content}: give texts or "
            "token ids for a text, and tensors (C, H, W) of pixels for images."
        )
    return inputs


def without_padding(domain: Domain, batch: Mapping[str, Any]) -> Tensor:
    """Return a candidate's pixels `(1, C, H, W)`, or its ids `(1, T)` without padding.

    Example:
        >>> padded = {"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])}
        >>> without_padding(TEXT, padded)
        tensor([[5]])
    """
    main, present = domain.main_input(batch), domain.present(batch)
    return main if present is None else main[present][None]


def at_places(
    observation: Observation, text: Any, places: Sequence[int], words: Sequence[Any] | None
) -> list[dict[str, Tensor]]:
    """Return one text with every word of a list, or of the vocabulary, at some of its places.

    Args:
        observation: The observation, whose tokenizer and vocabulary apply.
        text: The text, or its ids.
        places: Positions among its tokens, special ones included.
        words: Tokens or ids. Default: all that are not special.

    Raises:
        ValueError: If a place is none of the text's, or there would be too many candidates.
    """
    ids = without_padding(observation.domain, make_inputs(observation, [text]).batches[0])
    if not places or not all(0 <= place < ids.shape[1] for place in places):
        raise ValueError(f"places must be from 0 to {ids.shape[1] - 1}, but are {list(places)}.")
    if words is None:
        size = len(TEXT.embedding(observation.model).weight)  # type: ignore[arg-type]
        special = set(getattr(observation.tokenizer, "all_special_ids", ()))
        words = [token for token in range(size) if token not in special]
    tokenizer = observation.tokenizer
    tokens = [w if isinstance(w, int) else tokenizer.convert_tokens_to_ids(w) for w in words]
    if len(tokens) ** len(places) > MOST_COMBINATIONS:
        raise ValueError(
            f"{len(tokens)} words at {len(places)} places make more than {MOST_COMBINATIONS:,} "
            "candidates. Name fewer words, or ask for one place after the other."
        )
    filled_texts = []
    for filled in product(tokens, repeat=len(places)):
        filled_ids = ids.clone()
        filled_ids[0, list(places)] = torch.tensor(filled, device=ids.device)
        filled_texts.append({TEXT.key: filled_ids})
    return filled_texts


def _entries(observation: Observation, candidate: Any, place: int) -> dict[str, Any] | None:
    """Return a candidate's entries by name; `None` if it is of another domain."""
    if isinstance(candidate, str):
        return {TEXT.key: _ids_of(observation, candidate)} if observation.domain is TEXT else None
    if isinstance(candidate, Mapping):
        domain = next((d for d in DOMAINS.values() if d.key in candidate), None)
        entries = {key: value for key, value in candidate.items() if value is not None}
    else:
        value = _tensor(candidate)
        domain = None if value is None else (IMAGE if value.dim() > 2 else TEXT)
        entries = {} if domain is None else {domain.key: value}
    if domain is None:
        raise ValueError(
            f"Candidate {place} is a {type(candidate).__name__}"
            f"{f' of {sorted(candidate)}' if isinstance(candidate, Mapping) else ''}: give "
            "texts or token ids "
            "for a text, tensors (C, H, W) of pixels for images, or mappings with one of them."
        )
    return entries if domain is observation.domain else None


def _ids_of(observation: Observation, text: str) -> list[int]:
    if observation.tokenizer is None:
        raise ValueError("Texts need a tokenizer: give it to the Observation, or give ids.")
    length, special = observation.input_shape[1], observation.special_tokens
    cut = {"truncation": True, "max_length": length, "add_special_tokens": special}
    token_ids: list[int] = observation.tokenizer(text, **cut)["input_ids"]
    return token_ids


def _tensor(value: Any) -> Tensor | None:
    """Return numbers, lists and arrays of them as a tensor; `None` for anything else."""
    if isinstance(value, Sequence) and any(isinstance(entry, str) for entry in value):
        return None
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _as_batch(observation: Observation, entries: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return each entry as a tensor of one row: rows of a data set have numbers and lists."""
    tensors = {}
    for key, value in entries.items():
        tensor = _tensor(value)
        if tensor is None:
            raise ValueError(
                f"Candidate {place} has a {type(value).__name__} under {key!r}, which is no "
                "tensor: leave it out."
            )
        tensors[key] = tensor.to(observation.device)
    label_key = next((name for name in _LABELS if name in tensors), None)
    labels = None if label_key is None else _as_label(observation.model, tensors[label_key], place)
    tensors = {key: value for key, value in tensors.items() if key not in _LABELS}
    main = _MAINS[observation.domain.name](observation, tensors.pop(observation.domain.key), place)
    rows = {key: _as_row(value) for key, value in tensors.items()}
    if observation.domain is TEXT:
        rows = {"attention_mask": torch.ones_like(main), **rows}
    return {observation.domain.key: main, **rows, **({} if labels is None else {"labels": labels})}


def _as_row(value: Tensor) -> Tensor:
    return value if value.dim() > 1 and len(value) == 1 else value[None]


def _as_label(model: nn.Module, label: Tensor, place: int) -> Tensor:
    """Return a label as the model's head takes it, `(1,)` or `(1, ...)`."""
    kind = label_kind(model)
    if kind in _PER_TOKEN:
        return label.reshape(1, -1)
    if kind in ("several", "number") and not label.is_floating_point():
        label = label.float()
    if label.numel() == 1 and kind != "several":
        return label.reshape(1)
    if kind == "class" and task_of(model) is not None:
        raise ValueError(
            f"Candidate {place} has labels of shape {tuple(label.shape)}, where the model takes "
            "one class."
        )
    return _as_row(label)


def _as_ids(observation: Observation, ids: Tensor, place: int) -> Tensor:
    one_row = ids.dim() == 1 or (ids.dim() == 2 and len(ids) == 1)
    if ids.is_floating_point() or not one_row or not ids.numel():
        raise ValueError(
            f"Candidate {place} has ids of shape {tuple(ids.shape)} and type {ids.dtype}, where "
            "those of one text are needed: whole numbers, one at least."
        )
    row = ids.reshape(1, -1).long()
    size = _vocabulary(observation)
    if len(wrong := row[(row < 0) | (row >= size)] if size is not None else row[row < 0]):
        valid_range = "at least 0" if size is None else f"from 0 to {size - 1}"
        raise ValueError(
            f"Candidate {place} has the token id {int(wrong[0])}, where the model's are "
            f"{valid_range}: give ids of the model's own tokenizer."
        )
    return row


def _vocabulary(observation: Observation) -> int | None:
    """Return how many ids there are, if the model says it."""
    embeddings = TEXT.token_embeddings(observation.model)[
        :2
    ]  # an encoder-decoder's third one is targets'
    weights = [getattr(module, "weight", None) for module in embeddings]
    return min((len(weight) for weight in weights if isinstance(weight, Tensor)), default=None)


def _as_pixels(observation: Observation, pixels: Tensor, place: int) -> Tensor:
    if not pixels.is_floating_point():
        raise ValueError(
            f"Candidate {place} holds pixels as whole numbers ({pixels.dtype}), where the model "
            "takes floating point: prepare it as the client's processor does."
        )
    row = pixels.reshape(-1, *pixels.shape[-3:])
    if tuple(row.shape) != (1, *observation.input_shape[1:]):
        raise ValueError(
            f"A candidate has shape {tuple(pixels.shape)}, where the message's images have "
            f"{tuple(observation.input_shape[1:])}: prepare it as the client's processor does."
        )
    dtype = next(p.dtype for p in observation.model.parameters() if torch.is_floating_point(p))
    return row.to(dtype)


_MAINS = {TEXT.name: _as_ids, IMAGE.name: _as_pixels}


def _pads_left(observation: Observation) -> bool:
    """Return whether clients' texts have padding before them, by the mask or the tokenizer."""
    if observation.domain is not TEXT:
        return False
    if observation.attention_mask is None:
        return getattr(observation.tokenizer, "padding_side", "right") == "left"
    return bool((~observation.tokens[:, 0] & observation.tokens[:, -1]).any())


def _fit_length(observation: Observation, batch: dict[str, Any], pads_left: bool) -> dict[str, Any]:
    """Return a text cut or padded to the message's length.

    A longer one is cut, unless labels belong to its tokens. A shorter one gets padding on the left
    if clients have it there. Many models count positions from there, and a language model predicts
    the first token from padding.
    """
    missing = 0
    if observation.domain is TEXT:
        missing = observation.input_shape[1] - batch[TEXT.key].shape[1]
    labels_are_tokens = "labels" in batch and label_kind(observation.model) in _PER_TOKEN
    if not missing or (missing < 0 and labels_are_tokens) or (missing > 0 and not pads_left):
        return batch
    pads_before = missing > 0 or not bool(batch["attention_mask"][0, 0])
    tokenizer, config = observation.tokenizer, getattr(observation.model, "config", None)
    pads = [getattr(tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None), 0]
    fill = {TEXT.key: next(pad for pad in pads if pad is not None), "labels": IGNORED}
    side = (missing, 0) if pads_before else (0, missing)
    return {
        key: nn.functional.pad(value, side, value=fill.get(key, 0))
        if _is_of_tokens(observation.model, key, value, batch[TEXT.key])
        else value
        for key, value in batch.items()
    }


def _is_of_tokens(model: nn.Module, key: str, value: Tensor, ids: Tensor) -> bool:
    """Return whether an entry is one number per token."""
    if key == "labels" and not has_token_labels(model):
        return False
    return value.shape == ids.shape and not key.startswith("decoder_")


def has_token_labels(model: nn.Module) -> bool:
    """Return whether there is one label per token of the text that the model reads.

    Example:
        >>> has_token_labels(model)
        False
    """
    return label_kind(model) in _PER_TOKEN and not is_encoder_decoder(model)


ALL_CLASSES = 8
"""Unknown labels are tried out if there are at most this many classes, and read off otherwise."""
_RARE = 1e-6  # what is as good as excluded still has a finite logarithm


@dataclass(frozen=True)
class Entries:
    """The P pairs of a candidate and a label, as batches of one.

    Args:
        batches: One batch a pair.
        candidate: Which of the K candidates a pair is of, `(P,)`.
        label: Which label a pair has, as a number: gradients of one label have a mean in common.
        prior: How often the batch has a pair's label, `(P,)`. The numbers of one candidate add up
            to 1.
        counts: The fraction of each label in the batch.
        inputs: One input a candidate: `(1, T)` ids without padding or `(1, C, H, W)` pixels.
        places: Where each candidate stands in the list, `(K,)`.
        listed: The length of the list, with what is passed over.
        values: The labels, each `(1, ...)`; none if each candidate has its own, token by token.
        items: Over how many labels the mean loss of each pair is taken, `(P,)`.
        mean_items: How many labels a sample of the message has on average.
        likely: The log prior of each candidate, `(K,)`, by its length, if the message's are known,
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
    observation: Observation, candidates: Sequence[Any], labels: Sequence[Any] | None
) -> Entries:
    """Return the candidates of the observation's domain, each with every label that it may have.

    Raises:
        ValueError: If a candidate is refused, see `make_inputs`, or labels are needed and not
            given.
    """
    inputs = make_inputs(observation, candidates, labels)
    own_labels = [_labels_of(observation, batch) for batch in inputs.batches]
    values, fractions, prior = _classes(observation, own_labels)
    batches, candidate, label, priors, best = [], list[int](), list[int](), list[float](), []
    for number, (batch, fixed) in enumerate(zip(inputs.batches, own_labels, strict=True)):
        choices = range(len(values)) if fixed is None else [place_of(values, fixed)]
        for place in choices:
            value = fixed if fixed is not None else values[place]
            if has_token_labels(observation.model):
                _check_tokens(value, observation.domain.main_input(batch), inputs.places[number])
            batches.append({**batch, "labels": value})
            candidate.append(number)
            label.append(place)
        likely = [max(prior.get(place, 1.0), _RARE) for place in choices]
        priors += likely
        best.append(max(likely, default=0.0))
    items = count_labels(observation.model, batches)
    return Entries(
        batches=batches,
        candidate=torch.tensor(candidate, device=observation.device),
        label=label,
        prior=torch.tensor(priors, dtype=torch.float64, device=observation.device),
        counts=fractions,
        inputs=[without_padding(observation.domain, batch) for batch in inputs.batches],
        places=torch.tensor(inputs.places, device=observation.device),
        listed=len(candidates),
        values=values,
        items=items,
        mean_items=mean_items(observation, batches, items),
        likely=_by_length(observation, inputs.counts) + _by_label(observation, best),
    )


def _by_length(observation: Observation, counts: Sequence[int]) -> Tensor:
    """Return the log prior of candidates by their number of tokens, `(K,)`.

    If none is as long as one of the message's texts, clients cut them otherwise, and lengths say
    nothing.
    """
    known_lengths = observation.attention_mask is not None
    lengths = set(observation.tokens.sum(1).tolist()) if known_lengths else set()
    fits = torch.tensor([count in lengths for count in counts], device=observation.device)
    rare = ~fits if bool(fits.any()) else torch.zeros_like(fits)
    return rare.double() * math.log(_RARE)


def _by_label(observation: Observation, priors: Sequence[float]) -> Tensor:
    """Return the log prior of candidates by how likely their labels are at most, `(K,)`.

    Those of labels that the message does not have are as good as excluded.
    """
    rare = torch.tensor([prior <= _RARE for prior in priors], device=observation.device)
    return rare.double() * math.log(_RARE)


def _check_tokens(labels: Tensor, ids: Tensor, place: int) -> None:
    if labels.shape != ids.shape:
        raise ValueError(
            f"Candidate {place} has {ids.shape[1]} tokens, and there are {labels.numel()} labels "
            "for it: they belong to the words of a text. Give labels with each candidate."
        )


def _labels_of(observation: Observation, batch: dict[str, Any]) -> Tensor | None:
    """Return labels that come with a candidate: its own entry, or a language model's tokens."""
    if "labels" in batch:
        labels: Tensor = batch["labels"]
        return labels
    if is_causal_lm(observation.model):
        ids: Tensor = observation.domain.main_input(batch)
        return ids.masked_fill(batch["attention_mask"] == 0, IGNORED)
    return None


def _classes(
    observation: Observation, own_labels: Sequence[Tensor | None]
) -> tuple[list[Tensor], dict[int, float], dict[int, float]]:
    """Return the possible labels, each `(1, ...)`, their fractions in the batch, and their prior.

    The prior is how likely a candidate has each label.
    """
    if any(
        label is not None and label.dim() > 1 for label in own_labels
    ):  # token by token: of each its own
        return [], {0: 1.0}, {0: 1.0}
    labels, sure = observation.labels, True
    if labels is None:
        labels, sure = _recovered(observation), False
    count = getattr(getattr(observation.model, "config", None), "num_labels", None)
    values = [] if labels is None else list(torch.unique(labels, dim=0)[:, None])
    if labels is None and label_kind(observation.model) != "class":
        count = None  # no ids to try
    if not sure and count is not None and (count <= ALL_CLASSES or labels is None):
        values = list(torch.arange(count, device=observation.device)[:, None])
    for label in own_labels:
        if label is not None and place_of(values, label) == len(values):
            values.append(label)
    if not values:
        raise ValueError("The labels are not known, and cannot be read off. Give labels.")
    if labels is None:
        fractions = {place: 1 / len(values) for place in range(len(values))}
        return values, fractions, dict(fractions)
    label_counts = Counter(place_of(values, row[None]) for row in labels)
    fractions = {place: label_counts[place] / len(labels) for place in range(len(values))}
    smooth = 0.0 if sure else 1.0  # labels that were read off may be wrong
    total = len(labels) + smooth * len(values)
    prior = {place: (label_counts[place] + smooth) / total for place in range(len(values))}
    return values, fractions, prior


def _recovered(observation: Observation) -> Tensor | None:
    try:
        return recover_labels(observation)
    except ValueError:
        return None


def place_of(values: Sequence[Tensor], label: Tensor) -> int:
    """Return the place of a label among these; the place after the last if it is none."""
    if label.dim() > 1 and not values:
        return 0
    return next((i for i, v in enumerate(values) if torch.equal(v, label.to(v))), len(values))


def spread_out(listed: Sequence[T], count: int) -> Sequence[T]:
    """Return at most this many entries, spread over the whole list."""
    return listed[:: max(1, len(listed) // count)][:count]
