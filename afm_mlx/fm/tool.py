"""Tools: functions that the model may call while it answers, written as classes or made of Python functions."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, get_args

import msgspec

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.fm.generable import Generable, GeneratedContent, as_instances, generation_schema
from afm_mlx.fm.generation_schema import (
    GenerationSchema,
    Property,
    Schema,
    inner_types,
    without_none,
)
from afm_mlx.guidance.type_libraries import arguments_type, bare
from afm_mlx.guidance.types import AnswerType, answer_type

_NAME = re.compile(r"[\w .-]+")


class Tool(ABC):
    """A tool that the model may call: a name, a description, a schema of its arguments, and a function.

    A subclass sets `name` and `description`, and defines `arguments_schema` and `call`. `from_function` makes a
    tool of a function.

    Raises:
        AssertionError: if the name or the description is missing.
        TypeError: if one of the four has the wrong type.
        ValueError: for a name with other characters than letters, digits, `_`, `-`, `.` and spaces.
        UnsupportedGuideError, InvalidGenerationSchemaError: for a schema that no arguments can follow.
    """

    name: str
    description: str

    def __init__(self) -> None:
        _ = self.tool_definition

    @staticmethod
    def from_function(function: Callable[..., object]) -> Tool:
        """Make a tool that calls a function, see `FunctionTool`."""
        return FunctionTool(function)

    @property
    @abstractmethod
    def arguments_schema(self) -> GenerationSchema:
        """The schema of the arguments."""

    @abstractmethod
    async def call(self, args: GeneratedContent) -> str:
        """Return the tool's result for arguments that the model chose."""

    @cached_property
    def tool_definition(self) -> Schema:
        """The tool's definition as in the OpenAI API; checked, and made once."""
        for attribute in ("name", "description"):
            if not hasattr(self, attribute):
                raise AssertionError(
                    f"The tool {type(self).__name__} has no {attribute!r}. Set it."
                )
            self._check_type(attribute, getattr(self, attribute), str)
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{type(self).__name__}.name is {shown(self.name)}; a name has letters, digits, _, -, . and "
                "spaces."
            )
        schema = self.arguments_schema
        self._check_type("arguments_schema", schema, GenerationSchema)
        if not inspect.iscoroutinefunction(self.call):
            raise TypeError(f"{type(self).__name__}.call must be an async function.")
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": schema.to_dict(),
        }
        return {"type": "function", "function": function}

    def _check_type(self, attribute: str, value: object, allowed: type) -> None:
        if not isinstance(value, allowed):
            raise TypeError(
                f"{type(self).__name__}.{attribute} must be a {allowed.__name__}, got {shown(value)}."
            )


class FunctionTool(Tool):
    """A tool that calls a Python function; a function that isn't async runs in a thread, so that it may block.

    The tool has the function's name, and its docstring's first paragraph as description. The model may leave
    out parameters with a default. Parameters are described by the docstring's `Args`, and described and limited
    by `Annotated[T, msgspec.Meta(...)]`.

    Args:
        function: a function with a docstring. Its annotations are generable classes, lists or options of these,
            or types that `answer_type` takes.

    Raises:
        TypeError: for a function without a docstring, a parameter without an annotation or whose annotation has
            no schema, and parameters that can't be passed by name.
        UnsupportedGuideError, InvalidGenerationSchemaError: for generable classes that no arguments can follow.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        if not inspect.isroutine(function):
            raise TypeError(f"A tool is made of a function, got {shown(function)}.")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"The function {function.__name__} yields; a tool returns one result. Return a list."
            )
        self._function = function
        self._generable: dict[str, object] = {}  # generable types by parameter

        def read_as(parameter: inspect.Parameter) -> object:
            hint = parameter.annotation
            # A default of None means absent: the model leaves the argument out.
            if parameter.default is None:
                hint = without_none(hint)[0]
            if not _has_generable(hint):
                return hint
            self._generable[parameter.name] = bare(hint)
            notes = getattr(hint, "__metadata__", ())
            return Annotated[Any, *notes] if notes else Any

        try:
            self._answers: AnswerType = answer_type(arguments_type(function, read_as))
        except ConstraintError as error:
            raise TypeError(f"The function {function.__name__} can't be a tool: {error}") from None
        self._signature = inspect.signature(function)
        self.name = self._answers.name
        self.description = " ".join((self._answers.description or "").split("\n\n")[0].split())
        if not self.description:
            raise TypeError(
                f"The function {self.name} has no docstring. Its first paragraph tells the model what the "
                "tool is for: write one."
            )
        super().__init__()

    @property
    def arguments_schema(self) -> GenerationSchema:
        """The schema of the function's parameters."""
        return _FunctionSchema(self._answers, self._generable)

    async def call(self, args: GeneratedContent) -> str:
        """Call the function; return its result, as JSON if it is not text.

        Raises `TypeError` for a missing or an unknown argument, `ValueError` for one of another type, and what
        the function raises.
        """
        arguments = args.value()
        # Python reports missing and unknown arguments.
        parameters = self._signature.bind(**arguments).signature.parameters
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None or parameters[name].default is not None
        }
        try:
            given = self._answers.instance(given)
        except ConstraintError as error:
            raise ValueError(str(error)) from None
        for name in self._generable.keys() & given.keys():
            given[name] = as_instances(self._generable[name], given[name], name)
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**given)
        else:
            result = await asyncio.to_thread(self._called, given)
            if inspect.isawaitable(result):  # a wrapped async function's
                result = await result
        if isinstance(result, str):
            return result
        try:
            plain = msgspec.to_builtins(result, str_keys=True)
            return json.dumps(plain, ensure_ascii=False)
        except TypeError:  # an object of some class
            return str(result)

    def _called(self, given: Mapping[str, object]) -> object:
        try:
            return self._function(**given)
        except StopIteration as error:  # no future can raise it: the call would never end
            raise RuntimeError(f"{self.name} raised StopIteration") from error


class _FunctionSchema(GenerationSchema):
    """The schema of a function's parameters, with the fields that are generable classes in their dialect."""

    def __init__(self, answers: AnswerType, generable: Mapping[str, object]) -> None:
        properties = [Property(name, hint) for name, hint in generable.items()]
        classes = {inner_types(hint)[-1] for hint in generable.values()}
        nested = [generation_schema(c) for c in classes if isinstance(c, Generable)]
        super().__init__(answers.kind, None, properties, nested)
        self._answers = answers

    def to_dict(self) -> Schema:
        schema = copy.deepcopy(self._answers.schema)
        schema.pop("description", None)  # the tool's own
        of_generable = super().to_dict()
        for name, value in of_generable["properties"].items():
            schema["properties"][name] |= value
        definitions, others = of_generable.get("$defs", {}), schema.get("$defs", {})
        if both := definitions.keys() & others.keys():
            raise TypeError(
                f"The function {self.name} takes two classes of the name {min(both)}. Rename one."
            )
        if definitions:
            schema["$defs"] = others | definitions
        return schema


def _has_generable(hint: object) -> bool:
    is_class = isinstance(hint, type) and isinstance(hint, Generable)
    return is_class or any(map(_has_generable, get_args(hint)))
