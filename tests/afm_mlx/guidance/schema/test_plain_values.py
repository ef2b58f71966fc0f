"""Strings and numbers."""

import json
from datetime import date, datetime

from jsonschema import Draft202012Validator

from afm_mlx.guidance.schema.numbers import Numbers, exact, number_terminals
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.regular import has_text, matches
from afm_mlx.guidance.schema.strings import LOOSE, PATTERNS
from tests.tools.cases import each


@each(
    "schema, valid, invalid",
    [
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "é😀"], ["", "abc"]),
        ({"type": "string"}, ["", 'a"\\\n/\t'], [1]),
        ({"enum": ["\x00\x7f", "a"]}, ["a"], ["b"]),
        ({"type": "string", "pattern": "^[a-c]+$", "not": {"pattern": "bb"}}, ["abc", "bab"], ["abb", "d"]),
        ({"type": "string", "pattern": "^(?!no).*$", "maxLength": 3}, ["yes", "on"], ["no", "nox"]),
        ({"type": "string", "pattern": "^((?!no).)*$"}, ["yes", "on"], ["a no b"]),
        ({"type": "string", "pattern": '^["\\\\/\\n]+$'}, ['"\\\n/'], ["n"]),
        ({"type": "string", "format": "date", "minLength": 3}, ["2024-02-28"], []),
        ({"type": "string", "format": "date", "enum": ["soon", "2024-02-28"]}, ["2024-02-28"], ["soon"]),
        ({"type": "string", "not": {"format": "date"}}, ["soon"], ["2024-02-28"]),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]},
         ["2024-02-28", "2024-02-28T10:00:00Z"], ["soon"]),
        ({"type": "string", "format": "of-a-company"}, ["anything"], []),
        ({"type": "integer", "minimum": -2, "exclusiveMaximum": 11}, [-2, 10, 0], [-3, 11, 1.5]),
        ({"type": "integer", "multipleOf": 7, "minimum": 1}, [7, 700], [1, 0]),
        ({"type": "integer", "multipleOf": 0.01}, [3, -70], [1.5]),
        ({"type": "integer", "multipleOf": 1.5}, [3, -6], [1]),
        ({"type": "integer", "multipleOf": 3, "not": {"enum": [6, 9]}}, [3, 12], [6, 9]),
        ({"type": "number", "multipleOf": 0.01}, [19.99, 0.07, -5], [0.001]),
        ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1}, [0.25, 1], [0.3, 1.25, -0.25]),
        ({"type": "number", "multipleOf": 1}, [3, -7, 0], [0.5]),
        ({"type": "number", "multipleOf": 123.457}, [123.457, -246.914, 0], [123]),
        ({"type": "integer", "multipleOf": 0.123456789, "minimum": 5}, [123456789], [0, 5]),
        ({"type": "integer", "multipleOf": 7, "minimum": 10**16}, [10**16 + 7 - 10**16 % 7], [10**16]),
        ({"type": "integer", "multipleOf": 7, "maximum": -(10**16)}, [-(10**16) - 7 + 10**16 % 7], [-7]),
        ({"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 10**17 + 3}, [10**17 + 100], [10**17]),
        ({"type": "number", "multipleOf": 0.07, "maximum": -3.14159}, [-7], [7]),
        ({"type": "number", "multipleOf": 0.07}, [0.07, -0.14, 0], [0.08]),
        ({"type": "number", "multipleOf": 0.3}, [0.3, -0.6, 3], [0.4]),
        ({"type": "number", "maximum": 9007199254740991}, [9007199254740991, 1.5], [9007199254740992]),
        ({"type": "number", "minimum": 1e15}, [10**15, 10**17], [10**15 - 1]),
        ({"type": "integer", "minimum": 10**20, "exclusiveMaximum": 10**20 + 2}, [10**20 + 1],
         [10**20 + 2, 10**20 - 1]),
        ({"type": "number", "maximum": -1e22}, [-(10**22) - 1], [-(10**22) + 1]),
        ({"type": "number", "minimum": 1e23}, [10**23], [10**22]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1, 0.001], [0, 1.01, -1]),
        ({"type": "number", "minimum": 1.25, "maximum": 1.5}, [1.25, 1.3, 1.5], [1.24, 1.51, 1]),
        ({"type": "number"}, [1e5, -0.5, 1e-05, 0], ["1"]),
        ({"enum": [1, 2.5, "a", None, True]}, [1, 2.5, "a", None, True], [2, False]),
        ({"const": 1.0, "type": "integer"}, [1], [2]),
    ],
)  # fmt: skip
def test_plain_values_keep_their_meaning(checker, schema, valid, invalid):
    checker.check(schema, valid, invalid)


def test_bounds_of_decimals(rng):
    """All texts of some decimals, against exact fractions, for random bounds."""
    bounds = "1e15 9007199254740991 -12345678901234567890 0 1 -1 5 10 0.5 0.05 1.25 99.99".split()
    bounds += "-3.14 12345 1e3 -0.01".split()
    texts = [f"{rng.uniform(-20, 20):.{rng.integers(5)}f}" for _ in range(10)]
    texts += "0 5 9 10 11 99 -11 9007199254740990 9007199254740992 -12345678901234567891".split()
    texts += "0.50 -0.5 10.01 99.99 100.000 12345".split()
    for _ in range(25):
        low, high = sorted(exact(str(text)) for text in rng.choice(bounds, 2))
        above, below = rng.random(2) < 0.4
        kinds = [None, None, True, False]
        numbers = Numbers(
            kinds[rng.integers(4)],
            low if rng.random() < 0.6 else None,
            bool(above),
            high if rng.random() < 0.6 else None,
            bool(below),
            excluded=frozenset(map(exact, rng.choice(bounds, int(rng.integers(2))).tolist())),
        )
        terminals = [] if numbers.is_void() else number_terminals(numbers)
        for text in texts:
            if not exact(text) and text.startswith("-"):  # zero has no sign
                continue
            found = any(has_text(t, text) for t in terminals)
            is_long = len(text) > 15  # such integers are written only where there are bounds
            assert found is numbers.has(text) or (is_long and not found), (numbers, text)


def test_what_is_generated_has_its_format(checker):
    """By jsonschema's checks, which are there for all of them."""
    formats = Draft202012Validator.FORMAT_CHECKER
    assert not PATTERNS.keys() - formats.checkers.keys()
    for name in PATTERNS:
        matcher = checker.matcher({"type": "string", "format": name})
        for text in (checker.generated(matcher) for _ in range(10)):
            assert text is None or formats.conforms(text, name), (name, text)
            assert text is None or matches(searched(LOOSE[name], wide=True), text)
            if name in ("date-time", "time") and text:
                assert datetime.fromisoformat(text if "T" in text else f"2000-01-01T{text}")


def test_dates_are_those_of_the_calendar(checker, rng):
    matcher = checker.matcher({"type": "string", "format": "date"})
    days = ["02-28", "02-29", "02-30", "04-30", "04-31", "12-31", "13-01", "00-10", "01-00"]
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, *rng.integers(1, 10_000, 20).tolist()):
        for day in days:
            text = f"{year:04}-{day}"
            try:
                date.fromisoformat(text)
                is_day = True
            except ValueError:
                is_day = False
            assert checker.has(matcher, text) == is_day, text


def test_texts_are_as_json_dumps_writes_them(checker):
    schema = {"const": {"a": [1, "x"], "b": {"c": None}}}
    assert checker.text(schema) == json.dumps(schema["const"])
