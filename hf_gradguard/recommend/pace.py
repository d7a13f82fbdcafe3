"""A budget of minutes, and trainings that stop in time."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

_SURE = 3  # steps of a training after which its end can be foretold


class OutOfTime(Exception):
    """There is no time for this training."""


class Pace:
    """How long is left, and how long a training takes at the speed of the last one.

    Args:
        minutes: The budget, from now on.

    Attributes:
        reserved: Seconds that trainings must leave for what comes after them.
        step_seconds: Of the latest training, measured.

    Example:
        >>> pace = Pace(minutes=15)
        >>> pace.fits(60), pace.fits(1000)
        (True, False)
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.reserved = self.step_seconds = 0.0

    @property
    def left(self) -> float:
        """Seconds until the budget ends."""
        return self._end - time.monotonic()

    def fits(self, seconds: float) -> bool:
        """Whether there is time for it, and for what is reserved."""
        return seconds + self.reserved <= self.left


class Progress(TrainerCallback):
    """Shows a training's steps and the time that is left, and ends it where it cannot be finished
    in time, also if the machine gets slower on the way.

    Args:
        pace: Of all trainings.
        title: Of the bar.

    Attributes:
        is_late: Whether the training was ended.
    """

    def __init__(self, pace: Pace, title: str) -> None:
        self._pace, self._title, self.is_late = pace, title, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A file or a pipe gets a line for each defense, and no bar.
        self._bar = logging.tqdm(
            total=state.max_steps, desc=self._title, leave=False, disable=None, mininterval=1
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:  # the first one takes longer
            self._began = time.monotonic()
        step_seconds = (time.monotonic() - self._began) / max(1, state.global_step - 1)
        self._bar.set_postfix_str(f"{self._pace.left / 60:.1f} minutes left", refresh=False)
        self._bar.update()
        remaining = (state.max_steps - state.global_step) * step_seconds
        if state.global_step >= _SURE:
            self._pace.step_seconds = step_seconds
            if remaining and not self._pace.fits(remaining):
                self.is_late = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()
