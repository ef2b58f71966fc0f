"""Hostile pictures in requests: each is the right picture, or a 400 that names its place, in bounded memory."""

import base64
import io
import json
import struct
import zlib
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from afm_mlx.server import images as images_module
from afm_mlx.vision.prompt_image import read_image
from tests.hostile.harness import Case, run_cases
from tests.tools.vision import TINY
from tests.tools.vision_server import MODEL, seeing_server

PIXELS = 2_000_000
ROUTES = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/api/chat")


@pytest.fixture(scope="module")
def seeing():
    with (
        seeing_server(max_tokens=1, max_image_pixels=PIXELS) as running,
        running.server.http() as http,
        pytest.MonkeyPatch.context() as patch,
    ):
        found = SimpleNamespace(http=http, images=[])

        def read(*arguments):
            found.images.append(read_image(*arguments))
            return found.images[-1]

        patch.setattr(images_module, "read_image", read)
        yield found


def pick(rng, values):
    return values[int(rng.integers(len(values)))]


# -- pictures whose halves have known colours


class Halves:
    """A picture whose left and right halves have one colour each, and what of it has to be seen."""

    def __init__(self, rng, least=8):
        self.size = tuple(int(n) for n in rng.integers(least, 150, 2))
        self.colours = [tuple(int(c) for c in rng.integers(0, 256, 3)) for _ in range(2)]
        self.tolerance = 12

    def image(self, mode="RGB"):
        image = Image.new("RGB", self.size, self.colours[0])
        image.paste(self.colours[1], (self.size[0] // 2, 0, *self.size))
        if mode in ("1", "L", "LA", "I;16"):  # of two different greys
            self.colours = [(0, 0, 0), (255, 255, 255)]
            grey = Image.new("L", self.size, 0)
            grey.paste(255, (self.size[0] // 2, 0, *self.size))
            if mode == "I;16":
                return Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
            return grey.convert(mode)
        if mode == "RGBA":  # the right half is transparent: white
            image.putalpha(255)
            image.paste((0, 0, 0, 0), (self.size[0] // 2, 0, *self.size))
            self.colours[1] = (255, 255, 255)
        elif mode == "P":
            image = image.quantize(8)
            self.tolerance = 24
        elif mode == "CMYK":
            image = image.convert("CMYK")
        return image

    def saved(self, format, image, **options):
        file = io.BytesIO()
        image.save(file, format, **options)
        if format in ("JPEG", "GIF") or (format == "WEBP" and not options.get("lossless")):
            self.tolerance = 60
        return file.getvalue()

    def check(self, found):
        """Compare the middles of both halves, in the last tile, which is the overview."""
        tile = found.tiles[-1].astype(int)
        side = len(tile)
        scale = side / max(self.size)
        width, left = self.size[0] * scale, (side - self.size[0] * scale) / 2
        for share, colour in ((0.25, self.colours[0]), (0.75, self.colours[1])):
            shown = tile[side // 2, int(left + share * width)]
            assert np.abs(shown - colour).max() <= self.tolerance, (shown, colour)


def any_kind(rng):
    """A whole picture of some kind: what it is, its file, and what has to be seen of it."""
    halves = Halves(rng)
    kinds = {
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
        "JPEG": ("L", "RGB", "CMYK"),
        "WEBP": ("RGB", "RGBA"),
        "GIF": ("L", "P"),
        "BMP": ("1", "L", "P", "RGB"),
        "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"),
    }
    format = pick(rng, list(kinds))
    mode = pick(rng, kinds[format])
    options = {}
    if format == "WEBP":
        options = {"lossless": bool(rng.integers(2))}
    elif format == "TIFF":
        options = {"compression": pick(rng, ["raw", "tiff_lzw", "tiff_adobe_deflate"])}
    elif format == "JPEG":
        options = {"progressive": bool(rng.integers(2)), "quality": 95}
    image = halves.image(mode)
    if format in ("GIF", "WEBP", "TIFF", "PNG") and mode in ("RGB", "P") and rng.random() < 0.3:
        other = Image.new("RGB", halves.size, (1, 2, 3))
        options |= {"save_all": True, "append_images": [other] * 3}
        mode += " animated"
    return (
        f"{format} {mode} {halves.size} {options}",
        halves.saved(format, image, **options),
        halves,
    )


def thin(rng):
    """A picture of 1 x 100,000 pixels, or 100,000 x 1."""
    halves = Halves(rng)
    halves.size = pick(rng, [(1, 100_000), (100_000, 1)])
    return f"{halves.size}", halves.saved("PNG", Image.new("RGB", halves.size)), None


def turned(rng):
    """A picture that is stored turned, with the EXIF entry that says how."""
    halves = Halves(rng)
    image, exif = halves.image(), Image.Exif()
    orientation = int(rng.integers(1, 9))
    turns = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    exif[0x112] = orientation
    for turn in turns.get(orientation, []):
        image = image.transpose(turn)
    format = pick(rng, ["JPEG", "PNG", "WEBP", "TIFF"])
    return f"turned {orientation} {format}", halves.saved(format, image, exif=exif), halves


# -- damaged and hostile files


def truncated(rng):
    what, content, halves = any_kind(rng)
    at = int(rng.integers(len(content)))
    # Some formats can lose their last bytes, and others then show a part of the picture: no error says so.
    is_whole = len(content) - at <= 8
    return f"{what} truncated at {at}", content[:at], halves if is_whole else None


def damaged(rng):
    what, content, _ = any_kind(rng)
    content = bytearray(content)
    for at in rng.integers(0, len(content), int(rng.integers(1, 9))):
        content[at] = int(rng.integers(256))
    return f"{what} damaged", bytes(content), None


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, data, *more, bits=8, colours=2):
    head = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    body = b"".join([chunk(b"IHDR", head), *more, chunk(b"IDAT", data), chunk(b"IEND", b"")])
    return b"\x89PNG\r\n\x1a\n" + body


@cache
def zeros(count):
    """Compressed zeros."""
    return zlib.compress(bytes(count), 9)


BOMBS = {
    "PNG": lambda side: png(side, side, zeros(10**6)),
    "PNG of one bit": lambda side: png(20_000, 20_000, zeros(2501 * 20_000), bits=1, colours=0),
    "PNG with text": lambda side: png(
        9, 9, zeros(28 * 9), chunk(b"zTXt", b"a\0\0" + zeros(5 * 10**7))
    ),
    "PNG with a profile": lambda side: png(
        9, 9, zeros(28 * 9), chunk(b"iCCP", b"a\0\0" + zeros(5 * 10**7))
    ),
    "PNG with more data": lambda side: png(9, 9, zeros(5 * 10**7)),
    "GIF": lambda side: b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6)
    + b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x4c\x01\0;",
    "BMP": lambda side: b"BM"
    + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, side, side, 1, 24, 0, 0, 1, 1, 0, 0),
    "TIFF": lambda side: tiff(side),
    "JPEG": lambda side: b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, 65_500, 65_500, 3)
    + b"\1\x11\0\2\x11\0\3\x11\0" + b"\xff\xda\0\x0c\3\1\0\2\0\3\0\0\x3f\0" + bytes(99) + b"\xff\xd9",
    "WEBP": lambda side: b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8L"
    + struct.pack("<IBI", 10, 0x2F, 0x0FFFFFFF) + bytes(6),
}  # fmt: skip


def bomb(rng):
    """A small file that claims, or has, very many pixels or much text."""
    side = int(pick(rng, [1500, 20_000, 65_535, 2**31 - 1]))
    what = pick(rng, list(BOMBS))
    return f"bomb {what} {side}", BOMBS[what](side), None


def tiff(side):
    entries = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, side), (279, 4, 1, 100)]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    # Its list of pages is a circle.
    return (
        b"II*\0\x08\0\0\0"
        + struct.pack("<H", len(entries))
        + table
        + struct.pack("<I", 8)
        + bytes(100)
    )


