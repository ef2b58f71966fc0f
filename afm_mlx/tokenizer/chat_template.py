"""Chats: AFM's prompt format ("chat template V6" in tamm), and rendering templates in a sandbox.

A conversation is `<turn_start> ROLE<n>CONTENT<turn_end>` for each message, after one separator token. Without
a system message a default one comes first. Tool definitions follow the system message's content; tool calls,
tool results and response formats are written into the content of their message. AFM's template does all of
that itself, so that a model folder renders the same text in stock mlx-lm.

Source: tamm 0.2.0, `preprocessors/instruct_lm/afm/afm_v6.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.installation import package_problem
from afm_mlx.tokenizer.chat_messages import Message
from afm_mlx.tokenizer.control_tokens import CallerText, marked, strings_in
from afm_mlx.tokenizer.vocabulary import read_text

TEMPLATE_BYTES = 1 << 20
"""Bytes that a chat template's file may have."""
_REASON = 600  # characters of an error's reason

DEFAULT_SYSTEM_MESSAGE = "A conversation between a user and a helpful assistant."

# `bos_token` is empty here, because the tokenizer puts the separator's id first; in other programs it is the
# separator. Other programs also pass tool call arguments as JSON text, which is written as it is.
# With a generation prompt, a final assistant message is the answer to be generated again (as in tamm).
V6_TEMPLATE = (
    """
{{- bos_token -}}
{%- macro render_tool_calls(calls) -%}
    {%- for call in calls -%}
        {%- set function = call['function'] if call['function'] is defined else call -%}
        {%- set arguments = function['arguments'] -%}
        {{- '{"name": ' + (function['name'] | tojson) + ', "arguments": ' -}}
        {{- arguments if arguments is string and not arguments_are_decoded else arguments | tojson -}}
        {{- '}' + ('' if loop.last else ', ') -}}
    {%- endfor -%}
{%- endmacro -%}
{%- macro render_content(message) -%}
    {%- set content = message['content'] -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is mapping -%}
        {{- content | tojson -}}
    {%- elif content is sequence and content and content[0]['type'] == 'text' -%}
        {%- for part in content %}{{ part['text'] }}{% endfor -%}
    {%- elif content is sequence and message['role'] in ('tool', 'function') -%}
        {{- 'new tools: ' + (content | map('tojson') | join('\\n')) -}}
    {%- endif -%}
    {%- if message['tool_calls'] -%}
        {{- '<executable_start> ```function\\n[' -}}
        {{- render_tool_calls(message['tool_calls']) + ']```<executable_end>' -}}
    {%- endif -%}
    {%- if message['response_format'] -%}
        {%- set format = message['response_format']['json_schema'] -%}
        {{- '\\n\\nresponse format in json.\\nname: ' ~ format.get('name') -}}
        {{- '\\ndescription: ' ~ format.get('description') -}}
        {{- '\\nschema: ' + (format['schema'] | tojson) -}}
    {%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system, turns = render_content(messages[0]), messages[1:] -%}
{%- else -%}
    {%- set system, turns = '"""
    + DEFAULT_SYSTEM_MESSAGE
    + """', messages -%}
{%- endif -%}
{%- if add_generation_prompt and turns and turns[-1]['role'] == 'assistant' -%}
    {%- set turns = turns[:-1] -%}
{%- endif -%}
{{- '<turn_start> system<n>' + system -}}
{%- if tools -%}
    {{- '<n>system tools: ' + (tools | map('tojson') | join('<n>')) -}}
{%- endif -%}
{{- '<turn_end>' -}}
{%- for message in turns -%}
    {%- set role = 'tool' if message['role'] == 'function' else message['role'] -%}
    {{- '<turn_start> ' + role + '<n>' + render_content(message) + '<turn_end>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<turn_start> assistant<n>' -}}
{%- endif -%}
"""
).strip()


class ChatTemplate:
    """A Jinja template, compiled on first use in a sandbox that forbids reaching Python's internals.

    A template other than AFM's is also bounded in time and memory, see `template_sandbox`.

    Args:
        source: the template's text.
        path: the file that holds the template, for errors; pass None for the built-in one.
    """

    def __init__(self, source: str = V6_TEMPLATE, path: str | None = None) -> None:
        self.source = source
        self._name = f"The chat template in {path}" if path else "The chat template"

    @property
    def is_own(self) -> bool:
        """True if this is AFM's template, `V6_TEMPLATE`."""
        return self.source == V6_TEMPLATE

    def render(self, messages: list[Message], **variables: object) -> str:
        """Render a prompt's text.

        Args:
            messages: messages as `checked_messages` returns them.
            variables: the template's variables, such as `tools`, `add_generation_prompt` or `bos_token`.

        Raises:
            TokenizerError: if the template is wrong, forbidden, rejects the messages, takes too much time or
                memory, or ignores tool calls or response formats that the messages have.
        """
        for field in ("tool_calls", "response_format"):
            if field in self.source:
                continue
            index = next((i for i, message in enumerate(messages) if field in message), None)
            if index is not None:
                raise TokenizerError(
                    f"messages[{index}] has {field!r}, which {self._name[0].lower()}{self._name[1:]} "
                    "does not use. Remove that template to use AFM's own, or leave the field out."
                )
        try:
            render = _compile(self.source)
        except Exception as error:  # Jinja's own errors, and Python's when it compiles Jinja's code
            if problem := package_problem(error):  # of Jinja itself: templates import nothing
                raise TokenizerError(problem) from error
            raise TokenizerError(f"{self._name} is not valid Jinja: {reason_of(error)}") from error
        try:
            return render({**variables, "messages": messages})
        except _Refusal as refusal:
            raise TokenizerError(f"{self._name} refuses these messages: {refusal}") from None
        except Exception as error:  # a template may fail in any way that Python can
            raise TokenizerError(f"{self._name} failed: {reason_of(error)}") from error


