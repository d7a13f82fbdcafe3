"""Networks other than the frontier's, and images other than CIFAR-10."""

import itertools

from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, set_seed

from recipes.small_networks import SmallImageClassifier, SmallImageClassifierConfig

from .image_training import ImageTask, Network
from .settings import ELSEWHERE

RESNET = (16, 32, 64, 128)  # widths of its four stages
VIT = {
    "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192,
    "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class ResNet(SmallImageClassifier):
    """ResNet10 with group normalization, whose means are of one image, and GELU, which gradient
    matching reads better than ReLU. 308,618 parameters.
    """

    config_class = SmallImageClassifierConfig

    def __init__(self, config: SmallImageClassifierConfig) -> None:
        super().__init__(config)
        first = nn.Conv2d(config.num_channels, RESNET[0], 3, stride=2, padding=1)
        blocks = [Block(RESNET[0], RESNET[0], 1)]
        blocks += [Block(before, after, 2) for before, after in itertools.pairwise(RESNET)]
        self.layers = nn.Sequential(
            first, nn.GroupNorm(8, RESNET[0]), nn.GELU(), *blocks, nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(RESNET[-1], config.num_labels),
        )  # fmt: skip

    def logits(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.layers(2 * pixel_values - 1)
        return logits


class Block(nn.Module):
    """Two convolutions beside a short cut (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.GroupNorm(8, after),
            nn.GELU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.GroupNorm(8, after),
        )  # fmt: skip
        same = before == after and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.long(x) + self.short(x))


def network(name: str, channels: int, side: int, classes: int) -> PreTrainedModel:
    """`"convolutions"` is the frontier's own, `"vit"` has 320,554 parameters for CIFAR-10."""
    shape = {"num_channels": channels, "image_size": side, "num_labels": classes}
    if name == "vit":
        return ViTForImageClassification(ViTConfig(**VIT, **shape))
    of = {"convolutions": Network, "resnet": ResNet}[name]
    return of(SmallImageClassifierConfig(**shape))


class Place(ImageTask):
    """A network and images, by their name in the settings.

    Args:
        name: Of `ELSEWHERE`.
        files: Of each data set, of training and of test images; one npz may hold both.
        folder: That keeps what is trained.
    """

    def __init__(self, name: str, files: dict[str, tuple[str, str]], folder: str) -> None:
        self._network, self.images = ELSEWHERE[name]
        super().__init__(*files[self.images], folder=f"{folder}/{name}")
        self.flips = self.images != "mnist"
        self.judged = "val" if self.images == "tiny_imagenet" else "test"

    def start(self, seed: int) -> PreTrainedModel:
        pixels, labels = self.train_rows
        set_seed(seed)
        return network(self._network, *pixels.shape[1:3], int(labels.max()) + 1)
