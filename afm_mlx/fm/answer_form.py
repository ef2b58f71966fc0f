"""The form of an answer: text, or JSON under a schema, which becomes an instance of a class or content."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.fm.errors import DecodingFailureError, GenerationError, InvalidGenerationSchemaError
from afm_mlx.fm.generable import Generable, GeneratedContent, GenerationID
from afm_mlx.fm.generation_schema import (
    GenerationSchema,
    Schema,
    choices_of,
    with_whole_patterns,
    without_none,
)
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.types import MISSING, json_so_far


@dataclass(frozen=True)
class AnswerForm:
    """The form that an answer must have: text, or JSON under a schema. Made by `answer_form`.

    All fields are None for text. `response_format` is the schema as the model reads it in a chat message;
    `followed` is the schema that the answer's tokens follow, with anchored patterns; `generating` is the class
    whose instance is the answer, None for `GeneratedContent`; `constraint` is None before `compiled`.
    """

    response_format: Schema | None = None
    followed: Schema | None = None
    generating: Any = None
    constraint: Constraint | None = None

    @property
    def is_text(self) -> bool:
        return self.followed is None

    async def compiled(self) -> AnswerForm:
        """Return the form with its constraint; raise `InvalidGenerationSchemaError` if there can be none."""
        if self.followed is None:
            return self
        try:
            constraint = await asyncio.to_thread(Constraint.json_schema, self.followed)
        except ConstraintError as error:
            raise InvalidGenerationSchemaError(f"Invalid generation schema: {error}") from error
        return replace(self, constraint=constraint)

    @property
    def name(self) -> str:
        return self.response_format["json_schema"]["name"] if self.response_format else ""

    def content(self, text: str) -> GeneratedContent:
        """Decode a complete answer to content; raise `DecodingFailureError` if it is cut off, or no JSON."""
        with _decoding(text):
            return GeneratedContent.of(json.loads(text))

    def value(self, content: GeneratedContent) -> Any:
        """Convert a complete answer to an instance of the class, if there is one."""
        if self.generating is None:
            return content
        return self.generating._from_generated_content(content)

    def so_far(self, text: str, is_complete: bool = False) -> Any:
        """Decode an answer, or its beginning unless `is_complete`; return None if there is no value yet."""
        with _decoding(text):
            if is_complete:
                return json.loads(text)
            value = json_so_far(text)
            if self.generating is not None and value is not MISSING:
                closed = json_so_far(text, open_strings=False)
                value = _without_open_choices(self.generating, value, closed)
            return None if value is MISSING else value

    def snapshot(self, value: object, id: GenerationID, is_complete: bool) -> Any:
        """Make a snapshot of the JSON value `value`; all snapshots of one answer have the same id."""
        with _decoding(value):
            content = GeneratedContent.of(value, id, is_complete)
        if self.generating is None:
            return content
        return self.generating.PartiallyGenerated._from_generated_content(content)


def _without_open_choices(type_class: Any, value: object, closed: Any) -> object:
    """Remove words of a `Literal` or an `Enum` that may go on from a value of type `type_class`.

    `value` has incomplete strings; `closed` is the same value without them, `MISSING` if nothing is left.
    """
    type_class, _ = without_none(type_class)
    if choices_of(type_class) is not None:
        return closed
    if isinstance(value, list) and get_origin(type_class) is list:
        (element,) = get_args(type_class)
        known = [] if closed is MISSING else closed
        pairs = itertools.zip_longest(value, known, fillvalue=MISSING)
        items = [_without_open_choices(element, *pair) for pair in pairs]
        return [item for item in items if item is not MISSING]
    if isinstance(value, dict) and isinstance(type_class, Generable):
        types = {p.name: p.type_class for p in type_class._generable_properties}  # type: ignore[attr-defined]
        known = {} if closed is MISSING else closed
        fields = {
            name: _without_open_choices(types[name], item, known.get(name, MISSING))
            for name, item in value.items()
        }
        return {name: item for name, item in fields.items() if item is not MISSING}
    return value


@contextmanager
def _decoding(what: object) -> Iterator[None]:
    """Raise errors of decoding `what`, an answer, as `DecodingFailureError` while the context is open."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise DecodingFailureError(
            f"The answer can't be decoded ({error}): {shown(what)}"
        ) from None


def answer_form(
    generating: Any = None,
    schema: GenerationSchema | None = None,
    json_schema: Mapping[str, object] | None = None,
) -> AnswerForm:
    """Check the arguments that give an answer's form, and make the form; text if there are none.

    Raises:
        ValueError: for more than one of them, and for a class that is not generable.
        TypeError: for a `schema` that is not a `GenerationSchema`, and a JSON schema that JSON can't hold.
        GenerationError: for a JSON schema that is not an object.
        UnsupportedGuideError, InvalidGenerationSchemaError: for a schema that can't be honoured.
    """
    if sum(given is not None for given in (generating, schema, json_schema)) > 1:
        raise ValueError(
            "Cannot specify more than one of 'generating', 'schema' and 'json_schema'."
        )
    if generating is not None:
        if not isinstance(generating, Generable):
            name = getattr(generating, "__name__", type(generating).__name__)
            raise ValueError(f"{name} is not a Generable type. Use the @generable decorator.")
        schema = generating.generation_schema()
    if schema is not None:
        if not isinstance(schema, GenerationSchema):
            raise TypeError(
                f"schema must be a GenerationSchema, got {shown(schema)}. JSON goes to json_schema, and a "
                "generable class to generating."
            )
        response_format = schema.response_format()
        followed = with_whole_patterns(response_format["json_schema"]["schema"])
    elif json_schema is not None:
        try:
            followed = json.loads(json.dumps(json_schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"The schema can't be written as JSON: {error}.") from None
        if not isinstance(followed, dict):
            raise GenerationError(
                f"The schema has the wrong format: {shown(json_schema)}; a dict with a JSON schema is needed."
            )
        name = followed.get("title")
        described = {"name": name if isinstance(name, str) else "Response"}
        described |= {key: followed[key] for key in ("description",) if key in followed}
        response_format = {"type": "json_schema", "json_schema": {**described, "schema": followed}}
    else:
        return AnswerForm()
    return AnswerForm(response_format, followed, generating)
