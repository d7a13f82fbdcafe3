"""What data sets and collators draw at random, replayed and put back."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class DrawState(NamedTuple):
    """The state of the generators of torch (on the processor), numpy and `random`.

    Example:
        >>> before = DrawState.now()
        >>> _ = torch.rand(1)
        >>> before.is_now()
        False
        >>> before.restore()
        >>> before.is_now()
        True
    """

    of_torch: torch.Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> DrawState:
        """As it is."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Let all three draw from here on."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        return self.plain() == DrawState.now().plain()

    def plain(self) -> tuple[Any, ...]:
        """What is equal where the state is."""
        return self.of_torch.numpy().tobytes(), pickle.dumps(self.of_numpy), self.of_python


@contextmanager
def draws_restored() -> Iterator[DrawState]:
    """Whatever is drawn in here, afterwards the three generators are as they were.

    Example:
        >>> before = DrawState.now()
        >>> with draws_restored():
        ...     _ = random.random(), np.random.rand(), torch.rand(1)
        >>> before.is_now()
        True
    """
    state = DrawState.now()
    try:
        yield state
    finally:
        state.restore()


def seed_all(seed: int) -> None:
    """Seed all three, inside `draws_restored`.

    Example:
        >>> with draws_restored():
        ...     seed_all(3)
        ...     torch.initial_seed()
        3
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
