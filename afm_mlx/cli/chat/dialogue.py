"""The turns of a chat: answers, the KV caches kept between them, and files of conversations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.prompt_masks import PromptMasks
from afm_mlx.cli.images import read_picture
from afm_mlx.cli.thoughts import ThoughtPrinter, Thoughts
from afm_mlx.engine.generation import GenerationResponse, stream_generate
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.prompt_cache import Continuation, PromptCaches
from afm_mlx.errors import AFMError, RequestError, TokenizerError, reason_of, shown
from afm_mlx.files import atomic_write, read_file
from afm_mlx.ranks import ranks_of
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.chat_messages import Message, checked_messages
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.vision_config import MODE_CHOICES

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

MAX_BYTES = 4 << 20
"""Maximum bytes of a conversation file: a million tokens, more than any context."""
_PREFIX_BYTES = 1 << 30
"""Maximum bytes of keys and values that a prefix cache of a chat keeps: of a split model on each rank."""
_KEYS = ("messages", "adapter")


class ConversationFileError(AFMError):
    """A conversation file that can't be written or read."""


class Dialogue:
    """The turns of a chat and their KV caches, one for each adapter.

    A turn renders the whole dialogue and computes the tokens that the adapter's cache doesn't hold yet. A
    method that raises, for Ctrl-C too, leaves the dialogue as it was; an answer that Ctrl-C stops keeps the
    text so far.

    Attributes:
        adapter: name of the adapter that answers, or None.
        last_response: final response of the last answer, with its figures; None before the first answer.
        prompt_tokens: number of tokens of the last question and the dialogue before it.

    With `masks`, a dialogue without an adapter runs with the mask that its first question chooses.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        new_cache: Callable[[], list[Any]],
        system_prompt: str | None = None,
        adapters: AdapterPool | None = None,
        thoughts: Thoughts | None = None,
        masks: PromptMasks | None = None,
    ):
        self._model, self._tokenizer = model, tokenizer
        self._thoughts = thoughts or Thoughts(tokenizer, None)
        self._new_cache, self._adapters, self._masks = new_cache, adapters, masks
        # Each rank of a split model has its part of the keys and values: no prompt cache holds them.
        self._prefixes = None if ranks_of(model) is None else PrefixCache(_PREFIX_BYTES)
        self.adapter: str | None = None
        self._system: list[Message] = []
        self.system = system_prompt
        self.reset()

    # -- turns

    @property
    def messages(self) -> list[Message]:
        """The instructions, if any, and all turns."""
        return [*self._system, *self._turns]

    @property
    def turns(self) -> list[Message]:
        """All turns, without the instructions."""
        return list(self._turns)

    @property
    def system(self) -> str | None:
        """Instructions for all turns; None if the chat template's own are used."""
        return self._system[0]["content"] if self._system else None

    @system.setter
    def system(self, text: str | None) -> None:
        # Tools of instructions that were loaded are kept.
        old: Mapping[str, Any] = self._system[0] if self._system else {}
        new = [] if text is None else [{**old, "role": "system", "content": text}]
        self._system = self._checked(new)

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole dialogue, as the chat template renders it."""
        return len(self._encoded(self.messages, open_answer=False)[0]) if self.messages else 0

    def reset(self) -> None:
        """Remove all turns; keep instructions and adapter."""
        self._turns: list[Message] = []
        self._question: list[Message] = []  # turns up to the last question, answered or not
        self._caches = PromptCaches(self._new_cache)
        self.last_response: GenerationResponse | None = None
        self.prompt_tokens = 0

    def restore(self, messages: Sequence[Message], adapter: str | None) -> None:
        """Replace instructions, turns and adapter.

        Raises:
            AFMError: if the messages are not valid, or the adapter can't be loaded.
        """
        checked = self._checked(messages)
        self._encoded(checked, open_answer=False)
        starts = int(bool(checked) and checked[0]["role"] == "system")
        turns = checked[starts:]
        questions = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
        self.switch(adapter)
        self.reset()
        self._system, self._turns = checked[:starts], turns
        self._question = turns[: questions[-1] + 1] if questions else []

    def switch(self, adapter: str | None) -> None:
        """Set the adapter that answers from now on, or none; keep the old one if `adapter` can't be loaded."""
        if adapter is not None:
            if self._adapters is None:
                raise RequestError(f"There is no adapter {adapter!r}: this chat has none.")
            self._adapters.load(adapter)
        self.adapter = adapter

    # -- answers

    def picture(self, path: Path, mode: str = "auto") -> Message:
        """Read a picture's file; return the part of a message that has its path and, as "image", the picture.

        Raises:
            AFMError: if the file can't be read, or the model reads text only.
        """
        picture = read_picture(path, mode, self._tokenizer)
        return {"type": "image", "path": str(path), "mode": mode, "image": picture}

    def ask(
        self, question: str | list[Message], show: Callable[[str], None], **arguments: Any
    ) -> GenerationResponse | None:
        """Add a question and its answer; return the final response with its figures, None after Ctrl-C.

        A question with pictures is a list of parts: of `picture`, and of text. `show` is called with each
        segment of the answer; `arguments` are options for `stream_generate`.
        """
        self._question = [*self._turns, {"role": "user", "content": question}]
        return self._answer(show, arguments)

    def retry(self, show: Callable[[str], None], **arguments: Any) -> GenerationResponse | None:
        """Answer the last question again, as `ask` does, and replace its answer if it has one.

        `arguments` go to `stream_generate`. None after Ctrl-C; raises `RequestError` if there is no question.
        """
        if not self._question:
            raise RequestError("There is no question yet that could be answered again.")
        return self._answer(show, arguments)

    def _answer(
        self, show: Callable[[str], None], arguments: Mapping[str, Any]
    ) -> GenerationResponse | None:
        prompt, images = self._encoded([*self._system, *self._question], open_answer=True)
        self.prompt_tokens = len(prompt)
        adapter = self.adapter
        if adapter is None and self._masks is not None:
            adapter = self._masks.name_for(prompt)
        answer, stopped, last = "", False, None
        splitter, printer = self._thoughts.splitter(prompt), ThoughtPrinter()
        if images and self._prefixes is None:
            # Prompt caches know tokens by their ids, which are the same for all pictures.
            self._prefixes = PrefixCache(_PREFIX_BYTES)
        caches: AbstractContextManager[Continuation] = nullcontext(Continuation([], prompt))
        if self._prefixes is None:
            caches = self._caches.continuing(prompt, adapter)
        try:
            with (
                caches as run,
                closing(
                    stream_generate(
                        self._model,
                        self._tokenizer,
                        run.rest,
                        prompt_cache=run.cache if self._prefixes is None else None,
                        prefix_cache=self._prefixes,
                        logprobs=False,
                        adapter=adapter,
                        adapters=self._adapters,
                        images=images,
                        **self._thoughts.options(prompt, seen=len(run.rest)),
                        **arguments,
                    )  # type: ignore[type-var]
                ) as responses,
            ):
                for response in responses:
                    said = printer.said(splitter, response)
                    answer += said
                    run.answer.append(response.token)
                    self.last_response = last = response
                    show(said)
        except KeyboardInterrupt:
            stopped = True
        finally:
            printer.close()
        if answer:
            thought = {"reasoning_content": printer.text} if printer.text else {}
            self._turns = [*self._question, {"role": "assistant", "content": answer, **thought}]
        return None if stopped else last

    def _encoded(
        self, messages: Sequence[Message], open_answer: bool
    ) -> tuple[list[int], Sequence[PromptImage]]:
        images, options = ChatImages(), dict(self._thoughts.variables)
        if any(map(_pictures_of, messages)):
            options["images"] = images
        tokens = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=open_answer, **options
        )
        return self._thoughts.ended(tokens) if open_answer else tokens, images.placed

    def _checked(self, messages: Sequence[Message]) -> list[Message]:
        """Return copies of messages, with their pictures read.

        Raises an `AFMError` that names a message that can't be encoded or saved.
        """
        read = [self._with_pictures(message) for message in messages]
        checked = checked_messages(read, ChatImages()) if read else []
        for index, message in enumerate(read):
            if _pictures_of(message):
                checked[index]["content"] = message["content"]
            try:
                json.dumps(_saved(checked[index]), ensure_ascii=False).encode("utf-8")
            except (ValueError, RecursionError) as error:  # a lone surrogate, a deep nesting
                raise TokenizerError(
                    f"messages[{index}] ({message['role']}) can't be written as JSON in UTF-8: {error}. "
                    "Change or remove it."
                ) from None
        return checked

    def _with_pictures(self, message: Message) -> Message:
        if not _pictures_of(message):
            return message
        parts = [
            self.picture(Path(part["path"]), part.get("mode", "auto"))
            if _is_picture(part)
            else part
            for part in message["content"]
        ]
        return {**message, "content": parts}


