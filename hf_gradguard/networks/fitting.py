"""Selection of the evaluation network that fits a model, if none was named."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from torch import nn
from transformers.utils import logging

from ..data.samples import load_texts
from ..gradient_map.domain import IMAGE, TEXT, domain_of_model
from .configuration import ImageEvaluationNetworkConfig, hub_name
from .loading import (
    EvaluationNetwork,
    load_network,
    packaged_image_network,
    packaged_networks,
    packaged_text_network,
    save_network,
)
from .noising import embedding_weight
from .text_network import TextEvaluationNetwork, embedding_fingerprint, every_embedding
from .training import train_text_network

logger = logging.get_logger(__name__)


def cache_folder() -> Path:
    """Return the folder of trained networks.

    It is `gradguard/evaluation_networks` in the Hugging Face home (`HF_HOME`).

    Example:
        >>> cache_folder().name
        'evaluation_networks'
    """
    return Path(constants.HF_HOME) / "gradguard" / "evaluation_networks"


def cached_text_network(
    embedding: nn.Module,
    tokenizer: Any,
    texts: Iterable[str] | Callable[[], Iterable[str]],
    *,
    base_model: str = "",
    cache: str | Path | None = None,
    **training: Any,
) -> TextEvaluationNetwork:
    """Return the evaluation network for a model's embeddings, trained only if there is none yet.

    It looks for a packaged network whose fingerprint fits, then for a cached one. If there is none
    it trains one, says so and how long it took, and caches it under the fingerprint. It may be
    called on all ranks at once: one trains, the others wait.

    Args:
        embedding: The language model's input-embedding module.
        tokenizer: The language model's tokenizer.
        texts: Public text to train on, or a function that loads it; called only if a network must
            be trained.
        base_model: The model's Hub name, for the configuration.
        cache: The folder of the cache. Default: `cache_folder()`.
        **training: Settings of `train_text_network`. They are no part of the key: delete the folder
            to train again.

    Returns:
        The network on the embedding's device, frozen, in eval mode.

    Example:
        >>> embedding, quick = model.get_input_embeddings(), {"steps": 1, "progress": False}
        >>> first = cached_text_network(embedding, tokenizer, texts, cache="nets", **quick)
        >>> again = cached_text_network(embedding, tokenizer, [], cache="nets")  # trains nothing
        >>> again.config.embedding_fingerprint == first.config.embedding_fingerprint
        True
    """
    weight = embedding_weight(embedding)
    fingerprint = embedding_fingerprint(every_embedding(embedding))  # a module may scale
    packaged = packaged_text_network(fingerprint)
    if packaged is not None:
        return _text(load_network(packaged)).to(weight.device)
    root = Path(cache) if cache is not None else cache_folder()
    folder = root / fingerprint
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(root / f"{fingerprint}.lock"):
            if not folder.is_dir():  # another rank may have trained it while this one waited
                _train_into(folder, embedding, tokenizer, texts, base_model, training)
    return _text(load_network(folder)).to(weight.device)


def _train_into(
    folder: Path,
    embedding: nn.Module,
    tokenizer: Any,
    texts: Any,
    base_model: str,
    training: dict[str, Any],
) -> None:
    logger.warning(
        f"No evaluation network fits these embeddings yet (fingerprint {folder.name[:12]}). "
        "Training one on public text, once; this takes minutes."
    )
    started = time.perf_counter()
    loaded = texts() if callable(texts) else texts
    network = train_text_network(embedding, tokenizer, loaded, base_model=base_model, **training)
    # A folder appears under its final name only when it is complete: whoever sees it may read it.
    unfinished = tempfile.mkdtemp(prefix=f".{folder.name[:12]}-", dir=folder.parent)
    try:
        save_network(network, unfinished)
        os.replace(unfinished, folder)
    except OSError:
        # on file systems without locks another process may have come first, with the same network
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    logger.warning(
        f"Trained the evaluation network in {time.perf_counter() - started:.0f} s and kept it in "
        f"{folder}."
    )


def _text(network: EvaluationNetwork) -> TextEvaluationNetwork:
    assert isinstance(network, TextEvaluationNetwork)
    return network


PUBLIC_TEXT, PUBLIC_TEXT_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"


def network_for(
    model: nn.Module, processing_class: Any = None, public_text: str | None = None
) -> EvaluationNetwork:
    """Return a packaged network that fits a model, or for text one trained on its embeddings.

    A network that was trained is cached.

    Args:
        model: The model to be protected.
        processing_class: The model's tokenizer. It is not needed for images.
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
    texts, base_model = partial(_public_text, public_text), hub_name(name)
    embedding = TEXT.embedding(model)
    return cached_text_network(embedding, processing_class, texts, base_model=base_model)


def _for_images(model: nn.Module) -> EvaluationNetwork:
    config = getattr(model, "config", None)
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", None)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (0, 0))
    packaged = packaged_image_network(channels, (height, width)) or _by_tiles(channels)
    if packaged is None:
        pixels = f"{channels} channels and {height}x{width} pixels"
        shape = pixels if size else "an image size its config does not name"
        raise ValueError(
            f"No packaged evaluation network judges images of {shape}. Train one with `gradguard "
            "evalnet train --dataset ... --num_channels ... --image_size ...` and pass its folder "
            "as evaluation_network in defense_kwargs."
        )
    return load_network(packaged)


def _by_tiles(channels: int) -> str | None:
    """Return a packaged network that judges images of another size, in a frame or tile by tile."""
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
