"""`gradguard audit`: from flags to an audit on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import yaml
from transformers import set_seed

from ..data.samples import load_samples
from ..models.loading import load_classifier
from .cells import Cells
from .report import write_report
from .run import audit
from .table import markdown_table

SETTINGS: dict[str, Any] = {
    "model": None,
    "dataset": None,
    "dataset_config": None,
    "split": "train",
    "column": None,
    "label_column": None,
    "defense": ["none"],
    "attack": None,
    "output": None,
    "samples": 8,
    "batch_size": 1,
    "repeats": 1,
    "seed": 0,
    "max_length": 64,
    "labels_known": True,
    "lengths_known": True,
    "noise_known": False,
    "share_input_embeddings": False,
    "reference": True,
    "device": None,
}
"""All that can be set, by flag or in a file, with defaults."""


def run_audit(given: Mapping[str, Any]) -> None:
    """Attack a model on data, write audit.json, table.md and report.html, and print the table.

    Args:
        given: Flags that were given, by name; `config` names a YAML or JSON file with others.

    Raises:
        ValueError: For settings that are missing, unknown or wrong.
        OSError: If a file cannot be read or the output folder not be written to.
    """
    given = dict(given)
    settings = SETTINGS | _read(given.pop("config", None)) | given
    missing = [name for name in ("model", "dataset", "attack", "output") if settings[name] is None]
    if missing:
        raise ValueError(f"{', '.join(f'--{name}' for name in missing)} must be given.")
    Cells(
        os.path.join(settings["output"], "cells")
    )  # an output that cannot be written to is said before a download
    set_seed(
        settings["seed"]
    )  # a model without a trained head gets one at random, the same when the audit goes on
    model, processing_class = load_classifier(settings["model"])
    samples = load_samples(
        settings["dataset"],
        kind="image" if getattr(model, "main_input_name", "") == "pixel_values" else "text",
        count=settings["samples"],
        seed=settings["seed"],
        classes=model.config.label2id,  # type: ignore[union-attr, arg-type]
        column=settings["column"],
        label_column=settings["label_column"],
        split=settings["split"],
        config=settings["dataset_config"],
    )
    device = settings["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    passed = (
        "output",
        "batch_size",
        "repeats",
        "seed",
        "max_length",
        "labels_known",
        "lengths_known",
        "noise_known",
    )
    result = audit(
        model.to(device),
        processing_class,
        samples,
        settings["defense"],
        settings["attack"],
        **{name: settings[name] for name in (*passed, "share_input_embeddings", "reference")},
    )
    report = write_report(result, settings["output"])
    print(markdown_table(result))
    print(f"{report} (holds the private samples: mind who sees it)")


def _read(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    with open(path, encoding="utf-8") as file:
        values = json.load(file) if os.path.splitext(path)[1] == ".json" else yaml.safe_load(file)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings.")
    unknown = sorted(set(values) - set(SETTINGS))
    if unknown:
        raise ValueError(f"{path} holds {', '.join(unknown)}, which no flag is called. See --help.")
    return values
