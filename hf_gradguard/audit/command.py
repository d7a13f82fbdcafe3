"""`gradguard audit`: from flags to an audit on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import set_seed

from ..data.samples import Sample, load_inputs, load_samples
from ..gradient_map.domain import domain_of_model
from ..models import label_kind, load_model, task_of
from .cells import Cells
from .run import audit, check_specs
from .settings import AuditSettings, CommandSettings, SourceSettings, read_settings


def run_audit(given: Mapping[str, Any]) -> None:
    """Attack a model on data, write audit.json, table.md and report.html, and print the table.

    Args:
        given: Flags that were given, by name; `config` names a YAML or JSON file with others.

    Raises:
        ValueError: For settings that are missing, unknown or wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    settings = read_settings(given)
    output = Path(settings.output)
    # Said before a download: an output that cannot be written to, or a misspelt name.
    Cells(output / "cells")
    check_specs(settings.defense, settings.attack)
    spare = 0 if settings.candidates else settings.decoys
    loaded = load(settings, count=settings.samples, spare=spare, seed=settings.seed)
    # Who is audited does not depend on how many decoys are drawn.
    audit(
        loaded.model.train(settings.dropout),
        loaded.processing_class,
        loaded.samples[: settings.samples],
        settings.defense,
        settings.attack,
        candidates=_listed(settings, loaded),
        metrics=settings.metrics,
        output=output,
        **{field.name: getattr(settings, field.name) for field in fields(AuditSettings)},
    )
    print((output / "table.md").read_text(encoding="utf-8"))
    print(f"{output / 'report.html'} (holds the private samples: mind who sees it)")


def _listed(settings: CommandSettings, loaded: Loaded) -> list[Any] | None:
    """What the attacker has a list of: the audited samples among others."""
    if settings.candidates:
        others = load_candidates(settings, loaded.model, settings.candidates)
        return loaded.samples[: settings.samples] + others
    many = settings.decoys and len(loaded.samples) > settings.samples
    return list(loaded.samples) if many else None


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
