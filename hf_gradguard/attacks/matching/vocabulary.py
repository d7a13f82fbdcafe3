"""From embeddings that an attack found back to tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...gradient_map.domain import TEXT, embed
from ..observation import Observation


class Vocabulary:
    """The model's token embeddings as the continuous input has them, with what may stand at a
    position.

    Args:
        seen: An observation of text.

    Rows of norm zero (often the padding token's) have no direction: a cosine with them is NaN, so
    they are never decoded to. Special tokens are decoded only where the tokenizer is known to put
    them.

    Example:
        >>> vocabulary = Vocabulary(seen)
        >>> ids = vocabulary.nearest(gmap.input)  # the true embeddings
        >>> torch.equal(ids[1], batch["input_ids"][1])  # the longest text
        True
    """

    def __init__(self, seen: Observation) -> None:
        self.module: nn.Module = TEXT.embedding(seen.model)
        self.known = seen.known_ids()
        with torch.no_grad():
            weight: Tensor = self.module.weight  # type: ignore[assignment]
            every = torch.arange(len(weight), device=weight.device)
            self.matrix = torch.cat([self.embed(chunk) for chunk in every.split(8192)])
        self.norms = self.matrix.norm(dim=1)
        self.allowed = self.norms > 0
        if seen.tokenizer is not None:
            self.allowed[
                [index for index in seen.tokenizer.all_special_ids if index < len(self.allowed)]
            ] = False
            self.allowed[len(seen.tokenizer) :] = (
                False  # rows beyond the tokenizer, added for speed
            )
        self.candidates = self.allowed.nonzero().flatten()
        self._directions = F.normalize(self.matrix[self.candidates], dim=1)

    def embed(self, ids: Tensor) -> Tensor:
        """`(*ids.shape, H)`: as the model embeds them, without hooks."""
        return embed(self.module, ids)

    def nearest(self, x: Tensor) -> Tensor:
        """`(..., T, H)` embeddings to `(..., T)` ids of the nearest allowed token by cosine; known
        tokens as they are.
        """
        flat = F.normalize(x.reshape(-1, x.shape[-1]), dim=1)
        best = [
            self.candidates[(chunk @ self._directions.T).argmax(1)] for chunk in flat.split(1024)
        ]
        ids = torch.cat(best).view(x.shape[:-1])
        return torch.where(self.known >= 0, self.known, ids)

    def random(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Ids drawn uniformly from the tokens that may stand anywhere; known tokens as they are."""
        at = torch.randint(
            len(self.candidates), shape, generator=generator, device=self.candidates.device
        )
        return torch.where(self.known >= 0, self.known, self.candidates[at])
