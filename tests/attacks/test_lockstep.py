"""Runs that are answered together: hand-worked questions, ends at different times, and errors from
everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_gradguard.attacks.matching.descent import in_lockstep


def doubling(asked: list[list[int]]) -> Callable[[list[int], list[int]], list[int]]:
    """Answers by doubling, and remembers who asked."""

    def evaluate(numbers: list[int], questions: list[int]) -> list[int]:
        asked.append(numbers)
        return [2 * question for question in questions]

    return evaluate


def asker(times: int, start: int) -> Callable[[Callable[[int], int]], int]:
    def run(ask: Callable[[int], int]) -> int:
        value = start
        for _ in range(times):
            value = ask(value)
        return value

    return run


def forever(ends: list[str]) -> Callable[[Callable[[int], int]], None]:
    """Asks until it is ended, and notes that it was."""

    def run(ask: Callable[[int], int]) -> None:
        try:
            while True:
                ask(1)
        finally:
            ends.append("ended")

    return run


def test_all_who_still_run_are_answered_together() -> None:
    asked: list[list[int]] = []
    found = in_lockstep([asker(3, 1), asker(1, 5), asker(0, 7), asker(2, -1)], doubling(asked))
    assert found == [8, 10, 7, -4]
    assert asked == [[0, 1, 3], [0, 3], [0]]


def test_one_run_alone_and_many() -> None:
    asked: list[list[int]] = []
    assert in_lockstep([asker(2, 3)], doubling(asked)) == [12]
    assert in_lockstep([asker(5, k) for k in range(40)], doubling(asked)) == [
        32 * k for k in range(40)
    ]
    assert asked == [[0]] * 2 + [list(range(40))] * 5


def test_only_one_computes_at_a_time() -> None:
    busy, most = 0, 0

    def run(ask: Callable[[int], int]) -> None:
        nonlocal busy, most
        for _ in range(20):
            busy += 1
            most = max(most, busy)
            torch.ones(200, 200) @ torch.ones(200, 200)  # lets other threads run
            busy -= 1
            ask(0)

    in_lockstep([run] * 8, doubling([]))
    assert most == 1


def test_an_error_ends_all_runs() -> None:
    ends: list[str] = []

    def fails(ask: Callable[[int], int]) -> None:
        ask(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_lockstep([forever(ends), fails, forever(ends)], doubling([]))
    assert ends == ["ended"] * 2


def test_an_interrupt_ends_all_runs() -> None:
    ends: list[str] = []

    def evaluate(numbers: list[int], questions: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_lockstep([forever(ends)] * 3, evaluate)
    assert ends == ["ended"] * 3


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ThreadPoolExecutor.submit
    left = [2]

    def few(pool: ThreadPoolExecutor, *arguments: Any) -> Any:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return submit(pool, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", few)
    with pytest.raises(RuntimeError, match="can't start"):
        in_lockstep([asker(2, 0)] * 3, doubling([]))


def test_evaluations_run_in_the_callers_thread() -> None:
    where = set()

    def evaluate(numbers: list[int], questions: list[int]) -> list[int]:
        where.add((threading.get_ident(), torch.is_grad_enabled()))
        return questions

    with torch.no_grad():
        in_lockstep([asker(2, 0), asker(1, 0)], evaluate)
    assert where == {(threading.get_ident(), False)}


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_of_the_evaluation_reaches_the_caller(first: int) -> None:
    """Also where it is a run's end that lets the others be evaluated."""

    def evaluate(numbers: list[int], questions: list[int]) -> list[int]:
        if len(numbers) < 3:
            raise FloatingPointError("not finite")
        return questions

    runs = [asker(2, 0), asker(2, 0), asker(1, 0)]
    with pytest.raises(FloatingPointError, match="not finite"):
        in_lockstep(runs[first:] + runs[:first], evaluate)
