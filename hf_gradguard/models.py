"""Models by name, and what a model's head is for.

A name is a folder here or a name on the Hub. A model gets the class that its configuration asks
for, and with that says what a label is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

ADAPTER = "adapter_config.json"
_WAY_OUT = (
    "Give the folder that `save_pretrained` wrote, with its config.json, or a name on the Hugging "
    "Face Hub, like distilbert/distilbert-base-uncased."
)


def check_name(name: str | os.PathLike[str]) -> None:
    """Refuse a path that leads nowhere. What could be a name on the Hub passes.

    Raises:
        FileNotFoundError: If the name is written like a path, and no folder is there.
        NotADirectoryError: If a file is there.

    Example:
        >>> check_name("distilbert/distilbert-base-uncased")
        >>> check_name("./runs/model")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder ./runs/model. Give the folder that ...
    """
    path = os.fspath(name)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        raise NotADirectoryError(f"{path} is a file, not the folder of a model. {_WAY_OUT}")
    if path.startswith("~") and os.path.isdir(full := os.path.expanduser(path)):
        raise FileNotFoundError(f"There is no folder {path}: write {full}, as no shell did.")
    if os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1:
        raise FileNotFoundError(f"There is no folder {path}. {_WAY_OUT}")


@contextlib.contextmanager
def explain_missing_model(name: str | os.PathLike[str]) -> Iterator[None]:
    """Around what loads a model, or its tokenizer, by name: says what is missing.

    Transformers takes what is no folder for a name on the Hub, and says of a mistyped folder that
    the Hub cannot be reached.

    Raises:
        FileNotFoundError: If there is no such folder, and the Hub gave no such model.
        NotADirectoryError: If a file is there.

    Example:
        >>> with explain_missing_model("folder"):
        ...     raise OSError("We couldn't connect to 'https://huggingface.co'.")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder folder, and the Hub gave no model of that name ...
    """
    check_name(name)
    try:
        yield
    except OSError as error:
        if os.path.isdir(name):
            raise
        raise FileNotFoundError(
            f"There is no folder {os.fspath(name)}, and the Hub gave no model of that name "
            f"({str(error).splitlines()[0]}). {_WAY_OUT}"
        ) from error


@dataclass(frozen=True)
class Task:
    """A kind of head.

    Args:
        name: As on the Hub.
        auto: The Auto class that loads such a model.
        models: Its model classes by model type.
        own_labels: Whether the labels are made of the text itself, so that they are as private as
            the text.
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
        return frozenset(
            name
            for names in self.models.values()
            for name in (names if isinstance(names, tuple | list) else (names,))
        )


