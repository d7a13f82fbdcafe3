"""`gradguard recommend`: from flags to a recommendation on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..data.samples import load_samples
from ..gradient_map.domain import domain_of_model
from ..models.loading import load_classifier
from .run import recommend
from .settings import CommandSettings, TrialSettings


def run_recommend(given: Mapping[str, Any]) -> None:
    """Recommend a defense for a model and data, and print the words and the table.

    Args:
        given: Flags that were given, by name.

    Raises:
        ValueError: For settings that are missing or wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    settings = CommandSettings(**given)
    required = ("model", "dataset", "output")
    if missing := [f"--{name}" for name in required if not getattr(settings, name)]:
        raise ValueError(f"{', '.join(missing)} must be given.")
    set_seed(settings.seed)  # of a head that the model does not come with
    model, processing_class = load_classifier(settings.model)
    samples = load_samples(
        settings.dataset,
        kind=domain_of_model(model).name,
        count=1,
        spare=settings.rows - 1,
        seed=settings.seed,
        classes=model.config.label2id,  # type: ignore[union-attr, arg-type]
        column=settings.column,
        label_column=settings.label_column,
        split=settings.split,
        config=settings.dataset_config,
    )
    recommend(
        model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        processing_class,
        samples,
        settings.defense,
        settings.attack,
        output=settings.output,
        **{field.name: getattr(settings, field.name) for field in fields(TrialSettings)},
    )
    folder = Path(settings.output)
    print((folder / "recommend.md").read_text(encoding="utf-8"))
    print(f"{folder / 'recommend.html'} (the audits beside it hold private samples)")
    if (folder / "recommended.yaml").exists():
        print(f"Train with it: --config {folder / 'recommended.yaml'}")
