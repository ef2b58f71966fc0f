"""Python types as answers: their JSON schema, instances of them, and snapshots of unfinished answers.

A snapshot of an instance of a class with fields, of whichever library, is an instance of a dataclass with the
same attributes, `PartialPerson` for `Person`, in which missing ones are None. Snapshots of a `TypedDict` and
of other objects are dicts without missing keys; snapshots of lists, tuples and sets are lists. A field of
type `str` shows the text so far; any other incomplete value (a number that more digits may follow, a word of
an enumeration, a date) is missing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args, get_origin

import jiter
import msgspec

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.type_libraries import (
    Library,
    TypeForm,
    afm_schema,
    arguments_type,
    bare,
    fields_of,
    is_typed_dict,
    library_of,
    members_of,
)

JsonObject = dict[str, Any]
ALLOWED = (
    "Allowed are dataclasses, TypedDicts, enumerations, classes of msgspec and pydantic (in unions: "
    "msgspec's with tag=True, or pydantic's), str, int, float, bool, Literal, and list, tuple, dict and "
    "Optional of these."
)


@dataclass(frozen=True)
class AnswerType:
    """A type of answers. Made by `answer_type`.

    Args:
        kind: the type; for a function, a `TypedDict` of its parameters.
        name: the class's name, the function's name, or "Response".
        description: the docstring without its arguments; None without one.
        schema: the JSON schema, in the form that AFM was trained on.
    """

    kind: TypeForm
    name: str
    description: str | None
    schema: JsonObject
    _library: Library

    @property
    def response_format(self) -> JsonObject:
        """The `response_format` of a user's message, which shows the schema in the prompt."""
        described = {} if self.description is None else {"description": self.description}
        json_schema = {"name": self.name, **described, "schema": self.schema}
        return {"type": "json_schema", "json_schema": json_schema}

    @cached_property
    def constraint(self) -> Constraint:
        """The constraint that answers are valid under the schema.

        Raises:
            ConstraintError: for a keyword of the schema that can't be honoured, with its place.
        """
        return Constraint.json_schema(self.schema)

    def instance(self, value: object) -> Any:
        """Convert JSON to an instance of the type; for a function, to its arguments by name.

        Args:
            value: a decoded JSON value, or JSON as str or bytes: a str is never a decoded string.

        Raises:
            ConstraintError: if it is not an instance, with the field that does not fit.
        """
        try:
            text = value if isinstance(value, str | bytes) else msgspec.json.encode(value)
            return self._library.decoded(text)
        except Exception as error:  # the type's own code may raise anything
            raise self._refused(f"{shown(value)} is no", error) from _unexpected(error)

    def partial(self, text: str) -> Any:
        """Return the snapshot of an unfinished answer; None while it has no value.

        Args:
            text: the beginning of a JSON text.

        Raises:
            ConstraintError: if the text does not begin JSON, or a complete value does not fit.
        """
        try:
            so_far = json_so_far(text)
            if so_far is MISSING:
                return None
            complete = json_so_far(text, open_strings=False)
            value = _snapshot(so_far, complete, self.kind, self._library)
            return None if value is MISSING else value
        except Exception as error:
            raise self._refused(f"{shown(text)} begins no", error) from _unexpected(error)

    def _refused(self, what: str, error: Exception) -> ConstraintError:
        name = "" if _unexpected(error) is None else f"{type(error).__name__}: "
        return ConstraintError(f"{what} {self.name}: {name}{error}")


def _unexpected(error: Exception) -> Exception | None:
    """Return an error that may be a fault of the type's code; None for one that refuses a value."""
    return None if isinstance(error, ValueError | TypeError | RecursionError) else error


def answer_type(kind: TypeForm) -> AnswerType:
    """Prepare a Python type as a type of answers.

    Args:
        kind: a dataclass, `TypedDict`, `NamedTuple`, enumeration, class of msgspec or attrs, model or
            `TypeAdapter` of pydantic; `Literal`, `list`, `tuple`, `dict`, `Optional` and unions of such,
            with the limits of `Annotated[..., msgspec.Meta(...)]`; or a function, whose arguments then are
            the answer.

    Raises:
        ConstraintError: for a type that no JSON schema describes, with what to use instead.
    """
    if callable(kind) and not isinstance(kind, type) and get_origin(kind) is None:
        kind = arguments_type(kind)
    library = library_of(kind)
    try:
        schema = afm_schema(library.schema())
    except ConstraintError:
        raise
    except Exception as error:  # the libraries have no error type for this
        reason = " ".join(str(error).split())
        raise ConstraintError(
            f"{shown(kind)} can't be a type of answers: {reason}. {ALLOWED}"
        ) from None
    name = schema.get("title", "Response")
    return AnswerType(library.kind, name, schema.get("description"), schema, library)


