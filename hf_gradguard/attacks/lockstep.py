"""Several optimizers at once that each ask for evaluations in their own time, answered together.

`torch.optim.LBFGS` calls its closure as often as its line search likes, so that descents cannot share a loop. Here each has a
thread, which sleeps until all others have asked too; then one vectorised pass answers everybody. Whoever is awake holds the lock,
so that only one computes at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Question = Any
Answer = Any


def in_lockstep(
    runs: Sequence[Callable[[Callable[[Question], Answer]], T]],
    evaluate: Callable[[list[int], list[Question]], list[Answer]],
) -> list[T]:
    """Results of `run(ask)` for every run, where `ask(question)` is answered for all together.

    Args:
        runs: Functions of `ask`. They may ask as often as they like, and end when they like.
        evaluate: `(numbers of the runs that ask, their questions)` to answers, in that order.

    Raises:
        BaseException: What a run or `evaluate` raises; the other runs are ended by it at their next question.
    """
    table = _Table(evaluate, len(runs))
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(table.seated, number, run) for number, run in enumerate(runs)]
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            table.close(error)
            raise


class _Table:
    def __init__(self, evaluate: Callable[[list[int], list[Question]], list[Answer]], count: int) -> None:
        self._evaluate, self._seated = evaluate, count
        self._questions: dict[int, Question] = {}
        self._answers: dict[int, Answer] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def seated(self, number: int, run: Callable[[Callable[[Question], Answer]], T]) -> T:
        """One run, from taking its seat to leaving it."""
        with self._changed:
            try:
                return run(lambda question: self._ask(number, question))
            except BaseException as error:
                self.close(error)
                raise
            finally:
                self._seated -= 1
                self._answer_if_all_asked()

    def close(self, error: BaseException) -> None:
        """End every run that asks from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _ask(self, number: int, question: Question) -> Answer:
        self._questions[number] = question
        self._answer_if_all_asked()
        while number not in self._answers and self._error is None:
            self._changed.wait()
        if self._error is not None:
            raise self._error
        return self._answers.pop(number)

    def _answer_if_all_asked(self) -> None:
        if self._error is None and self._questions and len(self._questions) == self._seated:
            numbers = sorted(self._questions)
            try:
                answers = self._evaluate(numbers, [self._questions.pop(number) for number in numbers])
            except BaseException as error:
                self.close(error)  # which everybody who asked will raise
            else:
                self._answers.update(zip(numbers, answers, strict=True))
                self._changed.notify_all()
