"""The budget of minutes, and trainings that stop in time."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

_SURE = 3  # steps of a training after which its end can be foretold


class OutOfTime(Exception):
    """An error: there is no time for this training."""


class Pace:
    """The time that is left, and how long a training takes at the latest speed of the machine.

    Args:
        minutes: The budget, from now on.

    Attributes:
        reserved: Seconds that trainings must leave for what comes after them.
        step_seconds: Seconds of an undefended training step, as measured last.
        costs: How many times as long a step takes under each defense, by label. A defense that is
            not in it takes as long as none.

    Example:
        >>> pace = Pace(minutes=15)
        >>> pace.fits(60), pace.fits(1000)
        (True, False)
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.reserved = self.step_seconds = 0.0
        self.costs = dict[str, float]()

    @property
    def left(self) -> float:
        """The seconds until the budget ends."""
        return self._end - time.monotonic()

    def step_of(self, label: str) -> float:
        """Return the seconds of a step under a defense."""
        return self.step_seconds * self.costs.get(label, 1.0)

    def measured(self, label: str, seconds: float) -> None:
        """Record how long a step under a defense took.

        The time is divided by the defense's cost: a slow defense makes no slow machine.
        """
        self.step_seconds = seconds / self.costs.get(label, 1.0)

    def compared(self, label: str, seconds: float) -> None:
        """Record how much slower a defense's first steps are than undefended ones."""
        self.costs[label] = seconds / self.step_seconds if self.step_seconds else 1.0

    def fits(self, seconds: float) -> bool:
        """Return whether there is time for this many seconds, and for what is reserved."""
        return seconds + self.reserved <= self.left


class Progress(TrainerCallback):
    """A callback that shows a training's steps, and ends the training if it cannot finish in time.

    It also ends it if the machine gets slower on the way.

    Args:
        pace: The pace of all trainings.
        label: The label of the defense.
        title: The title of the bar.
        longest: Seconds after which the training ends, late or not. Default: when its steps are
            done.

    Attributes:
        is_late: Whether the training was ended for lack of time.
        step_seconds: Seconds of a step, without the first one if there were others.
    """

    def __init__(self, pace: Pace, label: str, title: str, longest: float = math.inf) -> None:
        self._pace, self._label, self._title, self._longest = pace, label, title, longest
        self.is_late, self.step_seconds = False, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A file or a pipe gets a line for each defense, and no bar.
        self._bar = logging.tqdm(
            total=state.max_steps, desc=self._title, leave=False, disable=None, mininterval=1
        )
        self._began = self._training_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        self.step_seconds = (now - self._began) / max(1, state.global_step - 1)
        if state.global_step == 1:  # the first one takes longer
            self._began = now
        self._bar.set_postfix_str(f"{self._pace.left / 60:.1f} minutes left", refresh=False)
        self._bar.update()
        if now - self._training_began >= self._longest:
            control.should_training_stop = True
        remaining = (state.max_steps - state.global_step) * self.step_seconds
        if state.global_step >= _SURE and math.isinf(self._longest):
            self._pace.measured(self._label, self.step_seconds)
            if remaining and not self._pace.fits(remaining):
                self.is_late = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()
