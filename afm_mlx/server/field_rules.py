"""Rules for fields of requests, and a reader that applies them.

A struct's fields are annotated with their rules (`request_fields/` has them); a field without one is
`Honoured`. Fields that a struct doesn't have are accepted, and named if they are at the top of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from afm_mlx.errors import named, shown
from afm_mlx.server.replies import bad_request

Made = TypeVar("Made")
EMPTY: tuple[object, ...] = ("", [], {}, False)
"""Values that mean the same as null."""
MAX_IGNORED = 40
"""Maximum number of names in the list of ignored fields."""
_DROPPED = object()
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\[\]/-]{1,80}")


@dataclass(frozen=True, eq=False)
class Honoured:
    """A rule for fields that take effect.

    Args:
        text: the field's meaning and allowed values, for the documents.
        hint: advice on how to go on, for error messages.
        off: values that mean the same as null.
        shapes_answers: True if the field changes answers, so that routes that lack it refuse it.
    """

    text: str = ""
    hint: str = ""
    off: tuple[object, ...] = ()
    shapes_answers: bool = True


@dataclass(frozen=True, eq=False)
class Refused:
    """A rule for fields that can't be honoured, for the reason `text`: an error, unless they are `off`.

    Models that see take the field if `if_seen` says what it is then; structs have it.
    """

    text: str
    off: tuple[object, ...] = EMPTY
    if_seen: str = ""


@dataclass(frozen=True, eq=False)
class Ignored:
    """A rule for fields that are accepted without effect, such as hints; the response names them.

    Args:
        text: why it has no effect.
        off: values that mean the same as null; they are not named.
        is_named: False for fields that clients repeat from earlier answers.
        if_strict: True if strict servers accept the field, too.
        unless_thinking: True if the field takes effect in models that think; structs have it then.
    """

    text: str
    off: tuple[object, ...] = EMPTY
    is_named: bool = True
    if_strict: bool = False
    unless_thinking: bool = False


Rule = Honoured | Refused | Ignored


@dataclass(frozen=True, eq=False)
class Kinds:
    """A rule for objects of a union whose tag (the value of `type`) belongs to none of its structs.

    Args:
        text: why other tags can't be honoured.
        default: the tag of objects without one.
        ignored: tags of objects that are named and left out of their list; pass None for all other tags. Those
            that a struct has are ignored by models that don't think.
        why: why the ignored objects have no effect.
        if_seen: in place of `text`, for models that see.
    """

    text: str
    default: str | None = None
    ignored: frozenset[str] | None = frozenset()
    why: str = ""
    if_seen: str = ""

    def ignores(self, kind: str) -> bool:
        """True if objects with this tag are ignored."""
        return self.ignored is None or kind in self.ignored


NO_KINDS = Kinds("nothing else can be used here")


class Fields(Struct, kw_only=True):
    """An object of a request, whose struct fields are those that take effect.

    Attributes:
        rules: mapping from the names of fields, several with spaces between, to their rule; a text is the rule
            `Honoured(text)`. Struct fields without one are honoured. Subclasses add to their base's.
        is_image: True for images, which models that read text only don't have in their unions.
    """

    rules: ClassVar[Mapping[str, Rule | str]] = {}
    is_image: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class ValueShape:
    """The values that a field's annotation allows.

    Args:
        annotation: the type that msgspec converts to.
        structs: the structs that an object may be, by tag; a struct without a tag has None.
        tag_field: the name of the tag's field.
        kinds: the rule for other tags.
        element: the shape of a list's elements, if there are structs among them.
        bounds: the list's type with its limits of length, for msgspec.
    """

    annotation: object
    structs: Mapping[str | None, type[Struct]] = field(default_factory=dict)
    tag_field: str | None = None
    kinds: Kinds = NO_KINDS
    element: ValueShape | None = None
    bounds: object = None


@dataclass(frozen=True, eq=False)
class FieldRule:
    """What becomes of a request's field (`rule`: honoured, refused or ignored), and its allowed values."""

    rule: Rule
    shape: ValueShape
    is_required: bool = False


