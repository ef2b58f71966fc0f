"""Python types as answers: their JSON schema, instances of them, and snapshots of unfinished ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_origin

import msgspec

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.function_arguments import arguments_type
from afm_mlx.guidance.snapshots import snapshot
from afm_mlx.guidance.type_libraries import Library, library_of
from afm_mlx.guidance.type_schema import as_afm_reads_it

ALLOWED = (
    "Allowed are dataclasses, TypedDicts, enumerations, classes of msgspec and pydantic (in unions: "
    "msgspec's with tag=True, or pydantic's), str, int, float, bool, Literal, and list, tuple, dict and "
    "Optional of these."
)


@dataclass(frozen=True)
class AnswerType:
    """A type of answers. Made by `answer_type`.

    Args:
        kind: the type; of a function, a `TypedDict` of its parameters.
        name: the class's name, the function's name, or "Response".
        description: what the docstring says, but for its arguments; None without one.
        schema: the JSON schema, in the form in which AFM was shown schemas.
    """

    kind: Any
    name: str
    description: str | None
    schema: dict[str, Any]
    _library: Library

    @property
    def response_format(self) -> dict[str, Any]:
        """What a user's message has as `response_format`, for the prompt to show the schema."""
        described = {} if self.description is None else {"description": self.description}
        json_schema = {"name": self.name, **described, "schema": self.schema}
        return {"type": "json_schema", "json_schema": json_schema}

    @cached_property
    def constraint(self) -> Constraint:
        """What an answer must look like.

        Raises:
            ConstraintError: for a keyword of the schema that can't be honoured, with its place.
        """
        return Constraint.json_schema(self.schema)

    def instance(self, value: Any) -> Any:
        """An instance of the type; of a function, the arguments that are given, by their names.

        Args:
            value: a JSON text (str or bytes), or what one was decoded to.

        Raises:
            ConstraintError: when it is none, with the field that does not fit.
        """
        try:
            text = value if isinstance(value, str | bytes) else msgspec.json.encode(value)
            return self._library.decoded(text)
        except Exception as error:  # the type's own code may raise whatever it likes
            raise self._refused(f"{shown(value)} is no", error) from _unexpected(error)

    def partial(self, text: str) -> Any:
        """What an unfinished answer says so far; see `snapshots`.

        Args:
            text: the beginning of a JSON text.

        Raises:
            ConstraintError: when the text is no such beginning, or a value does not fit.
        """
        try:
            return snapshot(text, self.kind, self._library)
        except Exception as error:
            raise self._refused(f"{shown(text)} begins no", error) from _unexpected(error)

    def _refused(self, what: str, error: Exception) -> ConstraintError:
        name = "" if _unexpected(error) is None else f"{type(error).__name__}: "
        return ConstraintError(f"{what} {self.name}: {name}{error}")


def _unexpected(error: Exception) -> Exception | None:
    """An error that is no refusal of a value, and may be a fault of the type's code; else None."""
    return None if isinstance(error, ValueError | TypeError | RecursionError) else error


def answer_type(kind: Any) -> AnswerType:
    """A type as a type of answers.

    Args:
        kind: a dataclass, `TypedDict`, `NamedTuple`, enumeration, class of msgspec or attrs, model or
            `TypeAdapter` of pydantic; `Literal`, `list`, `tuple`, `dict`, `Optional` and unions of such,
            with the limits of `Annotated[..., msgspec.Meta(...)]`; or a function, whose arguments then are
            the answer.

    Raises:
        ConstraintError: for a type that JSON can't give, with what to use instead.
    """
    if callable(kind) and not isinstance(kind, type) and get_origin(kind) is None:
        kind = arguments_type(kind)
    library = library_of(kind)
    try:
        schema = as_afm_reads_it(library.schema())
    except ConstraintError:
        raise
    except Exception as error:  # the libraries have no error of their own for this
        reason = " ".join(str(error).split())
        raise ConstraintError(
            f"{shown(kind)} can't be a type of answers: {reason}. {ALLOWED}"
        ) from None
    name = schema.get("title", "Response")
    return AnswerType(library.kind, name, schema.get("description"), schema, library)
