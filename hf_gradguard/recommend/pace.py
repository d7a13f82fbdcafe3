"""A budget of minutes, and trainings that stop in time."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

_SURE = 3  # steps of a training after which its end can be foretold


class OutOfTime(Exception):
    """There is no time for this training."""


class Pace:
    """How long is left, and how long a training takes at the latest speed of the machine.

    Args:
        minutes: The budget, from now on.

    Attributes:
        reserved: Seconds that trainings must leave for what comes after them.
        step_seconds: Of an undefended training, by the latest that was measured.
        costs: How many times as long a step takes under each defense, by label. What is not in it
            takes as long as an undefended one.

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
        """Seconds until the budget ends."""
        return self._end - time.monotonic()

    def step_of(self, label: str) -> float:
        """Seconds of a step under a defense."""
        return self.step_seconds * self.costs.get(label, 1.0)

    def measured(self, label: str, seconds: float) -> None:
        """A step under a defense took so long: a slow defense makes no slow machine."""
        self.step_seconds = seconds / self.costs.get(label, 1.0)

    def compared(self, label: str, seconds: float) -> None:
        """The same of a defense's first steps: how much slower they are than undefended ones."""
        self.costs[label] = seconds / self.step_seconds if self.step_seconds else 1.0

    def fits(self, seconds: float) -> bool:
        """Whether there is time for it, and for what is reserved."""
        return seconds + self.reserved <= self.left


class Progress(TrainerCallback):
    """Shows a training's steps and the time that is left, and ends it where it cannot be finished
    in time, also if the machine gets slower on the way.

    Args:
        pace: Of all trainings.
        label: Of the defense.
        title: Of the bar.
        longest: Seconds after which it ends, late or not. Without it, when its steps are done.

    Attributes:
        is_late: Whether the training was ended for lack of time.
        step_seconds: Of its steps, the first one left out if there were others.
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
