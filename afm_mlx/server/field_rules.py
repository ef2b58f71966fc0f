"""Reads JSON as structs whose fields have rules, which say what becomes of what a client sends.

A field of a struct is annotated with its rule; `request_fields.py` is the table of them. A field without a rule
is `Honoured`. What no struct has is unknown: it is taken, and named if it stands at the top of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from afm_mlx.errors import named, shown
from afm_mlx.server.errors import ApiError, bad_request

Made = TypeVar("Made")
EMPTY: tuple[Any, ...] = ("", [], {}, False)
"""Values that ask for nothing, besides null."""
MAX_IGNORED = 40
"""Names in a list of what was ignored, at most."""
_DROPPED = object()
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\[\]/-]{1,80}")


@dataclass(frozen=True, eq=False)
class Honoured:
    """What the field asks for is done.

    Args:
        text: what it means and what is allowed, for the documents.
        hint: what to do next, for errors.
        off: values that mean the same as null.
        shapes_answers: whether a route that doesn't know the field has to refuse it.
    """

    text: str = ""
    hint: str = ""
    off: tuple[Any, ...] = ()
    shapes_answers: bool = True


@dataclass(frozen=True, eq=False)
class Refused:
    """The field changes the answer and can't be honoured: an error, unless it asks for nothing.

    Args:
        text: why it can't be honoured.
        off: values that ask for nothing, besides null.
    """

    text: str
    off: tuple[Any, ...] = EMPTY


@dataclass(frozen=True, eq=False)
class Ignored:
    """A hint, an optimisation, or another program's concern: taken, and named in the response.

    Args:
        text: why it has no effect.
        off: values that ask for nothing, besides null; they are not named.
        is_named: False for what clients echo of earlier answers.
        if_strict: whether a strict server takes it, too.
    """

    text: str
    off: tuple[Any, ...] = EMPTY
    is_named: bool = True
    if_strict: bool = False


Rule = Honoured | Refused | Ignored


@dataclass(frozen=True, eq=False)
class Kinds:
    """Of a union of structs that a tag tells apart: what becomes of other tags.

    Args:
        text: why other kinds can't be honoured.
        default: the kind of objects without a tag.
        ignored: kinds that are taken, named and left out of their list; None for all other kinds.
        why: why those have no effect.
    """

    text: str
    default: str | None = None
    ignored: frozenset[str] | None = frozenset()
    why: str = ""

    def ignores(self, kind: Any) -> bool:
        """True if objects whose `type` is this kind are ignored."""
        return isinstance(kind, str) and (self.ignored is None or kind in self.ignored)


@dataclass(frozen=True, eq=False)
class Shape:
    """What a value may be, of a field's annotation.

    Args:
        annotation: as msgspec reads it.
        structs: structs that an object may be, by tag; None is the tag of one without.
        tag_field: the field that holds the tag.
        kinds: what becomes of other tags.
        element: the shape of a list's elements, if structs are among them.
        bounds: the list's type with its limits of length.
    """

    annotation: Any
    structs: Mapping[str | None, type[Struct]]
    tag_field: str | None
    kinds: Kinds
    element: Shape | None
    bounds: Any


@dataclass(frozen=True, eq=False)
class FieldRule:
    """A field of a struct: its rule, its shape, and whether it has to be there."""

    rule: Rule
    shape: Shape
    is_required: bool


@cache
def rules_of(kind: type[Struct]) -> Mapping[str, FieldRule]:
    """The fields of a struct, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(kind):
        annotation = hints[field.name]
        rules = [each for each in _metadata(annotation) if isinstance(each, Rule)]
        rule = rules[0] if rules else Honoured()
        found[field.name] = FieldRule(rule, _shape(annotation), field.required)
    return found


def _metadata(annotation: Any) -> tuple[Any, ...]:
    return annotation.__metadata__ if get_origin(annotation) is Annotated else ()


def _shape(annotation: Any) -> Shape:
    structs: dict[str | None, type[Struct]] = {}
    tag_field = element = bounds = None
    kinds = Kinds("nothing else can be used here")
    open = [annotation]
    while open:
        part = open.pop()
        kinds = next((each for each in _metadata(part) if isinstance(each, Kinds)), kinds)
        limits = tuple(each for each in _metadata(part) if isinstance(each, Meta))
        if get_origin(part) is Annotated:
            part = part.__origin__
        if get_origin(part) in (Union, UnionType):
            open += reversed(get_args(part))
        elif isinstance(part, type) and issubclass(part, Struct):
            structs[part.__struct_config__.tag] = part  # type: ignore[index]
            tag_field = part.__struct_config__.tag_field
        elif get_origin(part) is list:
            inner = _shape(get_args(part)[0])
            if inner.structs or inner.element:
                element = inner
                bounds = Annotated[(list[Any], *limits)] if limits else list[Any]
    return Shape(annotation, structs, tag_field, kinds, element, bounds)