@cache
def rules_of(kind: type[Struct]) -> Mapping[str, FieldRule]:
    """Return the rules of an object's fields: its base's, its struct's own in order, then all others."""
    base: Any = kind.__base__
    found = {} if base is Struct else {**rules_of(base)}
    named: dict[str, Rule] = {}
    for names, rule in vars(kind).get("rules", {}).items():
        rule = Honoured(rule) if isinstance(rule, str) else rule
        named |= dict.fromkeys(names.split(), rule)
    hints = get_type_hints(kind, include_extras=True)
    for each in msgspec.structs.fields(kind):
        if each.name not in found or each.name in named:
            rule = named.pop(each.name, Honoured())
            found[each.name] = FieldRule(rule, _shape(hints[each.name]), each.required)
    return found | {name: FieldRule(rule, ValueShape(object)) for name, rule in named.items()}


def _metadata(annotation: Any) -> tuple[object, ...]:
    return annotation.__metadata__ if get_origin(annotation) is Annotated else ()


def _shape(annotation: Any) -> ValueShape:
    structs: dict[str | None, type[Struct]] = {}
    tag_field = element = bounds = None
    kinds = NO_KINDS
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
    return ValueShape(annotation, structs, tag_field, kinds, element, bounds)


class Reader:
    """Converts one body to structs by the rules of their fields.

    Args:
        is_strict: True to refuse fields that would be ignored.
        known: fields of other APIs that are refused, except the values that mean the same as null.
        may_think: takes the body's `model`, and returns True if that model may think.
        sees: takes the body's `model`, and returns True if that model reads images.

    Attributes:
        ignored: names of fields without effect, in order, with [] for the indices of lists.
        has_images: True if the body has an image.
    """

    def __init__(
        self,
        is_strict: bool = False,
        known: Mapping[str, tuple[object, ...]] | None = None,
        may_think: Callable[[object], bool] = lambda model: False,
        sees: Callable[[object], bool] = lambda model: False,
    ):
        self._is_strict, self._known, self._may_think = is_strict, known or {}, may_think
        self._model_sees = sees
        self._thinks = self._sees = self.has_images = False
        self.ignored: dict[str, None] = {}

    def read(self, value: object, kind: type[Made]) -> Made:
        """Convert a decoded JSON object to a struct; raise a 400 that names the field at fault."""
        if not isinstance(value, dict):
            raise bad_request(f"The body is {shown(value)}; a JSON object is needed.")
        self._thinks = self._may_think(value.get("model"))
        self._sees = self._model_sees(value.get("model"))
        return self._struct(value, kind, "")

    def _struct(self, value: Mapping[str, object], kind: Any, place: str) -> Any:
        rules = rules_of(kind)
        config = kind.__struct_config__
        self.has_images |= _is_image(kind)
        given: dict[str, object] = {}
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
            elif isinstance(rule, Ignored) and rule.unless_thinking and self._thinks:
                off = None if is_one_of(item, ("", [], {})) else item
                given[name] = self._value(off, field.shape, where, "")
            elif isinstance(rule, Refused) and rule.if_seen and self._sees:
                given[name] = self._value(item or None, field.shape, where, "")
                self.has_images |= bool(item)
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

    def _take_unknown(self, name: str, item: object, where: str, place: str, forbids: bool) -> None:
        if forbids or self._is_strict:
            raise bad_request(
                f"{named(where)} is not a field that this server honours. Leave it out.",
                named(where),
                "unknown_parameter",
            )
        if place:
            return
        if name in self._known:
            refuse(item, name, "this route can't honour it", *self._known[name])
        elif not is_one_of(item, (None, *EMPTY)):
            self._name(name)

    def _value(self, item: object, shape: ValueShape, where: str, hint: str) -> Any:
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

    def _of_kind(self, value: Mapping[str, object], shape: ValueShape, where: str) -> Any:
        if shape.tag_field is None:
            (kind,) = shape.structs.values()
            return self._struct(value, kind, where)
        tag = value.get(shape.tag_field)
        tag = shape.kinds.default if tag is None else tag
        of_thinkers = isinstance(tag, str) and tag in (shape.kinds.ignored or ())
        found = shape.structs.get(tag) if isinstance(tag, str) else None
        if found is not None and self._takes(found) and (self._thinks or not of_thinkers):
            return self._struct(value, found, where)
        if isinstance(tag, str) and shape.kinds.ignores(tag) and not self._is_strict:
            self._name(where, tag)
            return _DROPPED
        place = f"{where}.{shape.tag_field}"
        why = (self._sees and shape.kinds.if_seen) or shape.kinds.text
        allowed = ", ".join(str(tag) for tag, kind in shape.structs.items() if self._takes(kind))
        raise bad_request(
            f"{place} is {shown(tag)}; {why}. Allowed are {allowed}.",
            place,
            "unsupported_value",
        )

    def _takes(self, kind: type[Struct]) -> bool:
        return self._sees or not _is_image(kind)

    def _name(self, where: str, kind: str | None = None) -> None:
        """Add the field at `where` to `ignored`; with `kind`, the list elements that have this tag."""
        name = re.sub(r"\[\d+\]", "[]", where)
        if kind is not None:
            name = f"{name.removesuffix('[]')}[{kind}]"
        name = name if _PLAIN_NAME.fullmatch(name) else "(other)"
        if len(self.ignored) < MAX_IGNORED:
            self.ignored[name] = None


