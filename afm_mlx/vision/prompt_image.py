"""Pictures to tiles of pixels: decoding within bounds, turning, fitting, cutting.

    bytes -> check sizes -> decode -> turn by EXIF -> RGB on white -> antialiased bicubic -> tiles, overview

Pillow opens a file by its header and decodes later, so a picture's pixels are bounded before memory is taken.
Colour profiles are ignored.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from afm_mlx.errors import ImageError, reason_of
from afm_mlx.files import read_file
from afm_mlx.vision_config import VisionConfig, check_mode

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of pictures, by Pillow's names."""
MAX_BYTES = 64 << 20
"""Maximum bytes of a picture's file."""
MAX_PIXELS = 64 << 20
"""Maximum pixels of a picture: 64 Mi, such as 8192 x 8192. Decoding takes up to 16 bytes for each."""

# Of pictures of 89 million pixels and more, which are refused here, and of damaged metadata.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A picture as a model with a `VisionConfig` takes it.

    Args:
        tiles: (T, S, S, 3) uint8 colours of T tiles.
        mode: "high", "balanced" or "rapid".
        tokens: its tokens in a prompt.
        digest: SHA-256 of the mode and the tiles; pictures with the same digest have the same features.
        size: width and height in pixels of the picture before it was fitted, after turning.
    """

    tiles: np.ndarray
    mode: str
    tokens: int
    digest: bytes
    size: tuple[int, int]


def read_image(
    source: bytes | Path, config: VisionConfig, mode: str = "auto", max_pixels: int = MAX_PIXELS
) -> PromptImage:
    """Read a picture for a model.

    Args:
        source: the content of a picture's file, or its path; of an animation, the first frame counts.
        mode: one of `vision_config.MODES`, or "auto" to choose one by the picture's size.
        max_pixels: larger pictures are refused before they are decoded.

    Raises:
        ImageError: if the picture can't be read, is in another format, or is too large.
    """
    if mode != "auto":
        check_mode(mode)
    name = "The image" if isinstance(source, bytes) else f"The image {source}"
    try:
        data = source if isinstance(source, bytes) else read_file(source, MAX_BYTES)
    except (OSError, ValueError) as error:  # or a name that no file can have
        raise ImageError(f"{name} can't be read: {reason_of(error)}.") from None
    if len(data) > MAX_BYTES:
        raise ImageError(
            f"{name} has {len(data):,} bytes; allowed are {MAX_BYTES:,}. Save it smaller."
        )
    picture = _decode(data, name, max_pixels)
    if mode == "auto":
        mode = config.mode_of(*picture.size)
    tiles = np.stack(list(_tiles(picture, config, mode)))
    digest = hashlib.sha256(mode.encode() + b"\0" + tiles.tobytes()).digest()
    return PromptImage(tiles, mode, config.tokens(mode), digest, picture.size)


def _decode(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """Return a picture in RGB, turned by its EXIF data."""
    # Decoders raise what they like for damaged data.
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ImageError(
            f"{name} has far more than {max_pixels:,} pixels, the most that are allowed. Save it smaller."
        ) from None
    except Image.UnidentifiedImageError:
        raise ImageError(
            f"{name} is in no format that is read: {', '.join(FORMATS)}. It begins with {data[:8]!r}."
        ) from None
    except Exception as error:
        raise ImageError(f"{name} is damaged: {reason_of(error)}.") from None
    width, height = picture.size
    if width * height > max_pixels:
        raise ImageError(
            f"{name} is {width:,} x {height:,} pixels; allowed are {max_pixels:,}. Save it smaller."
        )
    if min(width, height) < 1:
        raise ImageError(f"{name} is {width} x {height} pixels; at least 1 x 1 is needed.")
    try:
        picture.load()
        with suppress(Exception):  # damaged EXIF data
            picture = ImageOps.exif_transpose(picture)
        return _rgb(picture)
    except ImageError as error:
        raise ImageError(f"{name} {error}") from None
    except Exception as error:
        raise ImageError(
            f"{name} can't be decoded: {reason_of(error)}. It is damaged, or of a rare kind: save it as PNG."
        ) from None


def _rgb(picture: Image.Image) -> Image.Image:
    """Convert a decoded picture to RGB, on white where it is transparent."""
    if picture.mode == "F" or picture.mode.startswith("I"):
        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            raise ImageError("has numbers of 32 bits for each pixel; save it with 8 or 16 bits.")
        clear = picture.info.get("transparency")  # the value of pixels that are transparent
        picture = Image.fromarray((values >> 8).astype(np.uint8))
        if clear is not None:
            picture.putalpha(Image.fromarray(255 * (values != clear).astype(np.uint8)))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def _tiles(picture: Image.Image, config: VisionConfig, mode: str) -> Iterator[np.ndarray]:
    """Yield the tiles (S, S, 3) of a mode in the order of their tokens."""
    side = config.tile_size(mode)
    overview = _fit(picture, side, config)
    if mode != "high":
        yield overview
        return
    count = config.tile_grid
    whole = _fit(picture, side * count, config).reshape(count, side, count, side, 3).swapaxes(1, 2)
    tiles = list(whole.reshape(-1, side, side, 3))
    last = config.images.tile_order == "tiles_then_overview"
    yield from [*tiles, overview] if last else [overview, *tiles]


def _fit(picture: Image.Image, side: int, config: VisionConfig) -> np.ndarray:
    """Return a picture as a square (side, side, 3) of uint8 colours, by the config's rule."""
    images, cubic = config.images, Image.Resampling.BICUBIC
    width, height = picture.size
    if images.fit == "letterbox":
        scale = side / max(width, height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        mean = tuple(round(255 * value) for value in images.mean)
        square = Image.new("RGB", (side, side), mean)
        square.paste(picture.resize(size, cubic), ((side - size[0]) // 2, (side - size[1]) // 2))
    elif images.fit == "cover":
        square = ImageOps.fit(picture, (side, side), cubic)
    else:
        square = picture.resize((side, side), cubic)
    return np.asarray(square)
