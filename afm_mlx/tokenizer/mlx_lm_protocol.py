"""What mlx-lm asks of a tokenizer besides encoding and decoding.

mlx-lm's own answer is `mlx_lm.tokenizer_utils.TokenizerWrapper`, around a transformers tokenizer. A class
with these attributes can be passed to `mlx_lm.stream_generate` and the like in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START


class MLXLMTokenizer:
    """The attributes that are the same for every AFM model; `_marker_ids` comes from the subclass."""

    # AFM has no begin-of-sequence token; mlx-lm then has `encode` add the special tokens.
    bos_token: str | None = None
    bos_token_id: int | None = None
    clean_up_tokenization_spaces = False

    # Answers with several channels.
    has_thinking = False
    think_start = think_end = think_start_id = think_end_id = None
    think_start_tokens = think_end_tokens = None
    structural_markers: tuple[str, ...] = ()
    response_transitions: Mapping[str, list[tuple[str, str]]] = {}
    response_initial_state: str | None = None

    has_chat_template = True

    _marker_ids: dict[str, int | None]

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        # mlx-lm puts whatever is not its TokenizerWrapper into one, whose detokenizer loses the space
        # after each newline (it decodes every line by itself). To isinstance() this is both classes.
        wrapper = sys.modules.get("mlx_lm.tokenizer_utils")
        return type(self) if wrapper is None else wrapper.TokenizerWrapper

    @property
    def has_tool_calling(self) -> bool:
        """True if the vocabulary has the markers around a tool call."""
        return None not in (self._marker_ids[EXECUTABLE_START], self._marker_ids[EXECUTABLE_END])

    @property
    def tool_call_start(self) -> str | None:
        return EXECUTABLE_START if self.has_tool_calling else None

    @property
    def tool_call_end(self) -> str | None:
        return EXECUTABLE_END if self.has_tool_calling else None

    @property
    def tool_call_start_tokens(self) -> tuple[int | None, ...] | None:
        return (self._marker_ids[EXECUTABLE_START],) if self.has_tool_calling else None

    @property
    def tool_call_end_tokens(self) -> tuple[int | None, ...] | None:
        return (self._marker_ids[EXECUTABLE_END],) if self.has_tool_calling else None

    @property
    def tool_parser(self) -> Callable[..., list[dict[str, Any]]] | None:
        """`parse(text, tools=None)` for the text between the tool call markers."""
        return parse_tool_calls if self.has_tool_calling else None
