"""Tools: functions that the model may call while it answers."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

from afm_mlx.errors import shown
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_schema import GenerationSchema

_NAME = re.compile(r"[\w .-]+")


class Tool(ABC):
    """A function that the model may call, with its name, what it is for, and what arguments it takes.

    A subclass sets `name` and `description`, and defines `arguments_schema` and `call`. `from_function` makes a
    tool of a function.

    Raises:
        AssertionError: when the name or the description is missing.
        TypeError: when one of the four has another type than it must.
        ValueError: for a name with other characters than letters, digits, `_`, `-`, `.` and spaces.
        UnsupportedGuideError, InvalidGenerationSchemaError: for a schema that no arguments can follow.
    """

    name: str
    description: str

    def __init__(self) -> None:
        _ = self.tool_definition

    @staticmethod
    def from_function(function: Callable[..., Any]) -> Tool:
        """A tool that calls a function, see `function_tool.FunctionTool`."""
        from afm_mlx.fm.function_tool import FunctionTool

        return FunctionTool(function)

    @property
    @abstractmethod
    def arguments_schema(self) -> GenerationSchema:
        """What the arguments look like."""

    @abstractmethod
    async def call(self, args: GeneratedContent) -> str:
        """The tool's result for the arguments that the model gives."""

    @cached_property
    def tool_definition(self) -> dict[str, Any]:
        """The tool as chat templates and the OpenAI API have it; checked, and made once."""
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

    def _check_type(self, attribute: str, value: Any, allowed: type) -> None:
        if not isinstance(value, allowed):
            raise TypeError(
                f"{type(self).__name__}.{attribute} must be a {allowed.__name__}, got {shown(value)}."
            )