def _is_image(kind: type[Struct]) -> bool:
    return getattr(kind, "is_image", False)


def _converted(value: object, annotation: object, place: str, hint: str) -> Any:
    """Convert a value at `place` to `annotation`; raise a 400 that names the refused element, with `hint`."""
    try:
        return msgspec.convert(value, annotation)
    except (msgspec.ValidationError, RecursionError) as error:
        where = named(_refused_place(value, annotation, place))
        what = str(error).partition(" - at ")[0]  # msgspec's own place has no names of keys
        raise bad_request(
            f"{where} can't be used: {what}.{f' {hint}' if hint else ''}", where, "invalid_value"
        ) from None


def _refused_place(value: object, annotation: object, place: str) -> str:
    """Return the place of the innermost element that msgspec refuses.

    The elements of each level are bisected, and converted within single-element copies of the levels above.
    """
    above: list[str | None] = []  # keys of the levels above; None for lists

    def is_refused(part: object) -> bool:
        for key in reversed(above):
            part = [part] if key is None else {key: part}
        try:
            msgspec.convert(part, annotation)
        except (msgspec.ValidationError, RecursionError):
            return True
        return False

    while isinstance(value, list | dict):
        make = list if isinstance(value, list) else dict
        items = list(enumerate(value) if isinstance(value, list) else value.items())

        def part_of(some: list[Any], make: Any = make) -> Any:
            return make(some) if make is dict else [item for _, item in some]

        if is_refused(make()):
            return place  # another type is needed
        while len(items) > 1:
            half = items[: len(items) // 2]
            items = half if is_refused(part_of(half)) else items[len(half) :]
        if not items or not is_refused(part_of(items)):
            return place  # all elements are allowed, but not together
        ((key, value),) = items
        place += f"[{key}]" if make is list else f".{key}"
        above.append(None if make is list else key)
    return place


def is_one_of(value: object, values: tuple[object, ...]) -> bool:
    """True if `values` contains a value of the same type, so that false does not equal 0."""
    return any(type(value) is type(each) and value == each for each in values)


def refuse(value: object, name: str, why: str, *allowed: object) -> None:
    """Raise a 400 for the field `name`, with the reason `why`, unless it is null or one of `allowed`."""
    if is_one_of(value, (None, *allowed)):
        return
    words = ", ".join(json.dumps(each) for each in (*allowed, None))
    raise bad_request(
        f"{name} is {shown(value)}; {why}. Allowed here: {words}, or leave it out.",
        name,
        "unsupported_parameter",
    )
