"""Images in an audit: becoming a batch, being scored, being guessed, being shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..gradient_map.domain import IMAGE
from ..gradient_map.inputs import PixelSpace
from ..metrics import score_images
from ..models import label_kind
from .texts import with_labels

if TYPE_CHECKING:
    from ..attacks import Reconstruction
    from ..data.samples import Sample
    from .settings import AuditSettings


class Images:
    """Images for an image classifier.

    Args:
        model: The model, with a class for each label.
        processor: Its image processor; `None` for a model that takes pixels in [0, 1] of its
            configuration's `image_size` and `num_channels`.
        settings: Whether labels are known.
    """

    def __init__(self, model: nn.Module, processor: Any, settings: AuditSettings) -> None:
        self.model, self.processor, self.terms = model, processor, settings
        self.mean = self.std = None
        self.labels = label_kind(model)
        if getattr(processor, "do_normalize", False):
            self.mean, self.std = list(processor.image_mean), list(processor.image_std)

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The client's batch."""
        pixels = self._pixels([image for image, _ in samples])
        return with_labels(self.model, None, {IMAGE.key: pixels}, samples)

    def _pixels(self, given: Sequence[Any]) -> Tensor:
        config: Any = self.model.config
        mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        images = [to_pil(image, mode) for image in given]
        if self.processor is not None:
            pixels = self.processor(images, return_tensors="pt")[IMAGE.key]
        else:
            arrays = [
                np.asarray(image.resize((config.image_size, config.image_size))) for image in images
            ]
            stacked = torch.from_numpy(np.stack(arrays)).float() / 255
            pixels = stacked[:, None] if mode == "L" else stacked.permute(0, 3, 1, 2).contiguous()
        dtype = next(p.dtype for p in self.model.parameters() if torch.is_floating_point(p))
        found: Tensor = pixels.to(dtype)
        return found

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What an Observation holds of an image besides the gradient."""
        return {
            "input_shape": tuple(IMAGE.main_input(batch).shape),
            "image_mean": self.mean,
            "image_std": self.std,
        }

    can_grant = True

    def granted(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The labels that an attacker is told, if any are."""
        return batch["labels"].clone() if self.terms.labels_known else None

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """What an attacker makes of a list of images: pixels as clients have them, each once."""
        rows = [s[IMAGE.key] for s in samples if isinstance(s, Mapping)]
        rest = [s[0] if isinstance(s, tuple) else s for s in samples if not isinstance(s, Mapping)]
        device = next(self.model.parameters()).device
        pixels = torch.stack([*rows, *(self._pixels(rest).to(device) if rest else ())])
        return [row for at, row in enumerate(pixels) if not _same_as(row, pixels[:at])]

    def prepared(self, listed: Sequence[Any]) -> list[Any]:
        """An attack's own list as clients have it, in the same order: pictures become pixels;
        pixels as the model takes them, and rows of a batch, stay.
        """
        return [one if _is_pixels(one) else self.candidates([one])[0] for one in listed]

    def among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Which candidates are in a batch; those that are not listed are left out."""
        inside = IMAGE.main_input(batch).cpu()
        return [at for at, one in enumerate(candidates) if _same_as(_pixels_of(one), inside)]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The originals, for the report."""
        return {
            "images": [png(image) for image in self._plain(batch)],
            "labels": batch["labels"].tolist(),
        }

    def score(self, found: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Scores of a reconstruction, one number per sample, and the reconstruction in the samples'
        order.

        Raises:
            ValueError: If the attack gave no image.
        """
        if found.input is None:
            raise ValueError("The attack gave no image.")
        # Anybody can clip to the range of pixels, and an attack that diverged knows no more than
        # one that says gray.
        images = torch.nan_to_num(
            self._plain({IMAGE.key: found.input}), nan=0.5, posinf=1.0, neginf=0.0
        ).clamp(0, 1)
        scores = score_images(images, self._plain(batch), bootstrap=0)
        ordered = [images[at] for at in scores.matched if at is not None]
        return {"scores": scores.per_sample, "images": [png(image) for image in ordered]}

    def chance(
        self, batches: Sequence[dict[str, Tensor]], index: int, seed: int
    ) -> dict[str, list[float]]:
        """Scores of a guess made without a gradient: a uniform gray image."""
        plain = self._plain(batches[index])
        return score_images(torch.full_like(plain, 0.5), plain, bootstrap=0).per_sample

    def describe_chance(self, messages: int) -> str:
        """What `chance` guesses, in words."""
        return "a uniform gray image"

    def settings(self) -> dict[str, Any]:
        """What the report has to know of all images."""
        return {"kind": IMAGE.name}

    def threat_model(self) -> list[str]:
        """What the attacker sees and knows of images alone: nothing."""
        return []

    def identity(self) -> list[Any]:
        """What of the processor determines a result, beyond the pixels that it made."""
        return [self.mean, self.std]

    def _plain(self, batch: dict[str, Tensor]) -> Tensor:
        """`(B, C, H, W)` pixels in [0, 1]."""
        pixels = IMAGE.main_input(batch).detach().float().cpu()
        return PixelSpace(pixels, self.mean, self.std).plain(pixels)


def _is_pixels(one: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.issubdtype(one.dtype, np.floating))
    return isinstance(one, Mapping) or (isinstance(one, Tensor) and one.is_floating_point())


def _pixels_of(candidate: Any) -> Tensor:
    pixels = candidate[IMAGE.key] if isinstance(candidate, Mapping) else candidate
    found = torch.as_tensor(pixels).cpu()
    return found.reshape(found.shape[-3:])


def _same_as(image: Tensor, others: Tensor) -> bool:
    return any(torch.equal(image, other) for other in others)


def to_pil(image: Any, mode: str) -> Image.Image:
    """A PIL image, or an array or tensor of bytes `(H, W)` or `(H, W, C)`, as a PIL image."""
    if not isinstance(image, Image.Image):
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim not in (2, 3):
            raise ValueError(
                "An image must be a PIL image or bytes of shape (H, W) or (H, W, C), but is "
                f"{array.dtype} of shape {array.shape}."
            )
        image = Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    converted: Image.Image = image.convert(mode)
    return converted


def png(image: Tensor) -> str:
    """`(C, H, W)` pixels in [0, 1] as a PNG in base64."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array[..., :3]).save(
        file, format="PNG"
    )
    return base64.b64encode(file.getvalue()).decode()
