"""The text network for a model's embeddings: packaged, cached, or trained now and cached for the
next time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from torch import nn
from transformers.utils import logging

from .loading import EvaluationNetwork, load_network, packaged_text_network, save_network
from .noise import embedding_weight
from .text import TextEvaluationNetwork, embedding_fingerprint, every_embedding
from .training import train_text_network

logger = logging.get_logger(__name__)


def cache_folder() -> Path:
    """Where trained networks are kept: `gradguard/evaluation_networks` in the Hugging Face home
    (`HF_HOME`).

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
    """The evaluation network for a model's embeddings, trained only if there is none yet.

    Looks for a packaged network whose fingerprint fits, then for a cached one, and else trains one,
    says so and how long it took, and caches it under the fingerprint. Safe to call on all ranks at
    once: one trains, the others wait.

    Args:
        embedding: The language model's input-embedding module.
        tokenizer: Its tokenizer.
        texts: Public text to train on, or a function that loads it; called only if a network must
            be trained.
        base_model: The model's Hub name, for the configuration.
        cache: Folder of the cache. Default: `cache_folder()`.
        **training: Passed to `train_text_network`. They are no part of the key: delete the folder
            to train anew.

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
