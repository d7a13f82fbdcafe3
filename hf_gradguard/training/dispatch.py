"""Loaders by which one process reads for all: it sends batches before anything protects them."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset

from .partition import is_of_datasets

DISPATCHED = (
    "dispatched batches: rank 0 would read everybody's data and send it, unprotected, to the other "
    "ranks, as Accelerate does by default with iterable data sets. Set "
    "accelerator_config={'dispatch_batches': False}; in a loop of your own "
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))."
)


def check_loader(loader: Any) -> None:
    """Refuse one that dispatches, also where a class of the user's own made it.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_loader(torch.utils.data.DataLoader([1, 2]))
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise NotImplementedError(f"GradGuardTrainer does not support {DISPATCHED}")


def is_iterable(dataset: Any) -> bool:
    """Whether a data set has no rows that could be drawn."""
    return isinstance(dataset, IterableDataset) or is_of_datasets(dataset, "IterableDataset")
