"""One chat as a template is given it: what is the caller's, and what is the template's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.caller_text import free_mark, marked, strings_in
from afm_mlx.tokenizer.chat_messages import checked_messages, checked_tools
from afm_mlx.tokenizer.chat_template import ChatTemplate


class Chat:
    """Messages, tools and variables, checked, and the template that renders them.

    Args:
        template: renders the chat.
        messages: see `chat_messages.checked_messages`.
        tools: tool definitions; None takes those of the system message.
        separator: the token that comes before a chat; templates for other programs may write it out.
        eos_token: the token that ends a message.
        add_generation_prompt, continue_final_message: see `AFMTokenizer.apply_chat_template`.
        variables: the caller's further variables for the template.

    Raises:
        TokenizerError: for messages or tools that can't be honoured.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        separator: str,
        eos_token: str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> None:
        self.template = template
        self._separator, self._eos_token = separator, eos_token
        self._messages = checked_messages(messages)
        own_tools = self._messages[0].pop("tools", None)
        if own_tools and tools:
            raise TokenizerError(
                "Tool definitions are given twice, as tools= and as messages[0]['tools']. Leave one out."
            )
        self._is_open = continue_final_message
        self._variables = {**variables, "tools": checked_tools(tools) if tools else own_tools}
        # The caller may give other values for these two, which then are the caller's text.
        own = {"target_role": "assistant", "eos_token": eos_token}
        own = {name: value for name, value in own.items() if variables.get(name, value) == value}
        self._own = own | {
            "bos_token": "",
            "arguments_are_decoded": True,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    def render(self, mark: str = "") -> str:
        """The prompt's text, without the separator.

        Args:
            mark: put behind each of the caller's characters but whitespace, see `caller_text`.

        Raises:
            TokenizerError: when the template fails, see `ChatTemplate.render`.
        """
        messages, variables = self._messages, self._variables
        if mark:
            try:
                messages = [{**marked(m, mark), "role": m["role"]} for m in messages]
                variables = {name: marked(value, mark) for name, value in variables.items()}
            except RecursionError:
                raise TokenizerError(
                    "The messages or tools are nested too deeply to be encoded. Flatten them."
                ) from None
        text = self.template.render(messages, **variables | self._own)
        text = text.removeprefix(self._separator)
        if self._is_open:
            opened = text.rstrip().removesuffix(self._eos_token)
            text = text if opened == text.rstrip() else opened
        return text

    @cached_property
    def texts(self) -> list[str]:
        """The caller's strings, wherever they are; roles are left out, for only some are allowed."""
        values = [value for m in self._messages for name, value in m.items() if name != "role"]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):  # a message with more than text, which is rare
            texts = strings_in(values)
        return texts + strings_in([v for v in self._variables.values() if v is not None])

    def free_mark(self, text: str) -> str:
        """A character that neither the chat has, nor its template, nor the text that was rendered."""
        return free_mark([text, self.template.source, *self.texts])
