"""What an attack is: a function from what the server saw to a reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..randomness import Stream, torch_generator
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
        undecided: What of this nothing in the gradient decided, in words: an order, whose a token
            is. Empty if there is no such thing.

    Example:
        >>> Reconstruction(token_ids=[[101, 7592, 102]], text=["hello"]).text
        ['hello']
    """

    input: Tensor | None = None
    token_ids: list[list[int]] | None = None
    text: list[str] | None = None
    labels: Tensor | None = None
    objective: float = float("nan")
    seconds: float = float("nan")
    history: list[float] = field(default_factory=list)
    undecided: str = ""


class Attack:
    """Base of all attacks. A subclass is a dataclass of its settings with one method,
    `reconstruct`.

    An attack reads the observation and nothing else, and leaves the model as it found it.
    `hf_gradguard.testing.check_attack` checks this and the rest of the contract.

    Attributes:
        name: What it is called, as in the registry.
        domains: What it works on: `"text"`, `"image"` or both.
        does: Where it works on one domain only, what it does that the other has no place for.
        informed_by: What of an observation it makes use of if the server knows the defense:
            `"noise_variance"`, `"mechanism"`.

    Example:
        >>> @dataclass
        ... class FirstWord(Attack):
        ...     name = "first_word"
        ...     domains = ("text",)
        ...     token: int = 7
        ...
        ...     def reconstruct(self, seen, generator):
        ...         rows, columns = seen.input_shape
        ...         return Reconstruction(token_ids=[[self.token] * columns] * rows)
        >>> len(FirstWord()(seen).token_ids)
        2
        >>> FirstWord()(image_seen)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: first_word is for text, but the input is pixels...
    """

    name: ClassVar[str]
    domains: ClassVar[tuple[str, ...]] = ("text", "image")
    informed_by: ClassVar[frozenset[str]] = frozenset()

    def __call__(
        self, seen: Observation, generator: Stream | torch.Generator | None = None
    ) -> Reconstruction:
        """Reconstruct the batch behind an observation.

        Args:
            seen: What the server saw.
            generator: Source of all randomness, on the gradient's device. Default: a fresh one.

        Raises:
            ValueError: If the attack cannot work on what was seen, with the reason.
            TypeError: If the attack breaks its contract and returns something else than a
                reconstruction of so many samples.
        """
        self.check_domain(seen)
        found = self.reconstruct(seen, torch_generator(generator, seen.device))
        _check_returned(self.name, found, seen.batch_size)
        return found

    @property
    def passes(self) -> float:
        """About how many of the model's gradients it costs to attack one observation."""
        return 100.0

    def check_domain(self, seen: Observation) -> None:
        """Refuse what the attack was not made for.

        Raises:
            ValueError: If the observation is of another domain than the attack's, with an attack
                to take in its place.
        """
        if seen.domain.name not in self.domains:
            content = seen.domain.content
            raise ValueError(
                f"{self.name} is for {' and '.join(self.domains)}, but the input is {content}. "
                f"For {content} take {_INSTEAD[seen.domain.name]}."
            )

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        """The attack itself. Implemented by subclasses."""
        raise NotImplementedError


def as_text(token_ids: list[list[int]], tokenizer: Any) -> list[str] | None:
    """Ids as strings, without special tokens and positions where nothing was found; `None` without
    a tokenizer.

    Example:
        >>> as_text([[-1, *tokenizer("a fine film").input_ids]], tokenizer)
        ['a fine film']
        >>> as_text([[7]], None) is None
        True
    """
    if tokenizer is None:
        return None
    return [
        tokenizer.decode([index for index in ids if index >= 0], skip_special_tokens=True)
        for ids in token_ids
    ]


def _check_returned(name: str, found: Any, batch_size: int) -> None:
    if not isinstance(found, Reconstruction):
        raise TypeError(f"{name} returned {type(found).__name__}, and not a Reconstruction.")
    for part in ("input", "token_ids", "text", "labels"):
        value = getattr(found, part)
        if value is not None and len(value) != batch_size:
            raise TypeError(
                f"{name} returned {part} of {len(value)} samples, where the batch has {batch_size}."
            )


_INSTEAD = {"text": "tag", "image": "inverting_gradients"}
