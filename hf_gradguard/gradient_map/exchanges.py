"""What a model's or a loss's own code would send to other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_exchange(model: nn.Module) -> Iterator[None]:
    """Refuse what a model's own code sends to other ranks in here, as losses of detection send how
    many objects a batch has. The ranks that share a sharded model may exchange.

    Refused are collectives and messages of this thread, however they are called: also functional
    ones, those of compiled code, and those of objects. Barriers carry nothing and pass. Other
    threads go on. Not seen is what is written to `torch.distributed`'s key-value store, or goes
    through a process group that is itself written in Python.

    Args:
        model: The client's model.

    Raises:
        NotImplementedError: With the operation, and the way out.

    Example:
        >>> with no_exchange(model):
        ...     loss = model(**batch).loss
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_others and not any(hasattr(p, "device_mesh") for p in model.parameters()):
        with _NoExchange(type(model).__name__):
            yield
    else:
        yield


class _NoExchange(TorchDispatchMode):
    """Lets every operation of this thread pass, but for those that exchange."""

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._model_name = model_name

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled modules run compiled: torch leaves them to the interpreter under other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in _EXCHANGES and "barrier" not in func.__name__:
            raise NotImplementedError(
                f"GradGuardTrainer does not support a loss that exchanges: {self._model_name} "
                f"calls {func.namespace}.{func.__name__.split('.')[0]} in its pass, so that the "
                "others would be sent a figure of this rank's own batch, unprotected. Compute the "
                "loss without it (compute_loss_func; loss_fn of protect), or train on one rank."
            )
        return func(*args, **(kwargs or {}))


_EXCHANGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Where torch keeps the operations that `torch.distributed` and functional collectives end in."""
