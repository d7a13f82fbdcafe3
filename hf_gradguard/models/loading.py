"""Models by name, of the class that their configuration asks for."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from . import MODELS


def load_classifier(name: str) -> tuple[nn.Module, Any]:
    """A text or image classifier in eval mode, with its tokenizer or image processor.

    Args:
        name: A folder or a Hub name.

    Returns:
        The model, and its tokenizer, its image processor, or `None` for an image model that comes
        without one.

    Raises:
        ValueError: If it is neither kind of classifier.

    Example:
        >>> model.save_pretrained("classifier")
        >>> _ = tokenizer.save_pretrained("classifier")
        >>> classifier, processor = load_classifier("classifier")
        >>> classifier.num_labels, processor.pad_token
        (2, '[PAD]')
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    architecture = (getattr(config, "architectures", None) or [""])[0]
    images = {*MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, *MODELS}
    if "ForImageClassification" in architecture or (
        config.model_type in images and "ForSequenceClassification" not in architecture
    ):
        model = AutoModelForImageClassification.from_pretrained(name, trust_remote_code=False)
        has_processor = not os.path.isdir(name) or os.path.exists(
            os.path.join(name, "preprocessor_config.json")
        )
        if not has_processor:
            return model, None
        return model, AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    raise ValueError(f"{name} ({config.model_type}) is no model for text or image classification.")
