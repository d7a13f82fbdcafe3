"""What a client shares that averages what it protected part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..defenses.message import Message, Noise


def mean_of(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name by name.

    Example:
        >>> mean_of([{"w": torch.ones(2)}, {"w": torch.zeros(2)}])["w"].tolist()
        [0.5, 0.5]
    """
    if len(several) == 1:
        return dict(several[0])
    return {name: torch.stack([one[name] for one in several]).mean(0) for name in several[0]}


def average_of(messages: Sequence[Message]) -> Message:
    """The mean of several messages that were protected one by one, each with noise of its own."""
    if len(messages) == 1:
        return messages[0]
    noises = [message.noise for message in messages]
    noise = None
    if all(one is not None for one in noises):
        known = [one for one in noises if one is not None]
        added = [one.added for one in known if one.added is not None]
        noise = Noise(
            variance=_of_mean([one.variance for one in known]),
            added=_of_mean(added) if len(added) == len(known) else None,
            plain=all(one.plain for one in known),
        )
    carries = any(message.carries for message in messages)
    return Message(mean_of(messages), noise=noise, carries=carries)


def _of_mean(variances: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor / len(variances) for name, tensor in mean_of(variances).items()}