# -- snapshots

MISSING: Any = object()
_NUMBER_AT_END = re.compile(r"-?\d[\d.eE+-]*$")
_CLOSED_STRINGS = re.compile(r'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.S)


def json_so_far(text: str, open_strings: bool = True) -> Any:
    """Read the beginning of a JSON text; `open_strings` includes the text so far of a string without an end.

    Returns:
        The value so far, without a number at the text's end, which more digits may follow; `MISSING` if there
        is none.

    Raises:
        ValueError: if the text does not begin JSON.
    """
    closed = _CLOSED_STRINGS.match(text)
    assert closed is not None  # it matches the empty text
    if closed.end() == len(text):  # the end is in no string
        text = _NUMBER_AT_END.sub("", text)
    # As the item of a list: jiter reads nothing, or half a word, as an empty list, and on its own as an error.
    mode: Literal["on", "trailing-strings"] = "trailing-strings" if open_strings else "on"
    items = jiter.from_json(b"[" + text.encode(), allow_inf_nan=False, partial_mode=mode)
    return items[0] if items else MISSING


def _snapshot(value: object, complete: object, hint: TypeForm, library: Library) -> Any:
    """Make the snapshot of a value of a type from its part so far and its complete part, or `MISSING`."""
    if isinstance(value, dict):
        return _object(value, complete, members_of(hint), library)
    if isinstance(value, list):
        return _list(value, complete, members_of(hint), library)
    if complete is not MISSING:  # most values are what their type says
        is_one = type(value) is hint
        return value if is_one else library.decoded(json.dumps(value), hint)
    is_text = isinstance(value, str) and any(m in (str, Any) for m in members_of(hint))
    return value if is_text else MISSING


def _object(value: JsonObject, complete: Any, members: list[TypeForm], library: Library) -> Any:
    done = {} if complete is MISSING else complete
    # The first class that fits the complete part; or else the first.
    kinds = [kind for kind in map(_origin, members) if fields_of(kind)]
    kind = next((kind for kind in kinds if _can_be(done, kind)), kinds[0] if kinds else None)
    fields = {field.key: field for field in fields_of(kind)}
    values = (get_args(m)[1] for m in members if len(get_args(m)) > 1)
    others = Any if fields else next(values, Any)
    items = {}
    for key, item in value.items():
        hint = fields[key].type if key in fields else others
        new = _snapshot(item, done.get(key, MISSING), hint, library)
        if new is not MISSING:
            items[key] = new
    if not fields or is_typed_dict(kind):
        return items
    return _instance(kind, {fields[key].name: v for key, v in items.items() if key in fields})


def _list(value: list[object], complete: Any, members: list[TypeForm], library: Library) -> Any:
    done = [] if complete is MISSING else complete
    kind = next((m for m in map(_origin, members) if fields_of(m)), None)
    hints = _item_types(members) if kind is None else [f.type for f in fields_of(kind)]
    items = []
    for i, item in enumerate(value):
        hint = hints[min(i, len(hints) - 1)] if hints else Any
        items.append(_snapshot(item, done[i] if i < len(done) else MISSING, hint, library))
    if kind is not None:
        names = [field.name for field in fields_of(kind)]
        return _instance(kind, dict(zip(names, items, strict=False)))
    return [item for item in items if item is not MISSING]  # only the last can be missing


def _origin(hint: TypeForm) -> TypeForm:
    return get_origin(hint) or hint


def _can_be(done: JsonObject, kind: TypeForm) -> bool:
    types = {field.key: bare(field.type) for field in fields_of(kind)}
    return all(
        key in types and (get_origin(types[key]) is not Literal or value in get_args(types[key]))
        for key, value in done.items()
    )


def _item_types(members: list[TypeForm]) -> list[TypeForm]:
    """Return the types of a list's items; the last one also of all that follow."""
    for member in members:
        if get_args(member) and get_origin(member) is not Literal:
            first, *others = get_args(member)
            is_fixed = get_origin(member) is tuple and others != [...]
            return [first, *others] if is_fixed else [first]
    return []


def _instance(kind: TypeForm, values: JsonObject) -> Any:
    given = {name: value for name, value in values.items() if name and value is not MISSING}
    return _snapshot_class(kind)(**given)


@lru_cache(maxsize=1024)
def _snapshot_class(kind: TypeForm) -> TypeForm:
    names = [field.name for field in fields_of(kind) if field.name]
    made = dataclasses.make_dataclass(f"Partial{kind.__name__}", [(n, Any, None) for n in names])
    made.__module__ = kind.__module__
    return made
