"""Rows of features, made once of rows of texts or images.

Features are kept in the cache of the library `datasets`, under a key of all that decides them: the
encoder's weights, the directions, the settings, and the samples themselves. They say as much as the
samples do, so they stay on the machine, as the samples do.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from ..data.class_labels import find_class
from ..data.files import COLUMNS

PAIRS = (
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("question", "passage"), ("text", "text_pair"),
    ("text_a", "text_b"), ("text1", "text2"), ("query", "text"),
)  # fmt: skip
"""Columns that hold the two texts of a pair."""
LABELS = ("labels", "label", "label_ids", "score", "similarity_score", "y", "sentiment")
WORDS, TAGS = ("tokens", "words"), ("ner_tags", "pos_tags", "chunk_tags", "tags", "labels")
BATCH = 64  # samples at once


def prepared(head: Any, dataset: Any) -> Any:
    """Return rows of `features` and `labels`; rows that have features stay as they are.

    Args:
        head: The head, with its encoder.
        dataset: A `datasets.Dataset`, a list of rows, or any data set with a length.

    Raises:
        ValueError: If no column has texts, images or features, or a label is no class of the head.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
        >>> rows = prepared(head, [{"text": "a fine film", "label": 1}])
        >>> rows.column_names, len(rows[0]["features"])
        (['features', 'labels'], 16)
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "A head's features are made once for all rows: pass rows that have a length and can be "
            "read in any order, not a stream."
        )
    if not len(dataset) or "features" in names_of(dataset):
        return dataset
    from datasets import Dataset

    names = names_of(dataset)
    samples = _samples(head, dataset, names)
    features, lengths = features_of(head, samples)
    columns: dict[str, Any] = {"features": features.numpy()}
    label_name = _usual_name(TAGS if head.reads_words else LABELS, names)
    if label_name is not None:
        columns["labels"] = _labels(head, dataset, label_name)
    if lengths is not None:
        texts = features.split(lengths.tolist())
        columns["features"] = [text_features.numpy() for text_features in texts]
        if label_name is not None:  # of words that were not cut off
            counts = zip(columns["labels"], lengths.tolist(), strict=True)
            columns["labels"] = [labels[:count] for labels, count in counts]
    return Dataset.from_dict(columns).with_format("torch")


def names_of(dataset: Any) -> list[str]:
    """Return the columns of rows.

    Args:
        dataset: Rows, not none of them.
    """
    names = getattr(dataset, "column_names", None)
    return list(dataset[0] if names is None else names)


def _usual_name(usual: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in usual if name in names), None)


def column_of(dataset: Any, name: str) -> list[Any]:
    """Return a column's entries, as they are stored.

    Args:
        dataset: Rows.
        name: The column.
    """
    if hasattr(dataset, "column_names"):
        return list(dataset.with_format(None)[name])
    return [dataset[place][name] for place in range(len(dataset))]


def _samples(head: Any, dataset: Any, names: Sequence[str]) -> list[Any]:
    """Return the texts, pairs of texts or images of all rows."""
    kind, usual = "text", COLUMNS["text"]
    if head.takes_images:
        kind, usual = "image", COLUMNS["image"]
    elif head.reads_words:
        kind, usual = "lists of word", WORDS
    else:
        pair = next((pair for pair in PAIRS if set(pair) <= set(names)), None)
        if (pair is not None) != head.config.pairs:
            raise ValueError(
                f"The head is for {'pairs of' if head.config.pairs else 'single'} texts, and the "
                f"rows have the columns {list(names)}. Set pairs= of private_head, or rename them."
            )
        if pair is not None:
            return list(zip(*(column_of(dataset, name) for name in pair), strict=True))
    if (name := _usual_name(usual, names)) is None:
        raise ValueError(f"No column of {list(names)} has {kind}s: rename it to {usual[0]!r}.")
    return column_of(dataset, name)


def _labels(head: Any, dataset: Any, name: str) -> Any:
    """Return the labels of all rows as the head takes them."""
    labels = column_of(dataset, name)
    if head.config.problem_type == "regression":
        return np.asarray(labels, dtype=np.float32)
    if head.config.problem_type == "multi_label_classification":
        return _indicators(labels, head.config)
    if head.reads_words:
        return [[_class(label, head.config.label2id) for label in row] for row in labels]
    return [_class(label, head.config.label2id) for label in labels]


def _class(label: Any, classes: dict[str, int]) -> int:
    return (
        int(label) if isinstance(label, int | np.integer | Tensor) else find_class(label, classes)
    )


