"""Where candidates may lie: among token embeddings or pixels, each with where to start, how to get
back inside, and what is read off a candidate at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...gradient_map.inputs import PixelSpace
from ..observation import Observation
from .deep_prior import DeepPrior
from .priors import batch_norm_distance, total_variation
from .vocabulary import Vocabulary

STARTS = ("normal", "uniform", "tokens")


class SearchSpace(ABC):
    """What gradient matching has to know of the input's domain.

    Attributes:
        free: True where a candidate may move; broadcasts over `(B, T, H)` or `(B, C, H, W)`.
        usual: The start where none is asked for.

    Example:
        >>> [issubclass(space, SearchSpace) for space in SPACES.values()]
        [True, True]
    """

    free: Tensor
    usual: ClassVar[str]

    def start(
        self, start: Any, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The first candidates.

        Args:
            start: One of `STARTS`, a tensor in the shape of the input, or `None`.
            shape: `(K, *input.shape)`.
            like: The placeholder's input, which has the known tokens in their places.
            generator: Source of the draws.

        Raises:
            ValueError: If the tensor has another shape, or the domain has no such start.
        """
        if not isinstance(start, Tensor):
            return self.draw(start or self.usual, shape, like, generator)
        if start.shape != like.shape:
            raise ValueError(
                f"start has shape {tuple(start.shape)}, the input {tuple(like.shape)}."
            )
        return start.to(like).expand(shape).clone()

    @abstractmethod
    def draw(
        self, start: str, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Random candidates: `start` by its name."""

    def network(
        self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> DeepPrior:
        """A deep prior that draws candidates of that shape.

        Raises:
            ValueError: If the domain has none, or the images are too small for it.
        """
        raise ValueError(
            "A deep image prior draws pixels, and this input has none. Take prior=None."
        )

    def project_(self, x: Tensor) -> None:  # noqa: B027  # nothing to do where all may be
        """Back to where inputs may lie, in place."""

    def decode(self, x: Tensor) -> list[list[int]] | None:
        """Of a text, the ids at the positions that hold tokens."""
        return None

    def total_variation(self, x: Tensor) -> Tensor | float:
        """Of candidates `(K, B, ...)`: `(K,)`; 0 where entries have no neighbors."""
        return 0.0

    def batch_norm_distance(self, model: nn.Module, x: Tensor) -> Tensor | float:
        """Of candidates `(K, B, ...)` from batch normalizations' running statistics: `(K,)`; 0
        where there are none.
        """
        return 0.0


class Tokens(SearchSpace):
    """Token embeddings, with the known tokens held in their places.

    Args:
        seen: An observation of text.
        like: The placeholder's input.

    Raises:
        ValueError: If every token is known.

    Example:
        >>> space = Tokens(seen, gmap.input)
        >>> [len(ids) for ids in space.decode(gmap.input)] == seen.tokens.sum(1).tolist()
        True
    """

    usual = "normal"

    def __init__(self, seen: Observation, like: Tensor) -> None:
        self.vocabulary = Vocabulary(seen)
        self.present = seen.tokens
        self.free = (self.vocabulary.known < 0)[..., None]
        if not self.free.any():
            raise ValueError(
                "Every token of this shape is special or padding: there is nothing to reconstruct."
            )

    def start(
        self, start: Any, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return torch.where(self.free, super().start(start, shape, like, generator), like)

    def draw(
        self, start: str, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> Tensor:
        if start == "uniform":
            raise ValueError(
                "A text has no range to start uniformly in. Take start='normal' or 'tokens'."
            )
        if start == "tokens":
            return self.vocabulary.embed(self.vocabulary.random(shape[:-1], generator)).to(like)
        scale = self.vocabulary.matrix[self.vocabulary.candidates].std()
        return _normal(shape, like, generator) * scale

    def decode(self, x: Tensor) -> list[list[int]]:
        rows = zip(self.vocabulary.nearest(x), self.present, strict=True)
        return [ids[present].tolist() for ids, present in rows]

    def mean_norm(self) -> Tensor:
        """Of the embeddings of tokens that may stand anywhere."""
        return self.vocabulary.norms[self.vocabulary.candidates].mean()


class Pixels(SearchSpace):
    """Pixels, within the range that they had before normalization.

    Args:
        seen: An observation of images.
        like: The placeholder's input.

    Example:
        >>> space = Pixels(image_seen, image_gmap.input)
        >>> x = torch.full_like(image_gmap.input, 100.0)
        >>> space.project_(x)
        >>> bool((x == space.range.high).all())
        True
    """

    usual = "uniform"

    def __init__(self, seen: Observation, like: Tensor) -> None:
        self.range = PixelSpace(like, seen.image_mean, seen.image_std)
        self.free = torch.ones((), dtype=torch.bool, device=seen.device)

    def draw(
        self, start: str, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> Tensor:
        if start == "tokens":
            raise ValueError("Images have no tokens. Take start='normal' or 'uniform'.")
        if start == "uniform":
            return self.range.noise(shape, like, generator)
        return _normal(shape, like, generator)

    def network(
        self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
    ) -> DeepPrior:
        return DeepPrior(self.range, shape, like, generator)

    def project_(self, x: Tensor) -> None:
        self.range.project_(x)

    def total_variation(self, x: Tensor) -> Tensor:
        return total_variation(x)

    def batch_norm_distance(self, model: nn.Module, x: Tensor) -> Tensor | float:
        norms = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
        return batch_norm_distance(model, x) if norms else 0.0


SPACES: dict[str, type[Tokens] | type[Pixels]] = {"text": Tokens, "image": Pixels}


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
