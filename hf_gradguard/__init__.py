"""Share gradients, not the data in them: protected training for the Hugging Face Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .defenses import chain, make_defense
    from .gradient_map import GradientMap
    from .heads import private_head
    from .registry import DEFENSES
    from .training.config import GradGuardConfig
    from .training.loop import protect
    from .training.mixin import GradGuardMixin
    from .training.trainer import GradGuardTrainer

__all__ = [
    "DEFENSES",
    "GradGuardConfig",
    "GradGuardMixin",
    "GradGuardTrainer",
    "GradientMap",
    "chain",
    "make_defense",
    "private_head",
    "protect",
]
__version__ = "0.3.0"

_WHERE = {
    "DEFENSES": "registry",
    "GradGuardConfig": "training.config",
    "GradGuardMixin": "training.mixin",
    "GradGuardTrainer": "training.trainer",
    "GradientMap": "gradient_map",
    "chain": "defenses",
    "make_defense": "defenses",
    "private_head": "heads",
    "protect": "training.loop",
}


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that the command line answers without importing torch.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
