"""The prompt format of AFM ("chat template V6" in tamm) and the sandbox that renders templates.

A conversation is `<turn_start> ROLE<n>CONTENT<turn_end>` per message, behind one separator token. Without
a system message a default one comes first; tool definitions follow the system message's content; tool
calls, tool results and response formats are written into the content of their message. The template
below does all of that itself, so that the same text is right in a model folder that stock mlx-lm loads.

Source: tamm 0.2.0, `preprocessors/instruct_lm/afm/afm_v6.py`.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from afm_mlx.errors import TokenizerError

if TYPE_CHECKING:
    from jinja2 import Template

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

    The sandbox keeps a template from running code; it doesn't bound the time or memory it takes.
    `path` is the file that holds the template, for messages; none means the one built in.
    """

    def __init__(self, source: str = V6_TEMPLATE, path: str | None = None) -> None:
        self.source = source
        self._name = f"The chat template in {path}" if path else "The chat template"

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt's text.

        Args:
            messages: as `checked_messages` returns them.
            variables: `tools`, `add_generation_prompt`, `bos_token`, ... as the template uses them.

        Raises:
            TokenizerError: when the template is wrong, forbidden, rejects the messages, or doesn't know
                tool calls or response formats that the messages have.
        """
        self._refuse_ignored_fields(messages)
        template = self._compiled
        try:
            return template.render(messages=messages, **variables)
        except Exception as error:  # a template may fail in any way that Python can
            raise TokenizerError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Left alone, a forbidden attribute renders as nothing.
        environment.unsafe_undefined = _refuse_unsafe  # type: ignore[assignment, method-assign]
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise TokenizerError(f"{self._name} is not valid Jinja: {error}") from error

    def _refuse_ignored_fields(self, messages: list[dict[str, Any]]) -> None:
        for field in ("tool_calls", "response_format"):
            index = next((i for i, message in enumerate(messages) if field in message), None)
            if index is not None and field not in self.source:
                raise TokenizerError(
                    f"messages[{index}] has {field!r}, which {self._name[0].lower()}{self._name[1:]} "
                    "does not use. Remove that template to use AFM's own, or leave the field out."
                )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates write it; Jinja's own filter escapes `<` and `&` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse_unsafe(value: Any, attribute: str) -> NoReturn:
    from jinja2.exceptions import SecurityError

    raise SecurityError(f"{attribute!r} of {type(value).__name__} is not for templates.")


def _raise_exception(message: str) -> NoReturn:
    raise TokenizerError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)
