"""Gradient matching: find the input whose gradient is the one that was shared.

    x̂ = argmin dist(g(x̂), shared) + priors(x̂)

One loop for all of it. What differs between the published attacks (distance, priors, optimizer,
schedule) is in the settings of their classes in `images.py` and `text.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...randomness import Stream, torch_generator
from ..base import Attack, Reconstruction, as_text
from ..length import with_length
from ..observation import Observation, without_dropout
from .descent import Descended, descend
from .problem import Problem
from .settings import MatchingSettings


@dataclass
class GradientMatching(MatchingSettings, Attack):
    """Base of the attacks that descend on the distance between gradients. Subclasses say which
    distance and priors.

    Example:
        >>> from hf_gradguard.attacks.matching.objectives import squared_distance
        >>> @dataclass
        ... class Plain(GradientMatching):
        ...     name = "plain"
        ...     steps: int = 2
        ...
        ...     def objective(self):
        ...         return squared_distance
        >>> found = Plain(restarts=2)(seen)
        >>> len(found.token_ids), found.objective == min(found.history)
        (2, True)
    """

    informed_by: ClassVar[frozenset[str]] = frozenset({"noise_variance"})

    @property
    def passes(self) -> float:
        """About three an evaluation, a gradient and its derivative; L-BFGS takes 20 a step."""
        evaluations = self.steps * (20 if self.optimizer == "lbfgs" else 1)
        return 3.0 * evaluations * self.restarts

    def problem(self, observations: Sequence[Observation]) -> Problem:
        """The observations as this attack matches them.

        Raises:
            ValueError: If they do not belong together, or this attack cannot work on them.
        """
        return Problem(
            observations,
            self.objective(),
            restarts=self.restarts,
            optimize_labels=self.optimize_labels,
            match_nonzero=self.match_nonzero,
            leave_out=self.leave_out,
            clip_norm=self.clip_norm,
            clip_coordinate=self.clip_coordinate,
        )

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return self._match([with_length(seen)], generator)[0]

    def together(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> list[Reconstruction]:
        """Attack several observations at once, each by itself: faster than one after the other.

        Args:
            observations: All of one model, one input shape and one attention mask, with gradients
                of the same parameters.
            generator: Source of all randomness.

        Raises:
            ValueError: If they differ in those, or this attack cannot work on them.
        """
        for seen in observations:
            self.check_domain(seen)
        return self._match(observations, torch_generator(generator, observations[0].device))

    def _match(
        self, observations: Sequence[Observation], generator: torch.Generator
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        with without_dropout(observations[0].model):
            problem = self.problem(observations)
            found = descend(self, problem, generator, started)
        seconds = time.perf_counter() - started
        results = []
        for number, seen in enumerate(observations):
            own = found[number * self.restarts :][: self.restarts]
            best = min(own, key=lambda one: float(one.objective))
            results.append(_reconstruction(problem, seen, best, seconds))
        return results


def _reconstruction(
    problem: Problem, seen: Observation, found: Descended, seconds: float
) -> Reconstruction:
    ids = problem.space.decode(found.x)
    return Reconstruction(
        input=found.x,
        token_ids=ids,
        text=None if ids is None else as_text(ids, seen.tokenizer),
        labels=found.labels.argmax(-1) if problem.soft else found.labels,
        objective=float(found.objective),
        seconds=seconds,
        history=found.history.tolist(),
    )
