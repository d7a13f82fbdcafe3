"""What Refiner may do to a batch's continuous input: which entries move, where noise comes from,
and what stays.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..gradient_map import GradientMap
from ..gradient_map.domain import PixelSpace, embed
from ..randomness import Stream


class Words:
    """Token embeddings `(B, T, H)`. Padding and special tokens keep theirs; noise is embeddings of
    random tokens.

    Raises:
        ValueError: If every token of the batch is padding or special.
    """

    def __init__(self, gmap: GradientMap, network: Any) -> None:
        assert gmap.embedding is not None
        self.embedding, self.ids = gmap.embedding, gmap.batch["input_ids"]
        self.mask = gmap.batch.get("attention_mask")
        self.special = sorted(set(network.config.special_token_ids))
        present = (
            torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask.bool()
        )
        self.present = present
        words = present & ~torch.isin(self.ids, torch.tensor(self.special, device=self.ids.device))
        if not words.any():
            raise ValueError(
                "The batch holds no word: every token is padding or special, so there is nothing "
                "to refine, and its true gradient would be shared. Leave empty texts out of the "
                "data set."
            )
        self.free = words[..., None]

    def noise(self, like: Tensor, generator: Stream) -> Tensor:
        """v: embeddings of tokens drawn uniformly from the vocabulary without the special ones."""
        allowed = torch.ones(len(self.embedding.weight), dtype=torch.bool)  # type: ignore[arg-type]
        allowed[[index for index in self.special if index < len(allowed)]] = False
        ordinary = allowed.nonzero().flatten().to(like.device)
        drawn = ordinary[generator.integers(len(ordinary), self.ids.shape, device=like.device)]
        return embed(self.embedding, drawn).to(like.dtype)

    def project_(self, x: Tensor) -> None:
        """Embeddings have no range to stay in."""

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        return network.noise_ratio(x.float(), self.mask).mean()

    def digests(self) -> list[str]:
        """A name for each text, by its tokens."""
        return [_digest(ids[row]) for ids, row in zip(self.ids, self.present, strict=True)]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row, self.present[row]] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row, self.present[row]]


class Pixels:
    """Images `(B, C, H, W)` whose pixels were in [0, 1] before mean and deviation were taken out.
    Noise is uniform.

    Raises:
        ValueError: If pixels are outside that range.
    """

    def __init__(
        self, gmap: GradientMap, mean: list[float] | None, std: list[float] | None
    ) -> None:
        x = gmap.input
        self.images = x
        self.space = PixelSpace(x, mean, std)
        pixels = self.space.plain(x)
        if pixels.min() < -1e-3 or pixels.max() > 1 + 1e-3:
            raise ValueError(
                f"Pixels range from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}, where "
                "[0, 1] is expected. Give refiner the image processor's image_mean and image_std, "
                "or pass the processor to the Trainer as processing_class."
            )
        self.free = torch.ones_like(x[:, :1], dtype=torch.bool)

    def noise(self, like: Tensor, generator: Stream) -> Tensor:
        """v: uniform over the pixel range."""
        drawn = generator.uniform(like.shape, device=like.device, dtype=like.dtype)
        return self.space.low + drawn * (self.space.high - self.space.low)

    def project_(self, x: Tensor) -> None:
        self.space.project_(x)

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        return network.noise_ratio(self.space.plain(x).float()).mean()

    def digests(self) -> list[str]:
        """A name for each image, by its pixels."""
        return [_digest(image) for image in self.images]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row]


def _digest(content: Tensor) -> str:
    return hashlib.blake2b(
        content.detach().cpu().contiguous().numpy().tobytes(), digest_size=16
    ).hexdigest()