OTHERS = [
    b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', b"<html>",
    b"%PDF-1.7\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n",
    b"\0\0\0\x18ftypheic" + bytes(60), b"\0\0\0\x1cftypavif" + bytes(60),
    b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), b"P6 9 9 255\n" + bytes(243), b"\0\0\1\0\1\0" + bytes(40),
    b"icns" + bytes(40), b"DDS " + bytes(200), b"8BPS\0\1" + bytes(40), b"", b"\0", b"GIF89a", b"BM",
    b"II*\0", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\xff\xff\xff\xffWEBPVP8 ",
]  # fmt: skip


def other_formats(rng):
    content = pick(rng, OTHERS)
    return f"{content[:30]!r}", content, None


def random_bytes(rng):
    return "random bytes", rng.bytes(int(rng.integers(1, 3000))), None


def wrong_magic(rng):
    """A whole picture whose first bytes are of another format."""
    what, content, _ = any_kind(rng)
    magic = pick(
        rng, [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\0", b"MM\0*"]
    )
    return f"{what} with {magic!r}", magic + content[len(magic) :], None


KINDS = [
    any_kind, any_kind, any_kind, turned, thin, truncated, truncated, damaged, bomb, bomb, other_formats,
    random_bytes, wrong_magic,
]  # fmt: skip


# -- in requests

WHOLE_URIS = ["data:image/png;base64,{}", "data:;base64,{}", "DATA:Image/JPEG;charset=x;BASE64,{}"]
BROKEN_URIS = [
    "data:image/png,{}", "data:image/png;base64", "data:image/png;base64,{}@", "{}", "image/png;base64,{}",
    "data:image/png;base64,é{}", "data:image/png;base64;{}", "javascript:{}", "file:///{}", " data:;base64,{}",
    "ftp://example.com/{}", "data:" + "x" * 300 + ";base64,{}",
]  # fmt: skip


def request_of(path, uri, coded):
    """A request with an image, and the place of the image in it."""
    if path == "/tokenize":
        part = {"type": "image_url", "image_url": {"url": uri}}
        place = "messages[0].content[1].image_url"
        return {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
        }, place
    if path == "/v1/responses/input_tokens":
        part = {"type": "input_image", "image_url": uri}
        return {"input": [{"role": "user", "content": [part]}]}, "input[0].content[0].image_url"
    if path == "/api/chat":
        body = {"stream": False, "options": {"num_predict": 1}}
        return body | {"messages": [{"role": "user", "images": [coded]}]}, "messages[0].images[0]"
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": coded},
    }
    return {
        "messages": [{"role": "user", "content": [block]}]
    }, "messages[0].content[0].source.data"


