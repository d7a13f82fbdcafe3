"""Detection of what a model's or a loss's own code would send to other ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_exchange(model: nn.Module) -> Iterator[None]:
    """Refuse what a model's own code sends to other ranks inside the context.

    Losses of detection send how many objects a batch has, for example. The devices that
    `fully_shard` has cut the model over may exchange.

    Collectives and messages of this thread are refused, however they are called: also functional
    ones, those of compiled code, and those of objects. Barriers carry nothing and pass. Other
    threads continue. What is written to `torch.distributed`'s key-value store is not seen, nor what
    goes through a process group that is itself written in Python.

    Args:
        model: The client's model.

    Raises:
        NotImplementedError: If something is sent; the message has the operation, and the way out.

    Example:
        >>> with no_exchange(model):
        ...     loss = model(**batch).loss
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_others:
        with _NoExchange(model):
            yield
    else:
        yield


class _NoExchange(TorchDispatchMode):
    """Lets every operation of this thread pass, but for those that exchange."""

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model_name = type(model).__name__
        meshes = {p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}
        self._devices = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled modules run compiled: torch leaves them to the interpreter under other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if exchanges(func) and not self._is_within_client(args):
            raise NotImplementedError(
                f"GradGuardTrainer does not support a loss that exchanges: {self._model_name} "
                f"calls {func.namespace}.{func.__name__.split('.')[0]} in its pass, so that the "
                "others would be sent a figure of this rank's own batch, unprotected. Compute the "
                "loss without it (compute_loss_func; loss_fn of protect), or train on one rank."
            )
        return func(*args, **(kwargs or {}))

    def _is_within_client(self, args: Any) -> bool:
        """Whether a collective is of the devices of a sharded model alone."""
        objects = [argument for argument in args if isinstance(argument, torch.ScriptObject)]
        ranks = {rank for argument in objects for rank in _ranks_of(argument)}
        return bool(ranks) and ranks <= self._devices


def _ranks_of(argument: torch.ScriptObject) -> list[int]:
    """Of a process group. Other such arguments say how to reduce."""
    if not str(argument._type()).endswith("ProcessGroup"):
        return []
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))


@functools.cache
def exchanges(operation: Any) -> bool:
    """Return whether an operation sends something to other ranks.

    It does if it takes a process group, or is one of those that `torch.distributed` keeps together.
    A barrier carries nothing.

    Args:
        operation: An operation of torch's, as a dispatch mode gets it.

    Example:
        >>> exchanges(torch.ops.aten.mm.default), exchanges(torch.ops.c10d.send.default)
        (False, True)
    """
    if "barrier" in operation.__name__:
        return False
    arguments = getattr(getattr(operation, "_schema", None), "arguments", ())
    takes_group = any(
        argument.name == "group_name" or "ProcessGroup" in str(argument.type)
        for argument in arguments
    )
    return takes_group or operation.namespace in _EXCHANGES


_EXCHANGES = ("c10d", "c10d_functional", "_c10d_functional", "symm_mem")
"""Where torch keeps the operations that `torch.distributed`, functional collectives and symmetric
memory end in. Some take a handle in the place of a group.
"""
