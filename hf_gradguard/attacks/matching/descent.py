"""The loop of gradient matching, in which candidates descend the distance between gradients.

All of them are evaluated in one vectorized pass per step.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor
from transformers.utils import logging

from ..base import Clock
from .problem import OPTIMIZERS, Problem, Slopes
from .space import DeepPrior

T = TypeVar("T")
Question = Any
Answer = Any
Ask = Callable[[Question], Answer]


def in_lockstep(
    runs: Sequence[Callable[[Ask], T]],
    evaluate: Callable[[list[int], list[Question]], list[Answer]],
) -> list[T]:
    """Return the results of `run(ask)` for every run, and answer their questions together.

    Args:
        runs: Functions of `ask`. They may ask as often as they like, and end when they like.
        evaluate: A function from the numbers of the runs that ask and their questions to answers,
            in that order. It is called in this thread.

    Raises:
        BaseException: If a run or `evaluate` raises it; it ends the other runs at their next
            question.

    Example:
        >>> def run(ask):
        ...     return ask(1) + ask(2)
        >>> in_lockstep([run, run], lambda numbers, questions: [10 * q for q in questions])
        [30, 30]
    """
    table = _Table()
    with ThreadPoolExecutor(len(runs)) as pool, table.changed:
        try:
            futures = []
            for number, run in enumerate(runs):
                futures.append(pool.submit(table.run_to_end, number, run))
                table.running += 1
            while table.running:
                table.changed.wait_for(table.is_due)
                if table.running:
                    numbers = sorted(table.questions)
                    answers = evaluate(numbers, [table.questions.pop(number) for number in numbers])
                    table.answers.update(zip(numbers, answers, strict=True))
                    table.changed.notify_all()
        except BaseException:  # an interrupt too: no run may wait for an answer that never comes
            table.closed = True
            table.changed.notify_all()
            raise
    ended = [future.exception() for future in futures]
    for error in ended:
        if error is not None and not isinstance(error, _Ended):
            raise error
    return [future.result() for future in futures]


class _Ended(Exception):
    """No more answers will come."""


class _Table:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running, self.closed = 0, False
        self.questions: dict[int, Question] = {}
        self.answers: dict[int, Answer] = {}

    def is_due(self) -> bool:
        """Return whether all runs that continue have asked, or none continues."""
        return not self.running or (not self.closed and len(self.questions) == self.running)

    def run_to_end(self, number: int, run: Callable[[Ask], T]) -> T:
        """Run one run from its start to its end."""
        with self.changed:
            try:
                return run(lambda question: self._ask(number, question))
            except BaseException:
                self.closed = True
                raise
            finally:
                self.running -= 1
                self.changed.notify_all()

    def _ask(self, number: int, question: Question) -> Answer:
        self.questions[number] = question
        self.changed.notify_all()
        self.changed.wait_for(lambda: number in self.answers or self.closed)
        if number not in self.answers:
            self.questions.pop(number, None)
            raise _Ended
        return self.answers.pop(number)


SlopesAt = Callable[[Tensor, Tensor, slice], Slopes]


@dataclass
class Descended:
    """The result of one candidate's descent.

    Args:
        x: The best input on the way, `(B, ...)`.
        objective: The distance and penalty at the result, a scalar.
        labels: Labels `(B,)`, or logits `(B, C)` where labels are optimized.
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


def descend(problem: Problem, generator: Generator, clock: Clock) -> list[Descended]:
    """Descend from the attack's starts.

    Args:
        problem: The observations to match, with the attack's settings.
        generator: The source of all randomness.
        clock: The attack's clock: descents stop when it is over.

    Returns:
        Every candidate, those of one observation after another.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> tag = make_attack("tag", steps=2, restarts=3)
        >>> problem = tag.problem([observation])
        >>> found = descend(problem, torch.Generator(), Clock(None))
        >>> [len(candidate.history) for candidate in found]
        [2, 2, 2]
    """
    attack = problem.settings
    if attack.prior is not None:
        network = problem.network(generator)
        descent = _Descent(problem, network.draw().detach(), slice(None), network)
        return descent.run(problem.slopes, generator, clock)
    x = problem.start(attack.start, generator)
    if attack.optimizer == "lbfgs":  # whose line search is each candidate's own
        return _descend_separately(problem, x, generator, clock)
    descent = _Descent(problem, x, slice(None))
    return descent.run(problem.slopes, generator, clock)


