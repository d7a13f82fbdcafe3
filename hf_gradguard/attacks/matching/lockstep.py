"""Several optimizers at once that each ask for evaluations in their own time, answered together.

`torch.optim.LBFGS` calls its closure as often as its line search likes, so that descents cannot
share a loop. Here each has a thread, which sleeps until all others have asked too; then the
caller's thread answers everybody in one vectorized pass. Whoever is awake holds the lock, so that
only one computes at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Question = Any
Answer = Any
Ask = Callable[[Question], Answer]


def in_lockstep(
    runs: Sequence[Callable[[Ask], T]],
    evaluate: Callable[[list[int], list[Question]], list[Answer]],
) -> list[T]:
    """Results of `run(ask)` for every run, where `ask(question)` is answered for all together.

    Args:
        runs: Functions of `ask`. They may ask as often as they like, and end when they like.
        evaluate: `(numbers of the runs that ask, their questions)` to answers, in that order.
            Called in this thread.

    Raises:
        BaseException: What a run or `evaluate` raises; it ends the other runs at their next
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
                futures.append(pool.submit(table.seated, number, run))
                table.running += 1
            while table.running:
                table.changed.wait_for(table.is_due)
                if table.running:
                    numbers = sorted(table.questions)
                    answers = evaluate(numbers, [table.questions.pop(number) for number in numbers])
                    table.answers.update(zip(numbers, answers, strict=True))
                    table.changed.notify_all()
        except BaseException:  # an interrupt too: nobody may wait for an answer that does not come
            table.closed = True
            table.changed.notify_all()
            raise
    ended = [future.exception() for future in futures]
    for error in ended:
        if error is not None and not isinstance(error, _Ended):
            raise error
    return [future.result() for future in futures]


class _Ended(Exception):
    """Nobody answers any more."""


class _Table:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running, self.closed = 0, False
        self.questions: dict[int, Question] = {}
        self.answers: dict[int, Answer] = {}

    def is_due(self) -> bool:
        """Whether all who still run have asked, or nobody runs any more."""
        return not self.running or (not self.closed and len(self.questions) == self.running)

    def seated(self, number: int, run: Callable[[Ask], T]) -> T:
        """One run, from taking its seat to leaving it."""
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
