"""Private heads made of an encoder by its name, and of directions by public samples."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers.utils import logging

from ..data.samples import load_images, load_texts
from ..gradient_map.domain import domain_of_model
from ..models import ModelError, classifier_head
from .configuration import CONSTANT, PrivateHeadConfig
from .features import whitened_directions
from .head import (
    MOST_DIRECTIONS,
    PrivateHead,
    PrivateHeadForImageClassification,
    PrivateHeadForSequenceClassification,
    PrivateHeadForTokenClassification,
    directions_for,
    load_encoder,
    taken_of,
    warn_of_few,
)
from .rows import batches_by_length

HEADS: dict[str, type[PrivateHead]] = {
    head.task: head
    for head in (
        PrivateHeadForSequenceClassification,
        PrivateHeadForImageClassification,
        PrivateHeadForTokenClassification,
    )
}
MOST_PUBLIC = 2000
"""The most public samples that are looked at: more hardly change the directions."""
_WORDS = range(4, 31)
"""How many words a sentence of a public text has."""


def private_head(
    encoder: str | os.PathLike[str] | nn.Module,
    public: str | os.PathLike[str] | Sequence[Any] | Tensor | None = None,
    num_labels: int | None = None,
    *,
    labels: Sequence[str] | None = None,
    task: str | None = None,
    pairs: bool = False,
    problem_type: str | None = None,
    label_range: tuple[float, float] | None = None,
    directions: int | None = None,
    num_rows: int | None = None,
    processing_class: Any = None,
    max_length: int = 128,
    revision: str | None = None,
    save_encoder: bool | None = None,
    constant: float = CONSTANT,
    device: str | torch.device | None = None,
) -> PrivateHead:
    """Return a new head on a frozen encoder, to be trained by differentially private gradients.

    Nothing in it depends on private data. `head.training_arguments` has the defaults that it is
    trained with.

    Args:
        encoder: A name on the Hub, a folder, or a model that is loaded already. Of a classifier the
            encoder alone is taken. Any other module gives the features that it returns.
        public: Texts or images that are nobody's secret, preferably thousands, since what is
            learned from them is published. Texts may be a file; a `.txt` file is cut into
            sentences. Default: the 560 sentences that come with this package, for texts.
        num_labels: The number of classes or numbers. Default: 2, or as many as `labels`.
        labels: The names of the classes.
        task: `"text-classification"`, `"image-classification"` or
            `"token-classification"`. Default: one of the first two, by the encoder.
        pairs: Whether a row is a pair of texts. The encoder reads each by itself. Public texts are
            paired with those that follow, unless they are pairs.
        problem_type: The problem type of Transformers: `"single_label_classification"`,
            `"multi_label_classification"` or `"regression"`. Default: the first, or the last for
            one label.
        label_range: The least and the largest number of a regression. It must be known without
            private data. Default: -1 to 1.
        directions: The number of directions to keep, at most one less than there are public
            samples. More keep more of what differs between samples, and take more noise. Default:
            1,400, of which `head.fit_directions(num_rows)` keeps one for every 16 rows.
        num_rows: The number of private rows that it will be trained on; see `directions`.
        processing_class: The tokenizer or image processor. Default: the encoder's own.
        max_length: The most tokens of a text.
        revision: A branch, tag or commit of the Hub.
        save_encoder: Whether `save_pretrained` writes the encoder's weights, too. Default: unless
            it has a name on the Hub.
        constant: The feature in a bias's place.
        device: Where features are made. Default: where an encoder that is loaded already is;
            otherwise an accelerator, if there is one.

    Raises:
        ValueError: If there are fewer than three public samples, or no direction in which they
            differ, or arguments do not fit together; or the encoder gives a sample other features
            each time.
        FileNotFoundError: If neither a folder nor the Hub has the encoder.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
        >>> head.head.out_features, float(head.head.weight.abs().sum())
        (2, 0.0)
    """
    name, module = _named_encoder(encoder, revision)
    is_known = hasattr(module, "config")
    takes_images = is_known and domain_of_model(module).name == "image"
    task = task or ("image-classification" if takes_images else "text-classification")
    if task not in HEADS:
        raise ValueError(f"There is no task {task!r} for a head. There are: {', '.join(HEADS)}.")
    if (HEADS[task].takes_images, is_known) == (not takes_images, True):
        raise ValueError(f"{task} is no task for {type(module).__name__}: take another encoder.")
    samples, description = public_samples(public, takes_images)
    if pairs:
        samples = _paired(samples)
    if len(samples) < 3:
        raise ValueError(f"public has {len(samples)} samples, and whitening takes three or more.")
    if save_encoder is None:  # a model that is loaded may not be as its name has it
        save_encoder = isinstance(encoder, nn.Module) or not _is_hub_name(name)
    config = PrivateHeadConfig(
        task=task,
        pairs=pairs,
        encoder=name if _is_hub_name(name) or not save_encoder else _last_part(name),
        encoder_revision=_commit(name, revision),
        encoder_config=_settings(module.config) if is_known else None,
        save_encoder=save_encoder,
        max_length=max_length, constant=constant, public_data=description, directions=1,
        name_or_path=name,
        **_labels(num_labels, labels, problem_type, label_range),
    )  # fmt: skip
    head = HEADS[task](config, module, processing_class)
    if pairs:
        config.sep_token_id = _separator(head)
    head.to(_device(encoder) if device is None else device)
    _check_repeatable(head, samples[:2])
    features = _features_of_public(head, samples)
    most = directions or MOST_DIRECTIONS
    if directions is None and num_rows is not None:
        most = directions_for(num_rows)
    is_open = directions is None and num_rows is None
    head.set_directions(whitened_directions(features, most), is_chosen=not is_open)
    if not is_open:
        warn_of_few(head.config.directions, most)
    return head


def _paired(samples: Sequence[Any]) -> list[tuple[str, str]]:
    """Return pairs of texts: of neighbors, and of texts that are far from each other."""
    if isinstance(samples[0], tuple):
        return list(samples)
    half = len(samples) // 2
    far = list(zip(samples[::2], [*samples[half::2], *samples[:half:2]], strict=False))
    return [*zip(samples[::2], samples[1::2], strict=False), *far]


def _separator(head: PrivateHead) -> int:
    """Return the token that a tokenizer puts between the texts of a pair, and at its end."""
    tokenizer = head.processing_class
    separator = getattr(tokenizer, "sep_token_id", None)
    if head.task == "text-classification" and separator is not None:
        single, pair = tokenizer("a")["input_ids"], tokenizer("a", "a")["input_ids"]
        if pair[: len(single)] == single and pair.count(separator) > single.count(separator) > 0:
            return int(separator)
    raise ValueError(
        "pairs= is for text-classification by an encoder whose tokenizer puts a separator after "
        "each text of a pair. Take another encoder."
    )


def _named_encoder(
    encoder: str | os.PathLike[str] | nn.Module, revision: str | None
) -> tuple[str, Any]:
    """Return an encoder and its name."""
    if not isinstance(encoder, nn.Module):
        return os.fspath(encoder), load_encoder(os.fspath(encoder), revision)
    config = getattr(encoder, "config", None)
    if config is None:
        return "", encoder.eval()
    base = getattr(encoder, "base_model", encoder)
    return str(getattr(config, "name_or_path", "") or ""), taken_of(base).eval()


def _device(encoder: Any) -> torch.device:
    """Return where an encoder is, or the accelerator that this process has."""
    if isinstance(encoder, nn.Module):
        parameter = next(encoder.parameters(), torch.empty(0))
        return parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))


def _check_repeatable(head: PrivateHead, samples: Any) -> None:
    """Refuse an encoder whose features are random."""
    features, repeated = (head.public_features(**head.inputs_of(samples)) for _ in range(2))
    if (repeated - features).norm() > 1e-2 * features.norm():
        raise ModelError(
            "The encoder gives the same samples other features each time, as one that masks at "
            "random does (ViT-MAE). A head learns little from these. Take another encoder."
        )


def _settings(config: Any) -> dict[str, Any]:
    """Return an encoder's configuration without its place."""
    return {n: value for n, value in config.to_dict().items() if n != "_name_or_path"}


