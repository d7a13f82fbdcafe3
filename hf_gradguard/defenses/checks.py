"""Settings of defenses: what is a number, in range, whole."""

from __future__ import annotations

import math
from decimal import Decimal


def is_number(value: object) -> bool:
    """Whether a setting is a finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_range(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Raise `ValueError` unless a setting is a number from `low`, or `above` it, to `high`."""
    if not is_number(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low}" if above else f"at least {low}"
        most = f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name} must be a finite number {least}{most}, but is {value!r}.")


def check_whole(name: str, value: object, least: int) -> None:
    """Raise `ValueError` unless a setting is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")


def floor_share(ratio: float, count: int) -> int:
    """floor(ratio · count), through the decimal that was written: 0.29 * 100 is 28.999… in
    binary.
    """
    return int(Decimal(str(ratio)) * count)
