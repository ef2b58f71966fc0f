"""The forms in which models write calls of tools.

    opening head ARGUMENTS tail (between head ARGUMENTS tail)* closing

| form | a call |
| --- | --- |
| AFM | `<executable_start> ```function\\n[{"name": "f", "arguments": {...}}]```<executable_end>` |
| Hermes (Qwen) | `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>` |
| Llama 3 | `{"name": "f", "parameters": {...}}`, which is the whole answer |
| Mistral | `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` |
| | or `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}` |
| Harmony (GPT-OSS) | `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>` |
| Pythonic (LFM2) | `<|tool_call_start|>[f(a="x", b=1)]<|tool_call_end|>` |
| Gemma 4 | `<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>` |
| others | what a parser of mlx-lm reads between two marks |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.thoughts import HARMONY
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

Call = dict[str, Any]
"""`name`, and `arguments` as decoded JSON."""
Tools = Sequence[Mapping[str, Any]]

_QUOTE = '<|"|>'  # of Gemma 4


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls of tools.

    Args:
        name: the form's name, for errors and figures.
        opening: text before the first call; it begins with a mark, unless a call is a whole answer.
        head: text before a call's arguments; `{name}` stands for the tool's name as JSON, `{bare_name}` for the
            name as it is, and `{call_id}` for nine letters and digits.
        tail: text after a call's arguments.
        between: text between two calls; pass None if an answer has one call at most.
        closing: text after the last call.
        ids: ids of the control tokens in these texts, and of others that an answer may have, by name; -1 if the
            vocabulary is not known.
        thinking: names of the tokens around a thought, which may come before an answer; empty for none.
        parser: reads the text between the marks `opening` and `closing`, given the tools' definitions; pass
            None if heads and arguments are JSON, which is read while it is generated.
        has_grammar: True if calls can be required, under the tools' schemas.
        quote: the token around strings in arguments; pass None for JSON's quotes.
        any_spaces: True if a mark may be followed by no, one or two spaces, as tokenizers put one there.
    """

    name: str
    opening: str = ""
    head: str = '{{"name": {name}, "arguments": '
    tail: str = "}"
    between: str | None = None
    closing: str = ""
    ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    thinking: tuple[str, ...] = ()
    parser: Callable[[str, Tools], list[Call]] | None = None
    has_grammar: bool = True
    quote: str | None = None
    any_spaces: bool = False

    @property
    def mark(self) -> str:
        """The name of the control token, or else the text, that begins calls; empty if nothing does."""
        if found := next((name for name in self.ids if self.opening.startswith(name)), None):
            return found
        return self.opening.split("\n")[0]

    @property
    def is_harmony(self) -> bool:
        """True if answers are messages in channels."""
        return self.name == "Harmony"

    def head_of(self, tool: str, call_id: str = "a00000000") -> str:
        """Return the text before the arguments of a call of a tool."""
        return self.head.format(name=json.dumps(tool), bare_name=tool, call_id=call_id)

    @property
    def head_pattern(self) -> re.Pattern[str]:
        """Matches the text before a call's arguments; the group is the name, in JSON if it has quotes."""
        text = re.escape(self.head.replace("{{", "{")).replace(r"\ ", r"\s*").replace(":", r"\s*:")
        text = text.replace(r"\{name\}", r'(?P<name>"(?:[^"\\]|\\.)*")')
        text = text.replace(r"\{call_id\}", "[a-zA-Z0-9]*")
        return re.compile(text.replace(r"\{bare_name\}", r"(?P<name>[^\s\[\](){}<>,]+)"))


AFM_CALLS = CallForm(
    "AFM",
    f"{EXECUTABLE_START} ```function\n[",
    between=", ",
    closing=f"]```{EXECUTABLE_END}",
    ids={EXECUTABLE_START: -1, EXECUTABLE_END: -1},
)
"""AFM's form, without the ids of a vocabulary."""


def call_form(tokenizer: Tokenizer) -> CallForm:
    """Return the form in which a model writes calls.

    Raises:
        ConstraintError: if the model can't call tools, or writes calls in no form that is known here.
        TokenizerError: if its chat template knows no tools.
    """
    where = tokenizer.name_or_path or "the model"
    if type(tokenizer) is AFMTokenizer:
        if not tokenizer.has_tool_calling:
            raise ConstraintError(
                f"{where} can't call tools: its tokenizer has no {EXECUTABLE_START} and {EXECUTABLE_END}. "
                "Leave out tools."
            )
        names = (EXECUTABLE_START, EXECUTABLE_END)
        found = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
        return replace(AFM_CALLS, ids={name: -1 if i is None else i for name, i in found.items()})
    source: str = getattr(tokenizer, "template_source", "")
    if source:
        tokenizer.check_tools()  # type: ignore[attr-defined]
    form = _zoo_form(tokenizer, source)
    if form is None:
        raise ConstraintError(
            f"{where} can't call tools: its chat template writes calls in none of the known forms (Hermes, "
            "Llama 3, Mistral, Harmony, Pythonic, and what mlx-lm's parsers read). Leave out tools."
        )
    return form


