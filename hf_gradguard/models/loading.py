"""Models by name, of the class that their configuration asks for."""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from .named import loading
from .tasks import TASKS, Task

ADAPTER = "adapter_config.json"


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
    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    chosen = TASKS[task] if task is not None else _own_task(config, name)
    if config.model_type not in chosen.models:
        raise ValueError(f"{name} ({config.model_type}) is no model for {chosen.name}.")
    model = chosen.auto_class.from_pretrained(name, trust_remote_code=False, **settings)
    return model, _processing(name, chosen)


def _own_task(config: Any, name: str) -> Task:
    """That of the class which a configuration names, or of a classifier on top of a bare model."""
    named = (getattr(config, "architectures", None) or [""])[0]
    own = [task for task in TASKS.values() if named in task.classes]
    bare = [
        TASKS[one]
        for one in ("text-classification", "image-classification")
        if config.model_type in TASKS[one].models
    ]
    if "For" in named and "ForPreTraining" not in named and not own:
        raise ValueError(
            f"{name} is a {named}, which is none of {', '.join(TASKS)}. Choose the head to put on "
            "it by a task, or audit the Trainer that trains it: audit(trainer)."
        )
    if not own + bare:
        raise ValueError(
            f"{name} ({config.model_type}) is no model for text or image classification, and names "
            f"no other head. Choose a task of: {', '.join(TASKS)}."
        )
    return (own + bare)[0]


def _adapted(name: str, task: str | None) -> tuple[nn.Module, Any]:
    """A base model with trainable adapters, for the task that these name."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{name} holds adapters, and peft is not installed: pip install 'hf-gradguard[peft]'"
        ) from error

    with open(os.path.join(name, ADAPTER), encoding="utf-8") as file:
        said = json.load(file)
    base, kind = said.get("base_model_name_or_path"), said.get("task_type")
    if not base:
        raise ValueError(
            f"{name}/{ADAPTER} does not say which model its adapters are for: write its folder or "
            "Hub name there, as base_model_name_or_path."
        )
    if task is None:
        task = next((one.name for one in TASKS.values() if one.peft and one.peft == kind), None)
    classes = _classes_of(name) if kind in ("SEQ_CLS", "TOKEN_CLS") else {}
    model, processing_class = _load(base, task, **classes)
    # PEFT hands the last to the download, which takes no code either.
    adapted = PeftModel.from_pretrained(model, name, is_trainable=True, trust_remote_code=False)
    own = os.path.exists(os.path.join(name, "tokenizer_config.json"))
    return adapted.eval(), _processing(name, TASKS[task]) if own and task else processing_class


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
    told = os.path.exists(os.path.join(name, "preprocessor_config.json"))
    if os.path.isdir(name) and not told:
        return None
    return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
