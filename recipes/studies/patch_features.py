"""Features of images that nobody has to learn: responses to patches of public images."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, PATCHES_PER_IMAGE = 6, 20  # pixels of a patch; patches that are drawn of an image
FLAT = 0.015  # added to a patch's variance: flat ones stay small
SHRINKAGE, THRESHOLD = 0.1, 0.5


class PatchFeatures(nn.Module):
    """How an image's patches respond to some patches of public images, above a threshold and of
    either sign, as means over its four quarters: `(N, C, H, W)` in [0, 1] to `(N, 8 · filters)`.

    Patches are normalized and whitened, filters are patches drawn at random (Coates and Ng, 2011,
    whose encoding, dictionary and constants these are). Features have mean 0 and variance 1 on the
    public images.

    Args:
        images: Public ones, `(N, C, H, W)` in [0, 1].
        filters: How many patches are filters.
        generator: Source of patches.
    """

    kernels: Tensor
    offset: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, images: Tensor, filters: int, generator: torch.Generator) -> None:
        super().__init__()
        patches = F.unfold(images, SIDE).transpose(1, 2)  # (N, places, pixels of a patch)
        places = torch.rand(patches.shape[:2], generator=generator).topk(PATCHES_PER_IMAGE).indices
        sampled_patches = torch.cat(
            [rows[place] for rows, place in zip(patches, places, strict=True)]
        )
        sampled_patches = sampled_patches - sampled_patches.mean(1, keepdim=True)
        sampled_patches = sampled_patches / (sampled_patches.var(1, keepdim=True) + FLAT).sqrt()
        values, vectors = torch.linalg.eigh(torch.cov(sampled_patches.T))
        whitening = (vectors / (values + SHRINKAGE).sqrt()) @ vectors.T
        center = sampled_patches.mean(0)
        chosen = torch.randperm(len(sampled_patches), generator=generator)[:filters]
        directions = F.normalize((sampled_patches[chosen] - center) @ whitening)
        kernels = directions @ whitening  # of normalized patches before whitening
        self.register_buffer("offset", kernels @ center)
        self.register_buffer("kernels", kernels.view(filters, -1, SIDE, SIDE))
        self.register_buffer("mean", torch.zeros(8 * filters))
        self.register_buffer("deviation", torch.ones(8 * filters))
        features = torch.cat([self(image_chunk) for image_chunk in images.split(100)])
        self.mean.copy_(features.mean(0))
        self.deviation.copy_(features.std(0).clamp(min=1e-6))

    def forward(self, pixels: Tensor) -> Tensor:
        count = self.kernels[0].numel()
        means = F.avg_pool2d(pixels.mean(1, keepdim=True), SIDE, 1)
        squares = F.avg_pool2d(pixels.square().mean(1, keepdim=True), SIDE, 1)
        variances = (squares - means.square()).clamp(min=0) * count / (count - 1)
        # Each patch less its mean, over its deviation, times the kernels.
        sums = self.kernels.sum((1, 2, 3))[:, None, None]
        responses = (F.conv2d(pixels, self.kernels) - means * sums) / (
            variances + FLAT
        ).sqrt() - self.offset[:, None, None]
        signs = torch.cat([responses, -responses], 1)
        features = F.adaptive_avg_pool2d((signs - THRESHOLD).relu(), 2).flatten(1)
        return (features - self.mean) / self.deviation
