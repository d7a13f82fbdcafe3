"""Gradient matching as published for text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...models import explain_missing_model
from .attack import GradientMatching
from .objectives import Objective, TagDistance, cosine_distance
from .priors import embedding_length
from .problem import Problem
from .space import Tokens


@dataclass
class Tag(GradientMatching):
    """Squared and absolute differences, early layers counting more; AdamW with a linear schedule.

    Args:
        absolute: Weight of the absolute differences.

    Reference: Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", 2021.

    Example:
        >>> found = Tag(steps=3)(seen)
        >>> len(found.history), len(found.text)
        (3, 2)
    """

    name: ClassVar[str] = "tag"
    steps: int = 1500
    learning_rate: float = 0.05
    optimizer: str = "adamw"
    schedule: str = "linear"
    warmup: int = 50
    absolute: float = 0.1

    def objective(self) -> Objective:
        return TagDistance(self.absolute)


@dataclass
class Lamp(GradientMatching):
    """Cosine matching, embeddings kept as long as words' are, and moves of tokens in between.

    Every `every` steps, `moves` random rearrangements of the candidate (two tokens swapped, one
    moved, a span moved, the beginning put behind the end) are scored by matching loss, plus the
    language model's loss on their tokens if there is one. The best takes the candidate's place if
    it is better than it.

    Args:
        length_weight: Weight of the squared difference between the embeddings' mean length and the
            vocabulary's.
        every: Steps between rounds of moves.
        moves: Rearrangements tried a round.
        language_model: A causal language model over the same tokens, by name, folder or object;
            `None` for none.
        language_weight: Weight of its mean negative log-likelihood a token.

    Reference: Balunović et al., "LAMP: Extracting Text from Gradients with Language Model Priors",
        2022.

    Example:
        >>> found = Lamp(steps=4, every=2, moves=3)(seen)
        >>> [len(ids) for ids in found.token_ids] == seen.tokens.sum(1).tolist()
        True
    """

    name: ClassVar[str] = "lamp"
    domains: ClassVar[tuple[str, ...]] = ("text",)
    steps: int = 1500
    learning_rate: float = 0.01
    schedule: str = "linear"
    length_weight: float = 1.0
    every: int = 75
    moves: int = 50
    language_model: Any = None
    language_weight: float = 0.2
    _language: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.every, self.moves) < 1:
            raise ValueError(
                f"every and moves must be at least 1, but are {self.every} and {self.moves}."
            )
        if isinstance(self.language_model, str):
            from transformers import AutoModelForCausalLM

            with explain_missing_model(self.language_model):
                self._language = AutoModelForCausalLM.from_pretrained(
                    self.language_model, trust_remote_code=False
                ).eval()
        else:
            self._language = self.language_model

    def objective(self) -> Objective:
        return cosine_distance

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        value = super().penalty(problem, x)
        if self.length_weight:
            mean = cast(Tokens, problem.space).mean_norm()
            value = value + self.length_weight * embedding_length(x, mean)
        return value

    def between_steps(
        self, problem: Problem, step: int, x: Tensor, first: int, generator: torch.Generator
    ) -> None:
        if (step + 1) % self.every:
            return
        for k in range(len(x)):
            moved = torch.stack(
                [x[k], *(self._rearranged(problem, x[k], generator) for _ in range(self.moves))]
            )
            scores = torch.stack([self._score(problem, one, first + k) for one in moved])
            x[k] = moved[scores.nan_to_num(torch.inf).argmin()]

    def _score(self, problem: Problem, x: Tensor, candidate: int) -> Tensor:
        value = problem.distance(x, candidate)
        if self._language is not None:
            ids = cast(Tokens, problem.space).vocabulary.nearest(x)
            labels, mask = ids.masked_fill(~problem.seen.tokens, -100), problem.seen.tokens.long()
            with torch.no_grad():
                loss = self._language(input_ids=ids, attention_mask=mask, labels=labels).loss
            value = value + self.language_weight * loss
        return value

    def _rearranged(self, problem: Problem, x: Tensor, generator: torch.Generator) -> Tensor:
        """`x` `(B, T, H)` with the words of one of its texts in another order."""

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator, device=x.device))

        row = draw(len(x))
        places = problem.space.free[row, :, 0].nonzero().flatten()
        order = list(range(len(places)))
        if len(order) > 1:
            i, j = sorted((draw(len(order)), draw(len(order))))
            kind = draw(4)
            if kind == 0:
                order[i], order[j] = order[j], order[i]
            elif kind == 1:
                order.insert(draw(len(order)), order.pop(i))
            elif kind == 2:
                span, rest = order[i : j + 1], order[:i] + order[j + 1 :]
                at = draw(len(rest) + 1)
                order = rest[:at] + span + rest[at:]
            else:
                order = order[i:] + order[:i]
        moved = x.clone()
        moved[row, places] = x[row, places[order]]
        return moved
