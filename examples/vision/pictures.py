"""Draw pictures with Pillow by a seed, with questions and short answers about them.

A picture has one of these scenes: a digit, a number, a word, a shape, two shapes, or several equal shapes. Its
longer side is 168 pixels in the mode "high", 84 in "balanced" and 28 in "rapid", the sides of the small
encoder's modes, and glyphs are a share of it:

| scene | height of the ink, in shares of the longer side |
| --- | --- |
| digit, number, word | 0.25 to 0.65, 0.2 to 0.4, 0.18 to 0.3 (less where a word would not fit) |
| fine | a digit of 8 to 14 pixels at 84 |
| small | a digit of 8 to 10 pixels at 168: 4 to 5 in the mode balanced, and 1.5 in rapid |

What is tested is not in the training pictures: six fonts, one of five cells of the shades of each colour, and
one of five cells of the places of each object, except for text that is too wide to choose its place. Fonts are
the ones that matplotlib and Pillow carry.

    python examples/vision/pictures.py --out DATA --train 2000 --test 200 --seed 0

writes PNG files, and chats about them as JSON lines for `afm-mlx lora`, `evaluate` and `perplexity`.
"""

from __future__ import annotations

import argparse
import colorsys
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

BILINEAR = Image.Resampling.BILINEAR
SIDES = {"high": 168, "balanced": 84, "rapid": 28}
"""Pixels of the longer side by the mode that takes a picture as it is."""

TRAIN_FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSans-BoldOblique DejaVuSansMono "
    "DejaVuSansMono-Oblique DejaVuSansMono-BoldOblique DejaVuSerif DejaVuSerif-Bold "
    "DejaVuSerif-BoldItalic STIXGeneral STIXGeneralItalic STIXGeneralBolIta cmr10 cmtt10"
).split()
TEST_FONTS = ["DejaVuSansMono-Bold", "DejaVuSerif-Italic", "STIXGeneralBol", "cmss10", "cmb10", ""]
"""The empty name is Pillow's own font, whose family no training font has."""

