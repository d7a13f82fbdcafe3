"""What the Trainer loads when it is given a name: a model and its tokenizer."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ..models import explain_missing_model


def load_model(args: TrainingArguments) -> PreTrainedModel:
    """The model at `args.model_name_or_path`, of the class that its configuration names.

    Raises:
        ValueError: If there is no such argument, or the class is unknown or has no loss.
        FileNotFoundError: If neither a folder nor the Hub has the model.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> model.save_pretrained("folder")
        >>> type(load_model(GradGuardConfig("out", model_name_or_path="folder"))).__name__
        'BertForSequenceClassification'
    """
    path = getattr(args, "model_name_or_path", None)
    if path is None:
        raise ValueError(
            "There is no model: pass model=, model_init=, or model_name_or_path in GradGuardConfig."
        )
    with explain_missing_model(path):
        named = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or []
    model_class = getattr(transformers, named[0], None) if named else None
    if model_class is None:
        raise ValueError(
            f"The `architectures` in {path}/config.json are {named}, which name no model class of "
            "Transformers. Load the model yourself and pass it as model=."
        )
    if model_class.__name__ in MODEL_MAPPING_NAMES.values():
        raise ValueError(
            f"{path} holds a {model_class.__name__}, which has no loss: choose a model with a "
            "head. To put a new head on it, load it with an AutoModelFor... class and pass it as "
            "model=."
        )
    return model_class.from_pretrained(path, trust_remote_code=False)


def load_tokenizer(args: TrainingArguments) -> Any:
    """The tokenizer at `args.model_name_or_path`, or `None`.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> folder = tokenizer.save_pretrained("folder")
        >>> len(load_tokenizer(GradGuardConfig("out", model_name_or_path="folder"))) > 0
        True
    """
    try:
        return AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        # vision models, and folders that hold a model alone: as if none had been passed
        return None
