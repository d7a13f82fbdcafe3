"""What is recorded of an audit beside its results: settings, threat model, versions."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from torch import nn

from .. import __version__
from ..attacks import Attack
from ..defenses import Defense
from ..models import task_of
from .modality import Modality
from .report.verdicts import TERMS
from .settings import AuditSettings

_MOST = 20  # entries of a list that is a setting
GRANTS = ("labels_known", "lengths_known", "noise_known", "share_input_embeddings")
"""What decides on what the attacker sees."""


def facts(
    model: nn.Module,
    modality: Modality,
    settings: AuditSettings,
    estimators: Mapping[str, Any],
    messages: int,
    told: Sequence[str] = (),
) -> dict[str, Any]:
    """All that it takes to repeat the audit, and all that its report has to know of it. `told` is
    what else there is to say of the threat model.
    """
    kind = modality.settings()
    return {
        **asdict(settings),
        **kind,
        "main_score": TERMS[kind["kind"]].score,
        "model": _model_name(model),
        "training_mode": model.training,
        "samples": messages * settings.rows,
        "messages": messages,
        "task": None if (task := task_of(model)) is None else task.name,
        "classes": getattr(model.config, "num_labels", None)
        if modality.labels == "class" and hasattr(model, "config")
        else None,
        "chance": modality.describe_chance(messages),
        "threat_model": [*threat_model(model, modality, settings), *told],
        "estimators": {
            name: {"title": one.title, "meaning": one.meaning} for name, one in estimators.items()
        },
        "device": str(next(model.parameters()).device),
        "versions": _versions(),
    }


def threat_model(model: nn.Module, modality: Modality, settings: AuditSettings) -> list[str]:
    """What the attacker sees and knows, a sentence each."""
    terms = TERMS[modality.settings()["kind"]]
    size = settings.rows
    return [
        f"The server knows the model and follows the protocol. It sees {_shared(settings)} of "
        f"{f'one {terms.one}' if size == 1 else f'{size} {terms.many}'} at a time, as the defense "
        "lets it through, and tries to read the data back out of it.",
        *modality.threat_model(),
        *(
            [f"The client averages {settings.accumulation} batches, protected one by one, first."]
            if settings.accumulation > 1
            else []
        ),
        "The labels are made of the texts themselves, so nobody is told them."
        if not modality.can_grant
        else "It knows the labels."
        if settings.labels_known
        else "It does not know the labels: attacks have to recover them.",
        "It knows the covariance of the noise that a defense adds."
        if settings.noise_known
        else "It does not know how a defense's noise was shaped, but where it is said to know the "
        "defense."
        if settings.adaptive
        else "It does not know how a defense's noise was shaped.",
        "The model ran in training mode: dropout draws hide something from the attacker."
        if model.training
        else "The model ran in eval mode, without dropout: the attacker's best case.",
        "Every message is attacked by itself. A server that sees the same data again knows more.",
    ]


def _shared(settings: AuditSettings) -> str:
    if not settings.local_steps:
        return "the gradient"
    return (
        f"the change of the weights after {settings.local_steps} local steps (batches of "
        f"{settings.batch_size}, {settings.optimizer}, learning rate {settings.learning_rate:g}, "
        "in an order that it knows)"
    )


def attack_settings(attack: Attack) -> dict[str, Any]:
    """The settings of an attack."""
    return {name: value for name, value in vars(attack).items() if not name.startswith("_")}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON takes them; objects by their class."""
    return {str(key): _plain(value) for key, value in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple) and len(value) > _MOST:
        return f"{len(value)} entries"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, Defense) else type(value).__name__


def _model_name(model: nn.Module) -> str:
    """As on the Hub, or a folder; of an absolute path the last part: the rest is nobody's
    business.
    """
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return os.path.basename(os.path.normpath(name)) if os.path.isabs(name) else name


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"hf-gradguard": __version__, **packages, "python": platform.python_version()}
