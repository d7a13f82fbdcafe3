"""A client's pass exchanges nothing: what its loss is made of is not protected yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from .devices import devices

_EXCHANGES = (
    "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather",
    "gather_object", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv",
    "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv",
)  # fmt: skip


@contextmanager
def no_exchange(model: nn.Module) -> Iterator[None]:
    """Refuse what a model's own code sends to other ranks in here, as losses of detection send how
    many objects a batch has. The devices of one client may exchange.

    Raises:
        NotImplementedError: With the call, and the way out.

    Example:
        >>> with no_exchange(model):
        ...     loss = model(**batch).loss
    """
    if not _several() or devices().size > 1:
        yield
        return
    before = {name: vars(dist)[name] for name in _EXCHANGES if name in vars(dist)}
    vars(dist).update({name: _refusing(name, model) for name in before})
    try:
        yield
    finally:
        vars(dist).update(before)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _refusing(name: str, model: nn.Module) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"GradGuardTrainer does not support a loss that exchanges: {type(model).__name__} "
            f"calls torch.distributed.{name} in its pass, so that the others would be sent a "
            "figure of this rank's own batch, unprotected. Compute the loss without it "
            "(compute_loss_func; loss_fn of protect), or train on one rank."
        )

    return refuse
