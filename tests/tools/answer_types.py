"""Random types and instances of them; and texts walked byte by byte under a constraint."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import itertools
import uuid
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.deep_stack import LIMITS
from afm_mlx.guidance.unique_items import State

_numbers = itertools.count()  # classes of one name in one schema are none of msgspec's
NAMES = "title person day time place name age note kind street n_1".split()
BYTES = LLTokenizer("byte")


def random_type(rng: np.random.Generator, depth: int = 3) -> tuple[Any, Any]:
    """A type, and a function that draws an instance of it."""
    makers = [_scalar, _string, _words] if depth == 0 else [_list, _optional, _dict, *_CLASSES]
    return makers[rng.integers(len(makers))](rng, depth - 1)


def _scalar(rng, depth):
    ranged = Annotated[int, msgspec.Meta(ge=-3, le=7)]
    # Without limits, a number may have an exponent that no float has.
    bounded = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    kinds = [
        (int, lambda: int(rng.integers(-(10 ** rng.integers(1, 18)), 10**9))),
        (bounded, lambda: float(round(rng.normal() * 10.0 ** rng.integers(8), 6))),
        (bool, lambda: bool(rng.integers(2))),
        (ranged, lambda: int(rng.integers(-3, 8))),
        (datetime.date, lambda: datetime.date.fromordinal(int(rng.integers(1, 3 * 10**6)))),
        (uuid.UUID, lambda: uuid.UUID(bytes=rng.bytes(16))),
    ]
    return kinds[rng.integers(len(kinds))]


def text(rng: np.random.Generator) -> str:
    letters = list('ab "\\\n\t{}[]:,/éß\u2028字😀\x00-0.5e')
    return "".join(rng.choice(letters, int(rng.integers(0, 12))))


def _string(rng, depth):
    short = Annotated[str, msgspec.Meta(max_length=3)]
    return [(str, lambda: text(rng)), (short, lambda: text(rng)[:3])][rng.integers(2)]


def _words(rng, depth):
    words = sorted({f"w{n}" for n in rng.integers(0, 50, 4)})
    if rng.integers(2):
        return Literal[tuple(words)], lambda: str(rng.choice(words))
    kind = enum.Enum(f"Color{next(_numbers)}", {word.upper(): word for word in words})
    return kind, lambda: list(kind)[rng.integers(len(words))]


def _list(rng, depth):
    inner, draw = random_type(rng, depth)
    many = [lambda: draw() for _ in range(int(rng.integers(0, 4)))]
    if rng.integers(3) == 0:
        return tuple[inner, str], lambda: (draw(), text(rng))
    return list[inner], lambda: [one() for one in many]


def _optional(rng, depth):
    inner, draw = random_type(rng, depth)
    return inner | None, lambda: draw() if rng.integers(3) else None


def _dict(rng, depth):
    inner, draw = random_type(rng, depth)
    return dict[str, inner], lambda: {f"k{n}": draw() for n in range(int(rng.integers(0, 3)))}


def _fields(rng, depth):
    names = rng.permutation(NAMES)[: rng.integers(1, 5)].tolist()
    return {name: random_type(rng, int(rng.integers(0, depth + 1))) for name in names}


def _dataclass(rng, depth):
    fields = _fields(rng, depth)
    kind = dataclasses.make_dataclass(
        f"Place{next(_numbers)}", [(name, hint) for name, (hint, _) in fields.items()]
    )
    return kind, lambda: kind(**{name: draw() for name, (_, draw) in fields.items()})


def _struct(rng, depth):
    fields = _fields(rng, depth)
    options = [{}, {"tag": True}, {"rename": "camel"}, {"array_like": True}][rng.integers(4)]
    parts = [(name, hint) for name, (hint, _) in fields.items()]
    kind = msgspec.defstruct(f"Thing{next(_numbers)}", parts, **options)
    return kind, lambda: kind(**{name: draw() for name, (_, draw) in fields.items()})


def _typed_dict(rng, depth):
    (optional, (hint, draw)), *others = _fields(rng, depth).items()
    hints = {optional: NotRequired[hint], **{name: inner for name, (inner, _) in others}}

    def instance():
        given = {optional: draw()} if rng.integers(2) else {}
        return given | {name: inner() for name, (_, inner) in others}

    return TypedDict(f"Event{next(_numbers)}", hints), instance


def _named_tuple(rng, depth):
    fields = _fields(rng, depth)
    kind = NamedTuple(f"Pair{next(_numbers)}", [(name, hint) for name, (hint, _) in fields.items()])
    return kind, lambda: kind(*(draw() for _, draw in fields.values()))


_CLASSES = [_dataclass, _struct, _typed_dict, _named_tuple] * 2


def accepts(constraint: Constraint, text: str) -> bool:
    """True if a constraint allows a text as a whole."""
    matcher = LLMatcher(BYTES, constraint.grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def random_text(rng: np.random.Generator, constraint: Constraint, soft_limit: int = 60) -> str:
    """A text under a constraint, drawn byte by byte; past `soft_limit`, what closes it is preferred."""
    state = State(LLMatcher(BYTES, constraint.grammar, limits=LIMITS), BYTES)
    data = bytearray()
    while not state.matcher.is_stopped():
        mask = np.frombuffer(state.matcher.compute_bitmask(), np.uint32).copy()
        state.restrict(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256])
        if state.matcher.is_accepting() and (
            not len(allowed) or len(data) > soft_limit or rng.integers(2)
        ):
            break
        closing = [byte for byte in b'"]}' if byte in allowed] if len(data) > soft_limit else []
        byte = int(rng.choice(closing or allowed))
        state = state.then(bytes([byte]))
        assert not state.matcher.is_error()
        data.append(byte)
    return data.decode()