def _zoo_form(tokenizer: Any, source: str) -> CallForm | None:
    names: Mapping[str, int] = getattr(tokenizer, "control_names", {})
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    kind = getattr(tokenizer, "init_kwargs", {}).get("tool_parser_type")
    thinking: tuple[str, ...] = (tokenizer.think_start or "", tokenizer.think_end or "")
    made: CallForm | None = None
    if "functions." in source and all(name in names for name in HARMONY):
        made = CallForm(
            "Harmony",
            "<|channel|>commentary to=functions.",
            "{bare_name} <|constrain|>json<|message|>",
            "",
        )
    elif kind == "json_tools" or (kind is None and "<tool_call>" in source):
        end_and_start = "\n</tool_call>\n<tool_call>\n"
        made = CallForm("Hermes", "<tool_call>\n", between=end_and_start, closing="\n</tool_call>")
    elif kind == "mistral" and "[ARGS]" in source:
        mark = "[TOOL_CALLS]"
        call_id = "[CALL_ID]{call_id}" if "[CALL_ID]" in source else ""
        made = CallForm("Mistral", mark, f"{{bare_name}}{call_id}[ARGS]", "", mark)
    elif kind == "mistral":
        opening = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in source else "[TOOL_CALLS]["
        made = CallForm("Mistral", opening, between=", ", closing="]", any_spaces=True)
    elif kind == "pythonic":
        made = CallForm(
            "Pythonic",
            f"{start}[",
            "{bare_name}(",
            ")",
            ", ",
            f"]{end}",
            parser=partial(_pythonic_calls, tokenizer.tool_parser),
        )
    elif kind == "gemma4" and _QUOTE in names:
        made = CallForm(
            "Gemma 4",
            f"{start}call:",
            "{bare_name}",
            "",
            f"{end}{start}call:",
            end,
            parser=partial(_gemma_calls, tokenizer.tool_parser),
            quote=_QUOTE,
        )
    elif tokenizer.tool_parser is not None:
        made = CallForm(
            kind or "mlx-lm's",
            start,
            closing=end,
            parser=partial(_parsed_calls, tokenizer.tool_parser),
            has_grammar=False,
        )
    elif re.search(r'"parameters"\s*:', source) and "tool_calls" in source:
        head = '{{"name": {name}, "parameters": '
        made = CallForm("Llama 3", head=head)
    if made is None:
        return None
    if not all(any(name in mark for name in names) for mark in thinking):
        thinking = ()
    texts = [made.opening, made.head, made.tail, made.between or "", made.closing, *thinking]
    texts.append(made.quote or "")
    used = HARMONY if made.is_harmony else ("<|python_tag|>",) if made.name == "Llama 3" else ()
    ids = {name: i for name, i in names.items() if name in used or any(name in t for t in texts)}
    if not made.has_grammar and start not in names:
        ids = {}  # marks of several tokens are found as text
    return replace(made, ids=ids, thinking=thinking)


# -- parsers


def _parsed_calls(parse: Callable[..., Any], text: str, tools: Tools) -> list[Call]:
    """Read calls with one of mlx-lm's parsers; raise `ValueError` for a text that it can't read."""
    try:
        found = parse(text, list(tools) or None)
    except Exception as error:
        raise ValueError(str(error)) from error
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])
    return [{"name": str(call["name"]), "arguments": call.get("arguments", {})} for call in calls]


def _gemma_calls(parse: Callable[..., Any], text: str, tools: Tools) -> list[Call]:
    """Read `f{a:<|"|>x<|"|>}` with mlx-lm's parser."""
    return _parsed_calls(parse, f"call:{text}", tools)


_KEYWORD = re.compile(r"\s*(\w+)\s*=\s*")
_NAME = re.compile(r"\s*,?\s*([^\s(),\[\]]+)\(")


def _pythonic_calls(parse: Callable[..., Any], text: str, tools: Tools) -> list[Call]:
    """Read `f(a="x", b=1), g()` with values that are JSON or Python, else with mlx-lm's parser."""
    try:
        return _keyword_calls(text.strip())
    except (ValueError, RecursionError):
        return _parsed_calls(parse, f"[{text}]", tools)


def _keyword_calls(text: str) -> list[Call]:
    calls, at = list[Call](), 0
    while at < len(text):
        name = _NAME.match(text, at)
        if name is None:
            raise ValueError(f"no call at {at}")
        at, arguments = name.end(), {}
        while (keyword := _KEYWORD.match(text, at)) is not None:
            arguments[keyword[1]], at = _keyword_value(text, keyword.end())
            at += text[at : at + 1] == ","
        if text[at : at + 1] != ")":
            raise ValueError(f"no end of a call at {at}")
        at += 1
        calls.append({"name": name[1], "arguments": arguments})
    return calls


def _keyword_value(text: str, start: int) -> tuple[Any, int]:
    """Return the value at an index, and the index after it.

    Templates write texts and lists as Python does, without escapes for line breaks, and objects as JSON.
    """
    at, depth, quote = start, 0, ""
    while at < len(text) and (quote or depth or text[at] not in ",)"):
        character = text[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        at += 1
    written = text[start:at].strip()
    try:
        return json.loads(written, strict=False), at
    except ValueError:
        try:
            return ast.literal_eval(written.replace("\n", "\\n")), at
        except (SyntaxError, MemoryError) as error:
            raise ValueError(str(error)) from error
