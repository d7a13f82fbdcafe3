"""Gradient matching attacks, which find the input whose gradient is the one that was shared.

    x̂ = argmin dist(g(x̂), shared) + priors(x̂)

One loop serves all of them. The published attacks differ in distance, priors, optimizer and
schedule, which are the settings of their classes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...models import explain_missing_model
from ...randomness import Stream, torch_generator
from ..base import Attack, Clock, Observation, Reconstruction, as_text, without_dropout
from ..layer_inputs import with_length
from .descent import Descended, descend
from .objectives import Objective, TagDistance, cosine_distance, embedding_length, squared_distance
from .problem import MatchingSettings, Problem
from .space import Tokens


@dataclass
class GradientMatching(MatchingSettings, Attack):
    """A base of attacks that descend on the distance between gradients.

    Subclasses define the distance and the priors.

    Example:
        >>> from hf_gradguard.attacks.matching.objectives import squared_distance
        >>> @dataclass
        ... class Plain(GradientMatching):
        ...     name = "plain"
        ...     steps: int = 2
        ...
        ...     def objective(self):
        ...         return squared_distance
        >>> found = Plain(restarts=2)(observation)
        >>> len(found.token_ids), found.objective == min(found.history)
        (2, True)
    """

    informed_by: ClassVar[frozenset[str]] = frozenset({"noise_variance"})

    def problem(self, observations: Sequence[Observation]) -> Problem:
        """Return the problem of matching these observations with this attack.

        Raises:
            ValueError: If they do not belong together, or this attack cannot work on them.
        """
        return Problem(observations, self)

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        return self._match([with_length(observation)], generator)[0]

    def reconstruct_many(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> list[Reconstruction]:
        """Attack several observations at once, each by itself: faster than one after the other.

        Args:
            observations: Observations of one model, one input shape and one attention mask, with
                gradients of the same parameters.
            generator: The source of all randomness.

        Raises:
            ValueError: If they differ in those, or this attack cannot work on them.
        """
        for observation in observations:
            self.check_domain(observation)
        return self._match(observations, torch_generator(generator, observations[0].device))

    def _match(
        self, observations: Sequence[Observation], generator: torch.Generator
    ) -> list[Reconstruction]:
        clock = Clock(self.seconds)
        with without_dropout(observations[0].model):
            problem = self.problem(observations)
            descents = descend(problem, generator, clock)
        results = []
        for number, observation in enumerate(observations):
            own_descents = descents[number * self.restarts :][: self.restarts]
            best = min(own_descents, key=lambda descent: float(descent.objective))
            results.append(_reconstruction(problem, observation, best, clock))
        return results


def _reconstruction(
    problem: Problem, observation: Observation, descent: Descended, clock: Clock
) -> Reconstruction:
    ids = problem.space.decode(descent.x)
    return Reconstruction(
        input=descent.x,
        token_ids=ids,
        text=None if ids is None else as_text(ids, observation.tokenizer),
        labels=descent.labels.argmax(-1) if problem.soft else descent.labels,
        objective=float(descent.objective),
        seconds=clock.elapsed,
        history=descent.history.tolist(),
        complete=not clock.has_stopped,
    )


@dataclass
class DLG(GradientMatching):
    """Matches the squared distance by L-BFGS, and optimizes unknown labels with the input.

    It needs a model with second derivatives everywhere (sigmoid, GELU), and often restarts.

    Reference: Zhu, Liu and Han, "Deep Leakage from Gradients", 2019.

    Example:
        >>> found = DLG(steps=1, start="uniform")(image_observation)
        >>> found.input.shape == image_gmap.input.shape
        True
    """

    name: ClassVar[str] = "dlg"
    optimize_labels: ClassVar[bool] = True
    steps: int = 300
    learning_rate: float = 1.0
    optimizer: str = "lbfgs"

    def objective(self) -> Objective:
        return squared_distance


@dataclass
class IDLG(DLG):
    """Runs DLG with the label read off the last layer.

    Reference: Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020.

    Example:
        >>> IDLG(steps=1)(image_observation).labels.shape
        torch.Size([2])
    """

    name: ClassVar[str] = "idlg"
    optimize_labels: ClassVar[bool] = False


@dataclass
class InvertingGradients(GradientMatching):
    """Matches 1 - cosine and total variation on images, by L-BFGS from uniform pixels.

    It is far stronger than the attack as published (`inverting_gradients_published`).

    Reference: Geiping et al., "Inverting Gradients: How easy is it to break privacy in federated
    learning?", 2020, for what it minimizes.

    Example:
        >>> found = InvertingGradients(steps=2, total_variation=1e-2)(image_observation)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "inverting_gradients"
    steps: int = 60
    learning_rate: float = 1.0
    optimizer: str = "lbfgs"
    start: Any = None
    total_variation: float = 1e-4
    patience: int | None = 5

    def objective(self) -> Objective:
        return cosine_distance


@dataclass
class InvertingGradientsPublished(InvertingGradients):
    """Runs Inverting Gradients as published: signed Adam with three decays from a normal start.

    Reference: Geiping et al., "Inverting Gradients: How easy is it to break privacy in federated
    learning?", 2020.

    Example:
        >>> len(InvertingGradientsPublished(steps=2)(image_observation).history)
        2
    """

    name: ClassVar[str] = "inverting_gradients_published"
    steps: int = 4800
    learning_rate: float = 0.1
    optimizer: str = "adam"
    schedule: str = "steps"
    signed: bool = True
    start: Any = "normal"
    patience: int | None = None


