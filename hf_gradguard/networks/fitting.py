"""The evaluation network that fits a model, when nobody named one."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..data.files import load_texts
from ..gradient_map.domain import IMAGE, TEXT, domain_of_model
from .cache import cached_text_network
from .configuration import ImageEvaluationNetworkConfig, hub_name
from .loading import (
    EvaluationNetwork,
    load_network,
    packaged_image_network,
    packaged_networks,
)

PUBLIC_TEXT, PUBLIC_TEXT_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"


def network_for(
    model: nn.Module, processing_class: Any = None, public_text: str | None = None
) -> EvaluationNetwork:
    """A packaged network that fits, or for text one that is trained on the model's embeddings and
    cached.

    Args:
        model: The model to be protected.
        processing_class: Its tokenizer; not needed for images.
        public_text: A file or Hub name of texts to train on if no network fits. Default:
            WikiText-2, from the Hub.

    Raises:
        ValueError: If no packaged network fits the images, or a text network has to be trained and
            the tokenizer or the public text is missing.

    Example:
        >>> network_for(image_model).name_or_path  # 3 channels and 32 x 32 pixels
        'image-evaluation-network-32'
    """
    if domain_of_model(model) is IMAGE:
        return _for_images(model)
    if processing_class is None:
        raise ValueError(
            "refiner needs an evaluation network for this model's embeddings, and the tokenizer to "
            "find or train one: pass processing_class=tokenizer to the Trainer, or "
            "evaluation_network in defense_kwargs."
        )
    name = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return cached_text_network(
        TEXT.embedding(model),
        processing_class,
        lambda: _public_text(public_text),
        base_model=hub_name(name),
    )


def _for_images(model: nn.Module) -> EvaluationNetwork:
    config = getattr(model, "config", None)
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", None)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (0, 0))
    packaged = packaged_image_network(channels, (height, width)) or _by_tiles(channels)
    if packaged is None:
        shape = (
            f"{channels} channels and {height}x{width} pixels"
            if size
            else "an image size its config does not name"
        )
        raise ValueError(
            f"No packaged evaluation network judges images of {shape}. Train one with `gradguard "
            "evalnet train --dataset ... --num_channels ... --image_size ...` and pass its folder "
            "as evaluation_network in defense_kwargs."
        )
    return load_network(packaged)


def _by_tiles(channels: int) -> str | None:
    """A packaged network that judges images of another size, in a frame or tile by tile."""
    for name, config in packaged_networks().items():
        if isinstance(config, ImageEvaluationNetworkConfig) and channels in (
            1,
            config.num_channels,
        ):
            return name
    return None


def _public_text(public_text: str | None) -> list[str]:
    if public_text is not None:
        return load_texts(public_text)
    try:
        return load_texts(PUBLIC_TEXT, config=PUBLIC_TEXT_CONFIG)
    except (OSError, ValueError) as error:
        raise ValueError(
            "No evaluation network fits these embeddings, and WikiText-2 to train one on cannot be "
            f"had from the Hub ({str(error).splitlines()[0]}). Name a file of public sentences as "
            "public_text in defense_kwargs, or train with `gradguard evalnet train` and pass the "
            "folder as evaluation_network."
        ) from error
