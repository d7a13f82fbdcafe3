"""`gradguard audit`: from flags to an audit on disk."""

from __future__ import annotations

from . import installed as installed

# isort: split
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..data.samples import Sample, load_inputs, load_samples
from ..gradient_map.domain import domain_of_model
from ..models.loading import load_classifier
from .cells import Cells
from .run import audit
from .settings import AuditSettings, CommandSettings, read_settings


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
    # An output that cannot be written to is said before a download.
    Cells(output / "cells")
    # A model without a trained head gets one at random, the same when the audit goes on.
    set_seed(settings.seed)
    model, processing_class = load_classifier(settings.model)
    kind = domain_of_model(model).name
    samples = load_samples(
        settings.dataset,
        kind=kind,
        count=settings.samples,
        spare=0 if settings.candidates else settings.decoys,
        seed=settings.seed,
        classes=model.config.label2id,  # type: ignore[union-attr, arg-type]
        column=settings.column,
        label_column=settings.label_column,
        split=settings.split,
        config=settings.dataset_config,
    )
    # Who is audited does not depend on how many decoys are drawn.
    samples, listed = samples[: settings.samples], _listed(settings, samples, kind)
    audit(
        model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        processing_class,
        samples,
        settings.defense,
        settings.attack,
        candidates=listed,
        output=output,
        **{field.name: getattr(settings, field.name) for field in fields(AuditSettings)},
    )
    print((output / "table.md").read_text(encoding="utf-8"))
    print(f"{output / 'report.html'} (holds the private samples: mind who sees it)")


def _listed(settings: CommandSettings, samples: list[Sample], kind: str) -> list[Any] | None:
    """What the attacker has a list of: the audited samples among others."""
    own = [one for one, _ in samples]
    if settings.candidates:
        audited = own[: settings.samples]
        return audited + load_inputs(settings.candidates, kind=kind, column=settings.column)
    return own if settings.decoys and len(own) > settings.samples else None
