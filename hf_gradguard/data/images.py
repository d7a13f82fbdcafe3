"""Conversion of images in data sets, however they are stored, to eight bits a channel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from .tables import DataError


def read_image(stored: Any, row_name: str, folder: Path | None = None) -> Any:
    """Return one cell of a data set as a PIL image, gray or in color.

    Args:
        stored: `{"bytes": ..., "path": ...}`, bytes or an array.
        row_name: The file's name and the row's number, for an error.
        folder: The folder that a relative path starts from, if it leads nowhere from here.

    Raises:
        DataError: If the image is cut, or has pixels that are not of 8 or 16 bits.

    Example:
        >>> read_image({"bytes": b"no image", "path": "cat.png"}, "pets, row 3")
        Traceback (most recent call last):
        hf_gradguard.data.tables.DataError: pets, row 3 (cat.png): no image of 8 or 16 bits that ...
    """
    stored = {"bytes": stored} if isinstance(stored, bytes) else stored
    if not isinstance(stored, dict):
        try:
            return to_pil(stored, "RGB" if np.shape(stored)[2:] in ((3,), (4,)) else "L")
        except ValueError as error:
            raise DataError(f"{row_name}: {error}") from None
    path, content = Path(stored.get("path") or ""), stored.get("bytes")
    if content is None and folder is not None and not path.is_file():
        path = folder / path
    # What is no name of an image is a text, which no error says.
    is_named = path.suffix.lower() in Image.registered_extensions()
    named = f" ({path.name})" if is_named else ""
    if content is None and not path.is_file():
        raise DataError(f"{row_name}{named}: no such image. Correct the row, or delete it.")
    try:
        image: Image.Image = Image.open(path if content is None else io.BytesIO(content))
        image.load()
        image = ImageOps.exif_transpose(image)  # as cameras mean it
        return to_pil(image, "L" if is_gray(image) else "RGB")
    except DataError as error:
        raise DataError(f"{row_name}{named}: {error}") from None
    except Exception:
        raise DataError(
            f"{row_name}{named}: no image of 8 or 16 bits that can be read whole. Copy the file "
            "again, or delete it."
        ) from None


def to_pil(picture: Any, mode: str) -> Image.Image:
    """Return a PIL image of one mode, made from another image or from pixels.

    Args:
        picture: An image, or an array or tensor of pixels `(H, W)` or `(H, W, C)`, of 8 bits, or of
            16, which are scaled. A transparent one is laid on white, or on black if it stands out
            more from that.
        mode: `"L"` or `"RGB"`.

    Raises:
        ValueError: If pixels are no whole numbers of 8 or 16 bits, or so transparent that one color
            is left.

    Example:
        >>> white = np.full((2, 2), 65535, dtype=np.uint16)
        >>> to_pil(white, "L").getpixel((0, 0)), to_pil(white // 2, "L").getpixel((0, 0))
        (255, 127)
    """
    if not isinstance(picture, Image.Image):
        pixels = _eight_bits(np.asarray(picture))
        pixels = pixels[..., 0] if pixels.shape[2:] == (1,) else pixels
        picture = Image.fromarray(pixels)
    elif picture.mode[0] in "IF":  # PIL would cut off whatever is above 255: a white image
        picture = _scaled(picture)
    elif picture.mode == "LAB":
        picture = picture.convert("RGB")
    converted: Image.Image = _laid_on_ground(picture).convert(mode)
    return converted


def is_gray(image: Image.Image) -> bool:
    """Return whether a PIL image has no colors, however it is stored.

    Example:
        >>> is_gray(Image.new("La", (1, 1))), is_gray(Image.new("PA", (1, 1)))
        (True, False)
    """
    return image.mode[0] in "1LIF" and image.mode != "LAB"


def _scaled(picture: Image.Image) -> Image.Image:
    """Return a picture of more than 8 bits in 8; one of its numbers may stand for transparency."""
    pixels = np.asarray(picture)
    scaled = Image.fromarray(_eight_bits(pixels))
    if (hole := picture.info.get("transparency")) is not None:
        scaled = scaled.convert("LA")
        scaled.putalpha(Image.fromarray(np.where(pixels == hole, 0, 255).astype(np.uint8)))
    return scaled


def _laid_on_ground(picture: Image.Image) -> Image.Image:
    """Return a picture without its transparency, which may hold all that is drawn."""
    if not picture.has_transparency_data:
        return picture
    hole = picture.info.get("transparency")
    if isinstance(hole, tuple) and max(hole) > 255:  # of 16 bits, of which the upper 8 were read
        picture = picture.copy()
        picture.info["transparency"] = tuple(number >> 8 for number in hole)
    # Premultiplied ones become plain by a mode of as many channels alone.
    plain = picture.convert({"La": "LA"}.get(picture.mode, picture.mode)).convert("RGBA")
    laid = [
        Image.alpha_composite(Image.new("RGBA", plain.size, ground), plain).convert("RGB")
        for ground in ("white", "black")
    ]
    on_white, on_black = (np.asarray(image, dtype=np.float64).var((0, 1)).sum() for image in laid)
    shown = laid[0] if on_white >= on_black else laid[1]
    if max(_ranges(shown)) < _FAINTEST and _is_hidden(plain):
        raise DataError(
            "it is so transparent that one color is left of it. Save it without transparency, or "
            "delete it."
        )
    return shown


_FAINTEST = 2
"""Steps of 255 between the lightest and the darkest pixel that count as a drawing."""


def _is_hidden(plain: Image.Image) -> bool:
    """Return whether colors or transparency differ between pixels, or nothing is opaque at all."""
    return max(_ranges(plain)) >= _FAINTEST or plain.getchannel("A").getextrema() == (0, 0)


def _ranges(image: Image.Image) -> list[int]:
    """Return for each channel the largest number less the smallest."""
    pixels = np.asarray(image).astype(int)
    return [int(n) for n in pixels.max((0, 1)) - pixels.min((0, 1))]


def _eight_bits(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    has_channels = pixels.shape[2:] in ((), (1,), (3,), (4,))
    if pixels.ndim > 1 and has_channels and pixels.size and pixels.dtype.kind in "iu":
        least, most = int(pixels.min()), int(pixels.max())
        # PIL opens 16 bits as 32 where their order of bytes is not this machine's.
        if least >= 0 and (pixels.dtype == np.uint8 or (pixels.itemsize > 2 and most < 1 << 8)):
            return pixels.astype(np.uint8)
        if least >= 0 and pixels.itemsize > 1 and most < 1 << 16:
            return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    raise ValueError(
        "An image must be a PIL image or whole numbers of 8 or 16 bits, of shape (H, W) or "
        f"(H, W, C), but is {pixels.dtype} of shape {pixels.shape}. Save it as PNG or JPEG."
    )
