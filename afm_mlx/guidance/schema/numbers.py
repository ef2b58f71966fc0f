"""Numbers: what a schema allows of them, and their JSON text.

What is generated has at most 15 digits, as many as a binary number holds exactly: so comparing with a bound
comes out the same for the text and for the number that a program reads. Integers have 18 at most, so that they
fit 64 bits. An exponent is written only where nothing bounds the number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Any

DIGITS = 15
INTEGER_DIGITS = 18
_LISTED = 256
"""Multiples that are listed one by one at most."""
_ZERO = Fraction(0)


@dataclass(frozen=True)
class Numbers:
    """A set of numbers.

    Attributes:
        is_integer: whether they are integers; None when either.
        low, high: bounds; None without.
        above, below: whether the bounds are exclusive.
        divisor: they are multiples of this integer; 1 when that says nothing.
        values: the only ones there are, as they are written; None when they are not listed.
        excluded: numbers that are not of the set.
    """

    is_integer: bool | None = None
    low: Fraction | None = None
    above: bool = False
    high: Fraction | None = None
    below: bool = False
    divisor: int = 1
    values: tuple[str, ...] | None = None
    excluded: frozenset[Fraction] = frozenset()

    def meet(self, other: Numbers) -> Numbers | None:
        """Numbers of both sets; None when there are none."""
        if self.values is None and other.values is not None:
            return other.meet(self)
        if self.values is not None:
            theirs = None if other.values is None else {exact(v) for v in other.values}
            kept = [v for v in self.values if other.has(v) and (not theirs or exact(v) in theirs)]
            return replace(self, values=tuple(kept)) if kept else None
        if None not in (self.is_integer, other.is_integer) and self.is_integer != other.is_integer:
            return None
        lows = [(s.low, s.above) for s in (self, other) if s.low is not None]
        highs = [(s.high, not s.below) for s in (self, other) if s.high is not None]
        low, above = max(lows) if lows else (None, False)
        high, closed = min(highs) if highs else (None, True)
        met = Numbers(
            is_integer=other.is_integer if self.is_integer is None else self.is_integer,
            low=low,
            above=above,
            high=high,
            below=not closed,
            divisor=lcm(self.divisor, other.divisor),
            excluded=self.excluded | other.excluded,
        )
        return None if met.is_void() else met

    def has(self, text: str) -> bool:
        """Whether the number that a text writes is within bounds, a multiple, and not excluded."""
        value = exact(text)
        if self.is_integer is not None and (value.denominator == 1) is not self.is_integer:
            return False
        if self.is_integer and not text.lstrip("-").isdigit():
            return False  # 1.0 is no integer before draft 6
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.below and value == self.high)):
            return False
        is_multiple = self.divisor == 1 or value % self.divisor == 0
        return is_multiple and value not in self.excluded

    def is_void(self) -> bool:
        """Whether no number can be seen to be of the set."""
        if self.values is not None:
            return not self.values
        if self.low is None or self.high is None:
            return False
        if self.is_integer:
            first, last = self.integers()
            return first > last
        return self.low > self.high or (self.low == self.high and (self.above or self.below))

    def integers(self) -> tuple[int, int]:
        """The smallest and the largest integer, within `INTEGER_DIGITS`."""
        limit = 10**INTEGER_DIGITS - 1
        low, high = -limit, limit
        if self.low is not None:
            low = max(low, floor(self.low) + 1 if self.above else ceil(self.low))
        if self.high is not None:
            high = min(high, ceil(self.high) - 1 if self.below else floor(self.high))
        return low, high


def exact(number: Any) -> Fraction:
    """A number as a fraction: the decimal that is written, not the binary number that is stored."""
    return Fraction(number) if isinstance(number, int) else Fraction(str(number))


def written(number: Any) -> str:
    """A number as `json.dumps` writes it."""
    return json.dumps(number)


def number_terminals(numbers: Numbers) -> list[str]:
    """Right sides of Lark terminals whose texts are the numbers of a set; without any when there are none.

    Multiples that are too many to list come as a `%json` rule, which no terminal can be.
    """
    if numbers.values is not None:
        return [_listed(numbers.values)] if numbers.values else []
    if numbers.divisor > 1:
        return _multiples(numbers)
    form = _form(numbers)
    if form is None:
        return []
    if numbers.excluded:
        texts = "|".join(_equal(value) for value in sorted(numbers.excluded))
        form = f"{form} & ~/(?:{texts})/"
    return [form]


def first_digits(numbers: Numbers, head: str) -> list[str]:
    """Those whose text starts with a regular expression, of which there are no two texts of one number.

    Such as `-3` for the negative ones that begin with 3.
    """
    if numbers.values is None and numbers.divisor > 1:
        return []
    plain = (
        replace(numbers, excluded=numbers.excluded | {_ZERO}) if numbers.values is None else numbers
    )
    terminals = number_terminals(plain)
    zero = ["/0/"] if head == "0" and numbers.values is None and numbers.has("0") else []
    return [f"({t}) & /{head}[0-9.]*/" for t in terminals] + zero


def _listed(texts: Iterable[str]) -> str:
    return " | ".join(json.dumps(text) for text in texts)


def _multiples(numbers: Numbers) -> list[str]:
    whole = replace(numbers, is_integer=True)
    first, last = whole.integers()
    first += -first % numbers.divisor
    if numbers.is_integer is False or first > last:
        return []
    count = (last - first) // numbers.divisor + 1
    if count <= _LISTED:
        listed = [n for n in range(first, last + 1, numbers.divisor) if n not in numbers.excluded]
        return [_listed(map(str, listed))] if listed else []
    schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "integer",
        "minimum": first,
        "maximum": last,
        "multipleOf": numbers.divisor,
    }
    return [f"%json {json.dumps(schema)}"]


def _form(numbers: Numbers) -> str | None:
    """The terminal without what is excluded."""
    low, above, high, below = numbers.low, numbers.above, numbers.high, numbers.below
    size, fraction = DIGITS, "(?:\\.[0-9]+)?"
    if numbers.is_integer:
        first, last = numbers.integers()
        size, fraction, above, below = INTEGER_DIGITS, "", False, False
        low = None if low is None else Fraction(first)
        high = None if high is None else Fraction(last)
    elif numbers.is_integer is False:
        fraction = "\\.[0-9]*[1-9][0-9]*"
    elif low is None and high is None and not numbers.excluded:
        return f"/-?(?:0|[1-9][0-9]{{0,{size - 1}}})(?:\\.[0-9]{{1,{size}}})?(?:[eE][+-]?[0-9]{{1,2}})?/"
    limit = Fraction(10**size)
    low, above = (None, False) if low is not None and low <= -limit else (low, above)
    high, below = (None, False) if high is not None and high >= limit else (high, below)
    if (low is not None and low >= limit) or (high is not None and high <= -limit):
        return None
    if low is not None and high is not None and (low > high or (low == high and (above or below))):
        return None
    length = f"/-?[0-9]{{1,{size}}}/" if not fraction else f"/-?[0-9.]{{1,{size + 1}}}/"
    return f"({_range(low, above, high, below, fraction)}) & {length}"


def _range(
    low: Fraction | None, above: bool, high: Fraction | None, below: bool, fraction: str
) -> str:
    """Decimals between two bounds. Zero is written without a sign."""
    form = f"/(?:0|[1-9][0-9]*){fraction}/"
    parts = []
    if low is None or low < 0:
        is_below = high is not None and high <= 0
        least, is_open = (
            (-high, below or high == 0) if is_below and high is not None else (_ZERO, True)
        )
        most = [] if low is None else [_most(-low, above)]
        parts.append(f'"-" ({" & ".join([form, _least(least, is_open), *most])})')
    if high is None or high > 0 or (high == 0 and not below):
        least, is_open = (low, above) if low is not None and low >= 0 else (_ZERO, False)
        bounds = [] if (least, is_open) == (_ZERO, False) else [_least(least, is_open)]
        bounds += [] if high is None else [_most(high, below)]
        parts.append(f"({' & '.join([form, *bounds])})")
    return " | ".join(parts)


def _digits(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point of a decimal that is not negative."""
    whole, rest = divmod(value, 1)
    digits = ""
    while rest and len(digits) < 400:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return str(whole), digits