def _last_part(name: str) -> str:
    """Return the last part of a folder's path: the rest means nothing elsewhere."""
    return os.path.basename(os.path.abspath(name)) if name else ""


def _is_hub_name(name: str) -> bool:
    return bool(name) and not os.path.isdir(name)


def _commit(name: str, revision: str | None) -> str | None:
    """Return the Hub's commit that an encoder was loaded from, if it was."""
    if not _is_hub_name(name):
        return None
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    folders = Path(cached).parts if isinstance(cached, str) else ()
    if "snapshots" in folders:
        return folders[folders.index("snapshots") + 1]
    return revision


def _labels(
    num_labels: int | None,
    labels: Sequence[str] | None,
    problem_type: str | None,
    label_range: tuple[float, float] | None,
) -> dict[str, Any]:
    """Return the settings of a configuration that say what is predicted."""
    if labels is not None and num_labels not in (None, len(labels)):
        raise ValueError(f"There are {len(labels)} labels, and num_labels is {num_labels}.")
    count = num_labels or (2 if labels is None else len(labels))
    settings: dict[str, Any] = {"num_labels": count}
    if labels is not None:
        settings = classifier_head(labels)
    problem_type = problem_type or ("regression" if count == 1 else "single_label_classification")
    settings["problem_type"] = problem_type
    if label_range is not None:
        if problem_type != "regression":
            raise ValueError("label_range is of a regression: set problem_type='regression', too.")
        low, high = label_range
        settings |= {"label_center": (low + high) / 2, "label_scale": (high - low) / 2}
    return settings