@dataclass
class DeepImagePrior(InvertingGradients):
    """Matches 1 - cosine of images that an untrained convolutional network draws.

    Adam descends on the network's weights. The best match is returned, and noise is matched in the
    end: behind a strong defense stop early, at 100 `steps`.

    Reference: Ulyanov, Vedaldi and Lempitsky, "Deep Image Prior", 2018, for the prior.

    Example:
        >>> found = DeepImagePrior(steps=2)(image_observation)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "deep_image_prior"
    domains: ClassVar[tuple[str, ...]] = ("image",)
    steps: int = 500
    learning_rate: float = 1e-2
    optimizer: str = "adam"
    prior: str | None = "deep"
    total_variation: float = 0.0
    patience: int | None = None


@dataclass
class GradInversion(GradientMatching):
    """Matches the squared distance with several priors on images.

    The priors are total variation, squared norm, batch-norm statistics and agreement between
    restarts.

    Args:
        batch_norm: The weight of the distance to the batch normalizations' running statistics.
        group_consistency: The weight of each restart's squared distance to the restarts' mean.

    Reference: Yin et al., "See through Gradients: Image Batch Recovery via GradInversion", 2021.

    Example:
        >>> found = GradInversion(steps=2, restarts=2)(image_observation)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "grad_inversion"
    steps: int = 4000
    learning_rate: float = 0.1
    schedule: str = "steps"
    total_variation: float = 1e-4
    squared_norm: float = 1e-6
    batch_norm: float = 1e-3
    group_consistency: float = 1e-3

    def objective(self) -> Objective:
        return squared_distance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "lbfgs" and self.restarts > 1 and self.group_consistency:
            raise ValueError(
                "With L-BFGS each restart descends by itself, so that they cannot be held "
                "together: set group_consistency=0, or take another optimizer."
            )

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        value = super().penalty(problem, x)
        if self.batch_norm:
            distance = problem.space.batch_norm_distance(problem.observation.model, x)
            value = value + self.batch_norm * distance
        if self.group_consistency and self.restarts > 1 and len(x) > 1:
            groups = x.view(-1, self.restarts, *x.shape[1:])
            # Without restarts that diverged. What draws to it adds up to 0, so it has no slope.
            mean = groups.detach().nanmean(1, keepdim=True)
            away = (groups - mean).view_as(x).flatten(1)
            value = value + self.group_consistency * away.square().mean(1)
        return value


@dataclass
class Tag(GradientMatching):
    """Matches squared and absolute differences, with early layers counting more.

    It descends by AdamW with a linear schedule.

    Args:
        absolute: The weight of the absolute differences.

    Reference: Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", 2021.

    Example:
        >>> found = Tag(steps=3)(observation)
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
    """Matches the cosine on texts, keeps embeddings as long as words', and moves tokens in between.

    Every `every` steps, `moves` random rearrangements of the candidate (two tokens swapped, one
    moved, a span moved, the beginning put behind the end) are scored by matching loss, plus the
    language model's loss on their tokens if there is one. The best takes the candidate's place if
    it is better than it.

    Args:
        length_weight: The weight of the squared difference between the embeddings' mean length and
            the vocabulary's.
        every: Steps between rounds of moves.
        moves: Rearrangements tried a round.
        language_model: A causal language model over the same tokens, by name, folder or object;
            `None` for none.
        language_weight: The weight of its mean negative log-likelihood per token.

    Reference: Balunović et al., "LAMP: Extracting Text from Gradients with Language Model Priors",
    2022.

    Example:
        >>> found = Lamp(steps=4, every=2, moves=3)(observation)
        >>> [len(ids) for ids in found.token_ids] == observation.tokens.sum(1).tolist()
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
        self,
        problem: Problem,
        step: int,
        x: Tensor,
        offset: int,
        generator: torch.Generator,
    ) -> None:
        if (step + 1) % self.every:
            return
        for k in range(len(x)):
            changed = [self._rearranged(problem, x[k], generator) for _ in range(self.moves)]
            moved = torch.stack([x[k], *changed])
            losses = [self._score(problem, candidate, offset + k) for candidate in moved]
            scores = torch.stack(losses)
            x[k] = moved[scores.nan_to_num(torch.inf).argmin()]

    def _score(self, problem: Problem, x: Tensor, candidate: int) -> Tensor:
        value = problem.distance(x, candidate)
        if self._language is not None:
            ids = cast(Tokens, problem.space).vocabulary.nearest(x)
            mask = problem.observation.tokens
            labels, mask = ids.masked_fill(~mask, -100), mask.long()
            with torch.no_grad():
                loss = self._language(input_ids=ids, attention_mask=mask, labels=labels).loss
            value = value + self.language_weight * loss
        return value

    def _rearranged(self, problem: Problem, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return `x` `(B, T, H)` with the words of one of its texts in another order."""

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
                span, remaining = order[i : j + 1], order[:i] + order[j + 1 :]
                insertion = draw(len(remaining) + 1)
                order = remaining[:insertion] + span + remaining[insertion:]
            else:
                order = order[i:] + order[:i]
        moved = x.clone()
        moved[row, places] = x[row, places[order]]
        return moved
