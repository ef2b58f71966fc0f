"""Sets of numbers, and their JSON text.

Generated integers have at most 18 digits (64 bits), or as many as a bound needs. Decimals have at most 15
digits, which a binary number holds exactly: a comparison with a bound gives the same result for the text and
for the number that a program reads. Exponents are generated only for numbers without bounds. `multipleOf` is
decided in decimal, as the schema writes it: 0.07 is a multiple of 0.01, though not in binary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, lcm

DIGITS = 15
INTEGER_DIGITS = 18
MAX_DIGITS = 310  # most digits of an integer bound: the number of digits of the largest float64
_LISTED = 256  # most multiples that are listed one by one
_MAX_REMAINDERS = 10_000
"""Most remainders that llguidance follows; of a larger step, the multiples next to zero are listed."""
_ZERO = Fraction(0)


@dataclass(frozen=True)
class Numbers:
    """A set of numbers.

    Attributes:
        is_integer: True for integers, False for numbers that are none, None for both.
        low, high: bounds; None without.
        above, below: True if the bound is exclusive.
        step: the number of which all are multiples; None without.
        values: the texts of all numbers; None if they are not listed.
        excluded: numbers that are not in the set.
    """

    is_integer: bool | None = None
    low: Fraction | None = None
    above: bool = False
    high: Fraction | None = None
    below: bool = False
    step: Fraction | None = None
    values: tuple[str, ...] | None = None
    excluded: frozenset[Fraction] = frozenset()

    def intersect(self, other: Numbers) -> Numbers | None:
        if self.values is None and other.values is not None:
            return other.intersect(self)
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
        steps = [s.step for s in (self, other) if s.step is not None]
        multiple = lcm(*(s.numerator for s in steps)), gcd(*(s.denominator for s in steps))
        met = Numbers(
            is_integer=other.is_integer if self.is_integer is None else self.is_integer,
            low=low,
            above=above,
            high=high,
            below=not closed,
            step=Fraction(*multiple) if steps else None,  # the least common multiple
            excluded=self.excluded | other.excluded,
        )
        return None if met.is_void() else met

    def has(self, text: str) -> bool:
        """True if the number that a text writes is within bounds, a multiple, and not excluded."""
        value = exact(text)
        if self.is_integer is not None and (value.denominator == 1) is not self.is_integer:
            return False
        if self.is_integer and not text.lstrip("-").isdigit():
            return False  # 1.0 is not an integer before draft 6
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.below and value == self.high)):
            return False
        is_multiple = self.step is None or value % self.step == 0
        return is_multiple and value not in self.excluded

    def is_void(self) -> bool:
        """True if the bounds alone show that the set is empty."""
        if self.values is not None:
            return not self.values
        if self.low is None or self.high is None:
            return False
        if self.is_integer or self.step is not None:
            first, last = self.multiples()
            return first > last
        return self.is_empty_range()

    def is_empty_range(self) -> bool:
        """True if no number lies between the bounds."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.above or self.below))

    def multiples(self) -> tuple[Fraction, Fraction]:
        """Return the smallest and largest multiple of the step (1 for integers without one) within `limit`."""
        step = self.step or Fraction(1)
        if self.is_integer:
            step = Fraction(step.numerator)
        most = Fraction(self.limit() - 1)
        low = -most if self.low is None else max(self.low, -most)
        high = most if self.high is None else min(self.high, most)
        first, last = step * ceil(low / step), step * floor(high / step)
        return (
            first + step * (self.above and first == self.low),
            last - step * (self.below and last == self.high),
        )

    def limit(self) -> int:
        """Return the `10**n` that integers stay below; n is `INTEGER_DIGITS`, or more if a bound needs it."""
        ends = [_ZERO if self.low is None else self.low, _ZERO if self.high is None else -self.high]
        return 10 ** max(INTEGER_DIGITS, len(str(ceil(max(ends)))) + 1)


def exact(number: int | float | str) -> Fraction:
    """Convert a number to a fraction: the decimal that is written, not the binary number that is stored."""
    return Fraction(number) if isinstance(number, int) else Fraction(str(number))


def written(number: int | float) -> str:
    """Write a number as `json.dumps` does; 1 for 1.0, which is an integer in every draft."""
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) < 1e15
    return json.dumps(int(number) if is_whole else number)


