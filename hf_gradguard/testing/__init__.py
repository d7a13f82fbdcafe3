"""Contracts of defenses and attacks, as checks that other packages can run in their tests."""

from .attacks import check_attack
from .defenses import check_defense

__all__ = ["check_attack", "check_defense"]
