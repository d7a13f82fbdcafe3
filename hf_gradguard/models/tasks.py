"""What a model's head is for, and with that what a label is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from . import MODELS


@dataclass(frozen=True)
class Task:
    """A kind of head.

    Args:
        name: As on the Hub.
        auto: The Auto class that loads such a model.
        models: Its model classes by model type.
        own_labels: Whether the labels are made of the text itself, so that nobody can be told them
            without it.
        peft: What PEFT calls it.
    """

    name: str
    auto: str
    models: Mapping[str, Any]
    own_labels: bool = False
    peft: str = ""

    @property
    def auto_class(self) -> Any:
        """The class itself."""
        return getattr(transformers, self.auto)

    @functools.cached_property
    def classes(self) -> frozenset[str]:
        """The names of all model classes."""
        names = (one if isinstance(one, tuple | list) else (one,) for one in self.models.values())
        return frozenset(name for several in names for name in several)


_OWN_IMAGES = {name: model.__name__ for name, model in MODELS.items()}
TASKS = {
    one.name: one
    for one in (
        Task(
            "text-classification", "AutoModelForSequenceClassification",
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, peft="SEQ_CLS",
        ),
        Task(
            "image-classification", "AutoModelForImageClassification",
            {**MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, **_OWN_IMAGES},
        ),
        Task(
            "text-generation", "AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            own_labels=True, peft="CAUSAL_LM",
        ),
        Task(
            "token-classification", "AutoModelForTokenClassification",
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, peft="TOKEN_CLS",
        ),
        Task(
            "text2text-generation", "AutoModelForSeq2SeqLM",
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, own_labels=True, peft="SEQ_2_SEQ_LM",
        ),
        Task(
            "fill-mask", "AutoModelForMaskedLM", MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            own_labels=True,
        ),
    )
}  # fmt: skip
"""By name. A class that is in two lists (BART) counts for the first."""


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that PEFT wrapped, or the model itself.

    Example:
        >>> without_adapters(model) is model
        True
    """
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return found


def task_of(model: nn.Module) -> Task | None:
    """What a model's head is for, by its class; `None` for a class that is in no list.

    Example:
        >>> task_of(model).name
        'text-classification'
    """
    names = [one.__name__ for one in type(without_adapters(model)).__mro__]
    return next((task for name in names for task in TASKS.values() if name in task.classes), None)


def label_kind(model: nn.Module) -> str:
    """What one label is: `"class"`, `"several"` classes, a `"number"` or several, a class a
    `"token"`, or the `"text"` itself.

    Example:
        >>> label_kind(model)
        'class'
    """
    task, config = task_of(model), getattr(model, "config", None)
    if task is not None and task.own_labels:
        return "text"
    if task is not None and task.name == "token-classification":
        return "token"
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return "several"
    if problem == "regression" or getattr(config, "num_labels", None) == 1:
        return "number"
    return "class"