def number_terminals(numbers: Numbers, *, is_canonical: bool = False) -> list[str]:
    """Write right sides of Lark terminals that match the numbers of a set; none if it is empty.

    Multiples that are too many to list are `%json` rules, which can't be terminals. If `is_canonical`, each
    integer, multiple and bound has one text, without exponent.
    """
    if numbers.values is not None:
        return [_listed(numbers.values)] if numbers.values else []
    step = numbers.step
    if step is not None and step.denominator == 1 and numbers.is_integer is None:
        numbers = replace(numbers, is_integer=True)
    if step is not None and not (numbers.is_integer and step.numerator == 1):
        return _multiples(numbers, step, is_canonical)
    if not is_canonical or numbers.is_integer:
        return _forms(numbers, is_canonical=is_canonical)
    # A bound has one text: only zeros could follow it, and `unique_items` needs another number to go to.
    closed = [(numbers.low, numbers.above), (numbers.high, numbers.below)]
    bounds = dict.fromkeys(bound for bound, is_open in closed if bound is not None and not is_open)
    kept = [decimal(bound) for bound in bounds if numbers.has(decimal(bound))]
    forms = _forms(replace(numbers, above=True, below=True), is_canonical=True)
    return [*forms, _listed(kept)] if kept else forms


def _listed(texts: Iterable[str]) -> str:
    return " | ".join(json.dumps(text) for text in texts)


