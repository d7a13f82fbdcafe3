"""The small networks that the field's papers report on, as Hugging Face models."""

from __future__ import annotations

from .lenet import LeakageLeNetConfig, LeakageLeNetForImageClassification

__all__ = ["LeakageLeNetConfig", "LeakageLeNetForImageClassification"]
