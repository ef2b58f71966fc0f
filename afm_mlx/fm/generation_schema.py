"""The schema of an object, in the JSON dialect of Apple's framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from afm_mlx.fm.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from afm_mlx.fm.generation_property import Property, Schema


class GenerationSchema:
    """What the answer to a request, or the arguments of a tool, must look like: an object's fields.

    `generable` makes it from a class, so it is seldom made by hand.

    Args:
        type_class: the class; its name is the schema's.
        description: what the model is told about the object.
        properties: the fields, in the order in which they are generated.
        dynamic_nested_types: the schemas of all classes that fields refer to.

    Raises:
        TypeError: for a list that doesn't say what its elements are.
    """

    def __init__(
        self,
        type_class: type,
        description: str | None = None,
        properties: list[Property] | None = None,
        dynamic_nested_types: Sequence[GenerationSchema] = (),
    ) -> None:
        self.type_class = type_class
        self.description = description
        self.properties = properties or []
        self.dynamic_nested_types = list(dynamic_nested_types)
        for one in self.properties:
            one.check_lists()

    @property
    def name(self) -> str:
        """The class's name: the schema's `title`."""
        return self.type_class.__name__

    def to_dict(self) -> Schema:
        """The schema as JSON: `x-order` has the fields' order, `$defs` the classes that they refer to.

        Raises:
            UnsupportedGuideError: for a guide on a type of field that can't have it.
            InvalidGenerationSchemaError: for a field of any other type, guides that no value can follow,
                and two classes of one name.
        """
        nested = self._nested_by_name()

        def reference(type_class: Any) -> Schema:
            name = type_class.__name__ if isinstance(type_class, type) else str(type_class)
            if name == self.name:
                return {"$ref": "#"}
            if name not in nested:
                raise InvalidGenerationSchemaError(
                    f"{name} is no type that can be generated; allowed are str, int, float, bool, Literal and "
                    "Enum, classes decorated with @generable, list[T] and Optional[T] of these."
                )
            return {"$ref": f"#/$defs/{name}"}

        try:
            schema = self.object_schema(reference)
            if nested:
                schema["$defs"] = {name: n.object_schema(reference) for name, n in nested.items()}
        except (UnsupportedGuideError, InvalidGenerationSchemaError) as error:
            raise type(error)(f"Invalid generation schema {self.name!r}. {error}") from None
        return schema

    def response_format(self) -> dict[str, Any]:
        """The schema as the `response_format` of a chat message; raises what `to_dict` raises."""
        described = {"description": self.description} if self.description else {}
        schema = {"name": self.name, **described, "schema": self.to_dict()}
        return {"type": "json_schema", "json_schema": schema}

    def object_schema(self, reference: Callable[[Any], Schema]) -> Schema:
        """The object without `$defs`; see `Property.to_dict` for what it takes and raises."""
        described = {"description": self.description} if self.description else {}
        return {
            "title": self.name,
            **described,
            "type": "object",
            "properties": {p.name: p.to_dict(reference) for p in self.properties},
            "required": [p.name for p in self.properties if not p.is_optional],
            "additionalProperties": False,
            "x-order": [p.name for p in self.properties],
        }

    def _nested_by_name(self) -> dict[str, GenerationSchema]:
        """The schemas that this one and its nested ones list, without this one."""
        found: dict[str, GenerationSchema] = {}
        waiting = list(self.dynamic_nested_types)
        while waiting:
            schema = waiting.pop(0)
            known = self if schema.name == self.name else found.get(schema.name)
            if known is None:
                found[schema.name] = schema
                waiting += schema.dynamic_nested_types
            elif not is_same_class(known.type_class, schema.type_class):
                raise InvalidGenerationSchemaError(
                    f"Invalid generation schema {self.name!r}. Two of its classes have the name "
                    f"{schema.name}, in {known.type_class.__module__} and "
                    f"{schema.type_class.__module__}. Rename one."
                )
        return found


def is_same_class(a: type, b: type) -> bool:
    """True if two classes are one, or a decorator such as `dataclass(slots=True)` made one of the other."""
    return a is b or (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def with_whole_patterns(schema: Any) -> Any:
    """A schema of this dialect in which patterns have to match all of a string, as guides mean them.

    To JSON schema, any part of it is enough.
    """
    if isinstance(schema, list):
        return [with_whole_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: with_whole_patterns(value) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str):
        changed["pattern"] = f"^(?:{schema['pattern']})$"
    return changed
