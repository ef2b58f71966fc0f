"""Snapshots of unfinished answers: a JSON text's beginning as typed values.

All types have one form. An instance of a class with fields, whichever library's it is, is shown as an
instance of a dataclass with the same attributes, `PartialPerson` for `Person`, in which what is missing is
None. A `TypedDict` and other objects are dicts, which lack what is missing; lists, tuples and sets are lists.
Strings are as long as the text has them, where the type is `str`; what else is not complete yet (a number
whose digits may go on, a word of an enumeration, a date) is missing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import jiter

from afm_mlx.guidance.type_fields import bare, fields_of, is_typed_dict, members_of
from afm_mlx.guidance.type_libraries import Library

MISSING: Any = object()
_NUMBER_AT_END = re.compile(r"-?\d[\d.eE+-]*$")
_CLOSED_STRINGS = re.compile(r'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.S)


def json_so_far(text: str, open_strings: bool = True) -> Any:
    """Read the beginning of a JSON text.

    Args:
        text: the beginning.
        open_strings: whether a string that has no end yet is part of the value, as long as it is.

    Returns:
        The value so far, without a number at the text's end: more digits may come. `MISSING` where there is
        none.

    Raises:
        ValueError: when the text is no beginning of JSON.
    """
    closed = _CLOSED_STRINGS.match(text)
    assert closed is not None  # it matches the empty text
    if closed.end() == len(text):  # the end is in no string
        text = _NUMBER_AT_END.sub("", text)
    # As the item of a list: jiter reads nothing, or half a word, as an empty list, and on its own as an error.
    mode: Literal["on", "trailing-strings"] = "trailing-strings" if open_strings else "on"
    items = jiter.from_json(b"[" + text.encode(), allow_inf_nan=False, partial_mode=mode)
    return items[0] if items else MISSING


def snapshot(text: str, kind: Any, library: Library) -> Any:
    """What the beginning of a JSON text says of a type's instance; None when that is nothing.

    Args:
        text: the beginning of a JSON text.
        kind: the type.
        library: reads what is complete.

    Raises:
        ValueError: when the text is no such beginning, or something complete does not fit.
    """
    so_far = json_so_far(text)
    if so_far is MISSING:
        return None
    value = _Snapshots(library).of(so_far, json_so_far(text, open_strings=False), kind)
    return None if value is MISSING else value


class _Snapshots:
    """Values as snapshots.

    Args:
        library: reads what is complete.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def of(self, value: Any, complete: Any, hint: Any) -> Any:
        """A value as a snapshot.

        Args:
            value: the value so far.
            complete: the same, without what is not complete; `MISSING` when that is all of it.
            hint: its type.
        """
        if isinstance(value, dict):
            return self._object(value, complete, members_of(hint))
        if isinstance(value, list):
            return self._list(value, complete, members_of(hint))
        if complete is not MISSING:
            # Most values are what their type says.
            is_one = type(value) is hint
            return value if is_one else self._library.decoded(json.dumps(value), hint)
        is_text = isinstance(value, str) and any(m in (str, Any) for m in members_of(hint))
        return value if is_text else MISSING

    def _object(self, value: dict[str, Any], complete: Any, members: list[Any]) -> Any:
        done = {} if complete is MISSING else complete
        kind = _class_of(done, members)
        fields = {field.key: field for field in fields_of(kind)}
        others = Any if fields else _argument(members, 1)
        items = {}
        for key, item in value.items():
            hint = fields[key].type if key in fields else others
            new = self.of(item, done.get(key, MISSING), hint)
            if new is not MISSING:
                items[key] = new
        if not fields or is_typed_dict(kind):
            return items
        return _instance(kind, {fields[key].name: v for key, v in items.items() if key in fields})

    def _list(self, value: list[Any], complete: Any, members: list[Any]) -> Any:
        done = [] if complete is MISSING else complete
        kind = next((m for m in map(_origin, members) if fields_of(m)), None)
        hints = _item_types(members) if kind is None else [f.type for f in fields_of(kind)]
        items = []
        for i, item in enumerate(value):
            hint = hints[min(i, len(hints) - 1)] if hints else Any
            items.append(self.of(item, done[i] if i < len(done) else MISSING, hint))
        if kind is not None:
            names = [field.name for field in fields_of(kind)]
            return _instance(kind, dict(zip(names, items, strict=False)))
        return [item for item in items if item is not MISSING]  # only the last can be missing


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _class_of(done: dict[str, Any], members: list[Any]) -> Any:
    """The first class that an object can be, as far as it is complete; None when none of them has fields."""
    kinds = [kind for kind in map(_origin, members) if fields_of(kind)]
    return next((kind for kind in kinds if _can_be(done, kind)), kinds[0] if kinds else None)


def _can_be(done: dict[str, Any], kind: Any) -> bool:
    types = {field.key: bare(field.type) for field in fields_of(kind)}
    return all(
        key in types and (get_origin(types[key]) is not Literal or value in get_args(types[key]))
        for key, value in done.items()
    )


def _argument(members: list[Any], index: int) -> Any:
    """The type of what a container among the members holds."""
    return next((get_args(m)[index] for m in members if len(get_args(m)) > index), Any)


def _item_types(members: list[Any]) -> list[Any]:
    """The types of a list's items, the last one of all that follow."""
    for member in members:
        if get_args(member) and get_origin(member) is not Literal:
            first, *others = get_args(member)
            is_fixed = get_origin(member) is tuple and others != [...]
            return [first, *others] if is_fixed else [first]
    return []


def _instance(kind: Any, values: dict[str, Any]) -> Any:
    given = {name: value for name, value in values.items() if name and value is not MISSING}
    return _snapshot_class(kind)(**given)


@lru_cache(maxsize=1024)
def _snapshot_class(kind: Any) -> Any:
    names = [field.name for field in fields_of(kind) if field.name]
    made = dataclasses.make_dataclass(f"Partial{kind.__name__}", [(n, Any, None) for n in names])
    made.__module__ = kind.__module__
    return made
