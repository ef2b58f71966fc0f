"""Constraints of answers that may or must call declared tools, in the form of the model (`call_forms`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from afm_mlx.errors import ConstraintError, did_you_mean, shown
from afm_mlx.guidance.call_forms import AFM_CALLS, CallForm
from afm_mlx.guidance.constraint import Constraint, literal, named_grammars
from afm_mlx.guidance.keyword_arguments import KeywordArguments
from afm_mlx.guidance.thoughts import FINAL, with_tokens

CHOICES = ("auto", "none", "required", "one")
MAX_CALLS = 16  # most calls in one answer

_TEXT = r"TEXT: /(.|\n)*/"
_ANNOTATIONS = (
    "title",
    "description",
    "$schema",
    "$id",
    "$comment",
    "examples",
    "default",
    "x-order",
)
_DEFINITIONS = ("$defs", "definitions")

Grammars = list[dict[str, Any]]


def tool_call_constraint(
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    answer: Constraint | None = None,
    *,
    parallel: bool = True,
    form: CallForm = AFM_CALLS,
) -> Constraint | None:
    """Make the constraint of an answer in a chat with tools.

    Args:
        tools: definitions in OpenAI's form, `{"type": "function", "function": {"name", "parameters", ...}}`;
            `parameters` may be called `arguments`, and none stands for any JSON object.
        choice: "auto" lets the model write text, calls, or both; "none" text only; "required" calls only; "one"
            exactly one call; the name of a tool exactly one call of that tool.
        answer: the constraint of an answer without calls, which then has no text before calls; pass None for
            any text.
        parallel: True if "auto" and "required" allow several calls in one answer.
        form: how the model writes calls, see `call_form`.

    Returns:
        The constraint; None for "auto" if the form's calls are only read by a parser.

    Raises:
        ConstraintError: for definitions or a choice that can't be honoured.
    """
    if choice == "none" or (not tools and choice == "auto"):
        if answer is not None or not (form.thinking or form.is_harmony):
            return answer or Constraint.text()
        return Constraint("\n".join(_free_answers(form, may_call=False)), "text")
    schemas = {
        name: schema for name, schema in _arguments(tools).items() if choice in (*CHOICES, name)
    }
    if not schemas:
        raise ConstraintError(
            f"tool_choice is {shown(choice)}; allowed are {', '.join(CHOICES)}, or the name of a tool"
            f"{did_you_mean(choice, _arguments(tools))}."
        )
    if not form.has_grammar:
        if choice == "auto" and answer is None and parallel:
            return None
        raise ConstraintError(
            f"Calls in this model's form ({form.name}) are read, but can't be enforced: allowed is the choice "
            "auto, with parallel calls, without a response format."
        )
    is_one = choice not in ("auto", "required") or not parallel or form.between is None
    lines, grammars = _calls(form, schemas, is_one)
    if choice == "auto" and answer is not None:
        final = _lark(form, FINAL) if form.is_harmony else ""
        lines += [f"start: calls | {final} @answer"]
        grammars += named_grammars(answer.grammar, "answer")
    elif choice == "auto":
        lines += _free_answers(form)
    else:
        lines += ["start: calls"]
    what = "tool calls"
    if choice == "auto" and answer is not None:
        what = f"tool calls, or {answer.what}"
    grammars.insert(0, {"lark_grammar": "\n".join(lines)})
    return Constraint(json.dumps({"grammars": grammars}), what)


def _calls(form: CallForm, schemas: Mapping[str, Any], is_one: bool) -> tuple[list[str], Grammars]:
    """Return the rules of `calls`, and the grammars of arguments that they use."""
    more = "" if is_one else f" ({_lark(form, form.between or '')} call){{0,{MAX_CALLS - 1}}}"
    opening = _lark(form, form.opening)
    if form.any_spaces:
        rest = form.opening.removeprefix(form.mark).lstrip()
        opening = f"{_lark(form, form.mark)} / {{0,2}}/ {_lark(form, rest)}"
    lines = [
        f"calls: {opening} opened",
        f"opened: call{more} {_lark(form, form.closing)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(schemas))),
    ]
    if form.quote is not None:
        lines.append(r"ANY_TEXT: /(.|\n)*/")
    grammars: Grammars = []
    for i, (name, schema) in enumerate(schemas.items()):
        head = " /[a-zA-Z0-9]{9}/ ".join(
            _lark(form, part) for part in form.head_of(name, call_id="\0").split("\0")
        )
        lines.append(f"call_{i}: {head} arguments_{i} {_lark(form, form.tail)}")
        if form.parser is not None:
            quote = None if form.quote is None else _lark(form, form.quote)
            keywords = KeywordArguments(name, f"keywords_{i}", quote)
            lines.append(f"arguments_{i}: {keywords.arguments(schema)}")
            lines += keywords.rules
            grammars += keywords.grammars
        else:
            lines.append(f"arguments_{i}: @schema_{i}")
            grammars += named_grammars(Constraint.json_schema(schema).grammar, f"schema_{i}")
    return lines, grammars


def _free_answers(form: CallForm, may_call: bool = True) -> list[str]:
    """Return the rules of answers with any text, and calls after it if the model `may_call`."""
    if form.is_harmony:
        body = _lark(form, "<|message|>") + " TEXT"
        channels = '"analysis" | "commentary" | "final"'
        opening, start = _lark(form, "<|channel|>"), _lark(form, "<|end|><|start|>assistant")
        return [
            f"start: (message {start})* (message{' | calls' if may_call else ''})",
            f"message: {opening} ({channels}) {body}",
            _TEXT,
        ]
    if not form.opening:
        begin = literal(form.head_of("").partition('""')[0] + '"')[1:-1]
        tag = "<|python_tag|>"
        tagged = f" | {_lark(form, tag)} calls" if tag in form.ids else ""
        return [f"start: OTHER | calls{tagged}", f"OTHER: /(.|\\n)*/ & ~/{begin}(.|\\n)*/"]
    if form.mark in form.ids:
        return [f"start: {_thought(form)} TEXT{' calls?' if may_call else ''}", _TEXT]
    # The calls' mark is text, which ends the text before it.
    rest = _lark(form, form.opening.removeprefix(form.mark))
    return [
        "start: TEXT | marked_calls",
        f"marked[lazy]: TEXT {literal(form.mark)}",
        f"marked_calls: marked {rest} opened",
        _TEXT,
    ]


def _thought(form: CallForm) -> str:
    """Return the rule's part for a thought before an answer; the prompt may have begun it."""
    if not form.thinking:
        return ""
    begin, end = (_lark(form, name) for name in form.thinking)
    return f"(({begin})? TEXT {end})?"


def _lark(form: CallForm, text: str) -> str:
    return with_tokens(text, form.ids)


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
