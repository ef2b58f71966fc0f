"""The prompt format of AFM ("chat template V6" in tamm) and the sandbox that renders templates.

A conversation is `<turn_start> ROLE<n>CONTENT<turn_end>` per message, behind one separator token. Without
a system message a default one comes first; tool definitions follow the system message's content; tool
calls, tool results and response formats are written into the content of their message. The template
below does all of that itself, so that the same text is right in a model folder that stock mlx-lm loads.

Source: tamm 0.2.0, `preprocessors/instruct_lm/afm/afm_v6.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, NoReturn

from afm_mlx.errors import TokenizerError
from afm_mlx.installation import package_problem
from afm_mlx.tokenizer.caller_text import CallerText, strings_in

_REASON = 600  # characters of a reason

DEFAULT_SYSTEM_MESSAGE = "A conversation between a user and a helpful assistant."

# `bos_token` is empty here, where the tokenizer puts the separator's id; in other programs it is the
# separator. They also hand over tool call arguments as JSON text, which is then taken as it is.
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

    One that isn't AFM's own is also bounded in the time and memory that it takes, see `template_sandbox`.
    `path` is the file that holds the template, for messages; none means the one built in.
    """

    def __init__(self, source: str = V6_TEMPLATE, path: str | None = None) -> None:
        self.source = source
        self._name = f"The chat template in {path}" if path else "The chat template"

    @property
    def is_own(self) -> bool:
        """True if it is `V6_TEMPLATE`."""
        return self.source == V6_TEMPLATE

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt's text.

        Args:
            messages: as `checked_messages` returns them.
            variables: `tools`, `add_generation_prompt`, `bos_token`, ... as the template uses them.

        Raises:
            TokenizerError: when the template is wrong, forbidden, rejects the messages, takes too much time or
                memory, or doesn't know tool calls or response formats that the messages have.
        """
        self._refuse_ignored_fields(messages)
        render = self._compiled
        try:
            return render({**variables, "messages": messages})
        except Exception as error:  # a template may fail in any way that Python can
            raise TokenizerError(f"{self._name} failed: {_reason(error)}") from error

    @cached_property
    def _compiled(self) -> Callable[[dict[str, Any]], str]:
        try:
            return _compile(self.source)
        except Exception as error:  # Jinja's own errors, and Python's when it compiles Jinja's code
            if problem := package_problem(error):  # of Jinja itself: templates import nothing
                raise TokenizerError(problem) from error
            raise TokenizerError(f"{self._name} is not valid Jinja: {_reason(error)}") from error

    def _refuse_ignored_fields(self, messages: list[dict[str, Any]]) -> None:
        for field in ("tool_calls", "response_format"):
            if field in self.source:
                continue
            index = next((i for i, message in enumerate(messages) if field in message), None)
            if index is not None:
                raise TokenizerError(
                    f"messages[{index}] has {field!r}, which {self._name[0].lower()}{self._name[1:]} "
                    "does not use. Remove that template to use AFM's own, or leave the field out."
                )


@lru_cache(maxsize=16)
def _compile(source: str) -> Callable[[dict[str, Any]], str]:
    """A function that renders a template with variables."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from afm_mlx.tokenizer.template_sandbox import BoundedEnvironment, bounded_filter

    is_own = source == V6_TEMPLATE
    kind = ImmutableSandboxedEnvironment if is_own else BoundedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # Left alone, a forbidden attribute renders as nothing.
    environment.unsafe_undefined = _refuse_unsafe  # type: ignore[assignment, method-assign]
    environment.filters["tojson"] = _to_json if is_own else bounded_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    if isinstance(environment, BoundedEnvironment):
        return partial(environment.render, template)
    return template.render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates write it; Jinja's own filter escapes `<` and `&` for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        marks = {item.mark for item in strings_in(value) if isinstance(item, CallerText)}
        text = "".join(c if c.isascii() or c in marks else json.dumps(c)[1:-1] for c in text)
    return text


def _reason(error: Exception) -> str:
    """An error in one line; what it quotes of the messages may be long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _REASON else f"{text[: _REASON // 2]} ... {text[-_REASON // 2 :]}"


def _refuse_unsafe(value: Any, attribute: str) -> NoReturn:
    from jinja2.exceptions import SecurityError

    raise SecurityError(f"{attribute!r} of {type(value).__name__} is not for templates.")


def _raise_exception(message: str) -> NoReturn:
    raise TokenizerError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)
