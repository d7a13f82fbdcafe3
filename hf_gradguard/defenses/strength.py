"""How large a client's gradients usually are, before anything was shared: of random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import Text, domains_in, special_ids
from ..gradient_map.random_batch import random_batch, resize_texts
from ..randomness import Stream
from .message import power

FIRST_BATCHES = 4
"""Random batches that the first estimate is of."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
             ValueError)  # fmt: skip
"""What models and losses raise of inputs that they do not take."""


def random_power(
    gmap: GradientMap, generator: Stream, prepared: Callable[[Tensors], Tensors]
) -> float:
    """The mean of ‖g‖² over random inputs with random labels.

    Args:
        gmap: The client's map.
        generator: Of the inputs.
        prepared: What is done to a gradient before noise is added, such as clipping.

    Raises:
        ValueError: Where the model takes no inputs that can be made up, with the way out.
    """
    powers = []
    try:
        client = gmap.undefended
        for _ in range(FIRST_BATCHES):
            gradient = prepared(_on_public_data(client, generator).gradient())
            powers.append(float(power(gmap.restrict(gradient), gmap.shards)))
    except _REFUSALS as error:
        raise ValueError(
            "Noise relative to the usual gradient begins with random inputs, and such as this "
            "model's cannot be made up. Give `scale` in place of relative_scale and "
            f"utility_budget. {error}"
        ) from error
    mean = math.fsum(powers) / len(powers)
    if not 0 < mean < math.inf:
        raise ValueError(
            "The gradient of random inputs is zero or not finite, so nothing says how strong noise "
            "must be. Give `scale` in place of relative_scale and utility_budget."
        )
    return mean


def is_anything_left(gmap: GradientMap) -> bool:
    """Whether a defense before this one left an entry to transmit. One that waits for more batches
    leaves none.
    """
    if gmap.transmitted is None:
        return True
    is_here = any(bool(mask.any()) for mask in gmap.transmitted.values())
    return is_here if gmap.shards is None else gmap.shards.any(is_here)


def _on_public_data(client: GradientMap, generator: Stream) -> GradientMap:
    """Texts have a length of their own, which is not the batch's. Models of one length alone are
    given theirs.
    """
    try:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, True))
    except _REFUSALS:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, False))


def public_batch(
    model: nn.Module, batch: Mapping[str, Any], generator: Stream, of_own_length: bool = True
) -> dict[str, Any]:
    """Random inputs and labels, as many rows as a batch has. In the place of entries of an unknown
    kind stand normal numbers, `True`, or indices that every table of the model has.

    Args:
        model: Says how many tokens and classes there are.
        batch: For shapes and types.
        generator: Of the inputs and labels.
        of_own_length: Whether texts are of 16 tokens, whatever the batch's length.

    Example:
        >>> public_batch(model, batch, Stream())["input_ids"].shape
        torch.Size([2, 16])
    """

    def unknown(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        if entry.is_floating_point():
            return generator.normal(entry.shape, device=entry.device).to(entry.dtype)
        if entry.dtype == torch.bool or entry.dim() < 2:
            return torch.full_like(entry, entry.dtype == torch.bool)
        tables = (getattr(module, "num_embeddings", None) for module in model.modules())
        rows = min((rows for rows in tables if isinstance(rows, int)), default=1)
        return generator.integers(rows, entry.shape, device=entry.device).to(entry.dtype)

    domains = domains_in(batch)
    try:
        (domain,) = domains
        if isinstance(domain, Text) and of_own_length:
            batch = resize_texts(domain, model, batch)
        return random_batch(domain, model, batch, generator, special_ids(model), unknown)
    except (AttributeError, ValueError):  # no text or image, or several, or tables without a name
        return {name: unknown(entry) for name, entry in batch.items()}
