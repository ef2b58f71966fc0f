"""The tools of a judge: sums are recomputed exactly, texts are counted, JSON is validated."""

import time
from fractions import Fraction

import pytest

from afm_mlx.errors import ConfigError, DataError, RewardError
from afm_mlx.measure.judge_tools import (
    MAX_CLAIMS,
    calculate,
    check_schema,
    check_sums,
    count,
    find_tools,
)
from tests.tools.cases import each


@each(
    "expression, value",
    [
        ("3 + 4", 7),
        ("(2 + 3) * 4 - -1", 21),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1,000 × 2 ÷ 8", 250),
        ("2 ** 10 − 2^3", 1016),
        ("2 ** -2", Fraction(1, 4)),
        ("007", 7),
    ],
)
def test_calculation_is_exact(expression, value):
    assert calculate(expression) == value


@each(
    "expression",
    [
        "",
        "3 +",
        "x + 1",
        "abs(3)",
        "().__class__",
        "[1]",
        "3 if 1 else 2",
        "1 < 2",
        "'3' * 9",
        "True + 1",
        "2 ** 0.5",
        "9 ** 9 ** 9",
        "10 ** 400 * 10 ** 4000",
        "+".join(["1"] * 600),
        "(" * 400 + "1" + ")" * 400,
        "3 // 2",
        "3 % 2",
        "1j * 1j",
        "1e999999999",
        "0x10",
        "1_0 + 1",
    ],
)
def test_nothing_but_bounded_arithmetic_is_calculated(expression):
    with pytest.raises(DataError, match="can't be computed"):
        calculate(expression)


def test_division_by_zero_is_an_error():
    with pytest.raises(DataError, match="divides by zero"):
        calculate("1 / (2 - 2)")


@each(
    "text, report",
    [
        ("3 + 4 = 8", "wrong: 3 + 4 = 8, it is 7"),
        ("So 3+4=7, I think.", "right: 3+4 = 7"),
        ("2 + 3 = 5 = 10 / 2", "right: 2 + 3 = 5; right: 5 = 10 / 2"),
        ("1 + 1 = 2 and 1 + 2 = 4", "wrong: 1 + 2 = 4, it is 3; right: 1 + 1 = 2"),
        # Results with decimals may be rounded, and whole ones may not.
        ("10/3 = 3.33", "right: 10/3 = 3.33"),
        ("10/3 = 3.34", "wrong: 10/3 = 3.34, it is 3.33333"),
        ("10/3 = 3", "wrong: 10/3 = 3, it is 3.33333"),
        ("1. 3 + 4 = 7 apples", "right: 3 + 4 = 7"),
        ("- 3 + 4 = 7\n- 2 + 1 = 4", "wrong: 2 + 1 = 4, it is 3; right: 3 + 4 = 7"),
        ("-3 × (2 - 5) = 9", "right: -3 × (2 - 5) = 9"),
        # What only looks like a sum of numbers.
        ("x + 3 + 4 = 8", None),
        ("x -3 + 4 = 8", None),
        ("2(3 + 4) = 14", None),
        ("f(3 + 4) = 2", None),
        ("3 + 4 = 2x", None),
        ("3 + 4 = 5 + y", None),
        ("3 + 4 = 7%", None),
        ("3 + 4 =\n\n2. Then", None),
        ("on 2020-11-12", None),
        ("1 / 0 = 2", None),
        ("", None),
    ],
)
def test_sums_of_a_text_are_checked(text, report):
    assert check_sums(text) == report


def test_a_report_is_short_and_begins_with_what_is_wrong():
    sums = [f"{i} + 1 = {i + 1}" for i in range(MAX_CLAIMS + 4)] + ["5 + 5 = 11"]
    report = check_sums(". ".join(sums))
    assert report.startswith("wrong: 5 + 5 = 11, it is 10; right: 0 + 1 = 1")
    assert report.endswith("; and 5 more")
    assert report.count(" = ") == MAX_CLAIMS


@each("text", ["1" * 100_000, "-" * 100_000, "1+" * 50_000, "(" * 100_000, "1,", "1 " * 50_000])
def test_hostile_texts_take_no_time(text):
    start = time.monotonic()
    assert check_sums(text) is None
    assert time.monotonic() - start < 5


def test_words_lines_and_characters_are_counted():
    assert count(" one two\n\nthree ") == "3 words, 2 lines, 14 characters"
    assert count("") == "0 words, 0 lines, 0 characters"


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_json_is_validated_under_the_tasks_schema():
    assert check_schema('{"n": 3}', SCHEMA) == "valid"
    assert check_schema("text", None) is None
    assert "'x' is not of type 'integer' (at $.n)" in check_schema('{"n": "x"}', SCHEMA)
    assert check_schema("n: 3", SCHEMA).startswith("not valid: this is not JSON")
    with pytest.raises(RewardError, match="The schema is not valid"):
        check_schema("{}", {"type": "thing"})


def test_tools_are_found_by_name():
    assert list(find_tools(["count", "math"])) == ["count", "math"]
    with pytest.raises(ConfigError, match=r"'maths' .*did you mean math.*allowed are math, schema"):
        find_tools(["maths"])
