"""The small networks that the field's papers report on, as Hugging Face models."""

from __future__ import annotations

from .convnets import (
    DeepConvNetConfig,
    DeepConvNetForImageClassification,
    LeakyConvNetConfig,
    LeakyConvNetForImageClassification,
    TanhConvNetConfig,
    TanhConvNetForImageClassification,
)
from .lenet import LeakageLeNetConfig, LeakageLeNetForImageClassification

__all__ = [
    "MODELS",
    "DeepConvNetConfig",
    "DeepConvNetForImageClassification",
    "LeakageLeNetConfig",
    "LeakageLeNetForImageClassification",
    "LeakyConvNetConfig",
    "LeakyConvNetForImageClassification",
    "TanhConvNetConfig",
    "TanhConvNetForImageClassification",
]

MODELS = {
    model.config_class.model_type: model
    for model in (
        LeakageLeNetForImageClassification,
        LeakyConvNetForImageClassification,
        DeepConvNetForImageClassification,
        TanhConvNetForImageClassification,
    )
}
"""The networks by model type, which is what `AutoConfig.for_model` takes."""
