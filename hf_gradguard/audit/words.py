"""Distinguishing advantage: how well a message tells two texts that differ in one word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..attacks.base import Observation
from ..attacks.likelihood import Distinguishability, distinguish, summarize_pairs
from ..defenses import Defense
from ..gradient_map import GradientMap
from ..randomness import Stream


def word_distinguishability(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    labels: Sequence[int],
    defense: Defense,
    pairs: int = 8,
    *,
    batch_size: int = 1,
    generator: Stream | None = None,
) -> Distinguishability:
    """Measure how often a message reveals which of two texts that differ in one word it is of.

    The attacker knows the defense, the labels, and both texts. It takes the one under which the
    message is likelier; if a mechanism has no likelihood, the one whose gradient is nearer, by the
    cosine of each tensor. It works for classifiers and for language models (labels are ids then).

    Args:
        model: The model, in the mode in which clients run it.
        tokenizer: The model's tokenizer.
        texts: At least one text. Messages are of `batch_size` of them.
        labels: One class id per text.
        defense: The defense that clients run.
        pairs: The number of pairs per message.
        batch_size: B. The last texts are left out if they fill no message.
        generator: The source of words, coins and noise. Default: a private one.

    Raises:
        ValueError: If there are fewer texts than a message has, or no word in one.

    Example:
        >>> from hf_gradguard.audit import word_distinguishability
        >>> found = word_distinguishability(
        ...     model, tokenizer, ["a fine film"] * 4, [1] * 4, make_defense("none")
        ... )
        >>> found.rate, found.pairs
        (1.0, 32)
    """
    stream = generator or Stream()
    if len(texts) < batch_size or len(texts) != len(labels):
        raise ValueError(
            f"There are {len(texts)} texts and {len(labels)} labels for messages of {batch_size}."
        )
    outcomes = []
    for start in range(0, len(texts) - batch_size + 1, batch_size):
        chosen = slice(start, start + batch_size)
        encoded = tokenizer(list(texts[chosen]), padding=True, return_tensors="pt")
        batch = {**encoded, "labels": torch.tensor(list(labels[chosen]))}
        device = next(model.parameters()).device
        batch = {key: value.to(device) for key, value in batch.items()}

        def send(sent: dict[str, Any]) -> Observation:
            message = defense(GradientMap(model, sent), stream)
            shape, mechanism = tuple(sent["input_ids"].shape), defense.mechanism(message)
            return Observation(model, message, shape, mechanism=mechanism)

        outcomes += distinguish(batch, tokenizer, send, pairs, stream)
    return summarize_pairs(outcomes)
