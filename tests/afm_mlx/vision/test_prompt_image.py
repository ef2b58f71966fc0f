"""Pictures to tiles: every kind of file, turned, on white, fitted and cut; and what is refused."""

import dataclasses
import hashlib
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from afm_mlx.errors import ImageError
from afm_mlx.vision import prompt_image
from afm_mlx.vision.prompt_image import read_image
from afm_mlx.vision_config import ImageConfig
from tests.tools.cases import each
from tests.tools.vision import TINY, picture

SIDE = TINY.image_size


def with_fit(fit, **changes):
    return dataclasses.replace(TINY, images=ImageConfig(fit=fit, **changes))


STRETCH = with_fit("stretch")


def saved(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def colours(rng, width, height, channels=3):
    return rng.integers(0, 256, (height, width, channels)).astype(np.uint8)


def seen(data, config=STRETCH):
    """The pixels of a picture that has the encoder's size already."""
    return read_image(data, config, "balanced").tiles[0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_cameras_say(rng, orientation):
    image = Image.fromarray(colours(rng, SIDE, SIDE))
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = seen(saved(image, exif=exif))
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    wanted = image.transpose(turns[orientation]) if orientation > 1 else image
    assert np.array_equal(got, np.asarray(wanted))
    tall = saved(Image.new("RGB", (30, 10)), exif=exif)
    assert read_image(tall, TINY).size == ((10, 30) if orientation >= 5 else (30, 10))


def test_damaged_exif_turns_nothing(rng):
    image = Image.fromarray(colours(rng, SIDE, SIDE))
    got = seen(saved(image, exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff"))
    assert np.array_equal(got, np.asarray(image))


def on_white(rgb, alpha):
    alpha = alpha.astype(float)[..., None] / 255
    return rgb * alpha + 255 * (1 - alpha)


def test_every_kind_of_pixel(rng):
    rgb, grey = colours(rng, SIDE, SIDE), colours(rng, SIDE, SIDE)[..., 0]
    alpha = colours(rng, SIDE, SIDE)[..., 0]
    greys = np.repeat(grey[..., None], 3, axis=2)
    palette = Image.fromarray(rgb).quantize(7)
    of_palette = np.asarray(palette.convert("RGB"))
    clear = np.asarray(palette) == 2
    words = rng.integers(0, 1 << 16, (SIDE, SIDE)).astype(np.uint16)
    high = np.repeat((words >> 8).astype(np.uint8)[..., None], 3, axis=2)
    cases = {
        "RGB": (Image.fromarray(rgb), {}, rgb),
        "L": (Image.fromarray(grey), {}, greys),
        "1": (Image.fromarray(grey).convert("1", dither=0), {}, np.where(greys > 127, 255, 0)),
        "LA": (Image.fromarray(np.dstack([grey, alpha])), {}, on_white(greys, alpha)),
        "RGBA": (Image.fromarray(np.dstack([rgb, alpha])), {}, on_white(rgb, alpha)),
        "P": (palette, {}, of_palette),
        "P, transparent": (
            palette,
            {"transparency": 2},
            np.where(clear[..., None], 255, of_palette),
        ),
        "16 bits": (Image.fromarray(words), {}, high),
        "16 bits, transparent": (
            Image.fromarray(words),
            {"transparency": int(words[0, 0])},
            np.where((words == words[0, 0])[..., None], 255, high),
        ),
    }
    for name, (image, options, wanted) in cases.items():
        got = seen(saved(image, **options))
        assert np.abs(got.astype(float) - wanted).max() <= 1, name
    # Formats of other kinds of pixels.
    cmyk = Image.fromarray(rgb).convert("CMYK")
    for data, wanted in (
        (saved(cmyk, "TIFF"), cmyk.convert("RGB")),
        (saved(Image.fromarray(words), "TIFF"), Image.fromarray(high)),
        (saved(Image.fromarray(words.astype(">u2")), "TIFF"), Image.fromarray(high)),
        (saved(Image.fromarray(words.astype(np.int32)), "TIFF"), Image.fromarray(high)),
        (saved(Image.fromarray(rgb), "BMP"), Image.fromarray(rgb)),
        (saved(Image.fromarray(rgb), "WEBP", lossless=True), Image.fromarray(rgb)),
    ):
        assert np.array_equal(seen(data), np.asarray(wanted))
    for image in (Image.fromarray(rgb), cmyk):
        got = seen(saved(image, "JPEG", quality=100, subsampling=0)).astype(float)
        assert np.abs(got - np.asarray(image.convert("RGB"))).mean() < 3


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(rng, format):
    frames = [Image.fromarray(colours(rng, SIDE, SIDE)).quantize(9) for _ in range(3)]
    frames = [frame.convert("RGB") for frame in frames]
    options = {"lossless": True} if format == "WEBP" else {}
    data = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert np.abs(seen(data).astype(int) - np.asarray(frames[0])).max() <= 1


# -- fitting


def test_a_letterbox_keeps_the_aspect_and_has_bars_of_the_mean(rng):
    data = saved(Image.fromarray(colours(rng, 60, 30)))
    got = read_image(data, with_fit("letterbox"), "balanced").tiles[0]
    image = Image.open(io.BytesIO(data)).resize((SIDE, SIDE // 2), Image.Resampling.BICUBIC)
    top = (SIDE - SIDE // 2) // 2
    assert np.array_equal(got[top : top + SIDE // 2], np.asarray(image))
    bars = np.concatenate([got[:top], got[top + SIDE // 2 :]]).reshape(-1, 3)
    assert (np.unique(bars, axis=0) == [[123, 117, 104]]).all()


def test_cover_cuts_the_longer_side(rng):
    image = Image.fromarray(colours(rng, 2 * SIDE, SIDE))
    got = read_image(saved(image), with_fit("cover"), "balanced").tiles[0]
    assert np.array_equal(got, np.asarray(image)[:, SIDE // 2 : SIDE // 2 + SIDE])


def test_stretch_fills_the_square(rng):
    image = Image.fromarray(colours(rng, 2 * SIDE, SIDE))
    wanted = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    assert np.array_equal(seen(saved(image)), np.asarray(wanted))


@pytest.mark.parametrize("order", ["tiles_then_overview", "overview_then_tiles"])
def test_tiles_are_row_by_row_and_the_overview_is_the_whole(rng, order):
    image = Image.fromarray(colours(rng, 2 * SIDE, 2 * SIDE))
    whole = np.asarray(image)
    got = list(read_image(saved(image), with_fit("stretch", tile_order=order), "high").tiles)
    overview = got.pop() if order == "tiles_then_overview" else got.pop(0)
    wanted = [whole[:SIDE, :SIDE], whole[:SIDE, SIDE:], whole[SIDE:, :SIDE], whole[SIDE:, SIDE:]]
    assert all(map(np.array_equal, got, wanted))
    assert np.array_equal(overview, ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.BICUBIC))


def test_long_and_small_pictures(rng):
    for width, height in ((1, 100_000), (100_000, 1), (1, 1), (7, 3)):
        image = read_image(saved(Image.new("L", (width, height))), TINY, "balanced")
        assert image.tiles.shape == (1, SIDE, SIDE, 3)
        assert image.size == (width, height)


@each(
    "width, height, mode",
    [(28, 28, "rapid"), (29, 1, "balanced"), (1, 84, "balanced"), (85, 2, "high"), (3, 3, "rapid")],
)
def test_the_longer_side_chooses_the_mode(rng, width, height, mode):
    image = read_image(picture(rng, width, height), TINY)
    assert image.mode == mode
    assert image.tokens == TINY.tokens(mode)
    assert len(image.tiles) == (5 if mode == "high" else 1)


def test_a_digest_is_of_the_pixels_that_the_model_sees(rng, tmp_path):
    image = Image.fromarray(colours(rng, SIDE, SIDE))
    data = saved(image)
    (path := tmp_path / "a.png").write_bytes(data)
    one = read_image(data, TINY, "balanced")
    assert one.digest == hashlib.sha256(b"balanced\0" + one.tiles.tobytes()).digest()
    same = [path, saved(image, "BMP"), saved(image.convert("RGBA"))]
    assert {read_image(each, TINY, "balanced").digest for each in same} == {one.digest}
    changed = np.array(image)
    changed[3, 5, 1] ^= 1
    others = [
        read_image(saved(Image.fromarray(changed)), TINY, "balanced"),
        read_image(data, TINY, "high"),
        read_image(data, TINY, "rapid"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4


# -- refused


def test_large_pictures_are_refused_before_they_are_decoded(rng, monkeypatch):
    """The file holds a header, and no pixels that could be decoded."""
    header = saved(Image.new("L", (9000, 9000)))[:60]
    for most in (1000, prompt_image.MAX_PIXELS):
        with pytest.raises(ImageError, match=f"is 9,000 x 9,000 pixels; allowed are {most:,}"):
            read_image(header, TINY, max_pixels=most)
    bomb = bytearray(header)
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4, "big")
    with pytest.raises(ImageError, match="has far more than 67,108,864 pixels"):
        read_image(bytes(bomb), TINY)
    monkeypatch.setattr(prompt_image, "MAX_BYTES", 10)
    with pytest.raises(ImageError, match=r"has 60 bytes; allowed are 10\."):
        read_image(header, TINY)


def test_files_that_hold_no_picture(rng, tmp_path):
    data = picture(rng, 40, 40)
    for bad, words in (
        (b"", "is in no format that is read: PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "It begins with b'<svg xml'"),
        (b"%PDF-1.7", "is in no format"),
        (saved(Image.new("RGB", (9, 9)), "PPM"), "is in no format"),
        (data[:-40], "can't be decoded"),
        (data[:50] + bytes(50) + data[100:], "can't be decoded"),
        (saved(Image.new("F", (9, 9)), "TIFF"), "has numbers of 32 bits for each pixel"),
        (saved(Image.new("I", (9, 9), 1 << 20), "TIFF"), "has numbers of 32 bits"),
    ):
        with pytest.raises(ImageError, match=words) as error:
            read_image(bad, TINY)
        assert "\n" not in str(error.value)
    with pytest.raises(ImageError, match=r"missing\.png can't be read: No such file"):
        read_image(tmp_path / "missing.png", TINY)
    with pytest.raises(ImageError, match="can't be read: it is a folder"):
        read_image(tmp_path, TINY)
    with pytest.raises(ValueError, match="mode is 'low'; allowed are high, balanced, rapid"):
        read_image(data, TINY, "low")
