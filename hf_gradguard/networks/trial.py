"""Trials of evaluation networks before they are used, since a network decides what is shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..gradient_map.domain import embed, ordinary_ids
from ..randomness import Stream
from .configuration import EvaluationNetworkBase
from .image_network import ImageEvaluationNetwork
from .noising import embedding_weight
from .text_network import TextEvaluationNetwork

LEAST_NOISE, LEAST_GAP, FEW_WORDS = 0.5, 0.2, 8
"""The least score of pure noise, the least gap to natural input, and the number of words below
which texts must only be in order. The published text network gives pure noise 0.94 on average and
0.76 at least; the gap is 0.36 at least over single sentences.
"""

_SAMPLES, _TOKENS = 32, 16


@torch.no_grad()
def try_on_noise(
    network: EvaluationNetworkBase, embedding: nn.Module | None = None, special: Sequence[int] = ()
) -> float:
    """Return D of nothing but noise, which must be finite and near 1.

    Args:
        network: The network D.
        embedding: For a text network, the model's input-embedding module.
        special: The ids of its tokenizer's special tokens, which are no noise.

    Returns:
        The mean over 32 inputs.

    Raises:
        ValueError: If it is not finite, or below 0.5; the message has the figure.

    Example:
        >>> from hf_gradguard.networks import load_network
        >>> try_on_noise(load_network("image-evaluation-network-32")) > 0.9
        True
    """
    stream = Stream()  # noise that a network cannot know beforehand
    if isinstance(network, TextEvaluationNetwork):
        assert embedding is not None
        weight = embedding_weight(embedding)
        candidates = ordinary_ids(len(weight), special).to(weight.device)
        picked = stream.integers(len(candidates), (_SAMPLES, _TOKENS), device=weight.device)
        x = embed(embedding, candidates[picked]).float()
    else:
        assert isinstance(network, ImageEvaluationNetwork)
        shape = (_SAMPLES, network.config.num_channels, *network.config.size)
        x = stream.uniform(shape, device=network.device)
    ratio = float(network.to(x.device).noise_ratio(x).mean())
    if not ratio >= LEAST_NOISE:
        raise ValueError(
            f"The evaluation network {name_of(network)} gives pure noise a ratio of {ratio:.2f}, "
            f"where 1 is right and {LEAST_NOISE} the least. Raising it would not protect. It is "
            f"of another model, badly trained, or was tampered with: {_WAY_OUT}"
        )
    return ratio


def check_order(network: nn.Module, ratios: Sequence[float], least_gap: float = LEAST_GAP) -> None:
    """Check that a network's noise ratio D rises with the noise in a batch.

    Args:
        network: The network, for its name.
        ratios: D of a batch, of its half-way mix with noise, and of noise alone.
        least_gap: The least difference between the last value and the first.

    Raises:
        ValueError: If they do not increase by so much, or are not finite; the message has the
            numbers.

    Example:
        >>> check_order(nn.Identity(), [0.05, 0.50, 0.95])
        >>> check_order(nn.Identity(), [0.95, 0.50, 0.05])
        Traceback (most recent call last):
        ValueError: The evaluation network Identity gives this data a ratio of 0.95, ...
    """
    natural, half, noise = ratios
    if natural < half < noise and noise - natural >= least_gap:
        return
    raise ValueError(
        f"The evaluation network {name_of(network)} gives this data a ratio of {natural:.2f}, the "
        f"data half way to noise {half:.2f}, and noise {noise:.2f}. These must rise, by "
        f"{least_gap:g} in all: by what it says now, noise looks like data, and "
        f"nothing was shared. It is for other data, badly trained, or was tampered with: {_WAY_OUT}"
    )


def check_special(network: nn.Module, special: Sequence[int]) -> None:
    """Check that every special token of a text network is special to the tokenizer too.

    The network reads none of its special tokens.

    Args:
        network: The network.
        special: The ids of the tokenizer's special tokens.

    Raises:
        ValueError: If it lists others; the message has their number.

    Example:
        >>> from hf_gradguard.networks import load_network
        >>> check_special(load_network("text-evaluation-network-minilm-l6"), [0, 100, 101, 102])
        Traceback (most recent call last):
        ValueError: The evaluation network text-evaluation-network-minilm-l6 takes 1 token(s) ...
    """
    listed = getattr(getattr(network, "config", None), "special_token_ids", ())
    if unknown_ids := sorted(set(listed) - set(special)):
        raise ValueError(
            f"The evaluation network {name_of(network)} takes {len(unknown_ids)} token(s) for "
            f"special that the tokenizer does not, the first of them {unknown_ids[:5]}: it would "
            "not read them, and they would not be protected. It was trained with another tokenizer "
            f"(if its folder is in the cache, delete that), or was tampered with: {_WAY_OUT}"
        )


def check_slope(network: nn.Module, slope: Tensor) -> None:
    """Check that a network's noise ratio D changes with its input, half way from data to noise.

    Args:
        network: The network, for its name.
        slope: ∂D/∂x, half way from data to noise.

    Raises:
        ValueError: If it is zero everywhere, or not finite.

    Example:
        >>> check_slope(nn.Identity(), torch.zeros(2, 3))
        Traceback (most recent call last):
        ValueError: The evaluation network Identity is flat ...
    """
    if bool(slope.isfinite().all()) and bool(slope.any()):
        return
    raise ValueError(
        f"The evaluation network {name_of(network)} is flat between data and noise, or its slope "
        "is not finite: it cannot be raised, and nothing was shared. It is badly trained, or was "
        f"tampered with: {_WAY_OUT}"
    )


def check_network(
    network: nn.Module, embedding: nn.Module | None, special: Sequence[int] | None
) -> None:
    """Check what can be said of a network before there is data.

    These are `check_special`, `try_on_noise`, and that a text network knows the embeddings.

    Args:
        network: A network. Those of other packages are not checked.
        embedding: The model's token embeddings; `None` for images.
        special: The ids of the tokenizer's special tokens, if there is a tokenizer.

    Raises:
        ValueError: If a check fails.

    Example:
        >>> from hf_gradguard.networks import load_network
        >>> check_network(load_network("image-evaluation-network-32"), None, None)
    """
    if isinstance(network, TextEvaluationNetwork):
        if embedding is None:
            return  # of another kind of input, which the first batch says better
        network.check_embedding(embedding_weight(embedding))
        if special is not None:
            check_special(network, special)
        try_on_noise(network, embedding, special or ())
    elif isinstance(network, ImageEvaluationNetwork):
        try_on_noise(network)


def name_of(network: nn.Module) -> str:
    """Return the name of a network for messages.

    Example:
        >>> name_of(nn.Identity())
        'Identity'
    """
    return getattr(network, "name_or_path", "") or type(network).__name__


_WAY_OUT = (
    "train one on the model's own tokens or images with `gradguard evalnet train`, or leave "
    "evaluation_network out."
)
