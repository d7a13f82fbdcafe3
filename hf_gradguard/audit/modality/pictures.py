"""Pictures as an audit takes them in, and as its report shows them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


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
