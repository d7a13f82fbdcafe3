"""Images in an audit, which become a batch, are scored, are guessed and are shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..data.images import to_pil
from ..gradient_map.domain import IMAGE
from ..gradient_map.inputs import PixelSpace
from ..metrics import score_images
from ..models import label_kind
from .text_samples import with_labels

if TYPE_CHECKING:
    from ..attacks import Reconstruction
    from ..data.samples import Sample
    from .settings import AuditSettings


class Images:
    """The modality of images, for an image classifier.

    Args:
        model: The model, with a class for each label.
        processor: The model's image processor. `None` if the model takes pixels in [0, 1], of its
            configuration's `image_size` and `num_channels`.
        settings: The audit's settings, which say whether labels are known.
    """

    can_grant = True

    def __init__(self, model: nn.Module, processor: Any, settings: AuditSettings) -> None:
        self.model, self.processor, self.audit_settings = model, processor, settings
        self.mean = self.std = None
        self.labels = label_kind(model)
        if getattr(processor, "do_normalize", False):
            self.mean, self.std = list(processor.image_mean), list(processor.image_std)

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the client's batch."""
        pixels = self._pixels([image for image, _ in samples])
        return with_labels(self.model, None, {IMAGE.key: pixels}, samples)

    def _pixels(self, pictures: Sequence[Any]) -> Tensor:
        config: Any = self.model.config
        mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        images = [to_pil(picture, mode) for picture in pictures]
        if self.processor is not None:
            pixels: Tensor = self.processor(images, return_tensors="pt")[IMAGE.key]
        else:
            side = getattr(config, "image_size", None)
            if side is None:
                raise ValueError(
                    "The model has no image processor, and its configuration no image_size: save a "
                    "preprocessor_config.json beside it."
                )
            arrays = [np.asarray(image.resize((side, side))) for image in images]
            stacked = torch.from_numpy(np.stack(arrays))
            stacked = stacked.float() / 255
            pixels = stacked[:, None] if mode == "L" else stacked.permute(0, 3, 1, 2).contiguous()
        # Quantized models have integer parameters beside floating ones.
        dtype = next(p.dtype for p in self.model.parameters() if torch.is_floating_point(p))
        return pixels.to(dtype)

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the fields of an Observation that images need besides the gradient."""
        shape = tuple(IMAGE.main_input(batch).shape)
        return {"input_shape": shape, "image_mean": self.mean, "image_std": self.std}

    def granted(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return the labels if the attacker knows them, else `None`."""
        return batch["labels"].clone() if self.audit_settings.labels_known else None

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """Return an attacker's list of images as pixels in the clients' form, each once."""
        rows = [row[IMAGE.key] for row in samples if isinstance(row, Mapping)]
        samples = [sample for sample in samples if not isinstance(sample, Mapping)]
        pictures = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
        device = next(self.model.parameters()).device
        pixels = torch.stack([*rows, *(self._pixels(pictures).to(device) if pictures else ())])
        # Twice in the list would count twice as a false positive.
        return [image for index, image in enumerate(pixels) if not _is_in(image, pixels[:index])]

    def members_among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Return the indices of those candidates that are in a batch."""
        members = IMAGE.main_input(batch).cpu()
        return [index for index, row in enumerate(candidates) if _is_in(row.cpu(), members)]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the originals, for the report."""
        images = [png(image) for image in self._plain(batch)]
        return {"images": images, "labels": batch["labels"].tolist()}

    def score(self, reconstruction: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the scores of a reconstruction, one per sample, and its images.

        Images are in the samples' order.

        Raises:
            ValueError: If the attack gave no image.
        """
        if reconstruction.input is None:
            raise ValueError("The attack gave no image.")
        # Anybody can clip to the range of pixels, and an attack that diverged knows no more than
        # a guess of gray.
        plain = self._plain({IMAGE.key: reconstruction.input})
        images = torch.nan_to_num(plain, nan=0.5, posinf=1.0, neginf=0.0).clamp(0, 1)
        scores = score_images(images, self._plain(batch), bootstrap=0)
        # In the samples' order: an attack cannot know it, so scores match the best pairs.
        ordered = [images[match] for match in scores.matched if match is not None]
        return {"scores": scores.per_sample, "images": [png(image) for image in ordered]}

    def chance(
        self, batches: Sequence[dict[str, Tensor]], index: int, seed: int
    ) -> dict[str, list[float]]:
        """Return the scores of a guess made without a gradient: a uniform gray image."""
        plain = self._plain(batches[index])
        return score_images(torch.full_like(plain, 0.5), plain, bootstrap=0).per_sample

    def describe_chance(self, messages: int) -> str:
        """Return the words for what `chance` guesses."""
        return "a uniform gray image"

    def settings(self) -> dict[str, Any]:
        """Return what the report has to know of all images."""
        return {"kind": IMAGE.name}

    def threat_model(self) -> list[str]:
        """Return sentences on what the attacker sees and knows only of images: none."""
        return []

    def identity(self) -> list[Any]:
        """Return what of the processor determines a result, beyond the pixels that it made."""
        return [self.mean, self.std]

    def _plain(self, batch: dict[str, Tensor]) -> Tensor:
        """Return pixels `(B, C, H, W)` in [0, 1]."""
        pixels = IMAGE.main_input(batch).detach().float().cpu()
        return PixelSpace(pixels, self.mean, self.std).plain(pixels)


def png(image: Tensor) -> str:
    """Return pixels `(C, H, W)` in [0, 1] as a PNG in base64."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    pixels = array[..., 0] if array.shape[2] == 1 else array[..., :3]
    Image.fromarray(pixels).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def _is_in(image: Tensor, images: Tensor) -> bool:
    return any(torch.equal(image, other_image) for other_image in images)
