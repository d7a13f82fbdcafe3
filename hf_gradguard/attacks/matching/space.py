"""Search spaces of candidates: token embeddings or pixels.

Each knows where to start, how to get back inside, and what is read off a candidate at the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...gradient_map.domain import TEXT, embed
from ...gradient_map.inputs import PixelSpace
from ..base import Observation
from .objectives import batch_norm_distance, total_variation


class Vocabulary:
    """The model's token embeddings as the continuous input has them, and where tokens may stand.

    Rows of norm zero (often the padding token's) have no direction: a cosine with them is NaN, so
    they are never decoded to. Special tokens are decoded only where the tokenizer is known to put
    them.

    Args:
        observation: An observation of text.

    Example:
        >>> vocabulary = Vocabulary(observation)
        >>> ids = vocabulary.nearest(gmap.input)  # the true embeddings
        >>> torch.equal(ids[1], batch["input_ids"][1])  # the longest text
        True
    """

    def __init__(self, observation: Observation) -> None:
        self.module: nn.Module = TEXT.embedding(observation.model)
        self.known_ids = observation.known_ids()
        with torch.no_grad():
            weight: Tensor = self.module.weight  # type: ignore[assignment]
            all_ids = torch.arange(len(weight), device=weight.device)
            self.matrix = torch.cat([self.embed(chunk) for chunk in all_ids.split(8192)])
        self.norms = self.matrix.norm(dim=1)
        self.allowed = self.norms > 0
        if observation.tokenizer is not None:
            special = observation.tokenizer.all_special_ids
            self.allowed[[index for index in special if index < len(self.allowed)]] = False
            # Rows beyond the tokenizer were added for speed.
            self.allowed[len(observation.tokenizer) :] = False
        self.candidates = self.allowed.nonzero().flatten()
        self._directions = functional.normalize(self.matrix[self.candidates], dim=1)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings `(*ids.shape, H)` as the model makes them, without hooks."""
        return embed(self.module, ids)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest allowed tokens by cosine, and known tokens as they are.

        Args:
            x: Embeddings, `(..., T, H)`.

        Returns:
            Ids, `(..., T)`.
        """
        flat = functional.normalize(x.reshape(-1, x.shape[-1]), dim=1)
        nearest = [(chunk @ self._directions.T).argmax(1) for chunk in flat.split(1024)]
        best = [self.candidates[index] for index in nearest]
        ids = torch.cat(best).view(x.shape[:-1])
        return torch.where(self.known_ids >= 0, self.known_ids, ids)

    def random(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Draw ids uniformly from the tokens that may stand anywhere; known tokens stay."""
        device, count = self.candidates.device, len(self.candidates)
        index = torch.randint(count, shape, generator=generator, device=device)
        return torch.where(self.known_ids >= 0, self.known_ids, self.candidates[index])


CODE, WIDTH, LEAST = 16, 32, 8


class DeepPrior:
    """A prior that draws every image of every candidate by an untrained network of its own.

    A network's input is random and fixed, of 16 channels, and its shorter side has at most 8
    pixels; the sides double until they are the image's. At each size there is a 3 × 3 convolution
    to 32 channels, at the last one two, each with instance normalization and a leaky ReLU; then a 1
    × 1 convolution and a sigmoid, scaled to the range of pixels. All networks run in one pass, as
    groups of the same convolutions.

    Args:
        pixels: The range of pixels.
        shape: The shape of the candidates, `(K, B, C, H, W)`.
        template: A tensor of their device and type.
        generator: The source of inputs and weights.

    Attributes:
        weights: The weights to descend on: leaves, each with the networks along its first axis.

    Raises:
        ValueError: If a side is below 8 pixels.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> network = DeepPrior(PixelSpace(torch.zeros(())), (2, 1, 3, 9, 20), torch.ones(1), draw)
        >>> network.draw().shape, bool((network.draw() > 0).all())
        (torch.Size([2, 1, 3, 9, 20]), True)
    """

    def __init__(
        self,
        pixels: PixelSpace,
        shape: tuple[int, ...],
        template: Tensor,
        generator: Generator,
    ) -> None:
        *counts, channels, height, width = shape
        if min(height, width) < LEAST:
            raise ValueError(
                f"A deep image prior draws images from {LEAST} x {LEAST} pixels on, but these have "
                f"{height} x {width}: it says nothing about smaller ones. Take prior=None."
            )
        self.shape, self.pixels, self.networks = shape, pixels, math.prod(counts)
        self.sizes = [(height, width)]
        while len(self.sizes) == 1 or min(self.sizes[0]) > LEAST:
            high, wide = self.sizes[0]
            self.sizes.insert(0, ((high + 1) // 2, (wide + 1) // 2))
        place: dict[str, Any] = {"device": template.device, "dtype": template.dtype}

        def uniform(outputs: int, inputs: int, side: int) -> Tensor:  # as torch's layers start
            kernel = (self.networks * outputs, inputs, side, side)
            draws = torch.rand(kernel, generator=generator, **place)
            return (2 * draws - 1) / math.sqrt(inputs * side**2)

        code = (1, self.networks * CODE, *self.sizes[0])
        self.code = 0.5 * torch.randn(code, generator=generator, **place)
        self.weights: list[Tensor] = []
        for inputs in (CODE, *[WIDTH] * len(self.sizes)):
            gain = torch.ones(self.networks * WIDTH, **place)
            self.weights += [uniform(WIDTH, inputs, 3), gain, torch.zeros_like(gain)]
        self.weights += [uniform(channels, WIDTH, 1), uniform(channels, WIDTH, 1)[:, 0, 0, 0]]
        for weight in self.weights:
            weight.requires_grad_()

    def draw(self) -> Tensor:
        """Return the images `(K, B, C, H, W)`, as a function of the weights."""
        x, sizes = self.code, [*self.sizes, self.sizes[-1]]
        for block, size in enumerate(sizes):
            kernel, gain, shift = self.weights[3 * block :][:3]
            if x.shape[2:] != size:
                x = functional.interpolate(x, size=size, mode="bilinear")
            x = functional.conv2d(x, kernel, padding=1, groups=self.networks)
            x = functional.leaky_relu(functional.instance_norm(x, weight=gain, bias=shift), 0.1)
        kernel, shift = self.weights[-2:]
        fraction = functional.conv2d(x, kernel, shift, groups=self.networks).sigmoid()
        low, high = (end.to(fraction.dtype) for end in (self.pixels.low, self.pixels.high))
        return low + fraction.view(self.shape) * (high - low)


STARTS = ("normal", "uniform", "tokens")


class SearchSpace(ABC):
    """A base of search spaces: what gradient matching has to know of the input's domain.

    Args:
        observation: The observation of the server.
        template: The placeholder's input, which has the known tokens in their places.

    Attributes:
        free: A mask that is true where a candidate may move; it broadcasts over `(B, T, H)` or `(B,
            C, H, W)`.
        usual: The start if none is asked for.

    Example:
        >>> [issubclass(space, SearchSpace) for space in SPACES.values()]
        [True, True]
    """

    free: Tensor
    usual: ClassVar[str]

    def __init__(self, observation: Observation, template: Tensor) -> None:
        self.template = template

    def start(self, start: Any, count: int, generator: Generator) -> Tensor:
        """Return the first candidates, `(count, *input.shape)`.

        Args:
            start: One of `STARTS`, a tensor in the shape of the input, or `None`.
            count: K, the number of candidates.
            generator: The source of the draws.

        Raises:
            ValueError: If the tensor has another shape, or the domain has no such start.
        """
        shape = (count, *self.template.shape)
        if not isinstance(start, Tensor):
            return self.draw(start or self.usual, shape, generator)
        if start.shape != self.template.shape:
            raise ValueError(
                f"start has shape {tuple(start.shape)}, the input {tuple(self.template.shape)}."
            )
        return start.to(self.template).expand(shape).clone()

    @abstractmethod
    def draw(self, start: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Draw random candidates by the name of a start."""

    def normal(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Draw standard normal numbers of the input's type."""
        x = self.template
        return torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)

    def network(self, count: int, generator: Generator) -> DeepPrior:
        """Return a deep prior that draws this many candidates.

        Raises:
            ValueError: If the domain has none, or the images are too small for it.
        """
        raise ValueError(
            "A deep image prior draws pixels, and this input has none. Take prior=None."
        )

    def project_(self, x: Tensor) -> None:  # noqa: B027  # nothing to do where all may be
        """Move candidates back to where inputs may lie, in place."""

    def decode(self, x: Tensor) -> list[list[int]] | None:
        """Return the ids of texts at the positions that hold tokens; `None` for images."""
        return None

    def total_variation(self, x: Tensor) -> Tensor | float:
        """Return the total variation of candidates `(K, B, ...)`, `(K,)`; 0 for texts."""
        return 0.0

    def batch_norm_distance(self, model: nn.Module, x: Tensor) -> Tensor | float:
        """Return the distance of candidates from batch normalizations' running statistics.

        It is `(K,)` for candidates `(K, B, ...)`, and 0 if the domain has none.
        """
        return 0.0


class Tokens(SearchSpace):
    """The space of token embeddings, with the known tokens held in their places.

    Raises:
        ValueError: If every token is known.

    Example:
        >>> space = Tokens(observation, gmap.input)
        >>> [len(ids) for ids in space.decode(gmap.input)] == observation.tokens.sum(1).tolist()
        True
    """

    usual = "normal"

    def __init__(self, observation: Observation, template: Tensor) -> None:
        super().__init__(observation, template)
        self.vocabulary = Vocabulary(observation)
        self.present = observation.tokens
        self.free = (self.vocabulary.known_ids < 0)[..., None]
        if not self.free.any():
            raise ValueError(
                "Every token of this shape is special or padding: there is nothing to reconstruct."
            )

    def start(self, start: Any, count: int, generator: Generator) -> Tensor:
        return torch.where(self.free, super().start(start, count, generator), self.template)

    def draw(self, start: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
        if start == "uniform":
            raise ValueError(
                "A text has no range to start uniformly in. Take start='normal' or 'tokens'."
            )
        if start == "tokens":
            ids = self.vocabulary.random(shape[:-1], generator)
            return self.vocabulary.embed(ids).to(self.template)
        scale = self.vocabulary.matrix[self.vocabulary.candidates].std()
        return self.normal(shape, generator) * scale

    def decode(self, x: Tensor) -> list[list[int]]:
        rows = zip(self.vocabulary.nearest(x), self.present, strict=True)
        return [ids[present].tolist() for ids, present in rows]

    def mean_norm(self) -> Tensor:
        """Return the mean norm of the embeddings of tokens that may stand anywhere."""
        return self.vocabulary.norms[self.vocabulary.candidates].mean()


class Pixels(SearchSpace):
    """The space of pixels, within the range that they had before normalization.

    Example:
        >>> space = Pixels(image_observation, image_gmap.input)
        >>> x = torch.full_like(image_gmap.input, 100.0)
        >>> space.project_(x)
        >>> bool((x == space.range.high).all())
        True
    """

    usual = "uniform"

    def __init__(self, observation: Observation, template: Tensor) -> None:
        super().__init__(observation, template)
        self.range = PixelSpace(template, observation.image_mean, observation.image_std)
        self.free = torch.ones((), dtype=torch.bool, device=observation.device)

    def draw(self, start: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
        if start == "tokens":
            raise ValueError("Images have no tokens. Take start='normal' or 'uniform'.")
        if start == "uniform":
            return self.range.noise(shape, self.template, generator)
        return self.normal(shape, generator)

    def network(self, count: int, generator: Generator) -> DeepPrior:
        return DeepPrior(self.range, (count, *self.template.shape), self.template, generator)

    def project_(self, x: Tensor) -> None:
        self.range.project_(x)

    def total_variation(self, x: Tensor) -> Tensor:
        return total_variation(x)

    def batch_norm_distance(self, model: nn.Module, x: Tensor) -> Tensor | float:
        layers = model.modules()
        is_normalized = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in layers)
        return batch_norm_distance(model, x) if is_normalized else 0.0


SPACES: dict[str, type[Tokens] | type[Pixels]] = {"text": Tokens, "image": Pixels}
