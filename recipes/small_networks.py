"""The small image networks that the field's papers report on, as Hugging Face models.

Pixels in, logits and the mean cross-entropy out. Importing this module registers the networks with
Transformers' Auto classes, under the model types of `MODELS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention


class SmallImageClassifierConfig(PreTrainedConfig):
    """What the papers' networks have in common.

    Args:
        num_channels: Of the images.
        image_size: Pixels along each side.
        **kwargs: A network's own settings (see its class), and classes: `num_labels` (10), or
            `id2label`.
    """

    def __init__(self, num_channels: int = 3, image_size: int = 32, **kwargs: Any) -> None:
        self.num_channels, self.image_size = num_channels, image_size
        if "id2label" not in kwargs:
            kwargs.setdefault("num_labels", 10)
        super().__init__(**kwargs)


class SmallImageClassifier(PreTrainedModel):
    """Base of the papers' networks. A subclass has `logits`. Weights start as PyTorch has them:
    deviations of 0.02, which Transformers has, are far too small for networks of this depth.
    """

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

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()


class LeakageLeNetConfig(SmallImageClassifierConfig):
    """`hidden_channels` of every convolution, `strides`, one a convolution. Weights and biases
    start uniform in ±`initializer_range`; `None` takes PyTorch's own start. The papers attack at
    0.5.
    """

    model_type = "gradguard_leakage_lenet"

    def __init__(self, **kwargs: Any) -> None:
        settings = {"hidden_channels": 12, "strides": [2, 2, 1, 1], "initializer_range": 0.5}
        super().__init__(**settings | kwargs)


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
        channels, side, self.convolutions = config.num_channels, config.image_size, nn.ModuleList()
        for stride in config.strides:
            self.convolutions.append(
                nn.Conv2d(channels, config.hidden_channels, 5, stride=stride, padding=2)
            )
            channels, side = config.hidden_channels, (side - 1) // stride + 1
        self.classifier = nn.Linear(channels * side * side, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        bound = self.config.initializer_range
        if bound is None:
            super()._init_weights(module)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            for parameter in module.parameters():
                nn.init.uniform_(parameter, -bound, bound)

    def logits(self, pixel_values: Tensor) -> Tensor:
        for convolution in self.convolutions:
            pixel_values = torch.sigmoid(convolution(pixel_values))
        return self.classifier(pixel_values.flatten(1))


class LeakyConvNetConfig(SmallImageClassifierConfig):
    """`channels` of every convolution, `hidden_size` of the dense layer before the last one.
    Defaults: MNIST, as in the paper.
    """

    model_type = "gradguard_leaky_convnet"

    def __init__(self, **kwargs: Any) -> None:
        settings = {"num_channels": 1, "image_size": 28, "channels": [32, 64], "hidden_size": 32}
        super().__init__(**settings | kwargs)


class LeakyConvNetForImageClassification(SmallImageClassifier):
    """3 × 3 convolutions of 32 and 64 channels, each with leaky ReLU and 2 × 2 max pooling, and two
    dense layers.

    The network of 119,530 parameters on which Chen, Gürsoy and Lei, "Optimal Defenses Against Data
    Reconstruction Attacks" (2024), report MNIST, with their names of its layers (their Table 1).

    Example:
        >>> LeakyConvNetForImageClassification(LeakyConvNetConfig()).num_parameters()
        119530
    """

    config_class = LeakyConvNetConfig

    def __init__(self, config: LeakyConvNetConfig) -> None:
        super().__init__(config)
        inputs, side, layers = config.num_channels, config.image_size, list[nn.Module]()
        for outputs in config.channels:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
            inputs, side = outputs, side // 2
        self.conv_layers = nn.Sequential(*layers)
        self.fc_layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs * side * side, config.hidden_size),
            nn.LeakyReLU(),
            nn.Linear(config.hidden_size, config.num_labels),
        )
        self.post_init()

    def logits(self, pixel_values: Tensor) -> Tensor:
        return self.fc_layers(self.conv_layers(pixel_values))


class DeepConvNetConfig(SmallImageClassifierConfig):
    """`width` is the first convolution's; the others have 2 and 4 times as many channels.
    `batch_norm` after each (what that shares is in `docs/threat_model.md`); `negative_slope` of the
    leaky ReLU, 0 for the plain one. Defaults: CIFAR-10.
    """

    model_type = "gradguard_deep_convnet"

    def __init__(self, **kwargs: Any) -> None:
        settings = {"width": 64, "batch_norm": True, "negative_slope": 0.01}
        super().__init__(**settings | kwargs)


class DeepConvNetForImageClassification(SmallImageClassifier):
    """Eight 3 × 3 convolutions with batch normalization and leaky ReLU, 3 × 3 max pooling after six
    and eight, one dense layer.

    The optimal-defenses paper reports CIFAR-10 on "a 2.9M parameter ConvNet" whose layers it does
    not list. This is the ConvNet of the attack that it uses (Geiping et al., "Inverting Gradients",
    2020), which has 2,904,970 parameters, with leaky ReLU as that paper says.

    Example:
        >>> DeepConvNetForImageClassification(DeepConvNetConfig()).num_parameters()
        2904970
    """

    config_class = DeepConvNetConfig

    def __init__(self, config: DeepConvNetConfig) -> None:
        super().__init__(config)
        inputs, layers = config.num_channels, list[nn.Module]()
        for number, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
            outputs = factor * config.width
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if config.batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.LeakyReLU(config.negative_slope))
            if number in (5, 7):
                layers.append(nn.MaxPool2d(3))
            inputs = outputs
        side = config.image_size // 3 // 3
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Linear(inputs * side * side, config.num_labels)
        self.post_init()

    def logits(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.features(pixel_values))


class TanhConvNetConfig(SmallImageClassifierConfig):
    """`convolutions` are lists `[channels, kernel, stride, padding]`; `pooling` are `[after,
    stride]` of every 2 × 2 average pooling, after how many convolutions it comes and its stride;
    `hidden_size` of the dense layer before the last one. Defaults: MNIST; `cifar10()` has the other
    one.
    """

    model_type = "gradguard_tanh_convnet"

    def __init__(self, **kwargs: Any) -> None:
        settings = {
            "num_channels": 1,
            "image_size": 28,
            "convolutions": [[16, 8, 2, 2], [32, 4, 2, 0]],
            "pooling": [[1, 1], [2, 1]],
            "hidden_size": 32,
        }
        super().__init__(**settings | kwargs)

    CIFAR10 = {
        "num_channels": 3, "image_size": 32,
        "convolutions": [[channels, 3, 1, 1] for channels in (32, 32, 64, 64, 128, 128)],
        "pooling": [[2, 2], [4, 2], [6, 2]], "hidden_size": 128,
    }  # fmt: skip

    @classmethod
    def cifar10(cls, **kwargs: Any) -> TanhConvNetConfig:
        """The paper's network for CIFAR-10: 3 × 3 convolutions, twice 32, 64 and 128 channels, and
        128 hidden units.
        """
        return cls(**cls.CIFAR10 | kwargs)


class TanhConvNetForImageClassification(SmallImageClassifier):
    """Convolutions with tanh and average pooling, and two dense layers: a smooth function of the
    input.

    The networks of 26,010 (MNIST) and 550,570 parameters (CIFAR-10) in Guo et al., "Bounding
    Training Data Reconstruction in Private (Deep) Learning" (2022), Appendix C. Its tables print a
    tanh after the last layer too; the authors' code has none, and neither has this.

    Example:
        >>> TanhConvNetForImageClassification(TanhConvNetConfig()).num_parameters()
        26010
        >>> TanhConvNetForImageClassification(TanhConvNetConfig.cifar10()).num_parameters()
        550570
    """

    config_class = TanhConvNetConfig

    def __init__(self, config: TanhConvNetConfig) -> None:
        super().__init__(config)
        inputs, side, layers = config.num_channels, config.image_size, list[nn.Module]()
        pooling = dict(config.pooling)
        for number, (outputs, kernel, stride, padding) in enumerate(config.convolutions, 1):
            layers.append(nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding))
            layers.append(nn.Tanh())
            inputs, side = outputs, (side + 2 * padding - kernel) // stride + 1
            if number in pooling:
                layers.append(nn.AvgPool2d(2, stride=pooling[number]))
                side = (side - 2) // pooling[number] + 1
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(inputs * side * side, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def logits(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.features(pixel_values)).tanh())


MODELS = {
    model.config_class.model_type: model
    for model in (
        LeakageLeNetForImageClassification,
        LeakyConvNetForImageClassification,
        DeepConvNetForImageClassification,
        TanhConvNetForImageClassification,
    )
}
"""The networks by model type, which is what `AutoConfig.for_model` takes."""

for _model_type, _model_class in MODELS.items():
    AutoConfig.register(_model_type, _model_class.config_class, exist_ok=True)
    AutoModelForImageClassification.register(_model_class.config_class, _model_class, exist_ok=True)
