"""Tokens of a batch from the gradient of the token embeddings, if that is shared.

Only the rows that a batch looked up have a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..gradient_map.domain import TEXT
from .base import Attack, Clock, Observation, Reconstruction, as_text
from .span.row_space import distances, row_space


@dataclass
class EmbeddingRows(Attack):
    """Finds the set of a batch's tokens from the rows of the token embeddings' gradient.

    Without noise the rows that are not zero are exactly the tokens whose input reaches the loss
    (padding has none, nor the last token of a causal language model's text). With noise, rows are
    ranked by their norm, and those are kept that stand out. If the output head is the same tensor,
    every row has a gradient: Σ_n p_n(v) h_n from the head. Those lie in the span of the head's
    inputs h, which the rows of unused tokens give away; the input's rows stand out of it.

    It finds neither the order nor how often a token occurs, as a row's norm tells nothing of
    counts. In a batch it does not find whose token it is: every sample gets the whole set, the
    largest row first.

    Args:
        seconds: Time after which rows are ranked by their norm alone, and the result is not
            complete. For a tied head the span takes most of the time.

    Example:
        >>> from hf_gradguard import GradientMap
        >>> whole = GradientMap(model, batch, share_input_embeddings=True).gradient()
        >>> found = EmbeddingRows()(Observation(model, whole, input_shape=(2, 8)))
        >>> words = batch["input_ids"][batch["attention_mask"].bool()]
        >>> set(found.token_ids[0]) == set(words.tolist())
        True
    """

    name: ClassVar[str] = "embedding_rows"
    domains: ClassVar[tuple[str, ...]] = ("text",)
    seconds: float | None = None

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        clock = Clock(self.seconds)
        gradient, tied = _gradient(observation)
        max_tokens = int(observation.tokens.sum())
        norms = gradient.norm(dim=1)
        if tied and not clock.must_stop():
            tokens = _outside_head(gradient, max_tokens)
            tokens = tokens[norms[tokens].argsort(descending=True)]
        else:
            tokens = _standing_out(norms, max_tokens)
        ids = [tokens.tolist() for _ in range(observation.batch_size)]
        return Reconstruction(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=observation.labels,
            objective=1 - float(norms[tokens].square().sum() / norms.square().sum()),
            seconds=clock.elapsed,
            complete=not clock.has_stopped,
        )


def _gradient(observation: Observation) -> tuple[Tensor, bool]:
    """Return the token embeddings' gradient in float64, and whether it is also the output head's.

    Raises:
        ValueError: If it was not shared, or says nothing.
    """
    weight = TEXT.embedding(observation.model).weight
    parameters = observation.model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is weight]
    shared = [name for name in names if name in observation.gradient]
    if not shared:
        raise ValueError(
            f"The gradient of the token embeddings ({names[0]}) was not shared, which is the "
            "library's default (share_input_embeddings=False). Use span or tag."
        )
    gradient = observation.gradient[shared[0]].double()
    if not gradient.any():
        raise ValueError(f"The gradient of {shared[0]} is zero in every entry: it names no token.")
    find_head: Any = getattr(observation.model, "get_output_embeddings", lambda: None)
    head = find_head()
    return gradient, head is not None and getattr(head, "weight", None) is weight


def _standing_out(norms: Tensor, max_tokens: int) -> Tensor:
    """Return rows that are not zero, largest first.

    Of a noisy gradient they are at most `max_tokens`, and only those that stand out of the bulk.
    """
    order = norms.argsort(descending=True)
    count = int((norms > 0).sum())
    if count > max_tokens:
        middle = norms.median()
        spread = (norms - middle).abs().median()
        # Noise on a whole vocabulary stays within some five of its deviations, each 1.5 medians of
        # |norm - median|.
        count = max(1, min(max_tokens, int((norms > middle + 8 * spread).sum())))
    return order[:count]


def _outside_head(gradient: Tensor, max_tokens: int) -> Tensor:
    """Return rows of a tied gradient that do not lie in the span of the head's inputs."""
    width = gradient.shape[1]
    if max_tokens >= min(width, len(gradient) // 2):
        raise ValueError(
            "The output head is tied to the token embeddings, and its part of the gradient has up "
            f"to {max_tokens} directions, one per token, in {width} dimensions: too many to tell "
            "the input's part from it. Use span."
        )
    norms = gradient.norm(dim=1)
    # Rows that were looked up, or are labels, are among the large ones: the smallest are the head's
    # alone.
    unused = gradient[norms.argsort()[: max(2 * max_tokens, len(gradient) // 8)]]
    unused = unused[unused.norm(dim=1) > 0]
    if not len(unused):
        return _standing_out(norms, max_tokens)
    unused = unused / unused.norm(dim=1, keepdim=True)
    space = row_space([unused], None, max_tokens)
    distance_from_head = distances(gradient * space.columns, *space.directions()).clamp(min=1e-15)
    distance_from_head[norms == 0] = 1e-15
    values, order = distance_from_head.sort(descending=True)
    # Rows without input are outside by rounding errors only: cut at the widest gap.
    ratios = values[:max_tokens] / values[1 : max_tokens + 1]
    return order[: int(ratios.argmax()) + 1]
