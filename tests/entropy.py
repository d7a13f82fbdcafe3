"""Entropy for tests: what protects is drawn from the operating system's, so a statistical test
would now and then fail. A test's comes from a name instead, and is the same in every run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable


def entropy_of(name: str) -> Callable[[int], bytes]:
    """In place of `os.urandom`: all keys differ, but are the same in every run. Other processes
    than the caller's keep the real entropy.
    """
    process, count = os.getpid(), itertools.count()

    def urandom(size: int) -> bytes:
        if os.getpid() != process:
            return os.urandom(size)
        return hashlib.shake_256(f"{name} {next(count)}".encode()).digest(size)

    return urandom
