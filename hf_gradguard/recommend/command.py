"""`gradguard recommend`: from flags to a recommendation on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..audit.loading import load
from ..audit.specs import check_specs
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
    check_specs(settings.defense, settings.attack)  # a misspelt name is said before a download
    loaded = load(settings, count=1, spare=settings.rows - 1, seed=settings.seed)
    recommend(
        loaded.model,
        loaded.processing_class,
        loaded.samples,
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
