"""What texts and images do differently in an audit."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...gradient_map.domain import IMAGE, TEXT, domain_of_model
from ..settings import AuditSettings
from .images import Images
from .texts import Texts

Modality = Texts | Images


def modality_of(model: nn.Module, processing_class: Any, settings: AuditSettings) -> Texts | Images:
    """What the inputs of a model ask for.

    Raises:
        ValueError: If a model of texts comes without a tokenizer.
    """
    return MODALITIES[domain_of_model(model).name](model, processing_class, settings)


MODALITIES: dict[str, type[Texts] | type[Images]] = {TEXT.name: Texts, IMAGE.name: Images}
"""By a domain's name."""
