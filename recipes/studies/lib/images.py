"""Single images, the leakage papers' LeNet, and the attack that reads most of its gradients."""

import statistics

import numpy as np
import torch
from datasets import load_dataset
from torch import Tensor

from hf_gradguard.attacks import Observation
from hf_gradguard.metrics import score_images
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

from .attacks import attack_of, generator_for

# Inverting Gradients by L-BFGS, far stronger than as published on these small smooth networks
INVERTING = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False}
INVERTING |= {"start": "uniform", "total_variation": 1e-5}
# Behind a defense it has to smooth more, by how much depends on the defense; it stops when 5 steps
# brought no better match.
SMOOTHING = {"total_variation": [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1], "patience": 5}
QUICK_SMOOTHING = {"total_variation": [1e-3, 1e-2]}

SINGLE_IMAGES = {
    "--mnist": "npz with x_train and y_train", "--cifar10": "npz with x (N, 32, 32, 3) and y"
}  # fmt: skip


def single_images(
    path: str, samples: int | None, side: int | None = None, split: str = "train"
) -> list[dict[str, Tensor]]:
    """Batches of one: the first images of an npz; larger ones are cut to `side`."""
    pixels, labels = array_images(path, split, samples)
    pixels = pixels[..., :side, :side].float() / 255
    return [
        {"pixel_values": x, "labels": y}
        for x, y in zip(pixels.split(1), labels.split(1), strict=True)
    ]


def array_images(
    path: str, split: str = "train", samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """`(N, C, H, W)` in uint8, and labels, of an npz with x and y, or x_train and the like; gray
    ones have one channel.
    """
    with np.load(path) as file:
        names = (f"x_{split}", f"y_{split}") if f"x_{split}" in file else ("x", "y")
        pixels, labels = (torch.from_numpy(file[name][:samples]) for name in names)
    pixels = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    return pixels, labels.long()


def public_images(path: str, count: int) -> Tensor:
    """Some of an npz's images to train on, drawn, `(count, C, H, W)` in [0, 1]."""
    pixels, _ = array_images(path)
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return pixels[chosen[:count]].float() / 255


def images_at(path: str, split: str) -> tuple[Tensor, Tensor]:
    """All images and labels of a parquet file, or of a split of an npz."""
    return array_images(path, split) if path.endswith(".npz") else parquet_images(path)


def parquet_images(path: str) -> tuple[Tensor, Tensor]:
    """`img` (N, 3, H, W) in uint8, and `label`."""
    data = load_dataset("parquet", data_files=path, split="train")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in data["img"]]))
    return pixels.permute(0, 3, 1, 2), torch.tensor(data["label"])


def lenet_for(batch: dict[str, Tensor]) -> LeakageLeNetForImageClassification:
    """Before training: weights from the global generator."""
    _, channels, side, _ = batch["pixel_values"].shape
    return LeakageLeNetForImageClassification(
        LeakageLeNetConfig(num_channels=channels, image_size=side)
    ).eval()


def smoothed(settings: dict, own_observations: list[Observation], images: list[Tensor]) -> dict:
    """Inverting Gradients with the one of several `total_variation` that shows most of images of
    the attacker's own.

    Args:
        settings: Of the attack, which tries with one start each. Returned with the patience that
            they do not name if there are not several.
        own: What the defense makes of these images' gradients.
        images: `(1, C, H, W)` each.
    """
    settings = {"patience": None, **settings}  # cells say it where it is another
    if not isinstance(tried := settings.get("total_variation"), list):
        return settings

    def shown(total_variation: float) -> float:
        attack = attack_of(
            "inverting_gradients", **settings | {"total_variation": total_variation, "restarts": 1}
        )
        reconstructions = attack.reconstruct_many(
            own_observations, generator_for(own_observations[0], 0)
        )
        return statistics.mean(
            score_images(
                [reconstruction.input.nan_to_num(0.5) for reconstruction in reconstructions], images
            ).per_sample["psnr"]
        )

    return settings | {"total_variation": max(tried, key=shown)}


@torch.no_grad()
def predicted_classes(model: torch.nn.Module, pixels: Tensor) -> Tensor:
    """`(N,)`, of images in [0, 1] or in bytes."""
    scale, device = 1 if pixels.is_floating_point() else 255, next(model.parameters()).device
    chunks = (chunk.to(device) / scale for chunk in pixels.split(500))
    return torch.cat([model(pixel_values=chunk).logits.argmax(1) for chunk in chunks])


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
