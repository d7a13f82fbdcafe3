"""Transformers' Auto classes know this package's models as soon as it is imported, in whichever
order the two are. Nothing is imported for that, and no code is loaded from a model's folder.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

ROOMS = {
    "gradguard_deep_convnet": "models",
    "gradguard_image_evaluation": "networks",
    "gradguard_leakage_lenet": "models",
    "gradguard_leaky_convnet": "models",
    "gradguard_tanh_convnet": "models",
    "gradguard_text_evaluation": "networks",
}
"""Each model type, and the room that registers it."""
_AUTO = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Register the model types now, or when Transformers' Auto classes are imported.

    Example:
        >>> from transformers import AutoConfig
        >>> AutoConfig.for_model("gradguard_leaky_convnet").channels
        [32, 64]
    """
    if _AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Sees that a module of Transformers is imported, and has it imported as ever."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    auto = sys.modules[_AUTO]
    for model_type, room in ROOMS.items():
        if model_type not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(model_type, _deferred(model_type, room))


def _deferred(name: str, room: str) -> Any:
    """A configuration in whose place the room's own is made, which is imported for that and
    registers its model.
    """
    from transformers import PreTrainedConfig

    class Deferred(PreTrainedConfig):
        model_type = name

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            importlib.import_module(f".{room}", __package__)
            own = sys.modules[_AUTO].CONFIG_MAPPING[name]
            if own is cls:
                raise ImportError(f"hf_gradguard.{room} does not know {name!r}.")
            return own(*args, **kwargs)

    return Deferred
