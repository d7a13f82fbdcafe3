"""Running statistics of normalization layers: what a rank's data leaves in a model beside
gradients.

Batch normalization keeps means and variances of the last batches' activations. They are computed on
private data, no defense protects them, and an attacker uses them (GradInversion matches them).
"""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from ..exchange.average import SecureSum, average

logger = logging.get_logger(__name__)


def tracking_layers(model: nn.Module) -> dict[str, nn.modules.batchnorm._NormBase]:
    """The layers that keep running statistics, by name.

    Example:
        >>> list(tracking_layers(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
        ['1']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    }


def warn_of_statistics(model: nn.Module, choice: str) -> None:
    """Say once what becomes of a model's running statistics.

    Args:
        model: What is trained.
        choice: One of `BATCH_STATISTICS` of `config.py`.

    Example:
        >>> warn_of_statistics(model, "local")  # BERT has none, so nothing is said
    """
    layers = tracking_layers(model)
    if layers and choice == "local":
        logger.warning(
            f"{type(model).__name__} keeps batch statistics ({len(layers)} layers, the first is "
            f"{next(iter(layers))!r}). Each rank's stay its own; rank 0's are saved with the "
            "model, so publishing it publishes them. Group normalization has none; "
            "batch_statistics='frozen' takes those that the model came with; 'shared' averages "
            "them over ranks. In a loop of your own put these layers in eval mode."
        )


def freeze_statistics(model: nn.Module) -> None:
    """Normalize by the statistics that the model came with. `model.train()` undoes it.

    Example:
        >>> layer = nn.BatchNorm1d(4)
        >>> freeze_statistics(layer)
        >>> layer.training
        False
    """
    for layer in tracking_layers(model).values():
        layer.eval()


def average_statistics(
    model: nn.Module, accelerator: Accelerator, secure: SecureSum | None = None
) -> None:
    """Replace running means and variances by their means over ranks, as federated averaging does.
    Unprotected but for `secure`, which hides each rank's behind the mean.

    Example:
        >>> average_statistics(nn.BatchNorm1d(4), Accelerator(cpu=True))
    """
    layers = tracking_layers(model).values()
    buffers = [
        buffer
        for layer in layers
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]
    average(buffers, accelerator, secure)