COLOURS = {  # hue, saturation, value: lowest and highest
    "red": ((-0.02, 0.02), (0.8, 1), (0.7, 1)),
    "orange": ((0.07, 0.1), (0.85, 1), (0.9, 1)),
    "yellow": ((0.14, 0.17), (0.8, 1), (0.9, 1)),
    "green": ((0.29, 0.38), (0.7, 1), (0.45, 0.8)),
    "blue": ((0.58, 0.66), (0.75, 1), (0.6, 1)),
    "purple": ((0.75, 0.8), (0.6, 1), (0.45, 0.75)),
    "pink": ((0.88, 0.93), (0.35, 0.6), (0.95, 1)),
    "brown": ((0.05, 0.08), (0.65, 0.9), (0.35, 0.5)),
    "black": ((0, 1), (0, 0.1), (0, 0.15)),
    "white": ((0, 1), (0, 0.05), (0.95, 1)),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLACES = ("top left", "top right", "bottom left", "bottom right")
WORDS = (
    "ant arm bag bed bee box boy bus cat cow cup day dog ear egg fan fig fox hat hen ice ink jam jar key kid "
    "leg lid man map mud net nut oak owl pan pea pen pie pig pot red rug sea sky sun tea toe toy van web yes "
    "baby bird boat book cake coat dark door duck fish game girl hand home king lamp leaf moon nose open "
    "park rain ring road rose ship snow star stop taxi tree wind wood"
).split()
SCENES = ("digit", "number", "word", "shape", "pair", "count", "fine", "small")
_HELD_OUT = 5  # one cell of five is for testing


@dataclass(frozen=True)
class Picture:
    """A picture (RGB), what it shows in words, and questions with their answers, by the name of their task."""

    image: Image.Image
    caption: str
    questions: tuple[tuple[str, str, str], ...]  # task, question, answer


def draw(
    scene: str, seed: str, side: int = SIDES["balanced"], test: bool = False, bent: bool = False
) -> Picture:
    """Draw the picture of a scene that belongs to a seed, from what is trained or from what is tested.

    `side` is the number of pixels of the longer side. With `bent`, text is slanted, turned, stretched and made
    bolder by the seed.
    """
    for attempt in count():
        try:
            random = Random(f"{scene} {seed} {test} {attempt}")
            return _Canvas(random, side, test, bent).draw(scene)
        except _NoPlaceError:  # for several shapes: drawn again
            continue
    raise AssertionError


class _NoPlaceError(Exception):
    pass


class _Canvas:
    def __init__(self, random: Random, side: int, test: bool, bent: bool):
        self.random, self.test, self.bent = random, test, bent
        short = round(side * random.uniform(0.65, 1))
        width, height = random.choice([(side, short), (short, side)])
        self.unit = 2 * side  # shapes are drawn twice as large, then reduced, for smooth edges
        self.size = 2 * width, 2 * height

    def draw(self, scene: str) -> Picture:
        self.background = self._background()
        self.image = Image.new("RGB", self.size, self.background)
        self.pen = ImageDraw.Draw(self.image)
        caption, questions = getattr(self, f"_{scene}")()
        return Picture(self.image.reduce(2), caption, tuple(questions))

    # -- scenes

    def _digit(self, lowest: float = 0.25, highest: float = 0.65, name: str = "digit") -> Any:
        if self.unit == 2 * SIDES["rapid"]:  # readable at 28 pixels
            lowest, highest = 0.45, 0.85
        digit = str(self.random.randrange(10))
        where, colour = self._write(digit, self.random.uniform(lowest, highest))
        questions = [
            (name, "Which digit is it?", digit),
            (f"{name} colour", "What colour is it?", colour),
            (f"{name} place", "Where is it?", where),
        ]
        return f"{colour} {digit} {where}", questions

    def _fine(self) -> Any:
        return self._digit(8 / 84, 14 / 84, "fine digit")

    def _small(self) -> Any:
        return self._digit(8 / 168, 10 / 168, "small digit")

    def _number(self) -> Any:
        number = str(self.random.randrange(10, 1000))
        _, colour = self._write(number, self.random.uniform(0.2, 0.4))
        return f"{colour} {number}", [("number", "What does it say?", number)]

    def _word(self) -> Any:
        word = self.random.choice(WORDS)
        _, colour = self._write(word, self.random.uniform(0.18, 0.3))
        return f"{colour} {word}", [
            ("word", "What does it say?", word),
            ("word colour", "What colour is it?", colour),
        ]

    def _shape(self) -> Any:
        shape, size = self.random.choice(SHAPES), self._pixels(0.2, 0.5)
        colour, rgb = self._colour()
        x, y = self._place(size, size)
        self._trace(shape, x, y, size, rgb)
        where = self._name_of_place(x + size / 2, y + size / 2)
        return f"{colour} {shape} {where}", [
            ("shape", "What shape is it?", shape),
            ("shape colour", "What colour is it?", colour),
            ("shape place", "Where is it?", where),
        ]

    def _pair(self) -> Any:
        names = self.random.sample(SHAPES, 2)
        found, taken, colours = [], [], []
        for shape in names:
            size = self._pixels(0.2, 0.3)
            colour, rgb = self._colour(colours)
            x, y = self._free_place(size, taken, apart=True)
            taken.append((x, y, size))
            colours.append(colour)
            self._trace(shape, x, y, size, rgb)
            found.append((x, shape, colour))
        (_, left, left_colour), (_, right, right_colour) = sorted(found)
        asked = self.random.randrange(2)
        (_, shape, colour) = found[asked]
        return f"{left_colour} {left} left of {right_colour} {right}", [
            ("colour of shape", f"What colour is the {shape}?", colour),
            ("shape of colour", f"What shape is {found[1 - asked][2]}?", found[1 - asked][1]),
            ("left", "What is on the left?", f"{left_colour} {left}"),
            ("right", "What is on the right?", f"{right_colour} {right}"),
        ]

    def _count(self) -> Any:
        n, shape = self.random.randint(1, 6), self.random.choice(SHAPES)
        colour, rgb = self._colour()
        size, taken = self._pixels(0.13, 0.2), []
        for _ in range(n):
            x, y = self._free_place(size, taken)
            taken.append((x, y, size))
            self._trace(shape, x, y, size, rgb)
        plural = "crosses" if shape == "cross" else f"{shape}s"
        return f"{n} {colour} {shape if n == 1 else plural}", [
            ("count", "How many are there?", str(n)),
            ("count shape", "What shape is it?", shape),
        ]

    # -- colours, fonts, places

    def _split(self, *shares: float) -> bool:
        """True if a point of the unit cube is in a cell of the canvas's split."""
        cell = sum(
            int(share * _HELD_OUT) * factor
            for share, factor in zip(shares, (1, 2, 3), strict=False)
        )
        return (cell % _HELD_OUT == 0) == self.test

    def _colour(self, others: Collection[str] = ()) -> tuple[str, tuple[int, int, int]]:
        """Draw a colour's name and a shade of it that stands out from the background."""
        while True:
            name = self.random.choice([name for name in COLOURS if name not in others])
            shares = [self.random.random() for _ in range(3)]
            if not self._split(*shares):
                continue
            hsv = [
                low + s * (high - low) for s, (low, high) in zip(shares, COLOURS[name], strict=True)
            ]
            rgb = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hsv[0] % 1, *hsv[1:]))
            if sum(abs(a - b) for a, b in zip(rgb, self.background, strict=True)) > 200:
                return name, rgb

    def _background(self) -> tuple[int, int, int]:
        """Draw a light or a dark colour with little saturation."""
        value = self.random.choice([(0.85, 1), (0.0, 0.25)])
        hsv = self.random.random(), self.random.uniform(0, 0.15), self.random.uniform(*value)
        return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(*hsv))

    def _pixels(self, lowest: float, highest: float) -> int:
        return round(self.unit * self.random.uniform(lowest, highest))

    def _place(self, width: int, height: int) -> tuple[int, int]:
        """Draw the corner of a box whose middle is clearly in one quarter, in a cell of the split."""
        room = [max(0, all_ - own) for all_, own in zip(self.size, (width, height), strict=True)]
        for attempt in range(100):
            x, y = (round(self.random.uniform(0, most)) for most in room)
            middle = (x + width / 2) / self.size[0], (y + height / 2) / self.size[1]
            # A box too large for its picture has no place of its own to choose.
            clear = attempt > 30 or min(abs(m - 0.5) for m in middle) > 0.04
            if clear and (attempt > 60 or self._split(*middle)):
                return x, y
        raise _NoPlaceError

    def _free_place(
        self, size: int, taken: list[tuple[int, int, int]], apart: bool = False
    ) -> tuple[int, int]:
        """Draw a place that overlaps none that is taken; with `apart`, clearly on another side of them."""
        gap = self.unit // 40
        for _ in range(50):
            x, y = self._place(size, size)
            if any(
                abs(x + size / 2 - a - b / 2) < (size + b) / 2 + gap
                and (apart or abs(y + size / 2 - c - b / 2) < (size + b) / 2 + gap)
                for a, c, b in taken
            ):
                continue
            return x, y
        raise _NoPlaceError

    def _name_of_place(self, x: float, y: float) -> str:
        return PLACES[2 * (y > self.size[1] / 2) + (x > self.size[0] / 2)]

    # -- ink

    def _write(self, text: str, height: float) -> tuple[str, str]:
        """Write a text whose ink is `height` of the longer side; return its place and its colour."""
        name = self.random.choice(TEST_FONTS if self.test else TRAIN_FONTS)
        pixels = self.unit * height
        box = _box(name, 100, text)
        size = pixels * 100 / (box[3] - box[1])
        most = 0.94 * self.size[0] * 100 / (box[2] - box[0])
        size = round(min(size, most))
        font, box = _font(name, size), _box(name, size, text)
        colour, rgb = self._colour()
        width, height = box[2] - box[0], box[3] - box[1]
        if self.bent:
            ink = self._bend(text, font, box)
            width, height = ink.size
            x, y = self._place(width, height)
            self.image.paste(rgb, (x, y), ink)
        else:
            x, y = self._place(width, height)
            self.pen.text((x - box[0], y - box[1]), text, rgb, font)
        return self._name_of_place(x + width / 2, y + height / 2), colour

    def _bend(self, text: str, font: Any, box: tuple[int, int, int, int]) -> Image.Image:
        """Return a text's ink (L), bent, no larger than the canvas."""
        width, height = box[2] - box[0], box[3] - box[1]
        bolder = max(0, round(height * self.random.uniform(-0.06, 0.05)))
        edge = bolder + max(width, height) // 4
        ink = Image.new("L", (width + 2 * edge, height + 2 * edge))
        ImageDraw.Draw(ink).text(
            (edge - box[0], edge - box[1]), text, 255, font, stroke_width=bolder
        )
        slant, middle = self.random.uniform(-0.25, 0.25), ink.height / 2
        ink = ink.transform(
            ink.size, Image.Transform.AFFINE, (1, slant, -slant * middle, 0, 1, 0), BILINEAR
        )
        ink = ink.rotate(self.random.uniform(-8, 8), BILINEAR)
        ink = ink.crop(ink.getbbox())
        stretch = self.random.uniform(0.75, 1.3)
        width, height = ink.width * stretch, ink.height
        most = min(1.0, 0.94 * self.size[0] / width, 0.94 * self.size[1] / height)
        return ink.resize((max(1, round(width * most)), max(1, round(height * most))), BILINEAR)

    def _trace(self, shape: str, x: int, y: int, size: int, rgb: tuple[int, int, int]) -> None:
        pen, third = self.pen, size / 3
        if shape == "circle":
            pen.ellipse((x, y, x + size, y + size), rgb)
        elif shape == "ring":
            pen.ellipse((x, y, x + size, y + size), outline=rgb, width=max(2, round(size / 6)))
        elif shape == "square":
            pen.rectangle((x, y, x + size, y + size), rgb)
        elif shape == "triangle":
            pen.polygon([(x + size / 2, y), (x + size, y + size), (x, y + size)], rgb)
        elif shape == "cross":
            pen.rectangle((x + third, y, x + 2 * third, y + size), rgb)
            pen.rectangle((x, y + third, x + size, y + 2 * third), rgb)
        else:
            pen.polygon([(x + size * a, y + size * b) for a, b in _STAR], rgb)


