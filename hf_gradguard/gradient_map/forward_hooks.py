"""Hooks of the forward pass that a user registered.

They may count passes, and keep what they see. Passes that a plain training does not make must not
change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hf_gradguard")
"""Whose hooks hold nothing that a pass changes."""


def forward_hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Find the forward hooks and pre-hooks on a module that no library put there.

    Example:
        >>> with model.register_forward_hook(print):
        ...     len(list(forward_hooks_of(model)))
        1
    """
    yield from _of_users(module._forward_pre_hooks, module._forward_hooks)


def global_forward_hooks() -> Iterator[Callable[..., Any]]:
    """Find the hooks that run with every module.

    Example:
        >>> list(global_forward_hooks())
        []
    """
    yield from _of_users(every_module._global_forward_pre_hooks, every_module._global_forward_hooks)


def has_forward_hooks(model: nn.Module) -> bool:
    """Return whether any hook runs with a module.

    A hook may register hooks on outputs, which only what has a gradient takes.

    Example:
        >>> has_forward_hooks(nn.Linear(2, 2))
        False
    """
    on_modules = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return on_modules or bool(
        every_module._global_forward_hooks or every_module._global_forward_pre_hooks
    )


def _of_users(*registered: Any) -> Iterator[Callable[..., Any]]:
    for hooks in registered:
        for hook in hooks.values():
            source = getattr(function_of(hook), "__module__", None) or ""
            if source.split(".")[0] not in _LIBRARIES:
                yield hook


def function_of(hook: Callable[..., Any]) -> Any:
    """Return the function that a hook runs: a partial's, a method's or an object's own.

    Example:
        >>> import functools
        >>> function_of(functools.partial(len)) is len
        True
    """
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__func__", hook)
    return hook if isinstance(hook, FunctionType | BuiltinFunctionType) else type(hook).__call__


def attributes_of(hook: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the attributes of the object that a hook is, or is a method of, if it is one.

    Example:
        >>> class Counter:
        ...     passes = 0
        ...     def __call__(self, *_):
        ...         self.passes += 1
        >>> counter = Counter()
        >>> counter()
        >>> attributes_of(counter), attributes_of(print)
        ([{'passes': 1}], [])
    """
    hook = getattr(hook, "func", hook)
    holder = getattr(hook, "__self__", hook)
    is_object = not isinstance(holder, FunctionType | ModuleType | nn.Module)
    return [vars(holder)] if is_object and hasattr(holder, "__dict__") else []
