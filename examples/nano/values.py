"""Values that the tasks copy from the prompt: names, places, times, dates, amounts.

Every value is either a training value or a test value, decided by a hash of its text: the test split
asks the model to copy values that no training sample contains. Most names are built from syllables, so
the space is far too large to learn by heart and the model has to learn to copy.

All values start with a capital letter or a digit. The tokenizer keeps the space in front of those
apart (see `train_tokenizer.py`), which makes ` Mira` in a sentence and `"Mira"` in JSON the same tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

TEST_SHARE = 8  # one value in eight belongs to the test split

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w y z th".split()
_VOWELS = "a e i o u a e i o ai ea ia io ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "nd", "rt", "x", "ck"]
_NAME_ENDS = "a o en in an ia ie el us is ay y er on ara ette ina ard".split()
_PLACE_ENDS = "ton ville burg field ford port stad dale mouth ham wick more holm land gate".split()
_REAL_NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Isla Jack Karen Liam Maya Noah Olivia Paul Quinn Rosa "
    "Sam Tara Uma Victor Wendy Xavier Yara Zoe Alice Bruno Chloe Daniel Elena Frank Gina Hugo Ivy James "
    "Kate Leo Maria Nina Oscar Petra Ravi Sofia Tom Vera Will Amir Bella Carlos Diana Ethan Fatima George "
    "Hana Ian Julia Kofi Lena Mark Nora Omar Priya Robert Sara Theo Lucy Max Ella Adam Mia Peter Laura"
).split()
_REAL_CITIES = (
    "Paris London Berlin Madrid Rome Tokyo Oslo Vienna Lisbon Dublin Prague Athens Cairo Delhi Boston "
    "Chicago Denver Seattle Austin Toronto Sydney Nairobi Lima Zurich Geneva Munich Milan Porto Bergen"
).split()
_SUBJECTS = (
    "Budget Design Sales Project Team Product Marketing Security Garden Book Chess Music Science Safety "
    "Hiring Client Vendor Strategy Yoga Dance Film History Poetry Robotics Research Support Travel Wine"
).split()
_GATHERINGS = (
    "Review Meeting Workshop Call Dinner Lunch Party Class Demo Briefing Session Training Picnic Retreat "
    "Interview Kickoff Lecture Planning Checkup Seminar Panel Update Social"
).split()
_VENUES = (
    "Room Cafe Hall Studio Hotel Library Gallery Club Bistro Lounge Theater School Park".split()
)
_GOODS = (
    "Lamp Chair Desk Jacket Kettle Camera Printer Backpack Monitor Blender Guitar Bicycle Tent Mixer "
    "Keyboard Heater Speaker Sofa Ladder Drill Scooter Telescope Toaster Helmet Rug Mirror Clock"
).split()
_COLORS = "Red Blue Green Black White Grey Orange Purple Silver Golden Yellow Brown".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def split_of(value: str) -> str:
    """Return `"test"` or `"train"`, the one split that may use this value."""
    digest = hashlib.sha256(value.encode()).digest()
    return "test" if digest[0] % TEST_SHARE == 0 else "train"


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def _stem(rng: random.Random) -> str:
    stem = _syllable(rng)
    if len(stem) < 4 and rng.random() < 0.5:
        stem += _syllable(rng)
    return stem


def _first_name(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_REAL_NAMES)
    return (_stem(rng) + rng.choice(_NAME_ENDS)).capitalize()


def _name(rng: random.Random) -> str:
    name = _first_name(rng)
    return f"{name} {_stem(rng).capitalize()}" if rng.random() < 0.12 else name


def _city(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(_REAL_CITIES)
    return (_stem(rng) + rng.choice(_PLACE_ENDS)).capitalize()


def _venue(rng: random.Random) -> str:
    venue = rng.choice(_VENUES)
    if venue == "Room" or rng.random() < 0.2:
        return f"{venue} {rng.randint(2, 499)}"
    return f"{venue} {_stem(rng).capitalize()}"


def _time(rng: random.Random) -> str:
    if rng.random() < 0.25:
        minutes = f":{rng.randint(0, 59):02d}" if rng.random() < 0.6 else ""
        return f"{rng.randint(1, 12)}{minutes} {rng.choice(('am', 'pm'))}"
    return f"{rng.randint(6, 22)}:{rng.randint(0, 59):02d}"


def _date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"


_GENERATORS: dict[str, Callable[[random.Random], str]] = {
    "name": _name,
    "city": _city,
    "venue": _venue,
    "time": _time,
    "date": _date,
    "event": lambda rng: f"{rng.choice(_SUBJECTS)} {rng.choice(_GATHERINGS)}",
    "item": lambda rng: f"{rng.choice(_COLORS)} {rng.choice(_GOODS)}",
    "song": lambda rng: f"{rng.choice(_COLORS)} {_stem(rng).capitalize()}",
    "count": lambda rng: str(rng.randint(2, 60)),
    "amount": lambda rng: str(rng.randint(3, 999)),
    "code": lambda rng: f"{rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}{rng.randint(100, 9999)}",
}
KINDS = tuple(_GENERATORS)


class Values:
    """Draws values of one split, "train" or "test". Equal arguments draw equal values."""

    def __init__(self, rng: random.Random, split: str):
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}")
        self.rng = rng
        self.split = split

    def draw(self, kind: str, avoid: tuple[str, ...] = ()) -> str:
        """Return one value of `kind` (a key of `KINDS`) that is not in `avoid`."""
        while True:
            value = _GENERATORS[kind](self.rng)
            if split_of(value) == self.split and value not in avoid:
                return value

    def fill(self, template: str, slots: dict[str, str]) -> str:
        """Replace `{slot}` in `template`, drawing slots that `slots` does not hold yet into it.

        A slot is a kind, or a kind and a digit where a template needs two of a kind: `{name} {name2}`.
        """
        for part in template.split("{")[1:]:
            slot = part.split("}")[0]
            if slot not in slots:
                slots[slot] = self.draw(slot.rstrip("0123456789"), tuple(slots.values()))
        return template.format(**slots)