def _is_picture(part: object) -> bool:
    """True for a part of a message such as `Dialogue.picture` returns, with or without its image."""
    return (
        isinstance(part, dict)
        and part.get("type") == "image"
        and isinstance(part.get("path"), str)
        and part.get("mode", "auto") in MODE_CHOICES
    )


def _pictures_of(message: object) -> list[Message]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return list(filter(_is_picture, content)) if isinstance(content, list) else []


def _saved(message: Message) -> Message:
    """Return a message as files have it: pictures by their paths alone."""
    if not _pictures_of(message):
        return message
    parts = [
        {key: part[key] for key in part if key != "image"} if _is_picture(part) else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


# -- files


def write_conversation(
    path: Path, messages: Sequence[Message], adapter: str | None, replace: bool
) -> None:
    """Write a conversation as JSON, atomically; only `replace` overwrites a file.

    Raises:
        ConversationFileError: if the file can't be written.
    """
    where = shown(str(path))
    try:
        if path.exists() and not replace:
            raise ConversationFileError(
                f"{where} exists, and was not written by this chat. Choose another name, or remove it first."
            )
        with atomic_write(path) as temporary:
            record = {"adapter": adapter, "messages": [_saved(message) for message in messages]}
            text = json.dumps(record, ensure_ascii=False, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
    except (OSError, RecursionError) as error:  # RecursionError for a deeply nested tool result
        raise ConversationFileError(
            f"{where} can't be written: {reason_of(error)}. Give the path of a file."
        ) from None


def read_conversation(path: Path) -> tuple[list[Any], str | None]:
    """Read the messages of a file, unchecked, and the name of its adapter, or None.

    Paths of pictures are relative to the file's folder.
    """
    where = shown(str(path))
    try:
        record = json.loads(read_file(path, MAX_BYTES))
    except OSError as error:
        raise ConversationFileError(
            f"{where} can't be read: {reason_of(error)}. Give a file that /save has written."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConversationFileError(f"{where} is not JSON: {reason_of(error)}.") from None
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise ConversationFileError(
            f'{where} holds no conversation; {{"messages": [{{"role", "content"}}, ...]}} is needed.'
        )
    if unknown := [key for key in record if key not in _KEYS]:
        raise ConversationFileError(
            f"{where} has the key {shown(unknown[0])}; a conversation has {' and '.join(_KEYS)}."
        )
    adapter = record.get("adapter")
    if not isinstance(adapter, str | None):
        raise ConversationFileError(
            f"{where}: adapter is {shown(adapter)}; a name, or null for none, is needed."
        )
    for part in [part for message in record["messages"] for part in _pictures_of(message)]:
        part["path"] = str(path.parent / part["path"])
    return record["messages"], adapter


def typed_path(text: str) -> Path:
    """Convert a typed path, in which `~` is the home folder, to an absolute one."""
    if not text.isprintable():
        raise ConversationFileError(f"{shown(text)} is not the name of a file.")
    return Path(os.path.expanduser(text)).absolute()
