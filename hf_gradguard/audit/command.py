"""The command `gradguard audit`: from flags to an audit on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from ..data.files import load_rows
from ..data.samples import Labeled, Sample, load_inputs, show_rows
from ..gradient_map.domain import domain_of_model
from ..models import find_head, label_kind, load_model, task_of
from .cells import Cells
from .report.summary import summarize
from .report.terminal import terminal_summary
from .run import audit, make_attacks, make_defenses
from .settings import AttackedSettings, AuditSettings, read_settings


def run_audit(flags: Mapping[str, Any]) -> None:
    """Attack a model on data, write audit.json, table.md and report.html, and print the summary.

    Args:
        flags: The flags that were used, by name.

    Raises:
        ValueError: If settings are wrong.
        OSError: If a file cannot be read, or the output folder cannot be written to.
    """
    settings = read_settings(flags)
    output, count = Path(settings.output), settings.samples
    # Refused before a download: an output that cannot be written to, or a misspelt name.
    Cells(output / "cells")
    check_specs(settings.defense, settings.attack)
    # The draw is one permutation, so the audited samples do not depend on the number of decoys.
    decoys = 0 if settings.candidates else settings.decoys
    model, processing_class, samples = load(settings, count, decoys, settings.seed)
    candidates: list[Any] | None = None
    if settings.candidates:
        candidates = samples[:count] + _load_candidates(settings, model, settings.candidates)
    elif settings.decoys and len(samples) > count:
        candidates = list(samples)
    result = audit(
        model.train(settings.dropout),
        processing_class,
        samples[:count],
        settings.defense,
        settings.attack,
        candidates=candidates,
        metrics=settings.metrics,
        output=output,
        **{field.name: getattr(settings, field.name) for field in fields(AuditSettings)},
    )
    print(terminal_summary(summarize(result), output))


def check_specs(defenses: Any, attacks: Any) -> None:
    """Refuse unknown names and settings before anything is loaded; `None` passes."""
    make_defenses(defenses or [])
    make_attacks(attacks or [])


def load(
    source: AttackedSettings, count: int, decoys: int, seed: int
) -> tuple[nn.Module, Any, list[Sample]]:
    """Load the model, its tokenizer or image processor, and samples as the model's head takes them.

    A terminal shows the first rows. A model without a head gets one for the data's classes.

    Args:
        source: Names of the model and the data.
        count: The number of samples that are needed.
        decoys: How many more are loaded, or as many as there are.
        seed: The seed of the draw, and of a head that the model does not come with.

    Raises:
        ValueError: If the model has no such head, or the data no such columns.
        OSError: If something cannot be read.
    """
    set_seed(seed)
    device = source.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"--device {device} cannot be used here ({str(error).splitlines()[0][:80]}): give cpu, "
            "or leave it out."
        ) from error
    head = find_head(source.model, source.task)
    columns = Labeled(
        load_rows(source.dataset, source.split, source.dataset_config), source.dataset,
        head.domain, head.labels, source.column, source.label_column,
    )  # fmt: skip
    new_head = None if head.is_saved else columns.new_head()
    rows = columns.draw(count, decoys, seed)
    columns.check(rows)  # before weights are loaded
    model, processing_class = load_model(source.model, source.task, new_head)
    if new_head is not None:
        columns.labels = label_kind(model)  # of numbers or lists, where the data has these
    classes: Any = model.config.label2id  # type: ignore[union-attr]
    show_rows(columns, classes)
    return model.to(device), processing_class, columns.samples(classes, rows)


def _load_candidates(source: AttackedSettings, model: nn.Module, dataset: str) -> list[Any]:
    task = task_of(model)
    if task is not None and task.name in ("token-classification", "text2text-generation"):
        raise ValueError(
            f"Candidates for {task.name} need the labels that belong to each text, which a file of "
            "texts has not: leave out --candidates and take --decoys, or give samples with their "
            "labels to audit(candidates=...)."
        )
    kind = domain_of_model(model).name
    return load_inputs(
        dataset, kind=kind, column=source.column, split=source.split, config=source.dataset_config
    )
