"""The LeNet of the gradient-leakage papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from .classifier import SmallImageClassifier, SmallImageClassifierConfig


class LeakageLeNetConfig(SmallImageClassifierConfig):
    """Configuration of `LeakageLeNetForImageClassification`.

    Args:
        num_channels: Of the images.
        image_size: Pixels along each side.
        hidden_channels: Of every convolution.
        strides: One a convolution.
        initializer_range: Weights and biases start uniform between minus this and this; `None`
            takes PyTorch's own start. The papers attack at 0.5.

    Example:
        >>> LeakageLeNetConfig(num_channels=1, image_size=28, num_labels=62).strides
        [2, 2, 1, 1]
    """

    model_type = "gradguard_leakage_lenet"

    def __init__(
        self,
        num_channels: int = 3,
        image_size: int = 32,
        hidden_channels: int = 12,
        strides: list[int] | None = None,
        initializer_range: float | None = 0.5,
        **kwargs: Any,
    ) -> None:
        self.hidden_channels = hidden_channels
        self.strides = strides or [2, 2, 1, 1]
        self.initializer_range = initializer_range
        super().__init__(num_channels, image_size, **kwargs)


class LeakageLeNetForImageClassification(SmallImageClassifier):
    """Four 5 × 5 convolutions of 12 channels, strides 2, 2, 1 and 1, each with a sigmoid, and one
    dense layer.

    Smooth everywhere, so that its gradient has useful second derivatives: the network on which
    gradient inversion was introduced (Zhu, Liu and Han, "Deep Leakage from Gradients", 2019) and on
    which most of its papers report.

    Example:
        >>> config = LeakageLeNetConfig(num_channels=1, image_size=28)
        >>> model = LeakageLeNetForImageClassification(config)
        >>> model(pixel_values=torch.rand(2, 1, 28, 28), labels=torch.tensor([3, 7])).logits.shape
        torch.Size([2, 10])
    """

    config_class = LeakageLeNetConfig
    base_model_prefix = "lenet"

    def __init__(self, config: LeakageLeNetConfig) -> None:
        super().__init__(config)
        channels, side, convolutions = config.num_channels, config.image_size, []
        for stride in config.strides:
            convolutions.append(
                nn.Conv2d(channels, config.hidden_channels, 5, stride=stride, padding=2)
            )
            channels, side = config.hidden_channels, (side - 1) // stride + 1
        self.convolutions = nn.ModuleList(convolutions)
        self.classifier = nn.Linear(channels * side * side, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Conv2d | nn.Linear):
            return
        bound = self.config.initializer_range
        if bound is None:
            module.reset_parameters()
            return
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def logits(self, pixel_values: Tensor) -> Tensor:
        hidden = pixel_values
        for convolution in self.convolutions:
            hidden = torch.sigmoid(convolution(hidden))
        logits: Tensor = self.classifier(hidden.flatten(1))
        return logits


AutoConfig.register(LeakageLeNetConfig.model_type, LeakageLeNetConfig, exist_ok=True)
AutoModelForImageClassification.register(LeakageLeNetConfig, LeakageLeNetForImageClassification)
