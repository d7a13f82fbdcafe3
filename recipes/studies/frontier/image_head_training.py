"""One client's training of a linear head on CIFAR-10, on features that stay as they are."""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from ...head import SHRINKAGE, whitening_of
from ..lib.device import DEVICE
from ..lib.images import array_images
from .image_training import ImageTask
from .on_embeddings import OnEmbeddings, classified
from .patch_features import PatchFeatures
from .settings import FILTERS, IMAGE_HELD_OUT, PUBLIC_IMAGES


class ImageHead(nn.Module):
    """Frozen features, whitened, and a linear head, which alone is shared. It takes images, or
    `embeddings` that were made of them before.
    """

    def __init__(self, features: nn.Module, whitening: nn.Linear, labels: int = 10) -> None:
        super().__init__()
        self.features = features.requires_grad_(False)
        self.whitening = whitening.requires_grad_(False)
        self.head = nn.Linear(whitening.out_features, labels)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        embeddings: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        if embeddings is None:
            assert pixel_values is not None
            embeddings = self.whitening(self.features(pixel_values))
        return classified(self.head, embeddings, labels)


class ImageHeadTask(OnEmbeddings):
    """Heads on features of `public` images, an npz."""

    def __init__(self, train: str, test: str, folder: str, public: str) -> None:
        super().__init__(Path(folder) / "image-heads", Path(folder) / "image-heads")
        self._images, self._public = ImageTask(train, test, folder), public

    @property
    def held_back(self) -> int:
        return IMAGE_HELD_OUT

    @functools.cached_property
    def _public_images(self) -> Tensor:
        pixels, _ = array_images(self._public, "train")
        drawn = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
        return pixels[drawn[:PUBLIC_IMAGES]].float() / 255

    @functools.cached_property
    def features(self) -> PatchFeatures:
        """Nobody's secret."""
        return PatchFeatures(self._public_images, FILTERS, torch.Generator().manual_seed(0)).eval()

    @functools.cached_property
    def whitening(self) -> nn.Linear:
        return whitening_of(self.kept("public")["embeddings"], SHRINKAGE)

    def start(self, seed: int) -> ImageHead:
        """The head that a seed gives."""
        set_seed(seed)
        return ImageHead(self.features, self.whitening).eval()

    @torch.no_grad()
    def embed(self, name: str) -> dict[str, Tensor]:
        if name == "public":
            pixels = self._public_images
            labels = torch.zeros(len(pixels), dtype=torch.long)
        else:
            pixels, labels = getattr(self._images, f"{name}_rows")
        features, scale = self.features.to(DEVICE), 1 if pixels.is_floating_point() else 255
        found = [features(some.to(DEVICE) / scale).cpu() for some in pixels.split(100)]
        return {"embeddings": torch.cat(found), "labels": labels}