class _Descent:
    """The descent of candidates `rows` of `x`, with the best of each so far.

    If a network draws them, its weights descend.
    """

    def __init__(
        self,
        problem: Problem,
        x: Tensor,
        rows: slice,
        network: DeepPrior | None = None,
    ) -> None:
        self.attack, self.problem, self.rows, self.network = (
            problem.settings,
            problem,
            rows,
            network,
        )
        self.x, self.labels = x[rows].clone(), problem.labels[rows].clone()
        self.best_x, self.best_labels = self.x.clone(), self.labels.clone()
        self.best = torch.full((len(self.x),), math.inf, device=x.device, dtype=x.dtype)
        self.history: list[Tensor] = []

    def run(self, slopes_at: SlopesAt, generator: Generator, clock: Clock) -> list[Descended]:
        """Follow `slopes_at` for as long as the settings say."""
        attack, offset = self.attack, self.rows.start or 0
        leaves = self.network.weights if self.network else [self.x]
        leaves = [*leaves, self.labels] if self.problem.soft else leaves
        optimizer = OPTIMIZERS[attack.optimizer](leaves, attack.learning_rate)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, attack.rate)
        evaluate = functools.partial(self._evaluate, slopes_at)
        best_progress, steps_since = (math.inf, math.inf), 0
        is_hidden = not attack.progress or offset > 0
        bar = logging.tqdm(range(attack.steps), desc=attack.name, disable=is_hidden)
        for step in bar:
            if step and clock.must_stop():
                break
            optimizer.step(evaluate)
            rate.step()
            self.problem.space.project_(self.x)
            attack.between_steps(self.problem, step, self.x, offset, generator)
            if step % 20 == 0:
                bar.set_postfix(objective=f"{float(self.best.min()):.4g}")
            progress = self._progress()
            best_progress, steps_since = (
                (progress, 0) if progress < best_progress else (best_progress, steps_since + 1)
            )
            if self._is_over().all():
                break
            if attack.patience is not None and steps_since >= attack.patience:
                break
        bar.close()
        self.problem.space.project_(self.best_x)  # evaluated before a step's projection
        history = torch.stack(self.history, 1)
        rows = zip(self.best_x, self.best, self.best_labels, history, strict=True)
        return [Descended(*row) for row in rows]

    def _progress(self) -> tuple[float, float]:
        """Return how many candidates were never finite, and the sum of the others' best.

        Less is better.
        """
        is_finite = torch.isfinite(self.best)
        return float((~is_finite).sum()), float(self.best[is_finite].sum())

    def _is_over(self) -> Tensor:
        """Return which candidates are at the tolerance, or diverged, `(K,)`; others continue."""
        diverged = ~torch.isfinite(self.x.flatten(1)).all(1)
        return diverged | (self.best <= self.attack.tolerance)

    def _evaluate(self, slopes_at: SlopesAt) -> float:
        if self.network:
            images = self.network.draw()
            self.x.copy_(images.detach())
        values, slopes, label_slopes = slopes_at(self.x, self.labels, self.rows)
        penalty = self.attack.penalty(self.problem, point := self.x.detach().requires_grad_())
        if isinstance(penalty, Tensor):
            values = values + penalty.detach()
            slopes = slopes + torch.autograd.grad(penalty.sum(), point)[0]
        better = values < self.best
        for stored, current in (
            (self.best_x, self.x),
            (self.best, values),
            (self.best_labels, self.labels),
        ):
            stored.copy_(torch.where(better.view(-1, *[1] * (stored.dim() - 1)), current, stored))
        slopes = (slopes.sign() if self.attack.signed else slopes) * self.problem.space.free
        if self.network:
            weights = self.network.weights
            by_weight = torch.autograd.grad(images, weights, slopes)
            for weight, slope in zip(weights, by_weight, strict=True):
                weight.grad = slope
        else:
            self.x.grad = slopes.contiguous()  # as L-BFGS reads it; of channels last it is not
        if self.problem.soft:
            self.labels.grad = label_slopes["labels"]
        self.history.append(values)
        return float(values.sum())


def _descend_separately(
    problem: Problem,
    x: Tensor,
    generator: Generator,
    clock: Clock,
) -> list[Descended]:
    """Descend with each candidate by an optimizer of its own, all evaluated together."""
    vectorized = True

    def run(
        k: int, run_generator: Generator, ask: Callable[[tuple[Tensor, Tensor]], Slopes]
    ) -> list[Descended]:
        def slopes_at(x: Tensor, labels: Tensor, rows: slice) -> Slopes:
            return ask((x.detach(), labels.detach()))

        return _Descent(problem, x, slice(k, k + 1)).run(slopes_at, run_generator, clock)

    def evaluate(numbers: list[int], questions: list[tuple[Tensor, Tensor]]) -> list[Slopes]:
        nonlocal vectorized
        if vectorized and len(numbers) > 1:
            all_run = len(numbers) == len(x)
            rows = slice(None) if all_run else torch.tensor(numbers, device=x.device)
            try:
                xs, labels = (torch.cat(columns) for columns in zip(*questions, strict=True))
                slopes = problem.slopes(xs, labels, rows)
            except RuntimeError as error:
                if not _is_about_vectorizing(error):
                    raise
                vectorized = False  # the same numbers, in more time
            else:
                return [_row(slopes, i) for i in range(len(numbers))]
        numbered = zip(numbers, questions, strict=True)
        return [problem.slopes(*question, slice(k, k + 1)) for k, question in numbered]

    seeds = torch.randint(2**62, (len(x),), generator=generator, device=generator.device).tolist()
    generators = [torch.Generator(device=generator.device).manual_seed(seed) for seed in seeds]
    runs = [functools.partial(run, k, run_generator) for k, run_generator in enumerate(generators)]
    return [slopes for descents in in_lockstep(runs, evaluate) for slopes in descents]


def _is_about_vectorizing(error: RuntimeError) -> bool:
    """Return whether an error comes from running several candidates at once.

    There may be no memory for it, which on the CPU has no error class of its own, or torch cannot
    vectorize the model.
    """
    message = str(error)
    memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in message
    words = ("vmap", "functorch", "torch.func", "etc) transform")
    return memory or any(word in message for word in words)


def _row(slopes: Slopes, i: int) -> Slopes:
    values, input_slopes, label_slopes = slopes
    row = slice(i, i + 1)
    return values[row], input_slopes[row], {name: x[row] for name, x in label_slopes.items()}
