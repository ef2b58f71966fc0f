"""Types for every model's tokenizer: AFM's `AFMTokenizer`, and mlx-lm's `TokenizerWrapper` of other models.

Annotate with `Tokenizer`. Code that needs the pieces of AFM's vocabulary asks for `AFMTokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

from afm_mlx.vision_config import VisionConfig


class Detokenizer(Protocol):
    """Text of a growing token sequence: `add_token` for each id, then `finalize`."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def text(self) -> str:
        """All text so far."""
        ...

    @property
    def last_segment(self) -> str:
        """The text completed since this property was last read."""
        ...

    def reset(self) -> None: ...
    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...


class Tokenizer(Protocol):
    """A model's tokenizer: text and chats to token ids, and back."""

    @property
    def name_or_path(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    def __len__(self) -> int: ...

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int: ...
    @property
    def eos_token_ids(self) -> set[int]:
        """Ids that end an answer; `add_eos_token` adds one."""
        ...

    def add_eos_token(self, token: str) -> None: ...

    @property
    def all_special_ids(self) -> list[int]: ...
    def get_vocab(self) -> dict[str, int]: ...
    @overload
    def convert_ids_to_tokens(self, tokens: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, tokens: Iterable[int]) -> list[str]: ...
    @overload
    def convert_tokens_to_ids(self, names: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, names: list[str] | tuple[str, ...]) -> list[int | None]: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]:
        """Encode a text of other people, in which names of control tokens are plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...
    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer, for one sequence."""
        ...

    @property
    def vision_config(self) -> VisionConfig | None:
        """The config of the model's vision part; None if the model reads text only."""
        ...

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def has_tool_calling(self) -> bool: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        tokenize: Literal[True] = ...,
        **kwargs: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        *,
        tokenize: Literal[False],
        **kwargs: Any,
    ) -> str: ...
