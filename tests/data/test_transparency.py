"""A picture whose drawing is in its transparency stays visible, or is refused: in every mode of
PIL's that has any.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hf_gradguard.data.images import read_image, to_pil
from hf_gradguard.data.tables import DataError
from hf_gradguard.networks.noising import as_pixels

SIDE, DRAWN = 16, (4, 4, 12, 12)
COLORS = {"black": 0, "white": 255, "gray": 128, "pale": 250}


def drawn() -> np.ndarray[Any, Any]:
    alpha = np.zeros((SIDE, SIDE), np.uint8)
    alpha[4:12, 4:12] = 255
    return alpha


def gray(mode: str) -> Callable[[int], Image.Image]:
    """One gray everywhere, of which the drawing alone is opaque."""

    def made(color: int) -> Image.Image:
        bands = [Image.new("L", (SIDE, SIDE), color)] * (3 if mode.startswith("RGB") else 1)
        return Image.merge(mode.upper(), (*bands, Image.fromarray(drawn()))).convert(mode)

    return made


def palette(transparency: Any) -> Callable[[int], Image.Image]:
    """Two entries of one color, of which one is transparent."""

    def made(color: int) -> Image.Image:
        image = Image.fromarray(drawn() // 255, "P" if transparency != "PA" else "L")
        if transparency == "PA":
            image = Image.new("PA", (SIDE, SIDE))
            image.putpalette([color] * 6)
            image.putalpha(Image.fromarray(drawn()))
        elif transparency == "RGBA":
            image.putpalette([*[color] * 3, 0, *[color] * 3, 255], "RGBA")
        else:
            image.putpalette([color] * 6)
            image.info["transparency"] = transparency
        return image

    return made


MODES: dict[str, Callable[[int], Image.Image]] = {
    **{mode: gray(mode) for mode in ("RGBA", "RGBa", "LA", "La")},
    "PA": palette("PA"), "P, an index": palette(0), "P, bytes": palette(bytes([0, 255])),
    "P, of RGBA": palette("RGBA"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:'mode' parameter")
@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("mode", MODES)
def test_a_drawing_in_alpha_stays_visible(mode: str, color: str) -> None:
    shade = COLORS[color]
    image = MODES[mode](shade)
    assert image.has_transparency_data
    ground = 255 if shade < 128 else 0
    expected = np.where(drawn() > 0, shade, ground)
    np.testing.assert_array_equal(np.asarray(to_pil(image, "L")), expected)
    np.testing.assert_array_equal(
        np.asarray(to_pil(image, "RGB")), expected[..., None].repeat(3, 2)
    )
    np.testing.assert_array_equal(as_pixels([image])[0, 0], expected)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "I;16"])
def test_one_number_that_stands_for_transparency(mode: str, tmp_path: Path) -> None:
    """A black drawing on transparent white, as PNG has it without a channel of its own."""
    most: Any = {"1": 1, "L": 255, "RGB": (255,) * 3, "I;16": 65535}[mode]
    if mode == "I;16":
        image = Image.fromarray(np.where(drawn() > 0, 0, 65535).astype(np.uint16))
    else:
        image = Image.fromarray(255 - drawn()).convert(mode)
    path = tmp_path / "a.png"
    image.save(path, transparency=most)
    read = read_image({"path": str(path)}, "row 1")
    assert read.mode == ("RGB" if mode == "RGB" else "L")
    np.testing.assert_array_equal(np.asarray(to_pil(read, "L")), 255 - drawn())
    image.save(path, transparency=(0,) * 3 if mode == "RGB" else 0)
    read = read_image({"path": str(path)}, "row 1")  # now it is the drawing that is transparent
    np.testing.assert_array_equal(np.asarray(to_pil(read, "L")), 255 - drawn())


def png_of_16_bits(pixels: np.ndarray[Any, Any], hole: tuple[int, ...]) -> bytes:
    """A picture in color, with a transparent one, by the letter of the PNG specification."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    return b"".join((
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)),
        chunk(b"tRNS", struct.pack(">3H", *hole)), chunk(b"IDAT", zlib.compress(lines)),
        chunk(b"IEND", b""),
    ))  # fmt: skip


@pytest.mark.parametrize("is_of_drawing", [True, False])
def test_a_transparent_color_of_16_bits(is_of_drawing: bool) -> None:
    pixels = np.where(drawn()[..., None] > 0, 40_000, 65_535).repeat(3, 2)
    hole = (40_000 if is_of_drawing else 65_535,) * 3
    read = np.asarray(read_image({"bytes": png_of_16_bits(pixels, hole)}, "row 1"))
    ground = 255 if is_of_drawing else 0
    expected = np.where(drawn() > 0, *((0, 255) if is_of_drawing else (40_000 >> 8, ground)))
    np.testing.assert_array_equal(read[..., 0], expected)


def test_an_array_with_a_fourth_channel() -> None:
    for dtype, most in ((np.uint8, 255), (np.uint16, 65535)):
        pixels = np.zeros((SIDE, SIDE, 4), dtype)
        pixels[..., 3] = drawn() > 0
        pixels[..., 3] *= most
        np.testing.assert_array_equal(np.asarray(to_pil(pixels, "L")), 255 - drawn())


def test_what_is_opaque_stays_as_it_is() -> None:
    colors = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 4), dtype=np.uint8)
    colors[..., 3] = 255
    image = Image.fromarray(colors)
    np.testing.assert_array_equal(np.asarray(to_pil(image, "RGB")), colors[..., :3])
    one_color = Image.new("RGBA", (SIDE, SIDE), (9, 9, 9, 255))
    np.testing.assert_array_equal(np.asarray(to_pil(one_color, "RGB")), 9)


def test_a_ground_shows_most_of_a_drawing() -> None:
    """White letters and one black dot: on white the dot alone would be left."""
    pixels = np.full((SIDE, SIDE, 4), 255, np.uint8)
    pixels[..., 3] = drawn()
    pixels[4, 4, :3] = 0
    shown = np.asarray(to_pil(Image.fromarray(pixels), "L"))
    assert (shown > 128).sum() == 63
    assert shown[0, 0] == 0


@pytest.mark.parametrize("content", ["colors", "one color", "faint"])
def test_what_is_transparent_everywhere_is_refused(content: str, tmp_path: Path) -> None:
    colors = np.zeros((SIDE, SIDE, 4), np.uint8)
    if content != "one color":
        colors[..., :3] = drawn()[..., None]
    colors[..., 3] = 1 if content == "faint" else 0
    written = io.BytesIO()
    Image.fromarray(colors).save(written, "png")
    with pytest.raises(DataError, match=r"^pets, row 3: it is so transparent that one color"):
        read_image({"bytes": written.getvalue()}, "pets, row 3")
    with pytest.raises(ValueError, match="one color is left"):
        to_pil(colors, "RGB")
