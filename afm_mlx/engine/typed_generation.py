"""Chats answered with instances of Python types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import mlx.nn as nn

from afm_mlx.engine.generation import stream_generate
from afm_mlx.errors import RequestError, shown
from afm_mlx.guidance.types import AnswerType, answer_type

T = TypeVar("T")
Messages = str | Sequence[Mapping[str, Any]]


@overload
def generate_as(
    kind: type[T], model: nn.Module, tokenizer: Any, messages: Messages, **options: Any
) -> T: ...
@overload
def generate_as(
    kind: Any, model: nn.Module, tokenizer: Any, messages: Messages, **options: Any
) -> Any: ...
def generate_as(
    kind: Any, model: nn.Module, tokenizer: Any, messages: Messages, **options: Any
) -> Any:
    """Answer a chat with an instance of a type.

        person = generate_as(Person, model, tokenizer, "Who wrote Emma?", max_tokens=100)

    Args:
        kind: what `answer_type` takes (a dataclass, `TypedDict`, class of msgspec or pydantic, function, ...),
            or what it returns. A function's answer is a dict of its arguments.
        model, tokenizer: what `load` returns.
        messages: the chat, or a user's only message. The last user's message is given the type's schema to
            show, unless it has a `response_format`. Without a chat template a text is continued as it is.
        options: those of `stream_generate`.

    Raises:
        AFMError: as `stream_generate` does; `ConstraintError` for a type that can't be generated, and for a
            value that its code refuses; `IncompleteError` for an answer that is cut off.
    """
    *_, answer = stream_generate_as(kind, model, tokenizer, messages, **options)
    return answer


def stream_generate_as(
    kind: Any, model: nn.Module, tokenizer: Any, messages: Messages, **options: Any
) -> Iterator[Any]:
    """Answer a chat with an instance of a type, and show how far it is.

    Yields a snapshot whenever there is more to see (`AnswerType.partial`), and the instance as the last item.

    Args:
        kind, model, tokenizer, messages, options: as for `generate_as`.

    Raises:
        AFMError: as `generate_as` does.
    """
    answers = kind if isinstance(kind, AnswerType) else answer_type(kind)
    prompt = _prompt(answers, tokenizer, messages)
    options = {"logprobs": False, **options, "constraint": answers.constraint}
    text, seen = "", None
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        snapshot = answers.partial(text)
        if snapshot is not None and snapshot != seen:
            yield snapshot
            seen = snapshot
    yield answers.instance(text)


def _prompt(answers: AnswerType, tokenizer: Any, messages: Messages) -> str | list[int]:
    if not tokenizer.has_chat_template:
        if not isinstance(messages, str):
            raise RequestError("The model has no chat template; give a text instead of messages.")
        return messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is {shown(messages)}; a text or a list of messages is needed."
        )
    chat = list(messages)
    for i, message in reversed(list(enumerate(chat))):
        if isinstance(message, Mapping) and message.get("role") == "user":
            chat[i] = {"response_format": answers.response_format, **message}
            break
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)
