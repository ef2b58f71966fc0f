"""Tools made of Python functions: annotations give the schema, the docstring what the model is told."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Mapping
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
from afm_mlx.fm.tool import Tool
from afm_mlx.guidance.type_libraries import arguments_type, bare
from afm_mlx.guidance.types import AnswerType, answer_type


class FunctionTool(Tool):
    """A tool that calls a function; one that is not async runs in a thread, so that it may block.

    Its name is the function's, its description the first paragraph of the docstring. The model may leave out
    parameters with a default. What the docstring says of arguments describes parameters, and so does
    `Annotated[T, msgspec.Meta(...)]`, which can also limit them.

    Args:
        function: with a docstring, and with annotations that are generable classes, lists or options of such,
            or types that `answer_type` knows: plain types, lists, dicts, `Literal`, enums, dataclasses,
            TypedDicts, dates, models of pydantic and more.

    Raises:
        TypeError: for a function without a docstring, a parameter without an annotation or with one that has no
            schema, and parameters that can't be given by name.
        UnsupportedGuideError, InvalidGenerationSchemaError: for generable classes that no arguments can follow.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.isroutine(function):
            raise TypeError(f"A tool is made of a function, got {shown(function)}.")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"The function {function.__name__} yields; a tool returns one result. Return a list."
            )
        self._function = function
        self._generable: dict[str, Any] = {}  # types by the parameters that have them
        self._answers = self._answer_type()
        self._signature = inspect.signature(function)
        self.name = self._answers.name
        self.description = " ".join((self._answers.description or "").split("\n\n")[0].split())
        if not self.description:
            raise TypeError(
                f"The function {self.name} has no docstring. Its first paragraph tells the model what the "
                "tool is for: write one."
            )
        super().__init__()

    def _answer_type(self) -> AnswerType:
        def read_as(parameter: inspect.Parameter) -> Any:
            hint = parameter.annotation
            # A function whose default is None takes None for absent: the model leaves it out instead.
            if parameter.default is None:
                hint = without_none(hint)[0]
            if not _has_generable(hint):
                return hint
            self._generable[parameter.name] = bare(hint)
            notes = getattr(hint, "__metadata__", ())
            return Annotated[Any, *notes] if notes else Any

        try:
            return answer_type(arguments_type(self._function, read_as))
        except ConstraintError as error:
            raise TypeError(
                f"The function {self._function.__name__} can't be a tool: {error}"
            ) from None

    @property
    def arguments_schema(self) -> GenerationSchema:
        """What the function's parameters look like."""
        return _FunctionSchema(self._answers, self._generable)

    async def call(self, args: GeneratedContent) -> str:
        """The function's result for these arguments; JSON, when it is no text.

        Raises:
            TypeError: for an argument that is missing, and one that the function doesn't have.
            ValueError: for an argument of another type.
            Exception: what the function raises.
        """
        given = self._converted(args.value())
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**given)
        else:
            result = await asyncio.to_thread(self._called, given)
            if inspect.isawaitable(result):  # of a wrapped async function
                result = await result
        if isinstance(result, str):
            return result
        try:
            plain = msgspec.to_builtins(result, str_keys=True)
            return json.dumps(plain, ensure_ascii=False)
        except TypeError:  # an object of some class
            return str(result)

    def _called(self, given: Mapping[str, Any]) -> Any:
        try:
            return self._function(**given)
        except StopIteration as error:  # which no future takes: it would never be done
            raise RuntimeError(f"{self.name} raised StopIteration") from error

    def _converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function's annotations have them; Python says which are missing or too many."""
        parameters = self._signature.bind(**arguments).signature.parameters
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None or parameters[name].default is not None
        }
        try:
            converted: dict[str, Any] = self._answers.instance(given)
        except ConstraintError as error:
            raise ValueError(str(error)) from None
        for name in self._generable.keys() & converted.keys():
            converted[name] = as_instances(self._generable[name], converted[name], name)
        return converted


class _FunctionSchema(GenerationSchema):
    """The schema of a function's parameters, in the dialect of generable classes."""

    def __init__(self, answers: AnswerType, generable: Mapping[str, Any]) -> None:
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


def _has_generable(hint: Any) -> bool:
    is_class = isinstance(hint, type) and isinstance(hint, Generable)
    return is_class or any(map(_has_generable, get_args(hint)))
