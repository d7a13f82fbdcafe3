"""Synthetic samples: random ones of a public law, in the span of whose gradients another is fitted.

Whoever knows the law makes up samples of his own: other draws of it span as much of a gradient. A
message's own are not to be read out of it, or its span would be known. So texts are that long that
they have more tokens than a weight's gradient can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...randomness import Stream
from ..batch.texts import ends_of, is_of_targets
from ..map import GradientMap

LENGTH = 16
"""Tokens of a synthetic text come in so many, if the model takes as many."""
MORE = 4 / 3
"""Times as many tokens as a layer's inputs have directions: then these are in no span."""
READERS = 4  # of one input at most, whose gradients are read together: query, key and value
USUAL = {"text": 4, "image": 16}
"""Samples: of texts few are enough to learn from, and tell who is in a message less."""


def synthetic_samples(
    gmap: GradientMap, samples: int | None, generator: Stream, special: Sequence[int] = ()
) -> GradientMap:
    """A model on random samples with random labels; texts are of 16 tokens or more.

    Args:
        gmap: A map of the model, whose batch says which entries there are.
        samples: How many. `None`: 4 texts, or 16 images.
        generator: Of everything.
        special: Ids of special tokens, which stand at a text's ends only.

    Raises:
        ValueError: For an entry of the batch that cannot be made up, by name.

    Example:
        >>> synthetic_samples(gmap, 5, Stream()).input.shape[:2]
        torch.Size([5, 16])
    """
    x, batch = gmap.input, gmap.batch
    samples = USUAL[gmap.domain.name] if samples is None else samples
    rows = torch.arange(samples, device=x.device) % len(x)
    places = _places(gmap, text_length(gmap, samples)) if x.dim() == 3 else None

    def resized(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if places is not None and value.shape == (len(x), x.shape[1]):
            value = value.gather(1, places)
        elif places is not None and value.dim() == 2 and is_of_targets(gmap.model, name):
            value = value[:, :1].expand(-1, places.shape[1])  # their length is the batch's, too
        return value[rows] if len(value) == len(x) else value

    like = {name: resized(name, value) for name, value in batch.items()}
    made = gmap.domain.random_batch(gmap.model, like, generator, special)
    return gmap.undefended.of_batch(made)


def text_length(gmap: GradientMap, samples: int) -> int:
    """Of how many tokens synthetic texts are: half of what the model takes at most, or 16.

    A linear layer's gradient is δᵀX. Where X has fewer rows, one a token, than columns, it shows
    which tokens they are of (the span attack).

    Args:
        gmap: A map of the model.
        samples: How many texts there are.

    Example:
        >>> text_length(gmap, 16), gmap.input.shape[2]  # 16 x 16 tokens are more than enough
        (16, 32)
    """
    matrices = [min(p.shape) for p in gmap.parameters.values() if p.dim() == 2]
    told_apart = min(READERS * max(matrices, default=1), gmap.input.shape[-1])
    wanted = LENGTH * math.ceil(MORE * told_apart / samples / LENGTH)
    most = _most_tokens(gmap.model)
    return min(wanted, max(min(LENGTH, most), most // 2))


def _most_tokens(model: nn.Module) -> int:
    return getattr(getattr(model, "config", None), "max_position_embeddings", None) or LENGTH


def _places(gmap: GradientMap, length: int) -> Tensor:
    """`(B, length)`: places of each text to take, again and again, its own end last: synthetic
    texts end as the batch's do, whatever their lengths and padding.
    """
    x, present = gmap.input, gmap.domain.present(gmap.batch)
    first, last = ends_of(torch.ones(x.shape[:2], device=x.device) if present is None else present)
    at = torch.arange(length, device=x.device) % (last - first + 1)[:, None] + first[:, None]
    at[:, -1] = last
    return at
