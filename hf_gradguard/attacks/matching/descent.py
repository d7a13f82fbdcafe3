"""The loop of gradient matching: candidates go down the distance between gradients, all of them in
one vectorized pass per step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import logging

from .deep_prior import DeepPrior
from .lockstep import in_lockstep
from .problem import Problem, Slopes
from .settings import OPTIMIZERS, MatchingSettings

SlopesAt = Callable[[Tensor, Tensor, slice], Slopes]


@dataclass
class Descended:
    """Where one candidate came to.

    Args:
        x: The best of it, `(B, ...)`.
        objective: A scalar: its distance and penalty there.
        labels: `(B,)`, or logits `(B, C)` where labels are optimized.
        history: The objective at every evaluation.

    Example:
        >>> zero = torch.zeros(())
        >>> Descended(torch.zeros(1, 4), zero, torch.tensor([1]), zero[None]).labels.tolist()
        [1]
    """

    x: Tensor
    objective: Tensor
    labels: Tensor
    history: Tensor


def descend(
    attack: MatchingSettings, problem: Problem, generator: torch.Generator, started: float
) -> list[Descended]:
    """From the attack's starts downwards.

    Args:
        attack: Its settings.
        problem: The observations to match.
        generator: Source of all randomness.
        started: When the attack began, as `time.perf_counter` says it: its time budget runs from
            there.

    Returns:
        Every candidate, those of one observation after another.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> tag = make_attack("tag", steps=2, restarts=3)
        >>> found = descend(tag, tag.problem([seen]), torch.Generator(), time.perf_counter())
        >>> [len(candidate.history) for candidate in found]
        [2, 2, 2]
    """
    if attack.prior is not None:
        network = problem.network(generator)
        drawn = _Descent(attack, problem, network.draw().detach(), slice(None), network)
        return drawn.run(problem.slopes, generator, started)
    x = problem.start(attack.start, generator)
    if attack.optimizer == "lbfgs":  # whose line search is each candidate's own
        return _descend_apart(attack, problem, x, generator, started)
    descent = _Descent(attack, problem, x, slice(None))
    return descent.run(problem.slopes, generator, started)


class _Descent:
    """The candidates `rows` of `x` on their way, with the best of each so far. If a network draws
    them, its weights go that way.
    """

    def __init__(
        self,
        attack: MatchingSettings,
        problem: Problem,
        x: Tensor,
        rows: slice,
        network: DeepPrior | None = None,
    ) -> None:
        self.attack, self.problem, self.rows, self.network = attack, problem, rows, network
        self.x, self.labels = x[rows].clone(), problem.labels[rows].clone()
        self.best_x, self.best_labels = self.x.clone(), self.labels.clone()
        self.best = torch.full((len(self.x),), math.inf, device=x.device, dtype=x.dtype)
        self.history: list[Tensor] = []

    def run(
        self, slopes_at: SlopesAt, generator: torch.Generator, started: float
    ) -> list[Descended]:
        """Follows `slopes_at` for as long as the settings say."""
        attack, first = self.attack, self.rows.start or 0
        leaves = self.network.weights if self.network else [self.x]
        leaves = [*leaves, self.labels] if self.problem.soft else leaves
        optimizer = OPTIMIZERS[attack.optimizer](leaves, attack.learning_rate)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, attack.rate)
        evaluate = functools.partial(self._evaluate, slopes_at)
        least, since = (math.inf, math.inf), 0
        bar = logging.tqdm(
            range(attack.steps), desc=attack.name, disable=not attack.progress or first > 0
        )
        for step in bar:
            optimizer.step(evaluate)
            rate.step()
            self.problem.space.project_(self.x)
            attack.between_steps(self.problem, step, self.x, first, generator)
            if step % 20 == 0:
                bar.set_postfix(objective=f"{float(self.best.min()):.4g}")
            now = self._reached()
            least, since = (now, 0) if now < least else (least, since + 1)
            if self._over().all():
                break
            if attack.patience is not None and since >= attack.patience:
                break
            if (
                attack.time_budget is not None
                and time.perf_counter() - started > attack.time_budget
            ):
                break
        bar.close()
        self.problem.space.project_(self.best_x)  # evaluated before a step's projection
        rows = zip(
            self.best_x, self.best, self.best_labels, torch.stack(self.history, 1), strict=True
        )
        return [Descended(*row) for row in rows]

    def _reached(self) -> tuple[float, float]:
        """How many candidates were never finite, and what the others' best add up to: less is
        better.
        """
        found = torch.isfinite(self.best)
        return float((~found).sum()), float(self.best[found].sum())

    def _over(self) -> Tensor:
        """`(K,)`: who is at the tolerance, or diverged, which does not concern the others."""
        diverged = ~torch.isfinite(self.x.flatten(1)).all(1)
        return diverged | (self.best <= self.attack.tolerance)

    def _evaluate(self, slopes_at: SlopesAt) -> float:
        if self.network:
            drawn = self.network.draw()
            self.x.copy_(drawn.detach())
        values, slopes, others = slopes_at(self.x, self.labels, self.rows)
        penalty = self.attack.penalty(self.problem, at := self.x.detach().requires_grad_())
        if isinstance(penalty, Tensor):
            values = values + penalty.detach()
            slopes = slopes + torch.autograd.grad(penalty.sum(), at)[0]
        better = values < self.best
        for kept, new in (
            (self.best_x, self.x),
            (self.best, values),
            (self.best_labels, self.labels),
        ):
            kept.copy_(torch.where(better.view(-1, *[1] * (kept.dim() - 1)), new, kept))
        slopes = (slopes.sign() if self.attack.signed else slopes) * self.problem.space.free
        if self.network:
            weights = self.network.weights
            by_weight = torch.autograd.grad(drawn, weights, slopes)
            for weight, slope in zip(weights, by_weight, strict=True):
                weight.grad = slope
        else:
            self.x.grad = slopes.contiguous()  # as L-BFGS reads it; of channels last it is not
        if self.problem.soft:
            self.labels.grad = others["labels"]
        self.history.append(values)
        return float(values.sum())


def _descend_apart(
    attack: MatchingSettings,
    problem: Problem,
    x: Tensor,
    generator: torch.Generator,
    started: float,
) -> list[Descended]:
    """Each candidate by an optimizer of its own, all of them evaluated together."""
    vectorized = True

    def run(
        k: int, own: torch.Generator, ask: Callable[[tuple[Tensor, Tensor]], Slopes]
    ) -> list[Descended]:
        def slopes_at(x: Tensor, labels: Tensor, rows: slice) -> Slopes:
            return ask((x.detach(), labels.detach()))

        return _Descent(attack, problem, x, slice(k, k + 1)).run(slopes_at, own, started)

    def evaluate(numbers: list[int], asked: list[tuple[Tensor, Tensor]]) -> list[Slopes]:
        nonlocal vectorized
        if vectorized and len(numbers) > 1:
            every = len(numbers) == len(x)
            rows = slice(None) if every else torch.tensor(numbers, device=x.device)
            try:
                xs, labels = (torch.cat(parts) for parts in zip(*asked, strict=True))
                found = problem.slopes(xs, labels, rows)
            except RuntimeError as error:
                if not _only_together(error):
                    raise
                vectorized = False  # the same numbers, in more time
            else:
                return [_row(found, i) for i in range(len(numbers))]
        return [
            problem.slopes(*one, slice(k, k + 1)) for k, one in zip(numbers, asked, strict=True)
        ]

    seeds = torch.randint(2**62, (len(x),), generator=generator, device=generator.device).tolist()
    owns = [torch.Generator(device=generator.device).manual_seed(seed) for seed in seeds]
    runs = [functools.partial(run, k, own) for k, own in enumerate(owns)]
    return [found for alone in in_lockstep(runs, evaluate) for found in alone]


def _only_together(error: RuntimeError) -> bool:
    """Whether an error is about running several at once: no memory for it, which on the CPU has no
    class of its own, or a model that torch cannot vectorize.
    """
    said = str(error)
    memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said
    return memory or any(
        word in said for word in ("vmap", "functorch", "torch.func", "etc) transform")
    )


def _row(found: Slopes, i: int) -> Slopes:
    values, slopes, others = found
    row = slice(i, i + 1)
    return values[row], slopes[row], {name: other[row] for name, other in others.items()}