def test_each_picture_is_right_or_refused(seeing, rng):
    outcomes = {200: 0, 400: 0}

    def generate(rng):
        what, content, halves = pick(rng, KINDS)(rng)
        path, coded = pick(rng, ROUTES), base64.b64encode(content).decode()
        if rng.random() < 0.1:  # as MIME writes it
            coded = base64.encodebytes(content).decode()
        is_broken = path in ROUTES[::2] and rng.random() < 0.1
        uri = pick(rng, BROKEN_URIS if is_broken else WHOLE_URIS).format(coded)
        body, place = request_of(path, uri, coded)

        def run():
            seeing.images.clear()
            answered = seeing.http.post(path, json={"model": MODEL, **body})
            assert answered.status_code in outcomes, answered.text
            outcomes[answered.status_code] += 1
            if answered.status_code == 200:
                (image,) = seeing.images
                assert not is_broken, uri[:100]
                assert image.tokens == TINY.tokens(image.mode)
                if halves is not None:
                    halves.check(image)
                return
            error = answered.json()["error"]
            said = error if isinstance(error, str) else f"{error.get('param')} {error['message']}"
            assert place in said, said
            assert len(said) < 700, said
            assert halves is None or is_broken or "truncated" in what, said

        return Case(f"{path} {what} {uri[:60]}", run)

    run_cases(generate, rng, share=0.075)
    assert min(outcomes.values()) > 20, outcomes


def test_pixels_are_counted_before_they_are_decoded(seeing):
    """A picture at the limit is read, and one row more is refused, without its data."""
    height = PIXELS // 1000
    for rows, status in ((height, 200), (height + 1, 400)):
        content = png(1000, rows, zlib.compress(bytes(3001 * rows)) if status == 200 else b"")
        uri = f"data:;base64,{base64.b64encode(content).decode()}"
        body, _ = request_of("/tokenize", uri, "")
        answered = seeing.http.post("/tokenize", json={"model": MODEL, **body})
        assert answered.status_code == status, answered.text
    assert "allowed are 2,000,000" in json.dumps(answered.json())
