"""Tokenizers and image processors: from texts and images to an encoder's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoImageProcessor

from ..models import explain_missing_model, load_tokenizer
from .configuration import PrivateHeadConfig


def load_processing_class(name: str, takes_images: bool) -> Any:
    """Load the tokenizer or image processor of a folder or a name on the Hub.

    Args:
        name: The folder or name.
        takes_images: Whether it is an image processor.

    Raises:
        FileNotFoundError: If neither a folder nor the Hub has it.
    """
    if not takes_images:
        return load_tokenizer(name)
    with explain_missing_model(name):
        return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)


def processed(
    processing_class: Any, samples: Sequence[Any], takes_images: bool, config: PrivateHeadConfig
) -> Any:
    """Return an encoder's inputs for a batch of samples.

    Args:
        processing_class: The tokenizer or image processor.
        samples: Texts, pairs of texts (tuples), lists of words, or images.
        takes_images: Whether they are images.
        config: The head's configuration.

    Raises:
        ValueError: If samples are pairs and the head is for single texts, or the other way round.

    Example:
        >>> config = PrivateHeadConfig(encoder_config={})
        >>> inputs = processed(tokenizer, [("a joke", "the plot")], False, config)
        Traceback (most recent call last):
        ValueError: The head is for single texts: see pairs= of private_head.
        >>> processed(tokenizer, ["a film", "a"], False, config)["attention_mask"]
        tensor([[1, 1, 1, 1],
                [1, 1, 1, 0]])
    """
    if takes_images:
        images = [_image(stored, config) for stored in samples]
        return processing_class(images, return_tensors="pt")
    places = (config.encoder_config or {}).get("max_position_embeddings") or config.max_length
    longest = min(config.max_length, places, processing_class.model_max_length)
    settings = {
        "padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt",
    }  # fmt: skip
    if any(isinstance(sample, tuple) != config.pairs for sample in samples):
        kind = "pairs of texts" if config.pairs else "single texts"
        raise ValueError(f"The head is for {kind}: see pairs= of private_head.")
    if config.pairs:
        texts, seconds = zip(*samples, strict=True)
        return processing_class(list(texts), list(seconds), **settings)
    if isinstance(samples[0], str):
        return processing_class(list(samples), **settings)
    return processing_class(list(samples), is_split_into_words=True, **settings)


def _image(stored: Any, config: PrivateHeadConfig) -> Any:
    """Return one image as an image processor takes it; what is an array already stays so."""
    if hasattr(stored, "shape") or isinstance(stored, list):
        return stored
    from ..data.images import read_image, to_pil

    gray = (config.encoder_config or {}).get("num_channels", 3) == 1
    image = stored if hasattr(stored, "size") else read_image(stored, "an image")
    return to_pil(image, "L" if gray else "RGB")