def _least(value: Fraction, is_open: bool) -> str:
    """Decimals at least a value, or above it; they are well formed by another terminal."""
    whole, digits = _digits(value)
    larger = [f"[1-9][0-9]{{{len(whole)},}}{_REST}"]
    for i, digit in enumerate(whole):
        if digit < "9":
            larger.append(f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{len(whole) - i - 1}}}{_REST}")
    # Fractions from the digits on: a larger digit somewhere, or all of them and more.
    tails = [
        f"{digits[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(digits) if digit < "9"
    ]
    tails.append(f"{digits}{'[0-9]*[1-9][0-9]*' if is_open else '[0-9]*'}")
    equal = f"{whole}\\.(?:{'|'.join(tails)})"
    return f"/{'|'.join([*larger, equal] + ([] if digits or is_open else [whole]))}/"


def _most(value: Fraction, is_open: bool) -> str:
    """Decimals at most a value, or below it; they are well formed by another terminal."""
    whole, digits = _digits(value)
    smaller = [f"[0-9]{{1,{len(whole) - 1}}}{_REST}"] if len(whole) > 1 else []
    for i, digit in enumerate(whole):
        if digit > "0":
            smaller.append(f"{whole[:i]}[0-{int(digit) - 1}][0-9]{{{len(whole) - i - 1}}}{_REST}")
    tails = [
        f"{digits[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(digits) if digit > "0"
    ]
    tails += [digits[:i] for i in range(1, len(digits))]
    if not is_open:
        tails.append(f"{digits}0*")
    equal = [f"{whole}\\.(?:{'|'.join(tails)})"] if tails else []
    if digits or not is_open:
        equal.append(whole)
    return f"/{'|'.join([*smaller, *equal]) or '[^0-9.-]'}/"


def _equal(value: Fraction) -> str:
    """All decimal texts of one number."""
    whole, digits = _digits(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return f"{sign}{whole}" + (f"\\.{digits}0*" if digits else "(?:\\.0*)?")


_REST = "(?:\\.[0-9]*)?"
