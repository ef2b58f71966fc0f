"""Constraints of answers that may or must call declared tools.

The form of calls is the one that AFM was trained on; text may come before them:

    <executable_start> ```function
    [{"name": NAME, "arguments": {...}}, ...]```<executable_end>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from afm_mlx.errors import ConstraintError, did_you_mean, shown
from afm_mlx.guidance.constraint import Constraint, literal, named_grammars
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

CHOICES = ("auto", "none", "required", "one")
MAX_CALLS = 16  # most calls in one answer

_TEXT = r"TEXT: /(.|\n)*/"


def tool_call_constraint(
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    answer: Constraint | None = None,
    *,
    parallel: bool = True,
) -> Constraint:
    """Make the constraint of an answer in a chat with tools.

    Args:
        tools: definitions in OpenAI's form, `{"type": "function", "function": {"name", "parameters", ...}}`;
            `parameters` may be called `arguments`, and none stands for any JSON object.
        choice: "auto" lets the model write text, calls, or both; "none" text only; "required" calls only; "one"
            exactly one call; the name of a tool exactly one call of that tool.
        answer: the constraint of an answer without calls, which then has no text before calls; pass None for
            any text.
        parallel: True if "auto" and "required" allow several calls in one answer.

    Raises:
        ConstraintError: for definitions or a choice that can't be honoured.
    """
    if choice == "none" or (not tools and choice == "auto"):
        return answer or Constraint.text()
    arguments = {
        name: schema for name, schema in _arguments(tools).items() if choice in (*CHOICES, name)
    }
    if not arguments:
        raise ConstraintError(
            f"tool_choice is {shown(choice)}; allowed are {', '.join(CHOICES)}, or the name of a tool"
            f"{did_you_mean(choice, _arguments(tools))}."
        )
    start = "start: calls"
    if choice == "auto":
        start = "start: TEXT calls?" if answer is None else "start: calls | @answer"
    is_one = choice not in ("auto", "required") or not parallel
    more = "" if is_one else f' (", " call){{0,{MAX_CALLS - 1}}}'
    lines = [
        start,
        _TEXT if choice == "auto" and answer is None else "",
        f'calls: {EXECUTABLE_START} " ```function\\n[" call{more} "]```" {EXECUTABLE_END}',
        "call: " + " | ".join(f"call_{i}" for i in range(len(arguments))),
    ]
    for i, name in enumerate(arguments):
        opening = literal(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'call_{i}: {opening} @arguments_{i} "}}"')
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(lines)}]
    for i, schema in enumerate(arguments.values()):
        grammars += named_grammars(Constraint.json_schema(schema).grammar, f"arguments_{i}")
    if choice == "auto" and answer is not None:
        grammars += named_grammars(answer.grammar, "answer")
        return Constraint(json.dumps({"grammars": grammars}), f"tool calls, or {answer.what}")
    return Constraint(json.dumps({"grammars": grammars}), "tool calls")


def _arguments(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Map each tool's name to the schema of its arguments."""
    found: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ConstraintError(
                f"tools[{index}] is {shown(tool)}; a definition is needed, such as "
                '{"type": "function", "function": {"name": "...", "parameters": {...}}}.'
            )
        if name in found:
            raise ConstraintError(
                f"tools[{index}] has the name {shown(name)} of another tool; each needs its own."
            )
        schema = function.get("parameters", function.get("arguments"))
        found[name] = {"type": "object"} if schema is None else schema
    return found
