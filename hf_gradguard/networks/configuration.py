"""Configurations of the evaluation networks, as the Hub keeps them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

MAX_LAYERS, MAX_SIDE, MAX_SPECIAL, MAX_PARAMETERS = 100, 8192, 10_000, 100_000_000
"""A configuration may come from anywhere. Beyond these no network is built: the published ones have
3 layers and 1.5 million parameters.
"""


def hub_name(model: str) -> str:
    """Return the name of a model on the Hub, or an empty string if it is a folder.

    A folder's path means nothing elsewhere, and may say whose it is.

    Example:
        >>> hub_name("organization/model"), hub_name(".")
        ('organization/model', '')
    """
    return "" if os.path.exists(model) else model


@strict
class ImageEvaluationNetworkConfig(PreTrainedConfig):
    """The configuration of an image network: which pixels it judges, and how wide it is.

    Args:
        num_channels: C of the images, 1 for gray and 3 for color.
        image_size: H and W in pixels; one number stands for both.
        filters: Output channels of the convolutions, each of which halves the image.

    Raises:
        ValueError: If a size is below 1, or the network would be larger than any has to be.

    Example:
        >>> ImageEvaluationNetworkConfig(num_channels=1, image_size=28).size
        (28, 28)
    """

    model_type = "gradguard_image_evaluation"

    num_channels: int = 3
    image_size: int | list[int] | tuple[int, int] = 32
    filters: list[int] | tuple[int, ...] = (128, 256, 512)

    def __post_init__(self, **kwargs: Any) -> None:
        # Here and not in a validator of the base class: those wrap the ValueError in an error of
        # their own.
        if self.num_channels < 1 or not self.filters or min(*self.size, *self.filters) < 1:
            raise ValueError(
                "num_channels, image_size and every entry of filters must be at least 1, but are "
                f"{self.num_channels}, {self.image_size} and {self.filters}."
            )
        _check_most("layers", len(self.filters), MAX_LAYERS)
        _check_most("pixels a side", max(self.size), MAX_SIDE)
        _check_most("parameters", self.num_parameters, MAX_PARAMETERS)
        super().__post_init__(**kwargs)

    @property
    def num_parameters(self) -> int:
        """The number of the network's parameters, computed without building it."""
        channels, (height, width) = [self.num_channels, *self.filters], self.size
        for _ in self.filters:
            height, width = (height + 1) // 2, (width + 1) // 2
        convolutions = sum((9 * a + 1) * b for a, b in itertools.pairwise(channels))
        return convolutions + channels[-1] * height * width + 1

    @property
    def num_entries(self) -> int:
        """The number of numbers that are saved, which are the network's parameters."""
        return self.num_parameters

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the images in pixels."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        height, width = self.image_size
        return height, width


@strict
class TextEvaluationNetworkConfig(PreTrainedConfig):
    """The configuration of a text network: which embeddings it judges, and how wide it is.

    Args:
        embedding_size: H, the length of a token embedding.
        embedding_fingerprint: The `embedding_fingerprint` of the matrix that the network was
            trained on. Another matrix gives the same word other coordinates, so the network would
            judge it at random.
        base_model: The Hub name of the model that the matrix is from, for people; empty if it has
            none.
        special_token_ids: Tokens that are neither replaced nor counted: [CLS], [SEP], padding and
            so on.
        width: Channels between input and output.
        num_layers: Residual convolutions over the tokens.
        kernel_size: Tokens that one convolution sees; odd.

    Raises:
        ValueError: If a size is below 1, kernel_size even, or the network would be larger than any
            has to be.

    Example:
        >>> TextEvaluationNetworkConfig(embedding_size=384, special_token_ids=[0, 101, 102]).width
        192
    """

    model_type = "gradguard_text_evaluation"

    embedding_size: int = 768
    embedding_fingerprint: str = ""
    base_model: str = ""
    special_token_ids: list[int] | tuple[int, ...] = ()
    width: int = 192
    num_layers: int = 3
    kernel_size: int = 5

    def __post_init__(self, **kwargs: Any) -> None:
        if min(self.embedding_size, self.width) < 1 or self.num_layers < 0:
            raise ValueError(
                "embedding_size and width must be at least 1 and num_layers at least 0, but are "
                f"{self.embedding_size}, {self.width} and {self.num_layers}."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                "kernel_size must be odd, so that a token is in its middle, but is "
                f"{self.kernel_size}."
            )
        _check_most("layers", self.num_layers, MAX_LAYERS)
        _check_most("special tokens", len(self.special_token_ids), MAX_SPECIAL)
        _check_most("parameters and kept embeddings", self.num_entries, MAX_PARAMETERS)
        super().__post_init__(**kwargs)

    @property
    def num_parameters(self) -> int:
        """The number of the network's parameters, computed without building it."""
        size, width = self.embedding_size, self.width
        norm, convolution = 2 * width, (self.kernel_size * width + 1) * width
        layer = norm + convolution + 2 * (width + 1) * width
        return 2 * size + (size + 1) * width + self.num_layers * layer + width + 1

    @property
    def num_entries(self) -> int:
        """The number of numbers that are saved.

        They are the network's parameters, the mean and deviation of embeddings, and the embeddings
        of special tokens.
        """
        return self.num_parameters + (2 + len(self.special_token_ids)) * self.embedding_size


def _check_most(entries: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(
            f"An evaluation network of {number:,} {entries} is refused before it is built: "
            f"{most:,} are the most. Nothing that judges noise needs more, and a configuration can "
            "come from anywhere."
        )


@dataclass
class EvaluationNetworkOutput(ModelOutput):
    """The output of an evaluation network's `forward`.

    Args:
        loss: The binary cross-entropy with the true ratios, if they were given.
        noise_ratio: `(B,)` in [0, 1]: 0 for natural data, 1 for nothing but noise.
    """

    loss: Tensor | None = None
    noise_ratio: Tensor | None = None


class EvaluationNetworkBase(PreTrainedModel):
    """A base of both kinds of networks, with initial weights by PyTorch's own rules.

    Attributes:
        revision: The Hub's commit, if the network was loaded from there.
        sha256: The hash of the file that the weights were loaded from.
    """

    revision: str | None = None
    sha256: str | None = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            init.ones_(module.weight)
            init.zeros_(module.bias)
