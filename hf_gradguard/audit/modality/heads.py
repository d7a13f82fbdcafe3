"""What labels a model's head takes, made of samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...gradient_map.domain import TEXT
from ...models import label_kind, task_of
from ...randomness import Stream

if TYPE_CHECKING:
    from ...data.samples import Sample

IGNORED = -100
MASKED = 0.15


def with_labels(
    model: nn.Module, tokenizer: Any, encoded: Any, samples: Sequence[Sample], seed: int = 0
) -> dict[str, Tensor]:
    """A batch with the labels that the model's head takes.

    Args:
        model: Says which.
        tokenizer: Of texts.
        encoded: The inputs, as the tokenizer or the processor gave them.
        samples: With a class id or its name; a number or several; one 0 or 1 a class; a class a
            word; a target text; or `None`, where the text is its own label.
        seed: Of the words that are masked: the same ones in one text every time.

    Raises:
        ValueError: If a label is none that the head takes.
    """
    batch, kind, task = dict(encoded), label_kind(model), task_of(model)
    if kind == "token":
        return batch | {"labels": _of_words(encoded, samples)}
    if kind != "text":
        return batch | {"labels": _KINDS[kind](model, [label for _, label in samples])}
    assert task is not None
    if task.name == "fill-mask":
        return batch | _masked(tokenizer, batch, seed)
    if task.name == "text-generation":
        own = batch[TEXT.key].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch | {"labels": own}
    return batch | {"labels": _targets(tokenizer, samples, batch[TEXT.key].shape[1])}


def _classes(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    config = getattr(model, "config", None)
    classes, names = getattr(config, "num_labels", None), getattr(config, "label2id", None) or {}
    labels = [names.get(label, label) if isinstance(label, str) else label for label in labels]
    for label in labels:
        if isinstance(label, str):
            known = ", ".join(names) or "unnamed"
            raise ValueError(
                f"A label must be a class id or a class's name, but is {label!r}. The model's "
                f"classes are: {known}."
            )
        if isinstance(label, bool) or not isinstance(label, int | np.integer):
            raise ValueError(f"A label must be a class id, but is {label!r}.")
        if label < 0 or (classes is not None and label >= classes):
            raise ValueError(
                f"Labels must be class ids from 0 to {classes - 1 if classes else 'up'}, but one "
                f"is {label}."
            )
    return torch.tensor(labels, dtype=torch.long)


def _numbers(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    found = torch.tensor(labels, dtype=torch.float32)
    if not torch.isfinite(found).all():
        raise ValueError(f"Labels must be finite numbers, but are {list(labels)}.")
    return found


def _several(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    classes: int = model.config.num_labels  # type: ignore[union-attr, assignment]
    for label in labels:
        if not isinstance(label, list | tuple) or len(label) != classes or set(label) - {0, 1}:
            raise ValueError(
                f"A label must be one 0 or 1 for each of {classes} classes, but is {label!r}."
            )
    return torch.tensor(labels, dtype=torch.float32)


_KINDS = {"class": _classes, "number": _numbers, "several": _several}


def _of_words(encoded: Any, samples: Sequence[Sample]) -> Tensor:
    """A class for the first token of every word."""
    if not getattr(encoded, "is_fast", False):
        raise ValueError(
            "This tokenizer does not say which token is of which word, so tokens cannot be given "
            "their words' labels: load a fast one."
        )
    labels = torch.full(encoded[TEXT.key].shape, IGNORED)
    for row, (words, classes) in enumerate(samples):
        if isinstance(words, str) or classes is None:
            raise ValueError(
                "Labels of words belong to their text: give a list of words and a list of as many "
                f"labels, and not {words!r} with {classes!r}."
            )
        if len(words) != len(classes):
            raise ValueError(f"There are {len(classes)} labels for {len(words)} words.")
        before = None
        for place, word in enumerate(encoded.word_ids(row)):
            if word is not None and word != before:
                labels[row, place] = classes[word]
            before = word
    return labels


def _masked(tokenizer: Any, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """As BERT was trained: 15 % of a text's words, one at least, of which 8 in 10 are hidden, one
    is another, and one stays.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("This tokenizer has no mask token, so no words can be masked.")
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
    ids = batch[TEXT.key].clone()
    labels = torch.full_like(ids, IGNORED)
    for row, own in zip(ids, labels, strict=True):
        places = (~torch.isin(row, special)).nonzero().flatten()
        stream = Stream.from_seeds(seed, zlib.crc32(row[places].numpy().tobytes()))
        count = max(1, round(MASKED * len(places)))
        for place in places[stream.uniform((len(places),)).argsort()[:count]]:
            own[place] = row[place]
            chance = float(stream.uniform(()))
            if chance < 0.8:
                row[place] = tokenizer.mask_token_id
            elif chance < 0.9:
                row[place] = int(stream.integers(len(tokenizer), ()))
    return {TEXT.key: ids, "labels": labels}


def _targets(tokenizer: Any, samples: Sequence[Sample], longest: int) -> Tensor:
    for _, target in samples:
        if not isinstance(target, str) or not target:
            raise ValueError(f"A target must be a text, but is {target!r}.")
    encoded = tokenizer(
        text_target=[target for _, target in samples], truncation=True, max_length=longest,
        padding=True, return_tensors="pt",
    )  # fmt: skip
    found: Tensor = encoded[TEXT.key].masked_fill(encoded["attention_mask"] == 0, IGNORED)
    return found
