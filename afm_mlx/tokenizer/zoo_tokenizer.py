"""Tokenizers of mlx-lm's models: chats in which only the template writes control tokens, and tokens as bytes.

Text and ids equal stock mlx-lm's: transformers renders the chat. If a message might hold the name of a
control token, the chat is rendered a second time, with marks, see `control_tokens`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from afm_mlx.errors import AFMError, TokenizerError, shown
from afm_mlx.installation import package_problem
from afm_mlx.tokenizer.chat_messages import Message
from afm_mlx.tokenizer.chat_template import Chat, ChatTemplate, drop_neutral_arguments, reason_of
from afm_mlx.tokenizer.control_tokens import ControlTokens, MixedText, is_bracketed, strings_in
from afm_mlx.tokenizer.detokenizer import SPACE
from afm_mlx.tokenizer.vocabulary import refuse_surrogates, with_names

_CONTROL_NAME = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_KEPT = 4  # templates whose control tokens are kept
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ARGUMENTS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class ZooTokenizer(TokenizerWrapper):
    """mlx-lm's wrapper of a tokenizer of transformers; only the chat template writes control tokens.

    Control tokens are special tokens, added tokens in brackets whose names the template or the marks of calls
    and thoughts have, and those named like `<|...|>`.
    """

    vision_config = None  # images are for AFM models
    _controls_of: dict[str, ControlTokens]

    @classmethod
    def of(cls, wrapper: TokenizerWrapper) -> ZooTokenizer:
        """Make one that shares all that mlx-lm's wrapper has."""
        made = cls.__new__(cls)
        made.__dict__.update(wrapper.__dict__)
        made._controls_of = {}
        return made

    def apply_chat_template(  # type: ignore[override]
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """Render a conversation with the model's template, and encode it as stock mlx-lm does.

        Names of control tokens in messages, tools and `kwargs` are encoded as plain text. Arguments of tool
        calls may be JSON text; ids that calls and results lack are made up.

        Args:
            messages, tools, add_generation_prompt, tokenize: see `AFMTokenizer.apply_chat_template`.
            kwargs: variables for the template, and `continue_final_message` and `chat_template` of
                transformers.

        Raises:
            TokenizerError: if the template fails, refuses the chat, or ignores tools or calls that it has.
        """
        if not self.has_chat_template and kwargs.get("chat_template") is None:
            raise TokenizerError(
                f"{self.name_or_path} has no chat template: it continues texts, and writes no chats. Give a "
                "text, or take a model that was trained for chats."
            )
        drop_neutral_arguments(kwargs)
        kwargs.setdefault(getattr(self, "_thinking_kwarg", "enable_thinking"), self.has_thinking)
        options = {**kwargs, "add_generation_prompt": add_generation_prompt}
        if tools:  # code that writes chats may know no such argument
            options["tools"] = list(tools)
        chat: _ZooChat | None = None
        try:
            source = self._source(kwargs.get("chat_template"), options.get("tools"))
            if source is not None:
                messages = self._completed(messages, source)
                if tools:
                    self.check_tools(source)
                chat = self._chat(messages, source, options, kwargs)
                chat.check_bounds()
            text = self._rendered(messages, options)
        except AFMError:
            raise
        except Exception as error:  # whatever a template of other people raises
            raise TokenizerError(
                package_problem(error)
                or f"The chat template of {self.name_or_path} can't write this chat: {reason_of(error)}"
            ) from error
        if not tokenize:
            return text
        tokens = self._encode(text)
        if source is None or chat is None or self._backend is None:
            return self._refusing(
                tokens, strings_in([list(messages), options.get("tools"), kwargs])
            )
        if kwargs.get("continue_final_message"):
            chat.begun = text
        return self._controls(source).encode_chat(chat, text, tokens)

    def _chat(
        self,
        messages: Sequence[Mapping[str, object]],
        source: str,
        options: Mapping[str, Any],
        kwargs: Mapping[str, Any],
    ) -> _ZooChat:
        variables = {name: value for name, value in kwargs.items() if name not in _ARGUMENTS}
        special = self._tokenizer.special_tokens_map.items()
        own = {name: token for name, token in special if name not in variables}
        own |= {"documents": None, "add_generation_prompt": options["add_generation_prompt"]}
        return _ZooChat(
            ChatTemplate(source, self.name_or_path),
            [dict(message) for message in messages],
            {**variables, "tools": options.get("tools")},
            own,
            separator="",
            open_end=None,
        )

    def check_tools(self, source: str | None = None) -> None:
        """Raise `TokenizerError` if the chat template, or another with this `source`, knows no tools."""
        source = self._source(None, [{}]) if source is None else source
        if source is not None and not re.search(r"\btools\b", source):
            raise TokenizerError(
                f"The chat template of {self.name_or_path} knows no tools, which the model would not be "
                "shown. Leave out tools, or use a model that was trained to call them."
            )

    @property
    def template_source(self) -> str:
        """The source of the template of chats with tools; empty if chats are not written by one."""
        return self._source(None, [{}]) or ""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for ids that no token has."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text of other people, in which names of control tokens are plain text.

        Raises `TokenizerError` if the text has surrogates, or a name that this tokenizer can't keep apart.
        """
        if self._backend is None:
            return self._refusing(self._encode(text), [text])
        refuse_surrogates(text)
        return self._controls(self.template_source).encode_plain(text)

    # -- chats

    def _source(self, given: str | None, tools: object) -> str | None:
        """Return the source of the template that a chat is written with; None if no template writes it."""
        tokenizer = self._tokenizer
        stock = PreTrainedTokenizerBase.apply_chat_template
        if self._chat_template is not None or type(tokenizer).apply_chat_template is not stock:
            return None
        if given is None and tokenizer.chat_template is None:
            return None
        source: str = tokenizer.get_chat_template(given, tools)
        return source

    def _rendered(self, messages: Sequence[Mapping[str, object]], options: dict[str, Any]) -> str:
        made = list(messages) if isinstance(messages, Sequence) else messages
        text: str = super().apply_chat_template(made, tokenize=False, **options)
        return text

    def _encode(self, text: str) -> list[int]:
        refuse_surrogates(text)
        if self._chat_template is not None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    def _refusing(self, tokens: list[int], texts: list[str]) -> list[int]:
        """Return ids of a chat that can't be written with marks; refuse texts with names of control tokens."""
        names = [str(name) for name in self._tokenizer.all_special_tokens]
        found = next((name for name in names if any(name in text for text in texts)), None)
        if found is not None:
            raise TokenizerError(
                f"The text has {shown(found)}, the name of a control token, and the tokenizer of "
                f"{self.name_or_path} can't keep it apart. Remove it."
            )
        return tokens

    def _completed(self, messages: Any, source: str) -> list[Message]:
        """Copy messages for a template: arguments decoded, no null fields, calls and results with their ids."""
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
            raise TokenizerError(
                f"messages must be a list of {{'role', 'content'}} dicts, got {shown(messages)}."
            )
        if not messages:
            raise TokenizerError(
                "messages is an empty conversation; at least one message is needed."
            )
        copied: list[Message] = []
        open_calls: list[Message] = []
        for index, message in enumerate(messages):
            made = {name: value for name, value in message.items() if value is not None}
            role = made.get("role")
            if not isinstance(role, str) or not re.fullmatch(r"\w+", role):
                raise TokenizerError(
                    f"messages[{index}] has the role {shown(role)}; a word is needed."
                )
            if "response_format" not in source:
                made.pop("response_format", None)  # a constraint holds the answer to it
            _complete_thought(made, source)
            if calls := made.get("tool_calls"):
                if not isinstance(calls, list | tuple):
                    raise TokenizerError(
                        f"messages[{index}] has {shown(calls)} as 'tool_calls'; a list of calls is needed."
                    )
                open_calls = [_completed_call(call, i, source) for i, call in enumerate(calls)]
                made.setdefault("content", "")
                made["tool_calls"] = list(open_calls)
                if "tool_calls" not in source and (written := self._written_calls(made, source)):
                    # LFM2's first templates and Falcon-H1's are given calls as a text.
                    del made["tool_calls"]
                    made["content"] = MixedText(made["content"], *written)
                elif "tool_calls" not in source:
                    raise TokenizerError(
                        f"messages[{index}] has 'tool_calls', which the chat template of {self.name_or_path} "
                        "does not use. Leave them out."
                    )
            elif made.get("role") == "tool":
                _complete_result(made, open_calls, source)
            else:
                made.pop("tool_calls", None)
            copied.append(made)
        return copied

    def _written_calls(self, message: Message, source: str) -> list[str]:
        """Write a message's calls for a template that doesn't; empty in a form that is not known.

        Every second part, from the first on, is a mark.
        """
        calls = message["tool_calls"]
        if self._tokenizer.init_kwargs.get("tool_parser_type") == "pythonic":
            written = ", ".join(map(_keyword_call, calls))
            return [f"{self.tool_call_start}[", written, f"]{self.tool_call_end}"]
        return _json_calls(calls) if "<tool_call>" in source else []

    # -- tokens

    @cached_property
    def _backend(self) -> Any:
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def _controls(self, source: str) -> ControlTokens:
        """Return the control tokens of chats that a template writes; kept for each `source`."""
        if source not in self._controls_of:
            marks = (self.tool_call_start, self.tool_call_end, self.think_start, self.think_end)
            written = "\0".join([source, *(mark or "" for mark in marks)])
            vocabulary = _ZooVocabulary(self._backend, control_names(self._backend, written))
            ids = vocabulary.symbols.values()
            if len(self._controls_of) == _KEPT:
                self._controls_of.clear()
            self._controls_of[source] = ControlTokens(vocabulary, ids, newline="\n")
        return self._controls_of[source]

    @property
    def control_names(self) -> dict[str, int]:
        """Ids by name of the tokens that only a chat template and the model write."""
        return {} if self._backend is None else dict(self._controls(self.template_source).names)

    @cached_property
    def _bytes(self) -> list[bytes]:
        if self._backend is None:
            return [self._tokenizer.decode([i]).encode() for i in range(len(self._tokenizer))]
        return bytes_of_tokens(self._backend)


def _complete_thought(message: Message, source: str) -> None:
    """Give a message's thought the name that the template reads; leave it out for other templates."""
    thought = message.pop("reasoning_content", None)
    if not isinstance(thought, str) or not thought:
        return
    if "reasoning_content" in source:
        message["reasoning_content"] = thought
    elif "message.thinking" in source:
        # GPT-OSS's refuses a text besides it before calls.
        is_call = bool(message.get("tool_calls")) and "<|channel|>" in source
        texts = [thought, message.pop("content", None) if is_call else None]
        message["thinking"] = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    elif "message.reasoning" in source:
        message["reasoning"] = thought


def _completed_call(call: Any, index: int, source: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TokenizerError(
            f"A tool call is {shown(call)}; {{'function': {{'name', 'arguments'}}}} is needed."
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else the template writes it as it is
            arguments = json.loads(arguments or "{}")
    written = {**function, "arguments": {} if arguments is None else arguments}
    made = {"type": "function", **({} if function is call else call), "function": written}
    made["id"] = _fitting_id(str(made.get("id") or f"call_{index}"), source)
    return made


def _json_calls(calls: Sequence[Message]) -> list[str]:
    """Write calls in Hermes' form; every second part, from the first on, is a mark."""
    parts = []
    for i, call in enumerate(calls):
        function = {name: call["function"][name] for name in ("name", "arguments")}
        mark = "\n</tool_call>\n<tool_call>\n" if i else "<tool_call>\n"
        parts += [mark, json.dumps(function, ensure_ascii=False)]
    return [*parts, "\n</tool_call>"]


def _keyword_call(call: Message) -> str:
    arguments = call["function"]["arguments"]
    pairs = arguments.items() if isinstance(arguments, Mapping) else ()
    written = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in pairs)
    return f"{call['function']['name']}({', '.join(written)})"


def _complete_result(message: Message, calls: list[Message], source: str) -> None:
    """Give the result of a call the id and the tool's name; one without an id answers the first open call."""
    known = message.get("tool_call_id")
    wanted = None if known is None else _fitting_id(str(known), source)
    call = next((call for call in calls if wanted in (None, call["id"])), None)
    if call is not None:
        calls.remove(call)
        wanted = call["id"]
        message.setdefault("name", call["function"]["name"])
    if wanted is not None:
        message["tool_call_id"] = wanted


def _fitting_id(call_id: str, source: str) -> str:
    """Return a call's id; Mistral's templates refuse ids that are not nine letters and digits."""
    if "[TOOL_CALLS]" not in source or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


@dataclass
class _ZooChat(Chat):
    """A chat that is rendered with marks; `begun` is its text if its last message stays open."""

    begun: str | None = None

    def check_bounds(self) -> None:
        """Raise `TokenizerError` if the template fails, takes too much, or reaches for internals.

        transformers compiles and renders in a sandbox without bounds, and so never sees such a template.
        """
        super().render()

    def render(self, mark: str = "") -> str:
        text = super().render(mark)
        if self.begun is None or not text.replace(mark, "").startswith(self.begun):
            return text
        left, kept = len(self.begun), list[str]()
        for part in text.split(mark):  # a mark comes after its character
            if len(part) >= left:
                return mark.join([*kept, part[:left]]) + (mark if len(part) == left else "")
            left -= len(part)
            kept.append(part)
        return text


# -- the vocabulary


def control_names(backend: Any, text: str) -> dict[str, int]:
    """Return ids by name of a tokenizer's control tokens; `text` has the names that a model's chats use."""
    return {
        token.content: token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special
        or _CONTROL_NAME.fullmatch(token.content)
        or (is_bracketed(token.content) and token.content in text)
    }


class _ZooVocabulary:
    """A tokenizer of the package `tokenizers`, with the attributes that `ControlTokens` needs."""

    unk_id: int | None = None
    is_literal = False  # a normalizer may turn other text into a name

    def __init__(self, backend: Any, symbols: Mapping[str, int]) -> None:
        self._backend, self.symbols = backend, symbols
        self.size: int = backend.get_vocab_size()
        self._names = {token: name for name, token in symbols.items()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def name(self, token: int) -> str:
        return self._names.get(token) or self._backend.id_to_token(token) or ""

    def id_of(self, name: str) -> int | None:
        return self.symbols.get(name)

    def is_hidden(self, token: int) -> bool:
        return False

    def renamed(self, names: Mapping[int, str]) -> _ZooVocabulary:
        from tokenizers import Tokenizer

        content = json.loads(self._backend.to_str())
        content = with_names(content, {self.name(token): name for token, name in names.items()})
        made = Tokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))
        return _ZooVocabulary(made, {name: token for token, name in names.items()})


def bytes_of_tokens(backend: Any) -> list[bytes]:
    """Return the bytes that each token of a tokenizer adds to a text, by id."""
    content = json.loads(backend.to_str())
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    decoder = json.dumps(content.get("decoder"))
    is_byte_level, has_bytes = "ByteLevel" in decoder, "ByteFallback" in decoder
    found = []
    for token in range(backend.get_vocab_size()):
        name = added.get(token)
        if name is not None:
            found.append((name if is_byte_level else name.replace(SPACE, " ")).encode())
            continue
        name = backend.id_to_token(token) or ""
        if is_byte_level and all(c in _BYTES for c in name):
            found.append(bytes(_BYTES[c] for c in name))
        elif has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", name):
            found.append(bytes([int(name[3:5], 16)]))
        else:
            found.append(name.replace(SPACE, " ").encode())
    return found


def _byte_letters() -> dict[str, int]:
    """Map the characters of byte-level vocabularies (GPT-2's) to bytes: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_letters()