def _multiples(numbers: Numbers, step: Fraction, is_canonical: bool) -> list[str]:
    if step.denominator == 1 and numbers.is_integer is False:
        return []
    places = len(_digits(step)[1])
    if step.numerator == 1 and step * 10**places == 1:
        return _forms(numbers, places, is_canonical)
    first, last = numbers.multiples()
    beyond = 10 ** max(1, DIGITS - places)
    if step.denominator > 1 and (numbers.is_integer or first >= beyond or last <= -beyond):
        # Integers only: decimals of this size have more digits than a binary number holds.
        numbers, step = replace(numbers, is_integer=True), Fraction(step.numerator)
        places, beyond = 0, 10**DIGITS
        first, last = numbers.multiples()
    if first > last or numbers.is_integer is False:
        return []
    is_round = step.denominator == 1 and not str(step).strip("0").strip("1")
    is_coarse = step * 10**places > _MAX_REMAINDERS and not is_round
    is_coarse |= not _is_followed(step, places) or (is_canonical and step.denominator > 1)
    if (last - first) / step < _LISTED or first >= beyond or last <= -beyond or is_coarse:
        # If there are too many, the ones next to zero.
        start = max(first, min(last - step * (_LISTED - 1), -step * (_LISTED // 2)))
        count = int(min(_LISTED, (last - start) // step + 1))
        listed = [start + step * i for i in range(count)]
        kept = [value for value in listed if value.denominator == 1 or abs(value) < beyond]
        texts = [decimal(value) for value in kept if value not in numbers.excluded]
        return [_listed(texts)] if texts else []
    first, last = max(first, step * ceil(-beyond / step)), min(last, step * floor(beyond / step))
    excluded = numbers.excluded | ({_ZERO} if is_canonical else set())  # which has the text -0, too
    gaps = sorted(v for v in excluded if v % step == 0 and first <= v <= last)
    starts, ends = [first, *(gap + step for gap in gaps)], [*(gap - step for gap in gaps), last]
    schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "integer" if step.denominator == 1 else "number",
        "multipleOf": _plain(step),
    }
    ranges = [
        schema | {"minimum": _plain(low), "maximum": _plain(high)}
        for low, high in zip(starts, ends, strict=True)
        if low <= high
    ]
    zero = [_listed(["0"])] if _ZERO in gaps and _ZERO not in numbers.excluded else []
    return [*zero, *(f"%json {json.dumps(one)}" for one in ranges)]


def _is_followed(step: Fraction, places: int) -> bool:
    """True if llguidance reads a step with `places` decimals exactly; it multiplies by 10 in binary."""
    value = float(step)
    for _ in range(places):
        value *= 10
    return value == step * 10**places


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _forms(numbers: Numbers, places: int | None = None, is_canonical: bool = False) -> list[str]:
    """Write the terminal of a range, or of the multiples of 10^-places in it; none if it is empty.

    For `is_canonical`, see `number_terminals`.
    """
    low, above, high, below = numbers.low, numbers.above, numbers.high, numbers.below
    is_free = low is None and high is None and not (numbers.excluded or places or is_canonical)
    if is_free and numbers.is_integer is None:
        return [
            f"/-?(?:0|[1-9][0-9]{{0,{DIGITS - 1}}})(?:\\.[0-9]{{1,{DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?/"
        ]
    forms = []
    has_integers = numbers.is_integer or not (places and is_canonical)  # else they have decimals
    if numbers.is_integer is not False and has_integers:
        first, last = replace(numbers, is_integer=True, step=None).multiples()
        if first <= last:
            limit = numbers.limit()
            bounds = (None if first == 1 - limit else first), (None if last == limit - 1 else last)
            form = _range(bounds[0], False, bounds[1], False, "")
            forms.append(f"({form}) & /-?[0-9]{{1,{len(str(limit)) - 1}}}/")
    if numbers.is_integer is not True:
        most = Fraction(10 ** (DIGITS - 1))
        is_void = (low is not None and low >= most) or (high is not None and high <= -most)
        is_void |= numbers.is_empty_range()
        low, above = (None, False) if low is not None and low <= -most else (low, above)
        high, below = (None, False) if high is not None and high >= most else (high, below)
        fraction = "\\.[0-9]*[1-9][0-9]*" if numbers.is_integer is False else "\\.[0-9]+"
        if not is_void:
            length = f"/-?[0-9.]{{1,{DIGITS + 1}}}/"
            fewest = places if is_canonical else 1
            length += f" & /-?[0-9]+\\.[0-9]{{{fewest},{places}}}/" if places else ""
            forms.append(f"({_range(low, above, high, below, fraction)}) & {length}")
    if not forms:
        return []
    form = " | ".join(f"({one})" for one in forms)
    if numbers.excluded:
        texts = "|".join(_equal(value) for value in sorted(numbers.excluded))
        form = f"({form}) & ~/(?:{texts})/"
    return [form]


def decimal(value: Fraction) -> str:
    whole, digits = _digits(abs(value))
    return f"{'-' if value < 0 else ''}{whole}" + (f".{digits}" if digits else "")


def _range(
    low: Fraction | None, above: bool, high: Fraction | None, below: bool, fraction: str
) -> str:
    """Write Lark for decimals between two bounds, exclusive if `above` and `below`, that end with `fraction`.

    Zero has no sign.
    """
    form = f"/(?:0|[1-9][0-9]*){fraction}/"
    parts = []
    if low is None or low < 0:
        least, is_open = _ZERO, True
        if high is not None and high <= 0:
            least, is_open = -high, below or high == 0
        most = [] if low is None else [_most(-low, above)]
        parts.append(f'"-" ({" & ".join([form, _least(least, is_open), *most])})')
    if high is None or high > 0 or (high == 0 and not below):
        least, is_open = (low, above) if low is not None and low >= 0 else (_ZERO, False)
        bounds = [] if (least, is_open) == (_ZERO, False) else [_least(least, is_open)]
        bounds += [] if high is None else [_most(high, below)]
        parts.append(f"({' & '.join([form, *bounds])})")
    return " | ".join(parts)


def _digits(value: Fraction) -> tuple[str, str]:
    """Return the digits before and after the point of a decimal that is not negative."""
    whole, rest = divmod(value, 1)
    digits = ""
    while rest and len(digits) < 400:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return str(whole), digits


def _least(value: Fraction, is_open: bool) -> str:
    """Write a pattern of the well-formed decimals from a value on, or above it if `is_open`."""
    whole, digits = _digits(value)
    larger = [f"[1-9][0-9]{{{len(whole)},}}{_REST}"]
    larger += [f"{start}[{d + 1}-9][0-9]{{{n}}}{_REST}" for start, d, n in _places(whole) if d < 9]
    # Fractions from the digits on: a larger digit somewhere, or all of them and more.
    tails = [f"{start}[{d + 1}-9][0-9]*" for start, d, _ in _places(digits) if d < 9]
    tails.append(f"{digits}{'[0-9]*[1-9][0-9]*' if is_open else '[0-9]*'}")
    equal = f"{whole}\\.(?:{'|'.join(tails)})"
    return f"/{'|'.join([*larger, equal] + ([] if digits or is_open else [whole]))}/"


def _most(value: Fraction, is_open: bool) -> str:
    """Write a pattern of the well-formed decimals up to a value, or below it if `is_open`."""
    whole, digits = _digits(value)
    smaller = [f"[0-9]{{1,{len(whole) - 1}}}{_REST}"] if len(whole) > 1 else []
    smaller += [f"{start}[0-{d - 1}][0-9]{{{n}}}{_REST}" for start, d, n in _places(whole) if d]
    tails = [f"{start}[0-{d - 1}][0-9]*" for start, d, _ in _places(digits) if d]
    tails += [digits[:i] for i in range(1, len(digits))]
    tails += [] if is_open else [f"{digits}0*"]
    equal = [f"{whole}\\.(?:{'|'.join(tails)})"] if tails else []
    equal += [whole] if digits or not is_open else []
    return f"/{'|'.join([*smaller, *equal]) or '[^0-9.-]'}/"


def _places(digits: str) -> list[tuple[str, int, int]]:
    """List each digit with the digits before it and the number of digits after it."""
    return [(digits[:i], int(digit), len(digits) - i - 1) for i, digit in enumerate(digits)]


def _equal(value: Fraction) -> str:
    """Write a pattern of all decimal texts of one number."""
    whole, digits = _digits(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return f"{sign}{whole}" + (f"\\.{digits}0*" if digits else "(?:\\.0*)?")


_REST = "(?:\\.[0-9]*)?"
