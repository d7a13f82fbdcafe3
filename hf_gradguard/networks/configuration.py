"""Configurations of the evaluation networks, as the Hub keeps them."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class ImageEvaluationNetworkConfig(PreTrainedConfig):
    """Which pixels an image network judges, and how wide it is.

    Args:
        num_channels: C of the images, 1 for gray and 3 for color.
        image_size: H and W in pixels; a number stands for both.
        filters: Output channels of the convolutions, each of which halves the image.

    Raises:
        ValueError: If a size is below 1.

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
        super().__post_init__(**kwargs)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        height, width = self.image_size
        return height, width


@strict
class TextEvaluationNetworkConfig(PreTrainedConfig):
    """Which embeddings a text network judges, and how wide it is.

    Args:
        embedding_size: H, the length of a token embedding.
        embedding_fingerprint: `embedding_fingerprint` of the matrix the network was trained on.
            Another matrix gives the same word other coordinates, so the network would judge it at
            random.
        base_model: The Hub name of the model the matrix is from, for people; empty if it has none.
        special_token_ids: Tokens that are neither replaced nor counted: [CLS], [SEP], padding and
            so on.
        width: Channels between input and output.
        num_layers: Residual convolutions over the tokens.
        kernel_size: Tokens that one convolution sees; odd.

    Raises:
        ValueError: If a size is below 1, or kernel_size even.

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
        super().__post_init__(**kwargs)
