"""One client's training on CIFAR-10, from nothing."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import set_seed

from recipes.small_networks import SmallImageClassifier, SmallImageClassifierConfig

from ..lib.device import there
from ..lib.images import images_at
from .client import Client
from .settings import IMAGE_HELD_OUT, IMAGE_SIZES, WIDTHS

IMAGES = {
    "--train": "parquet with img and label, to train on",
    "--test": "the same, to judge on",
    "--images": "npz with x (N, 32, 32, 3) and y: images to attack",
}


class Network(SmallImageClassifier):
    """Convolutions with group normalization and GELU, of stride 2 and then with average pooling,
    and one dense layer: smooth, so that gradient matching reads it. 69,514 parameters.
    """

    config_class = SmallImageClassifierConfig

    def __init__(self, config: SmallImageClassifierConfig) -> None:
        super().__init__(config)
        layers = list[nn.Module]()
        for number, (before, after) in enumerate(
            zip((config.num_channels, *WIDTHS), WIDTHS, strict=False)
        ):
            kernel, stride = (3, 1) if number else (5, 2)
            layers.append(nn.Conv2d(before, after, kernel, stride, padding=kernel // 2))
            layers += [nn.GroupNorm(8, after), nn.GELU()]
            layers += [nn.AvgPool2d(2)] if number else []
        side = config.image_size // 2 ** len(WIDTHS)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * side**2, config.num_labels)
        )

    def logits(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.layers(2 * pixel_values - 1)
        return logits


class Images(Dataset):
    """`pixels` (N, C, H, W) in uint8 and `labels` as a client's rows, flipped at random."""

    def __init__(self, pixels: Tensor, labels: Tensor, flip: bool = True) -> None:
        self.pixels, self.labels, self._flip = pixels, labels, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        pixels = self.pixels[row].float() / 255
        flipped = pixels.flip(-1) if self._flip and torch.rand(()) < 0.5 else pixels
        return {"pixel_values": flipped, "labels": self.labels[row]}


class ImageTask(Client):
    """Images, the network, and trainings on them. What was trained is kept in `folder`."""

    flips, judged = True, "test"  # whether rows are flipped; which split of an npz judges

    def __init__(self, train: str, test: str, folder: str) -> None:
        super().__init__(folder)
        self._train, self._test = train, test

    @functools.cached_property
    def train_rows(self) -> tuple[Tensor, Tensor]:
        pixels, labels = images_at(self._train, "train")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return pixels[order], labels[order]

    @functools.cached_property
    def test_rows(self) -> tuple[Tensor, Tensor]:
        return images_at(self._test, self.judged)

    def start(self, seed: int) -> Network:
        set_seed(seed)
        return Network(SmallImageClassifierConfig())

    def rows_to_learn(self) -> Images:
        return Images(*(part[IMAGE_HELD_OUT:] for part in self.train_rows), flip=self.flips)

    def held_out(self) -> tuple[Tensor, Tensor]:
        pixels, labels = self.train_rows
        return pixels[:IMAGE_HELD_OUT], labels[:IMAGE_HELD_OUT]

    def later(self) -> Iterator[dict[str, Tensor]]:
        """Batches to come, of rows that nobody trained on."""
        for x, y in zip(
            *(part.split(IMAGE_SIZES["batch"]) for part in self.held_out()), strict=True
        ):
            yield there({"pixel_values": x.float() / 255, "labels": y})

    @torch.no_grad()
    def right(self, model: nn.Module, rows: tuple[Tensor, Tensor]) -> np.ndarray:
        model.eval()
        pixels, labels = rows
        some = (x.to(model.device).float() / 255 for x in pixels.split(500))
        classes = torch.cat([model(x).logits.argmax(1) for x in some])
        return (classes.cpu() == labels).numpy()
