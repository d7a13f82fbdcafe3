"""`gradguard audit`: from flags to an audit on disk."""

from __future__ import annotations

from . import installed as installed

# isort: split
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .cells import Cells
from .loading import Loaded, load, load_candidates
from .run import audit
from .settings import AuditSettings, CommandSettings, read_settings
from .specs import check_specs


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
