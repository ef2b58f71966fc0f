"""The tokenizer of a model folder: text and chat messages to ids, ids to text.

The ids equal those of tamm's `AFMTokenizer` and `AFMChatTemplateV6Preprocessor` on the same
`tokenizer.model`. The class has the attributes that mlx-lm reads, so that mlx-lm's functions take it in
place of its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.tokenizer.chat import Chat
from afm_mlx.tokenizer.chat_template import ChatTemplate
from afm_mlx.tokenizer.control_tokens import ControlTokens
from afm_mlx.tokenizer.detokenizer import (
    NEWLINE,
    SPACE,
    Piece,
    Spacing,
    StreamingDetokenizer,
)
from afm_mlx.tokenizer.mlx_lm_protocol import MLXLMTokenizer
from afm_mlx.tokenizer.tokenizer_config import (
    read_bytes,
    read_chat_template,
    read_config,
    read_text,
    text_of,
    tokenizer_folder,
)
from afm_mlx.tokenizer.tokenizer_export import save_tokenizer
from afm_mlx.tokenizer.vocabulary import (
    MARKERS,
    TURN_END,
    TURN_START,
    HubVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)

__all__ = ["AFMTokenizer", "load_tokenizer", "save_tokenizer"]

# Arguments of transformers' apply_chat_template that would change the result, with the values that don't.
_NEUTRAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "return_dict": (False, None),
    "return_tensors": (None,),
    "return_assistant_tokens_mask": (False, None),
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "documents": (None, []),
    "tokenizer_kwargs": (None, {}),
}


class AFMTokenizer(MLXLMTokenizer):
    """Encodes, decodes and renders chats for one model; see `load_tokenizer`.

    Attributes:
        eos_token, eos_token_id: what ends an answer, `<turn_end>`.
        eos_token_ids: the set of ids that end generation: `eos_token_id` and `separator_id`.
        separator_id: SentencePiece's end-of-sequence id, which comes before every sequence.
        pad_token_id, unk_token_id: None where the vocabulary has none.
        vocab_size: number of ids; a model's embedding may have more rows.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        eos_token: str | None = None,
        chat_template: ChatTemplate | None = None,
        name_or_path: str = "",
    ) -> None:
        """Wrap a vocabulary.

        Args:
            eos_token: what ends an answer; `<turn_end>` when not given.
            chat_template: the format of chats; AFM's own when not given.

        Raises:
            TokenizerError: when `eos_token` isn't in the vocabulary.
        """
        self._vocabulary = vocabulary
        self._chat_template = chat_template or ChatTemplate()
        self.name_or_path = name_or_path
        self.vocab_size = vocabulary.size
        self.separator_id = vocabulary.separator_id
        self.pad_token_id = vocabulary.pad_id
        self.unk_token_id = vocabulary.unk_id
        self.spacing = vocabulary.spacing
        # Vocabulary look-ups cross into C++ or Rust; generation sees the same few pieces again.
        self._pieces: dict[int, Piece] = {}

        separator = self.convert_ids_to_tokens(self.separator_id)
        turn_end = vocabulary.id_of(TURN_END)
        # Converters of LLaMA's tokenizer call the separator eos_token; it doesn't end AFM's turns.
        if eos_token is None or (eos_token == separator and turn_end is not None):
            eos_token = TURN_END if turn_end is not None else separator
        eos_token_id = vocabulary.id_of(eos_token)
        if eos_token_id is None:
            raise TokenizerError(
                f"The eos_token {shown(eos_token)} of tokenizer_config.json is not in the vocabulary of "
                f"{name_or_path or 'the tokenizer'} ({self.vocab_size} pieces). AFM's is {TURN_END!r}."
            )
        self.eos_token: str = eos_token
        self.eos_token_id: int = eos_token_id
        self.eos_token_ids: set[int] = {eos_token_id, self.separator_id}
        if turn_end is not None:
            self.eos_token_ids.add(turn_end)
        self._marker_ids = {name: vocabulary.id_of(name) for name in MARKERS}
        self._prefix_id = vocabulary.id_of(SPACE)
        self._separator = separator

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"AFMTokenizer({self.name_or_path!r}, vocab_size={self.vocab_size})"

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text; a newline is the piece `<n>`.

        Without special tokens these are the ids of tamm's `AFMTokenizer.encode`. With them, they are what
        the model expects at the start of a sequence: the separator first, and for a text that starts with
        a marker of the prompt format (a rendered chat), not the dummy prefix that encoding puts there.

        The text is taken as it is: where it has the name of a control token, such as `<turn_end>`, the ids have
        that token. What others wrote belongs in a message, see `apply_chat_template`.

        Raises:
            TokenizerError: when `text` is not a string, or has surrogates that no UTF-8 can hold.
        """
        if not isinstance(text, str):
            raise TokenizerError(
                f"Only a str can be encoded, got {type(text).__name__}. Decode bytes first."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"The text has {text[error.start]!r} at position {error.start}, half of a surrogate "
                "pair, which is not valid Unicode text. Read it with errors='replace', or remove it."
            ) from None
        tokens = self._vocabulary.encode(text.replace("\n", NEWLINE))
        if not add_special_tokens:
            return tokens
        return self._behind_separator(tokens, text)

    def _behind_separator(self, tokens: list[int], text: str) -> list[int]:
        if (
            tokens[:1] == [self._prefix_id]
            and text.startswith(MARKERS)
            and tokens[1:2]
            and tokens[1] in self._marker_ids.values()
        ):
            tokens = tokens[1:]
        return [self.separator_id, *tokens]

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        tokenize: Literal[True] = ...,
        continue_final_message: bool = ...,
        chat_template: str | None = ...,
        **kwargs: object,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        *,
        tokenize: Literal[False],
        continue_final_message: bool = ...,
        chat_template: str | None = ...,
        **kwargs: object,
    ) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: object,
    ) -> list[int] | str:
        """The ids (or the text, without the separator) of a conversation.

        The messages are not changed. A default system message is put first when there is none. Tool
        definitions come from `tools` or from the system message's `tools`.

        Only the template writes control tokens. Where messages, tools, response formats or `kwargs` hold a
        control token's name, or `<n>`, its characters are encoded as plain text. The text of `tokenize=False`
        can't tell the two apart: encoding it gives control tokens for both.

        Args:
            messages: `{"role", "content"}` dicts, see `chat_messages.checked_messages`.
            add_generation_prompt: end with the start of an answer. A final assistant message is then left
                out: it is the answer to be generated again, as in tamm.
            continue_final_message: leave the last message open, to be written further.
            chat_template: another Jinja template for this call.
            kwargs: variables for the template, such as `enable_thinking`; AFM's own uses none.
                transformers' `return_dict`, `return_tensors`, `padding`, `truncation`, `max_length`,
                `documents`, `tokenizer_kwargs` and `return_assistant_tokens_mask` are accepted with the
                values that change nothing.

        Raises:
            TokenizerError: for messages, tools or arguments that can't be honoured.
        """
        for name in _NEUTRAL_ARGUMENTS.keys() & kwargs.keys():
            value = kwargs.pop(name)
            if value not in _NEUTRAL_ARGUMENTS[name]:
                raise TokenizerError(
                    f"apply_chat_template({name}={shown(value)}) is not supported: it returns a list of ids, "
                    "or text with tokenize=False. Leave it out."
                )
        if add_generation_prompt and continue_final_message:
            raise TokenizerError(
                "add_generation_prompt starts a new answer and continue_final_message writes the last "
                "message further: only one of them can be true."
            )
        chat = Chat(
            ChatTemplate(chat_template) if chat_template is not None else self._chat_template,
            messages,
            tools,
            separator=self._separator,
            eos_token=self.eos_token,
            variables=kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        text = chat.render()
        return self._encode_chat(chat, text) if tokenize else text

    def _encode_chat(self, chat: Chat, text: str) -> list[int]:
        """The ids of a chat rendered as `text`, with the control tokens of its template and no others."""
        controls = self._controls
        tokens = self.encode(text, add_special_tokens=True)
        if not controls.may_come_from(chat) and controls.are_those_of(text, tokens):
            return tokens
        mark = chat.free_mark(text)
        rendered = chat.render(mark)
        written = controls.written_in(rendered, mark)
        # A template that looks into texts in ways that marks disturb has said something else this time.
        is_same = rendered.replace(mark, "") == text
        has_written = controls.ids_in(tokens[1:]) == written
        has_written = has_written and controls.has_newlines(rendered, tokens, mark)
        if has_written and (is_same or not controls.are_in(chat.texts)):
            return tokens
        tokens = self._behind_separator(controls.encode(rendered, mark), rendered)
        rest = iter(written)
        if not all(token in rest for token in controls.ids_in(tokens[1:])):
            raise TokenizerError(
                "The chat template mixes its control tokens with the messages' text, which has names of such. "
                "Remove them from the text, or the template, to use AFM's own."
            )
        return tokens

    # Ids to text

    def decode(
        self, tokens: int | Iterable[int], skip_special_tokens: bool = False, **kwargs: Any
    ) -> str:
        """The text of ids, equal to tamm's `AFMTokenizer.decode`.

        Control pieces (padding, separator) have no text; markers such as `<turn_end>` do, unless
        `skip_special_tokens`.

        Raises:
            TokenizerError: when an id is outside the vocabulary.
        """
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        for token in ids:
            self._check_id(token)
        if skip_special_tokens:
            special = set(self.all_special_ids)
            ids = [token for token in ids if token not in special]
        return self._vocabulary.decode(ids)

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer, for one sequence."""
        return StreamingDetokenizer(self)

    @property
    def inner_detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer for text that a constraint allows, to the character.

        A space at its beginning is one, and a `<n>` that several pieces spell is no newline.
        """
        spacing = Spacing(dummy_prefix=False, strip_all=False)
        return StreamingDetokenizer(self, spacing, spells_newlines=False)

    def piece(self, token: int) -> Piece:
        """The vocabulary entry of one id.

        Raises:
            TokenizerError: when the id is outside the vocabulary.
        """
        piece = self._pieces.get(token)
        if piece is None:
            self._check_id(token)
            piece = self._pieces[token] = self._vocabulary.piece(token)
        return piece

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"Token id {token} is outside the vocabulary of {self.name_or_path or 'the tokenizer'}: "
                f"0 to {self.vocab_size - 1}. Do the tokenizer and the model belong together?"
            )

    # Vocabulary

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self._vocabulary, self.all_special_ids)

    @property
    def pad_token(self) -> str | None:
        return None if self.pad_token_id is None else self.convert_ids_to_tokens(self.pad_token_id)

    @property
    def unk_token(self) -> str | None:
        return None if self.unk_token_id is None else self.convert_ids_to_tokens(self.unk_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """Padding, unknown, separator, the end of a turn and its start, as far as they exist."""
        ids = [
            self.pad_token_id,
            self.unk_token_id,
            self.separator_id,
            self._marker_ids[TURN_START],
            self._marker_ids[TURN_END],
            self.eos_token_id,
        ]
        return list(dict.fromkeys(token for token in ids if token is not None))

    @property
    def control_ids(self) -> frozenset[int]:
        """The tokens that only a chat's template writes: markers, special ids, added names in brackets."""
        return self._controls.ids

    @property
    def all_special_tokens(self) -> list[str]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    def get_vocab(self) -> dict[str, int]:
        """Every piece and its id."""
        return {self._vocabulary.name(token): token for token in range(self.vocab_size)}

    @overload
    def convert_ids_to_tokens(self, tokens: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, tokens: Iterable[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, tokens: int | Iterable[int]) -> str | list[str]:
        """The piece of one id, or the list of pieces of several."""
        if not isinstance(tokens, int):
            return [self.convert_ids_to_tokens(int(token)) for token in tokens]
        self._check_id(tokens)
        return self._vocabulary.name(tokens)

    @overload
    def convert_tokens_to_ids(self, names: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, names: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(
        self, names: str | list[str] | tuple[str, ...]
    ) -> int | list[int | None] | None:
        """The id of one piece, None when there is no such piece; or the list for several."""
        if isinstance(names, str):
            return self._vocabulary.id_of(names)
        return [self._vocabulary.id_of(name) for name in names]

    def add_eos_token(self, token: str | int) -> None:
        """Let a further piece, by name or id, end generation.

        Raises:
            TokenizerError: when there is no such piece.
        """
        try:
            token_id = int(token)
            self._check_id(token_id)
        except ValueError:
            found = self._vocabulary.id_of(token) if isinstance(token, str) else None
            if found is None:
                raise TokenizerError(
                    f"{shown(token)} is neither a piece nor an id of the vocabulary "
                    f"(0 to {self.vocab_size - 1}), so it can't end generation."
                ) from None
            token_id = found
        self.eos_token_ids.add(token_id)

    @property
    def chat_template(self) -> str:
        """The template's text."""
        return self._chat_template.source


def load_tokenizer(folder: str | Path) -> AFMTokenizer:
    """The tokenizer of a model folder.

    Reads `tokenizer.model` (SentencePiece) when it is there, else `tokenizer.json` (Hugging Face), and
    from `tokenizer_config.json` the `eos_token`. A chat template of the folder's own is used
    (`chat_template.jinja`, else `chat_template` in `tokenizer_config.json`), AFM's V6 otherwise.

    A draft model in its target's folder (`draft`) has that model's tokenizer, unless it brings one.

    Raises:
        TokenizerError: when the folder or its tokenizer files are missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"The model folder {folder} does not exist, or is not a folder.")
    folder = tokenizer_folder(folder)
    config = read_config(folder / "tokenizer_config.json")
    model, hub = folder / "tokenizer.model", folder / "tokenizer.json"
    vocabulary: Vocabulary
    if model.exists():
        vocabulary = SentencePieceVocabulary(read_bytes(model), model)
    elif hub.exists():
        vocabulary = HubVocabulary(read_text(hub), hub, config)
    else:
        raise TokenizerError(
            f"{folder} has no tokenizer: it needs tokenizer.model (SentencePiece) or tokenizer.json "
            "(Hugging Face). Convert the model again, or copy the file there."
        )
    return AFMTokenizer(
        vocabulary,
        eos_token=text_of(config.get("eos_token"), "eos_token"),
        chat_template=read_chat_template(folder, config),
        name_or_path=str(folder),
    )
