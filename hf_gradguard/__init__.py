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

_WITH_TRAINER = ("training.loop", "training.mixin", "training.trainer")


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that the command line answers without importing torch.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_WHERE[name]}", __name__)
    if _WHERE[name] in _WITH_TRAINER:  # which has imported almost all that heads import
        importlib.import_module(".heads", __name__)  # Transformers' Auto classes then load a head
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
