"""Recommendation: short trainings on the user's model and data, of which some are proved.

Others are attacked.

Example:
    result = recommend(model, tokenizer, samples, output="runs/recommend")
    result.words
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..extras import need

if TYPE_CHECKING:
    from .choice import Choice, choose
    from .evidence import Outcome, Proof
    from .recommendation import recommend
    from .recommendation import run_recommend as run_recommend

__all__ = ["Choice", "Outcome", "Proof", "choose", "recommend"]

_PLACES = {"Choice": ".choice", "Outcome": ".evidence", "Proof": ".evidence", "choose": ".choice"}


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that the command line's help imports nothing heavy.
    if name in (*__all__, "run_recommend"):
        need("audit", "attacks", "jinja2", "PIL")
        module = _PLACES.get(name, ".recommendation")
        return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