@torch.no_grad()
def _features_of_public(head: PrivateHead, samples: Any) -> Tensor:
    """Return the encoder's features of public samples, behind a progress bar."""
    bar = logging.tqdm(total=len(samples), desc="public samples", leave=False)
    features = []
    for places in batches_by_length(samples):
        chosen = samples[places] if isinstance(samples, Tensor) else [samples[n] for n in places]
        features.append(head.public_features(**head.inputs_of(chosen)).cpu())
        bar.update(len(places))
    bar.close()
    return torch.cat(features)


def public_samples(public: Any, takes_images: bool) -> tuple[Any, str]:
    """Return public samples, at most 2,000, and words that say where they come from.

    Args:
        public: What `private_head` takes.
        takes_images: Whether they are images.

    Raises:
        ValueError: If images are needed, and there are none.

    Example:
        >>> samples, description = public_samples(None, takes_images=False)
        >>> len(samples), description
        (560, "560 samples of hf-gradguard's own sentences")
    """
    source = "a list"
    if public is None:
        if takes_images:
            raise ValueError("public images are needed: none come with this package.")
        public, source = packaged_sentences(), "hf-gradguard's own sentences"
    elif isinstance(public, str | os.PathLike):
        path = os.fspath(public)
        if takes_images:
            public = list(load_images(path))
        else:
            public = sentences_of(path) if path.endswith(".txt") else load_texts(path)
        source = os.path.basename(os.path.normpath(path))
    if len(public) > MOST_PUBLIC and not isinstance(public, Tensor):
        places = sorted(random.Random(0).sample(range(len(public)), MOST_PUBLIC))
        public = [public[place] for place in places]
    return public, f"{len(public):,} samples of {source}"


def sentences_of(path: str) -> list[str]:
    """Return the sentences of a text file, of 4 to 30 words, without headings between `=`.

    If a file has none of that length, its lines are returned.

    Args:
        path: The file, with a sentence or a paragraph a line.
    """
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and line[0] != "="]
    pieces = [piece for line in lines for piece in re.split(r"(?<=[.!?]) ", line)]
    return [piece for piece in pieces if len(piece.split()) in _WORDS] or lines


def packaged_sentences() -> list[str]:
    folder = files("hf_gradguard.data") / "sentiment"
    return [text for name in ("train", "dev") for text in load_texts(str(folder / f"{name}.tsv"))]