_STAR = [
    (0.5, 0), (0.62, 0.36), (1, 0.38), (0.7, 0.6), (0.81, 0.97),
    (0.5, 0.76), (0.19, 0.97), (0.3, 0.6), (0, 0.38), (0.38, 0.36),
]  # fmt: skip


@cache
def _font(name: str, size: int) -> Any:
    if not name:
        return ImageFont.load_default(size)
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", f"{name}.ttf"), size)


@cache
def _box(name: str, size: int, text: str) -> tuple[int, int, int, int]:
    """Return the box of a text's ink, drawn at (0, 0)."""
    return tuple(map(round, _font(name, size).getbbox(text)))


# -- chats


def write_chats(folder: Path, split: str, pictures: int, seed: int) -> None:
    """Write pictures and a chat with all questions about each; of "test", examples for `afm-mlx evaluate`."""
    random, records = Random(f"{seed} {split}"), []
    for index in range(pictures):
        scene = SCENES[index % len(SCENES)]
        mode = "high" if scene == "small" else random.choice(["balanced", "balanced", "high"])
        picture = draw(scene, f"{seed} {split} {index}", SIDES[mode], test=split == "test")
        name = f"{split}/{index:05}.png"
        picture.image.save(folder / name)
        asked: list[Any] = [{"type": "image", "path": name}]
        if split == "test":
            records += [
                {
                    "task": task,
                    "messages": [{"role": "user", "content": [*asked, _text(question)]}],
                    "answer": answer,
                }
                for task, question, answer in picture.questions
            ]
            continue
        messages = []
        for _, question, answer in picture.questions:
            messages.append({"role": "user", "content": [*asked, _text(question)]})
            messages.append({"role": "assistant", "content": answer})
            asked = []
        records.append({"messages": messages})
    name = "evaluation" if split == "test" else split
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--train", type=int, default=2000, help="pictures to train on")
    parser.add_argument("--test", type=int, default=400, help="pictures to test on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for split, pictures in (
        ("train", options.train),
        ("valid", max(8, options.train // 20)),
        ("test", options.test),
    ):
        (options.out / split).mkdir(parents=True)
        write_chats(options.out, split, pictures, options.seed)


if __name__ == "__main__":
    main()