def read_chat_template(folder: Path, config: Mapping[str, object]) -> ChatTemplate | None:
    """Read a model folder's chat template; return None if it has none.

    The template is in `chat_template.jinja`, else in `config`, the content of `tokenizer_config.json`. Raises
    `TokenizerError` if the file or the field can't be read as a template.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(read_text(file, TEMPLATE_BYTES), str(file))
    given = source = config.get("chat_template")
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        named = [entry.get("template") for entry in given if entry.get("name") == "default"]
        source = named[-1] if named else (given or None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(
            f"'chat_template' in {folder / 'tokenizer_config.json'} must be a string or a list of "
            "{'name', 'template'} objects with one named 'default', got "
            f"{type(given).__name__}: {shown(given)}."
        )
    return ChatTemplate(source, str(folder / "tokenizer_config.json"))


# Arguments of transformers' apply_chat_template that are refused, except for values that change nothing.
_NEUTRAL_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "return_dict": (False, None),
    "return_tensors": (None,),
    "return_assistant_tokens_mask": (False, None),
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "documents": (None, []),
    "tokenizer_kwargs": (None, {}),
}


def drop_neutral_arguments(arguments: dict[str, object]) -> None:
    """Remove arguments of transformers' `apply_chat_template` that ask for other results than ids or text.

    Raises `TokenizerError` for a value that changes the result.
    """
    for name in _NEUTRAL_ARGUMENTS.keys() & arguments.keys():
        value = arguments.pop(name)
        if value not in _NEUTRAL_ARGUMENTS[name]:
            raise TokenizerError(
                f"apply_chat_template({name}={shown(value)}) is not supported: it returns a list of ids, "
                "or text with tokenize=False. Leave it out."
            )


@dataclass
class Chat:
    """A chat to be rendered.

    Args:
        template: renders the chat.
        messages: the caller's messages, see `checked_messages`.
        variables: the caller's variables for the template, tools included.
        own: the template's own variables.
        separator: name of the token before a chat, which templates for other programs may write.
        open_end: text to remove at the end, so that the last message stays open; pass None to keep all.
    """

    template: ChatTemplate
    messages: list[Message]
    variables: dict[str, object]
    own: dict[str, object]
    separator: str
    open_end: str | None

    def render(self, mark: str = "") -> str:
        """Render the prompt's text, without the separator; raise what `ChatTemplate.render` does.

        `mark` is put after each of the caller's characters, see `control_tokens.CallerText`; "" for none.
        """
        messages, variables = self.messages, self.variables
        if mark:
            try:
                messages = [{**marked(m, mark), "role": m["role"]} for m in messages]
                variables = {name: marked(value, mark) for name, value in variables.items()}
            except RecursionError:
                raise TokenizerError(
                    "The messages or tools are nested too deeply to be encoded. Flatten them."
                ) from None
        text = self.template.render(messages, **variables | self.own)
        text = text.removeprefix(self.separator)
        if self.open_end is None or not text.rstrip().endswith(self.open_end):
            return text
        return text.rstrip().removesuffix(self.open_end)

    @property
    def source(self) -> str | None:
        """The template's source; None for AFM's own."""
        return None if self.template.is_own else self.template.source

    @cached_property
    def texts(self) -> list[str]:
        """Every string in messages, tools and variables, except roles, which are one of a few words."""
        values = [value for m in self.messages for name, value in m.items() if name != "role"]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):  # a message with more than text, which is rare
            texts = strings_in(values)
        return texts + strings_in([v for v in self.variables.values() if v is not None])


@lru_cache(maxsize=16)
def _compile(source: str) -> Callable[[dict[str, object]], str]:
    """Compile a template to a function that renders it with variables."""
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from afm_mlx.tokenizer.template_sandbox import BoundedEnvironment, bounded_filter

    def refuse_unsafe(value: object, attribute: str) -> NoReturn:
        raise SecurityError(f"{attribute!r} of {type(value).__name__} is not for templates.")

    is_own = source == V6_TEMPLATE
    kind = ImmutableSandboxedEnvironment if is_own else BoundedEnvironment
    extensions = ["jinja2.ext.loopcontrols", _generation_blocks()]
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # By default, Jinja renders a forbidden attribute as nothing.
    environment.unsafe_undefined = refuse_unsafe  # type: ignore[assignment, method-assign]
    environment.filters["tojson"] = _to_json if is_own else bounded_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    if isinstance(environment, BoundedEnvironment):
        return partial(environment.render, template)
    return template.render


@lru_cache(maxsize=1)
def _generation_blocks() -> type:
    """Return the Jinja extension for `{% generation %}`, which training marks assistants' text with."""
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlocks


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' templates do; Jinja's own filter escapes `<` and `&` for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        marks = {item.mark for item in strings_in(value) if isinstance(item, CallerText)}
        text = "".join(c if c.isascii() or c in marks else json.dumps(c)[1:-1] for c in text)
    return text


class _Refusal(Exception):
    """What a template says of messages that it refuses."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


def reason_of(error: Exception) -> str:
    """Return an error's text in one line, shortened: it may quote long messages."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _REASON else f"{text[: _REASON // 2]} ... {text[-_REASON // 2 :]}"
