"""What a command names: a model, and samples as its head takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import set_seed

from ..data.samples import Sample, load_inputs, load_samples
from ..gradient_map.domain import domain_of_model
from ..models import label_kind, load_model, task_of
from .settings import SourceSettings


class Loaded(NamedTuple):
    """A model, what makes its inputs, and samples for it."""

    model: nn.Module
    processing_class: Any
    samples: list[Sample]


def load(source: SourceSettings, *, count: int, spare: int, seed: int) -> Loaded:
    """Load what a command names.

    Args:
        source: The names.
        count: Samples that are needed.
        spare: More of them, or as many as there are.
        seed: Of the draw, and of a head that the model does not come with.

    Raises:
        ValueError: If the model has no such head, or the data no such columns.
        OSError: If something cannot be read.
    """
    set_seed(seed)
    model, processing_class = load_model(source.model, source.task)
    kind, task = label_kind(model), task_of(model)
    alone = task is not None and task.name in ("text-generation", "fill-mask")
    samples = load_samples(
        source.dataset,
        kind=domain_of_model(model).name,
        labels=None if alone else kind,
        count=count,
        spare=spare,
        seed=seed,
        classes=model.config.label2id,  # type: ignore[union-attr, arg-type]
        column=source.column,
        label_column=source.label_column,
        split=source.split,
        config=source.dataset_config,
    )
    device = source.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Loaded(model.to(device), processing_class, samples)


def load_candidates(source: SourceSettings, model: nn.Module, dataset: str) -> list[Any]:
    """An attacker's own list.

    Raises:
        ValueError: If it cannot hold the labels that belong to a text.
    """
    task = task_of(model)
    if task is not None and task.name in ("token-classification", "text2text-generation"):
        raise ValueError(
            f"A list of candidates for {task.name} needs the labels that belong to each text, "
            "which a file of texts has not: leave out --candidates and take --decoys, or give "
            "samples with their labels to audit(candidates=...)."
        )
    kind = domain_of_model(model).name
    return load_inputs(
        dataset, kind=kind, column=source.column, split=source.split, config=source.dataset_config
    )
