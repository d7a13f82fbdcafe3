"""Where what the frontier and the benchmarks measure is computed."""

from collections.abc import Mapping

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def card() -> dict[str, str]:
    """What a figure was computed on, where that is no CPU."""
    return {"device": torch.cuda.get_device_name()} if DEVICE == "cuda" else {}
