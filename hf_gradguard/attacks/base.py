"""What an attack is: a function from what the server saw to a reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..randomness import private_generator
from .observation import Observation


@dataclass
class Reconstruction:
    """What an attack recovered from one observation.

    Args:
        input: The continuous input that it found, `(B, T, H)` or `(B, C, H, W)`; `None` if it finds
            none. Images lie within the range of pixels.
        token_ids: Of a text, one list of ids a sample, special tokens included where their place is
            known. -1 marks a position for which nothing was found.
        text: The same as strings without special tokens, if the observation has a tokenizer.
        labels: `(B,)`: those of the observation, or as recovered; `None` if the attack neither
            needs nor finds any.
        objective: Value of what the attack minimizes at what it returns, before pixels were
            clipped; lower is a better match.
        seconds: Time taken.
        history: The objective on the way, if the attack iterates.
    """

    input: Tensor | None = None
    token_ids: list[list[int]] | None = None
    text: list[str] | None = None
    labels: Tensor | None = None
    objective: float = float("nan")
    seconds: float = float("nan")
    history: list[float] = field(default_factory=list)


class Attack:
    """Base of all attacks. A subclass is a dataclass of its settings with one method,
    `reconstruct`.

    An attack reads the observation and nothing else, and leaves the model as it found it.
    """

    name: ClassVar[str]

    def __call__(
        self, seen: Observation, generator: torch.Generator | None = None
    ) -> Reconstruction:
        """Reconstruct the batch behind an observation.

        Args:
            seen: What the server saw.
            generator: Source of all randomness, on the gradient's device. Default: a fresh one.

        Raises:
            ValueError: If the attack cannot work on what was seen, with the reason.
        """
        return self.reconstruct(seen, generator or private_generator(seen.device))

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        """The attack itself. Implemented by subclasses."""
        raise NotImplementedError


def texts(token_ids: list[list[int]], tokenizer: object) -> list[str] | None:
    """Ids as strings, without special tokens and positions where nothing was found; `None` without
    a tokenizer.
    """
    if tokenizer is None:
        return None
    return [
        tokenizer.decode([index for index in ids if index >= 0], skip_special_tokens=True)  # type: ignore[attr-defined]
        for ids in token_ids
    ]