class Reader:
    """Reads one body.

    Args:
        is_strict: refuse what would be ignored.
        known: unknown fields at the top that are refused unless they have one of these values.

    Attributes:
        ignored: names of what was taken and has no effect, without the numbers of list elements.
    """

    def __init__(self, is_strict: bool = False, known: Mapping[str, tuple[Any, ...]] | None = None):
        self._is_strict, self._known = is_strict, known or {}
        self.ignored: dict[str, None] = {}

    def read(self, value: Any, kind: type[Made]) -> Made:
        """A struct from what JSON was decoded to.

        Raises:
            ApiError: 400 that names the field.
        """
        if not isinstance(value, dict):
            raise bad_request(f"The body is {shown(value)}; a JSON object is needed.")
        return self._struct(value, kind, "")

    def _struct(self, value: Mapping[str, Any], kind: Any, place: str) -> Any:
        rules = rules_of(kind)
        config = kind.__struct_config__
        given: dict[str, Any] = {}
        for name, item in value.items():
            where = f"{place}.{name}" if place else name
            field = rules.get(name)
            if field is None:
                if name != config.tag_field:
                    self._take_unknown(name, item, where, place, config.forbid_unknown_fields)
                continue
            rule = field.rule
            if isinstance(rule, Honoured):
                off = None if rule.off and is_one_of(item, rule.off) else item
                given[name] = self._value(off, field.shape, where, rule.hint)
            elif isinstance(rule, Refused) or (self._is_strict and not rule.if_strict):
                refuse(item, where, rule.text, *rule.off)
            elif rule.is_named and not is_one_of(item, (None, *rule.off)):
                self._name(where)
        for name, field in rules.items():
            if field.is_required and name not in given:
                where = f"{place}.{name}" if place else name
                raise bad_request(
                    f"{where} is missing; it is needed.", where, "missing_required_parameter"
                )
        return kind(**given)

    def _take_unknown(self, name: str, item: Any, where: str, place: str, forbids: bool) -> None:
        if forbids or self._is_strict:
            raise bad_request(
                f"{named(where)} is no field that this server honours. Leave it out.",
                named(where),
                "unknown_parameter",
            )
        if place:
            return
        if name in self._known:
            refuse(item, name, "this route can't honour it", *self._known[name])
        elif not is_one_of(item, (None, *EMPTY)):
            self._name(name)

    def _value(self, item: Any, shape: Shape, where: str, hint: str) -> Any:
        if isinstance(item, dict) and shape.structs:
            return self._of_kind(item, shape, where)
        if isinstance(item, list) and shape.element is not None:
            _converted(item, shape.bounds, where, hint)
            made = (
                self._value(each, shape.element, f"{where}[{index}]", hint)
                for index, each in enumerate(item)
            )
            return [each for each in made if each is not _DROPPED]
        return _converted(item, shape.annotation, where, hint)

    def _of_kind(self, value: Mapping[str, Any], shape: Shape, where: str) -> Any:
        if shape.tag_field is None:
            (kind,) = shape.structs.values()
            return self._struct(value, kind, where)
        tag = value.get(shape.tag_field)
        tag = shape.kinds.default if tag is None else tag
        if isinstance(tag, str) and tag in shape.structs:
            return self._struct(value, shape.structs[tag], where)
        if shape.kinds.ignores(tag) and not self._is_strict:
            self._name(where, tag)
            return _DROPPED
        place = f"{where}.{shape.tag_field}"
        raise bad_request(
            f"{place} is {shown(tag)}; {shape.kinds.text}. Allowed are "
            f"{', '.join(map(str, shape.structs))}.",
            place,
            "unsupported_value",
        )

    def _name(self, where: str, kind: str | None = None) -> None:
        """Note that something has no effect: a field, or a kind of a list's elements."""
        name = re.sub(r"\[\d+\]", "[]", where)
        if kind is not None:
            name = f"{name.removesuffix('[]')}[{kind}]"
        name = name if _PLAIN_NAME.fullmatch(name) else "(other)"
        if len(self.ignored) < MAX_IGNORED:
            self.ignored[name] = None


def _converted(value: Any, annotation: Any, place: str, hint: str) -> Any:
    """A value as msgspec checks it, whose errors are `what - at `$.place``."""
    try:
        return msgspec.convert(value, annotation)
    except (msgspec.ValidationError, RecursionError) as error:
        what, _, inner = str(error).partition(" - at `")
        inner = inner.rstrip("`").removeprefix("key in ").removeprefix("$")
        raise bad_request(
            f"{named(place + inner)} can't be used: {what}.{f' {hint}' if hint else ''}",
            named(place + inner),
            "invalid_value",
        ) from None


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """True if `values` contains a value of the same type, so that false does not equal 0."""
    return any(type(value) is type(each) and value == each for each in values)


def refuse(value: Any, name: str, why: str, *allowed: Any) -> None:
    """Raise for a field that can't be honoured, unless it is null or has one of the values that change nothing.

    Raises:
        ApiError: 400 that names the field.
    """
    if is_one_of(value, (None, *allowed)):
        return
    raise unsupported(name, value, why, allowed)


def unsupported(name: str, value: Any, why: str, allowed: tuple[Any, ...] = ()) -> ApiError:
    """The error of a field that can't be honoured."""
    words = ", ".join(json.dumps(each) for each in (*allowed, None))
    return bad_request(
        f"{name} is {shown(value)}; {why}. Allowed here: {words}, or leave it out.",
        name,
        "unsupported_parameter",
    )
