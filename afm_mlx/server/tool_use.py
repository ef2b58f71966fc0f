"""Which tools an answer may or must call, as the APIs say it in their own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from afm_mlx.errors import did_you_mean, shown
from afm_mlx.server.errors import bad_request

Tool = Mapping[str, Any]


def function_tool(name: str, description: str | None, parameters: Any) -> Tool:
    """A definition in OpenAI's chat form, which models were shown in training."""
    described = {} if description is None else {"description": description}
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def tool_fields(
    tools: Sequence[Tool], choice: str, *, parallel: bool, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """The fields of an `Ask` about tools.

    Args:
        tools: definitions, see `function_tool`.
        choice: "auto", "none", "required" or "one".
        parallel: whether an answer may have several calls.
        only: names of the tools that may be called; None for all of them.

    Raises:
        ApiError: 400 for calls without tools, or of a tool that is not among them.
    """
    names = [tool["function"]["name"] for tool in tools]
    known = set(names)
    for name in only or ():
        if name not in known:
            raise bad_request(
                f"tool_choice names the tool {shown(name)}{did_you_mean(name, names)}, which tools does not "
                f"have: {', '.join(names) or 'there are none'}.",
                "tool_choice",
                "invalid_value",
            )
    if only == [] and choice == "auto":  # those that it named are no functions
        choice, only = "none", None
    if (not tools or only == []) and choice not in ("auto", "none"):
        raise bad_request(
            "tool_choice asks for a call, and there is no tool to call: only functions are. Give one, or leave "
            "tool_choice out.",
            "tool_choice",
            "invalid_value",
        )
    return {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "allowed_tools": only,
    }
