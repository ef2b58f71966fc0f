"""Local checks of a text, whose short reports a judge gets with the text: sums, counts, JSON under a schema.

Nothing here runs code of the text: an arithmetic expression is a tree of numbers and operators, computed in
fractions, and its size is bounded.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

from afm_mlx.errors import ConfigError, DataError, did_you_mean

MAX_BITS = 4096
"""Size of a result: powers and products beyond it are not computed."""

MAX_LENGTH = 1000
"""Most characters of an expression."""

MAX_CLAIMS = 20
"""Most calculations of a text that a report lists; wrong ones come first."""


@dataclass(frozen=True)
class JudgeTool:
    """A check that a judge can ask for.

    Args:
        purpose: when the check is useful, as a clause for the judge.
        report: maps a text, and the task's JSON schema or None, to a short report; None if it finds nothing
            to check.
    """

    purpose: str
    report: Callable[[str, Mapping[str, Any] | None], str | None]


# -- arithmetic

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATORS = "-+*/×÷·−–^"
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
# Numbers, operators and brackets with "=" between: a whole chain, such as "2 + 3 = 5 = 10 / 2". The bounds keep
# the search linear.
_CHAIN = re.compile(
    rf"(?<![\d.,])[(−–-]{{0,9}}{_NUMBER}"
    rf"(?:[ \t()]{{0,9}}(?:\*\*|[{_OPERATORS}=])[ \t()−–-]{{0,9}}{_NUMBER})+\){{0,9}}"
)
# An operand that is no number: "x + 3 + 4 = 8" and "3 + 4 = 2x" are no sums of numbers.
_BEFORE = re.compile(rf"(?:\b[^\W\d_]|[)\d])[ \t]*[{_OPERATORS}][ \t({_OPERATORS}]*$|[\w).]\(*$")
_AFTER = re.compile(rf"[ \t]*[{_OPERATORS}][ \t]*[^\W\d_]\b|[^\W\d_]\b|%")


def calculate(expression: str) -> Fraction:
    """Compute an expression of decimal numbers, `+ - * / ** ^ × ÷ ·` and brackets, exactly.

    Raises:
        DataError: if it is no such expression, divides by zero, or its result is too large.
    """
    text = expression.translate(_SIGNS).replace("^", "**").replace(",", "").strip()
    # Python refuses integers like 007; leading zeros mean nothing here.
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DataError(
            f"{expression[:80]!r} can't be computed; numbers, + - * / ** and brackets are allowed."
        ) from None
    except ZeroDivisionError:
        raise DataError(f"{expression[:80]!r} divides by zero.") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            # From its digits: a float would have rounded 0.1. No exponents, which make huge numbers.
            digits = ast.get_source_segment(text, node) or ""
            if not re.fullmatch(r"\d*\.?\d*", digits):
                raise ValueError
            return Fraction(Decimal(digits))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left, text), _value(right, text)
            if exponent.denominator != 1 or abs(exponent) * _bits(base) > MAX_BITS:
                raise ValueError
            return base ** int(exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            found = _BINARY[type(op)](_value(left, text), _value(right, text))
            if _bits(found) > MAX_BITS:
                raise ValueError
            return found
    raise ValueError


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def check_sums(text: str, schema: Mapping[str, Any] | None = None) -> str | None:
    """Recompute every `expression = result` of a text; None if there is none.

    A result with decimals is right if the exact value rounds to it.
    """
    wrong, right = [], []
    for chain in _CHAIN.finditer(text):
        sides = [side.strip() for side in chain[0].split("=")]
        first = chain.start() + len(chain[0]) - len(chain[0].lstrip("(−–-"))
        if _BEFORE.search(text, max(0, chain.start() - 40), first):
            sides = sides[1:]
        if _AFTER.match(text, chain.end()):
            sides = sides[:-1]
        for left, claim in pairwise(sides):
            try:
                value, claimed = calculate(left), calculate(claim)
            except DataError:
                continue
            decimals = len(claim.partition(".")[2]) if re.fullmatch(r"-?[\d,.]+", claim) else 0
            error = abs(value - claimed)
            if error == 0 or (decimals and error <= Fraction(1, 2 * 10**decimals)):
                right.append(f"right: {left} = {claim}")
            else:
                wrong.append(f"wrong: {left} = {claim}, it is {_decimal(value)}")
    found = [*wrong, *right]
    more = f"; and {len(found) - MAX_CLAIMS} more" if len(found) > MAX_CLAIMS else ""
    return "; ".join(found[:MAX_CLAIMS]) + more if found else None


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


# -- other checks


def count(text: str, schema: Mapping[str, Any] | None = None) -> str:
    """Count a text's words, lines that aren't blank, and characters, white space around the text aside."""
    text = text.strip()
    lines = sum(bool(line.strip()) for line in text.splitlines())
    return f"{len(text.split())} words, {lines} lines, {len(text)} characters"


def check_schema(text: str, schema: Mapping[str, Any] | None) -> str | None:
    """Check JSON under the task's schema; None if the task has none.

    Raises:
        RewardError: for a schema that is not valid.
    """
    if schema is None:
        return None
    from jsonschema.exceptions import best_match

    from afm_mlx.measure.rewards import schema_validator

    validator = schema_validator(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not valid: this is not JSON ({error})"
    fault = best_match(validator.iter_errors(value))
    return "valid" if fault is None else f"not valid: {fault.message[:200]} (at {fault.json_path})"


TOOLS: dict[str, JudgeTool] = {
    "math": JudgeTool("it states results of calculations", check_sums),
    "schema": JudgeTool("it has to be JSON under a schema", check_schema),
    "count": JudgeTool("its length in words, lines or characters matters", count),
}
"""The tools by name."""


def find_tools(names: Sequence[str]) -> dict[str, JudgeTool]:
    """Return tools by their names; raise `ConfigError` for an unknown one."""
    for name in names:
        if name not in TOOLS:
            raise ConfigError(
                f"There is no tool {name!r} for a judge{did_you_mean(name, TOOLS)}; allowed are "
                f"{', '.join(TOOLS)}."
            )
    return {name: TOOLS[name] for name in names}