def _indicators(labels: list[Any], config: Any) -> np.ndarray:
    """Return 0 or 1 for each class of each row, `(N, classes)`, of such or of lists of classes."""
    rows = np.zeros((len(labels), config.num_labels), dtype=np.float32)
    are_indicators = all(
        len(row) == config.num_labels and not any(isinstance(entry, str) for entry in row)
        and set(map(float, row)) <= {0.0, 1.0}
        for row in labels
    )  # fmt: skip
    for place, row in enumerate(labels):
        if are_indicators:
            rows[place] = row
        else:
            rows[place, [_class(label, config.label2id) for label in row]] = 1
    return rows


def features_of(head: Any, samples: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return features of samples, from the cache if they were made before.

    Args:
        head: The head, with its encoder.
        samples: Texts, pairs of texts, lists of words, or images.

    Returns:
        The features `(N, directions + 1)`, of samples or of words; and how many words a sample has,
        where it has any.
    """
    path = _cache() / f"{key_of(head, samples)}.safetensors"
    if not path.exists():
        by_sample: list[Tensor] = [torch.empty(0)] * len(samples)
        bar = logging.tqdm(total=len(samples), desc="features", leave=False)
        for places in batches_by_length(samples):
            rows = head.rows_of([samples[place] for place in places])
            for place, features in zip(places, rows, strict=True):
                by_sample[place] = features
            bar.update(len(places))
        bar.close()
        entries = {"features": torch.cat(by_sample) if head.reads_words else torch.stack(by_sample)}
        if head.reads_words:
            entries["lengths"] = torch.tensor([len(features) for features in by_sample])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{secrets.token_hex(8)}")
        save_file(entries, partial)
        partial.replace(path)
    entries = load_file(path)
    return entries["features"], entries.get("lengths")


def batches_by_length(samples: Sequence[Any]) -> list[list[int]]:
    """Return the places of samples in batches of which each has samples of about one length.

    Padding takes as long as words do.

    Args:
        samples: Texts, pairs of texts, lists of words, or images.

    Example:
        >>> batches_by_length(["a long text", "a text", "a"])
        [[2, 1, 0]]
    """
    order = sorted(range(len(samples)), key=lambda place: _length(samples[place]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def _length(sample: Any) -> int:
    if isinstance(sample, str):
        return len(sample)
    return sum(map(_length, sample)) if isinstance(sample, tuple | list) else 0


def _cache() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "gradguard_heads"


def key_of(head: Any, samples: Sequence[Any]) -> str:
    """Return a key of all that decides features, as 64 hexadecimal digits.

    Args:
        head: The head.
        samples: The samples.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        if not name.startswith("head."):
            values = tensor.detach().cpu().contiguous().view(-1)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(values.view(torch.uint8).numpy().tobytes())
    config = head.config
    digest.update(f"{type(head).__name__} {config.max_length} {config.constant}".encode())
    digest.update(f"{config.encoder_config} {_described(head.processing_class)}".encode())
    for sample in samples:
        digest.update(_bytes(sample) + b"\0")
    return digest.hexdigest()


def digest_of(head: Any, dataset: Any) -> bytes:
    """Return a hash of rows in their order, by which they are known again.

    It is of samples and labels, and not of features, whose last digits are a machine's own.

    Args:
        head: The head that the rows are for.
        dataset: Rows as `prepared` takes them.
    """
    names, total = names_of(dataset), hashlib.sha256()
    has_features = "features" in names
    samples = column_of(dataset, "features") if has_features else _samples(head, dataset, names)
    label_name = _usual_name(TAGS if head.reads_words else LABELS, names)
    labels = [] if label_name is None else column_of(dataset, label_name)
    for entries in (samples, labels):
        for entry in entries:
            total.update(hashlib.sha256(_bytes(entry)).digest())
        total.update(b"\0")
    return total.digest()


def _described(processing_class: Any) -> str:
    """Return what a tokenizer or image processor does, as far as its settings say it."""
    backend = getattr(processing_class, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    return str(getattr(processing_class, "to_json_string", lambda: "")())


def _bytes(sample: Any) -> bytes:
    if isinstance(sample, str):
        return sample.encode()
    if isinstance(sample, tuple | list):
        return b"\1".join(map(_bytes, sample))
    if isinstance(sample, dict) and sample.get("bytes") is not None:
        return bytes(sample["bytes"])
    if hasattr(sample, "tobytes") and hasattr(sample, "mode"):
        return f"{sample.mode} {sample.size}".encode() + bytes(sample.tobytes())
    array = np.asarray(sample)
    return f"{array.dtype} {array.shape}".encode() + array.tobytes()
