"""What the small networks have in common: pixels in, logits and the mean cross-entropy out."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention


class SmallImageClassifierConfig(PreTrainedConfig):
    """What the papers' networks have in common.

    Args:
        num_channels: Of the images.
        image_size: Pixels along each side.
        **kwargs: Classes among them: `num_labels` (10), or `id2label`.
    """

    def __init__(self, num_channels: int = 3, image_size: int = 32, **kwargs: Any) -> None:
        self.num_channels = num_channels
        self.image_size = image_size
        if "id2label" not in kwargs:
            kwargs.setdefault("num_labels", 10)
        super().__init__(**kwargs)


class SmallImageClassifier(PreTrainedModel):
    """Base of the papers' networks. A subclass has `logits`."""

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # a mean of each micro-batch: the Trainer divides by their number

    def logits(self, pixel_values: Tensor) -> Tensor:
        """`(B, C, H, W)` to `(B, num_labels)`."""
        raise NotImplementedError

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Classify images.

        Args:
            pixel_values: `(B, C, H, W)`.
            labels: `(B,)` class ids; with them the output has the mean cross-entropy as `loss`.
        """
        logits = self.logits(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)
