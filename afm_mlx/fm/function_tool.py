"""Tools made of Python functions: annotations give the schema, the docstring what the model is told."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from afm_mlx.errors import shown
from afm_mlx.fm.generable import Generable, GeneratedContent, as_instances
from afm_mlx.fm.generable_utils import generation_schema, referenced_classes
from afm_mlx.fm.generation_property import Schema, inner_types, without_none
from afm_mlx.fm.generation_schema import GenerationSchema
from afm_mlx.fm.tool import Tool


class FunctionTool(Tool):
    """A tool that calls a function; one that is not async runs in a thread, so that it may block.

    Its name is the function's, its description the first paragraph of the docstring. The model may leave out
    parameters with a default. A Google-style `Args:` section describes parameters, and so does
    `Annotated[T, msgspec.Meta(...)]`, which can also limit them.

    Args:
        function: with a docstring, and with annotations that msgspec knows: plain types, lists, dicts,
            `Literal`, enums, dataclasses, TypedDicts, dates and more.

    Raises:
        TypeError: for a function without a docstring, a parameter without an annotation or with one that has no
            schema, and parameters that can't be given by name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.isroutine(function):
            raise TypeError(f"A tool is made of a function, got {shown(function)}.")
        self._function = function
        self.name = function.__name__
        text = inspect.getdoc(function) or ""
        self.description = " ".join(text.split("\n\n")[0].split())
        if not self.description:
            raise TypeError(
                f"The function {self.name} has no docstring. Its first paragraph tells the model what the "
                "tool is for: write one."
            )
        self._hints = _annotations(function)
        self._arguments = _arguments_type(function, self._hints, described_arguments(text))
        super().__init__()

    @property
    def arguments_schema(self) -> GenerationSchema:
        """What the function's parameters look like."""
        return _FunctionSchema(self._arguments, self.name)

    async def call(self, args: GeneratedContent) -> str:
        """The function's result for these arguments; JSON, when it is no text.

        Raises:
            ValueError: for an argument of another type.
            Exception: what the function raises.
        """
        given = {name: self._converted(name, value) for name, value in args.value().items()}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**given)
        else:
            result = await asyncio.to_thread(self._function, **given)
        if isinstance(result, str):
            return result
        try:
            plain = msgspec.to_builtins(result, str_keys=True)
            return json.dumps(plain, ensure_ascii=False)
        except TypeError:  # an object of some class
            return str(result)

    def _converted(self, name: str, value: Any) -> Any:
        """An argument as the function's annotation has it; Python says which ones are missing or too many."""
        hint = self._hints.get(name, Any)
        if isinstance(inner_types(hint)[-1], Generable):
            return as_instances(hint, value, name)
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ValueError(f"The argument {name!r}: {error}.") from None


class _FunctionSchema(GenerationSchema):
    """The schema of a function's parameters, in the dialect of generable classes."""

    def __init__(self, arguments: type, name: str) -> None:
        super().__init__(arguments)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def to_dict(self) -> Schema:
        try:
            (root,), definitions = msgspec.json.schema_components(
                [self.type_class], ref_template="#/$defs/{name}"
            )
        except TypeError as error:
            raise TypeError(
                f"The function {self.name} has a parameter without a schema: {error}"
            ) from None
        schema = definitions.pop(root["$ref"].removeprefix("#/$defs/"))
        schema["title"] = self.name
        for one in (schema, *definitions.values()):
            if "properties" in one:
                one |= {"additionalProperties": False, "x-order": list(one["properties"])}
        # msgspec sees a dataclass in a generable class, and nothing of its guides.
        for made in _generable_classes(get_type_hints(self.type_class).values()):
            generation_schema(made).to_dict()  # raises for types and guides that can't be
            definitions[made.__name__] = generation_schema(made).object_schema(
                lambda inner: {"$ref": f"#/$defs/{inner.__name__}"}
            )
        if definitions:
            schema["$defs"] = definitions
        return schema


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"An annotation of {function.__name__} can't be resolved: {error}."
        ) from None


def _arguments_type(
    function: Callable[..., Any], hints: dict[str, Any], descriptions: dict[str, str]
) -> type:
    """A struct with a field for each parameter; those with a default may be absent."""
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"The parameter {parameter} of {function.__name__} can't be given by name, as a model does. "
                "Name each parameter."
            )
        if name not in hints:
            raise TypeError(
                f"The parameter {name} of {function.__name__} has no annotation. Write its type."
            )
        hint = hints[name]
        described = [msgspec.Meta(description=descriptions[name])] if name in descriptions else []
        if parameter.default is parameter.empty:
            fields.append((name, Annotated[hint, *described] if described else hint))
            continue
        # A function whose default is None takes None for absent: the model leaves it out instead.
        if parameter.default is None:
            hint = without_none(hint)[0]
        hint = hint | msgspec.UnsetType
        fields.append((name, Annotated[hint, *described] if described else hint, msgspec.UNSET))
    return msgspec.defstruct(function.__name__, fields, kw_only=True)


def _generable_classes(types: Iterable[Any]) -> list[Any]:
    """The generable classes in some types, and those that their fields refer to."""
    found = []
    for one in types:
        if isinstance(one, type) and isinstance(one, Generable):
            found += [one, *referenced_classes(one)]
        found += _generable_classes(get_args(one))
    return found


def described_arguments(docstring: str) -> dict[str, str]:
    """What the `Args:` section of a Google-style docstring says about each argument.

    Args:
        docstring: without common indentation, as `inspect.getdoc` gives it.
    """
    section = re.search(
        r"^(?:Args|Arguments|Parameters):[ ]*\n((?:[ \t]+.*\n?|[ \t]*\n)*)", docstring, re.M
    )
    if section is None:
        return {}
    entries = re.split(r"^(?=\S)", inspect.cleandoc("\n" + section[1]), flags=re.M)
    found = (re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", entry, re.S) for entry in entries)
    return {entry[1]: " ".join(entry[2].split()) for entry in found if entry and entry[2].strip()}
