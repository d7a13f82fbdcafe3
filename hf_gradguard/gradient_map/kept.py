"""What a trial of a model puts back: its modules' modes, and the process's random draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[list[nn.Module]]:
    """All modules of a model, whose modes are put back, whatever happens to them meanwhile.

    Example:
        >>> model = model.train()
        >>> with modes_kept(model):
        ...     _ = model.eval()
        >>> model.training
        True
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield list(modes)
    finally:
        for module, mode in modes.items():
            module.training = mode


def draws_kept(model: nn.Module) -> AbstractContextManager[None]:
    """torch's generators of the processor and of the model's GPUs, put back as they were.

    Example:
        >>> before = torch.get_rng_state()
        >>> with draws_kept(model):
        ...     _ = torch.rand(1)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    return torch.random.fork_rng(devices=devices_that_draw(model))


def seed_draws(model: nn.Module, seed: int) -> None:
    """Seeds what `draws_kept` puts back. `torch.manual_seed` takes a millisecond where it is deep
    in calls: it notes a traceback for every kind of device that is not in use.

    Example:
        >>> seed_draws(model, 7)
        >>> torch.initial_seed()
        7
    """
    torch.default_generator.manual_seed(seed)
    for index in devices_that_draw(model):
        torch.cuda.default_generators[index].manual_seed(seed)


def devices_that_draw(model: nn.Module) -> list[int]:
    """The GPUs that a model is on.

    Example:
        >>> devices_that_draw(torch.nn.Linear(2, 1))
        []
    """
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