TASKS = {
    task.name: task
    for task in (
        Task(
            "text-classification", "AutoModelForSequenceClassification",
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, peft="SEQ_CLS",
        ),
        Task(
            "image-classification", "AutoModelForImageClassification",
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
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
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model


def task_of(model: nn.Module) -> Task | None:
    """What a model's head is for, by its class; `None` for a class that is in no list.

    Example:
        >>> task_of(model).name
        'text-classification'
    """
    names = [model_class.__name__ for model_class in type(without_adapters(model)).__mro__]
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


def load_model(name: str, task: str | None = None) -> tuple[nn.Module, Any]:
    """A model with its own head, in eval mode, with its tokenizer or image processor.

    Args:
        name: A folder or a Hub name; a checkpoint in the middle of training, or a folder of PEFT
            adapters, whose base model is loaded below them and stays frozen.
        task: One of `TASKS`. Default: that of the class which the configuration names, and for a
            model without a head a classifier's, with a head at random.

    Returns:
        The model, and its tokenizer, its image processor, or `None` for an image model that comes
        without one.

    Raises:
        ValueError: If there is no such task, or no class of the model's type for it.
        FileNotFoundError: If neither a folder nor the Hub has the model.

    Example:
        >>> model.save_pretrained("classifier")
        >>> _ = tokenizer.save_pretrained("classifier")
        >>> classifier, processor = load_model("classifier")
        >>> classifier.num_labels, processor.pad_token
        (2, '[PAD]')
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"There is no task {task!r}. There are: {', '.join(TASKS)}.")
    if os.path.exists(os.path.join(name, ADAPTER)):
        return _adapted(name, task)
    return _load(name, task)


def _load(name: str, task: str | None, **settings: Any) -> tuple[nn.Module, Any]:
    with explain_missing_model(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    chosen = TASKS[task] if task is not None else _own_task(config, name)
    if config.model_type not in chosen.models:
        raise ValueError(f"{name} ({config.model_type}) is no model for {chosen.name}.")
    model = chosen.auto_class.from_pretrained(name, trust_remote_code=False, **settings)
    return model, _processing(name, chosen)


def _own_task(config: Any, name: str) -> Task:
    """That of the class which a configuration names, or of a classifier on top of a bare model."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    by_head = [task for task in TASKS.values() if architecture in task.classes]
    classifiers = [
        TASKS[task]
        for task in ("text-classification", "image-classification")
        if config.model_type in TASKS[task].models
    ]
    is_bare = "For" not in architecture or "ForPreTraining" in architecture
    if not is_bare and not by_head:
        raise ValueError(
            f"{name} is a {architecture}, which is none of {', '.join(TASKS)}. Choose the head to "
            "put on it by a task, or audit the Trainer that trains it: audit(trainer)."
        )
    if not by_head + classifiers:
        raise ValueError(
            f"{name} ({config.model_type}) is no model for text or image classification, and names "
            f"no other head. Choose a task of: {', '.join(TASKS)}."
        )
    return (by_head + classifiers)[0]


def _adapted(name: str, task: str | None) -> tuple[nn.Module, Any]:
    """A base model with trainable adapters, for the task that these name."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{name} holds adapters, and peft is not installed: pip install 'hf-gradguard[peft]'"
        ) from error

    with open(os.path.join(name, ADAPTER), encoding="utf-8") as file:
        adapter = json.load(file)
    base, peft_type = adapter.get("base_model_name_or_path"), adapter.get("task_type")
    if not base:
        raise ValueError(
            f"{name}/{ADAPTER} does not say which model its adapters are for: write its folder or "
            "Hub name there, as base_model_name_or_path."
        )
    if task is None:
        task = next((t.name for t in TASKS.values() if t.peft and t.peft == peft_type), None)
    classes = _classes_of(name) if peft_type in ("SEQ_CLS", "TOKEN_CLS") else {}
    model, processing_class = _load(base, task, **classes)
    # PEFT hands the last to the download, which takes no code either.
    adapted = PeftModel.from_pretrained(model, name, is_trainable=True, trust_remote_code=False)
    has_tokenizer = os.path.exists(os.path.join(name, "tokenizer_config.json"))
    if has_tokenizer and task:
        processing_class = _processing(name, TASKS[task])
    return adapted.eval(), processing_class


_HEADS = ("classifier", "score", "out_proj")  # not `pre_classifier`, which PEFT saves as well


def _classes_of(folder: str) -> dict[str, int]:
    """How many classes the head has that was trained beside the adapters: its base need not."""
    path = os.path.join(folder, "adapter_model.safetensors")
    if not os.path.exists(path):
        return {}
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        saved = [name for name in names if "lora_" not in name and name.endswith(".weight")]
        heads = [name for name in saved if name.split(".")[-2] in _HEADS] or saved
        return {"num_labels": file.get_slice(heads[-1]).get_shape()[0]} if heads else {}


def _processing(name: str, task: Task) -> Any:
    if task.name != "image-classification":
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if tokenizer.pad_token is None:  # as recipes for decoders do
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    has_processor = os.path.exists(os.path.join(name, "preprocessor_config.json"))
    if os.path.isdir(name) and not has_processor:
        return None
    return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
