"""Inputs that an attacker draws at random, to see what the model makes of such."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gradient_map.domain import IMAGE
from .observation import Observation


def random_inputs(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of the shapes that were seen, drawn at random, without labels.

    Example:
        >>> random_inputs(seen, torch.Generator())["input_ids"].shape
        torch.Size([2, 8])
    """
    return _RANDOM[seen.domain.name](seen, generator)


def _random_ids(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    batch = seen.placeholder()
    size = seen.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    drawn = torch.randint(size, seen.input_shape, generator=generator, device=seen.device)
    return {**batch, "input_ids": torch.where(seen.known_ids() >= 0, batch["input_ids"], drawn)}


def _random_pixels(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    like = IMAGE.main_input(seen.placeholder())
    drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return {IMAGE.key: drawn}


_RANDOM = {"text": _random_ids, "image": _random_pixels}
