"""Which defense to train with: short trainings on the user's model and data, attacked.

result = recommend(model, tokenizer, samples, output="runs/recommend")
result.words
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .choice import Choice, Outcome, choose

if TYPE_CHECKING:
    from .run import recommend

__all__ = ["Choice", "Outcome", "choose", "recommend"]


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that the command line's help imports no torch.
    if name == "recommend":
        from .run import recommend

        return recommend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
