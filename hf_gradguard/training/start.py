"""Ranks begin alike: with the same settings and parameters, from the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from accelerate.utils import broadcast, gather
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..leakage.received import ADVICE, check_received
from .agreed import agreed_upon, differences
from .dispatch import check_loader

_MOST = 10  # findings that are listed

logger = logging.get_logger(__name__)


def check_agreed(found: Mapping[str, Any], device: torch.device | str) -> None:
    """Refuse to train where ranks differ, on all of them: their exchanges would not fit together,
    wait for each other, or mix up what is whose. All ranks must call it.

    Args:
        found: As `agreed_upon` says. Ranks send 8 bytes of a hash of each entry: that hides no
            small number.
        device: That ranks exchange from.

    Raises:
        ValueError: With what differs.

    Example:
        >>> check_agreed({"max_steps": 3}, "cpu")
    """
    own = torch.frombuffer(bytearray(b"".join(map(_hashed, found.values()))), dtype=torch.int64)
    everyone = gather(own.to(device)).view(-1, len(own))
    if differ := [
        name for name, same in zip(found, (everyone == everyone[0]).all(0), strict=True) if not same
    ]:
        raise ValueError(f"Ranks differ in {differences(differ)}")


def _hashed(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


_PLANTED = (
    "Rank 0 starts from another model than this rank has loaded: {} of {} tensors differ, and rank "
    "0's were taken. Weights can be made so that gradients give away their data. If every rank was "
    "to load the same checkpoint (and to make new heads under one seed), stop here."
)


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=16).digest()


def say_received(model: nn.Module) -> None:
    """Warn of what in a received model makes gradients leak.

    Example:
        >>> say_received(model)
    """
    if found := check_received(model):
        listed = "".join(f"\n- {one}" for one in found[:_MOST])
        more = f"\n- and {len(found) - _MOST} more" if len(found) > _MOST else ""
        logger.warning(f"In the model that this rank received:{listed}{more}\n{ADVICE}")


_TRAINED: WeakSet[nn.Module] = WeakSet()


class StartAlike(TrainerCallback):
    """Every rank is asked for the same, and starts, as wrapping in DDP would have made it, from
    rank 0's parameters and buffers.

    Rank 0 could plant weights that make gradients leak. A rank that has loaded a model of its own
    says so where rank 0's is another, and looks at what it got.

    Args:
        evaluated: Gives what the model is evaluated on.
    """

    def __init__(self, evaluated: Callable[[], Any] = lambda: None) -> None:
        self._started, self._evaluated = False, evaluated

    def on_train_begin(
        self, args: TrainingArguments, state: Any = None, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            trained = kwargs.get("optimizer"), kwargs.get("train_dataloader")
            check_loader(trained[1])  # also of a class of the user's own
            found = agreed_upon(args, model, state, *trained, self._evaluated())
            check_agreed(found, args.device)
            # later on buffers hold statistics of rank 0's data, also in another Trainer
            buffers = [] if model in _TRAINED else list(model.buffers())
            tensors = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
            compared = [] if self._started else tensors
            before = list(map(_digest, compared))
            with torch.no_grad():
                broadcast(tensors)
            pairs = zip(before, map(_digest, compared), strict=True)
            if args.process_index and not self._started and getattr(args, "check_received", True):
                say_received(model)
            if other := sum(one != after for one, after in pairs):
                logger.warning(_PLANTED.format(other, len(tensors)))
        self._started = True
        _TRAINED.add(model)
