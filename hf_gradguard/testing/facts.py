"""Facts that must be the same after an attack or a defense has run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the facts of a model that must not change, beside the values of its tensors.

    Example:
        >>> before = model_facts(model)
        >>> handle = model.register_forward_hook(print)
        >>> [what for what, fact in model_facts(model).items() if fact != before[what]]
        ["the modules' hooks"]
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    config: Any = getattr(model, "config", None)
    return {
        "the modules' training modes": {name: m.training for name, m in modules.items()},
        "the modules' hooks": {
            name: [len(getattr(m, hooks)) for hooks in _HOOKS] for name, m in modules.items()
        },
        "which modules there are": {name: id(m) for name, m in modules.items()},
        "which parameters there are": {name: id(p) for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "the parameters' .grad": {name: p.grad is None for name, p in parameters.items()},
        "the parameters' hooks": {
            name: len(p._backward_hooks or ()) for name, p in parameters.items()
        },
        "the model's configuration": config.to_dict() if config is not None else None,
    }


def random_states() -> dict[str, Any]:
    """Return the facts of the process that must not change, above all the states of its generators.

    Example:
        >>> before = random_states()
        >>> _ = torch.rand(1)
        >>> [what for what, fact in random_states().items() if fact != before[what]]
        ["torch's random numbers"]
    """
    name, keys, *position = np.random.get_state()
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's random numbers": (name, np.asarray(keys).tolist(), *position),
        "the random module's numbers": random.getstate(),
        "whether gradients are enabled": torch.is_grad_enabled(),
        "the default data type": torch.get_default_dtype(),
    }


def same(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, except for the kind of their NaNs.

    Example:
        >>> same(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    return tensor.shape == other_tensor.shape and bool(
        ((tensor == other_tensor) | (tensor.isnan() & other_tensor.isnan())).all()
    )
