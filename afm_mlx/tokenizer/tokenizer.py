"""AFM's tokenizer: text and chat messages to ids, ids to text.

The ids equal those that tamm's `AFMTokenizer` and `AFMChatTemplateV6Preprocessor` give for the same
`tokenizer.model`. `AFMTokenizer` has the attributes of `mlx_lm.tokenizer_utils.TokenizerWrapper`, so that
`mlx_lm.stream_generate` and the like take it in place of mlx-lm's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.tokenizer.chat_images import ChatImages, ImageChat
from afm_mlx.tokenizer.chat_messages import checked_messages, checked_tools, parse_tool_calls
from afm_mlx.tokenizer.chat_template import (
    Chat,
    ChatTemplate,
    drop_neutral_arguments,
    read_chat_template,
)
from afm_mlx.tokenizer.control_tokens import ControlTokens
from afm_mlx.tokenizer.detokenizer import (
    NEWLINE,
    SPACE,
    Piece,
    PieceKind,
    Spacing,
    StreamingDetokenizer,
)
from afm_mlx.tokenizer.tokenizer_export import save_tokenizer
from afm_mlx.tokenizer.vocabulary import (
    EXECUTABLE_END,
    EXECUTABLE_START,
    MARKERS,
    TURN_END,
    TURN_START,
    HubVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    read_bytes,
    read_config,
    read_text,
    refuse_surrogates,
    token_name,
    tokenizer_folder,
)

if TYPE_CHECKING:
    from afm_mlx.vision_config import VisionConfig

__all__ = ["AFMTokenizer", "load_tokenizer", "save_tokenizer"]

IMAGE_NAME = "<image>"
"""Name of an `image_token_id` outside the vocabulary; as text it is no image."""


class AFMTokenizer:
    """Encodes, decodes and renders chats for one model; made by `load_tokenizer`.

    Args:
        vocabulary: text to ids and back.
        eos_token: name of the token that ends an answer; pass None for `<turn_end>`.
        chat_template: the format of chats; pass None for AFM's own.
        name_or_path: the model folder, for errors.

    Attributes:
        eos_token, eos_token_id: the token that ends an answer.
        eos_token_ids: ids that end an answer: `eos_token_id`, `separator_id`, and what `add_eos_token` adds.
        separator_id: SentencePiece's end-of-sequence id, which comes before every sequence.
        pad_token_id, unk_token_id: padding and unknown ids; None if the vocabulary has none.
        vocab_size: number of ids; a model's embedding may have more rows.

    Raises:
        TokenizerError: if `eos_token` isn't in the vocabulary.
    """

    # AFM has no begin-of-sequence token; mlx-lm then has `encode` add the special tokens.
    bos_token: str | None = None
    bos_token_id: int | None = None
    clean_up_tokenization_spaces = False
    has_chat_template = True

    # Markers around tool calls, and the parser of the text between them, if the vocabulary has the markers.
    has_tool_calling = False
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    tool_call_start_tokens: tuple[int, ...] | None = None
    tool_call_end_tokens: tuple[int, ...] | None = None
    tool_parser: Callable[..., object] | None = None

    # What mlx-lm reads for models that think, or answer in several channels.
    has_thinking = False
    think_start = think_end = think_start_id = think_end_id = None
    think_start_tokens = think_end_tokens = None
    structural_markers: tuple[str, ...] = ()
    response_transitions: Mapping[str, list[tuple[str, str]]] = {}
    response_initial_state: str | None = None

    _vision_config: VisionConfig | None = None

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        eos_token: str | None = None,
        chat_template: ChatTemplate | None = None,
        name_or_path: str = "",
    ) -> None:
        self._vocabulary = vocabulary
        self._chat_template = chat_template or ChatTemplate()
        self.name_or_path = name_or_path
        self.vocab_size = vocabulary.size
        self.separator_id = vocabulary.separator_id
        self.pad_token_id = vocabulary.pad_id
        self.unk_token_id = vocabulary.unk_id
        self.pad_token = None if vocabulary.pad_id is None else vocabulary.name(vocabulary.pad_id)
        self.unk_token = None if vocabulary.unk_id is None else vocabulary.name(vocabulary.unk_id)
        self.spacing = vocabulary.spacing
        # Vocabulary look-ups cross into C++ or Rust, and generation needs the same few pieces again and again.
        self._pieces: dict[int, Piece] = {}

        separator = self.convert_ids_to_tokens(self.separator_id)
        turn_end = vocabulary.id_of(TURN_END)
        # Converters of LLaMA's tokenizer name the separator as eos_token; it doesn't end AFM's turns.
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
        self._prefix_id = vocabulary.id_of(SPACE)
        self._separator = separator
        self._marker_ids = {name: vocabulary.id_of(name) for name in MARKERS}
        start, end = self._marker_ids[EXECUTABLE_START], self._marker_ids[EXECUTABLE_END]
        if start is not None and end is not None:
            self.has_tool_calling = True
            self.tool_call_start, self.tool_call_end = EXECUTABLE_START, EXECUTABLE_END
            self.tool_call_start_tokens, self.tool_call_end_tokens = (start,), (end,)
            self.tool_parser = parse_tool_calls

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"AFMTokenizer({self.name_or_path!r}, vocab_size={self.vocab_size})"

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        # mlx-lm wraps other objects in a TokenizerWrapper, whose detokenizer loses the space after each newline
        # (it decodes every line by itself). To isinstance() this object is of both classes.
        wrapper = sys.modules.get("mlx_lm.tokenizer_utils")
        return type(self) if wrapper is None else wrapper.TokenizerWrapper

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text; a newline is the piece `<n>`.

        Names of control tokens in the text, such as `<turn_end>`, become these tokens. Text of other people
        belongs in a message, see `apply_chat_template`.

        Args:
            add_special_tokens: pass False for the ids of tamm's `AFMTokenizer.encode`; True for what the model
                expects at the start of a sequence: the separator first, and no dummy prefix (the space that
                SentencePiece puts before a text) if `text` starts with a marker, as a rendered chat does.

        Raises:
            TokenizerError: if `text` is not a string, or has surrogates, which UTF-8 can't hold.
        """
        if not isinstance(text, str):
            raise TokenizerError(
                f"Only a str can be encoded, got {type(text).__name__}. Decode bytes first."
            )
        refuse_surrogates(text)
        tokens = self._vocabulary.encode(text.replace("\n", NEWLINE))
        if not add_special_tokens:
            return tokens
        return self._behind_separator(tokens, text)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text of other people: names of control tokens, and `<n>`, are plain text.

        Raises `TokenizerError` if the text has surrogates.
        """
        refuse_surrogates(text)
        return self._controls.encode_plain(text)

    def _behind_separator(self, tokens: list[int], text: str) -> list[int]:
        """Return `tokens` of `text` after the separator, without the dummy prefix before a marker."""
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
        images: ChatImages | None = ...,
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
        images: ChatImages | None = ...,
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
        images: ChatImages | None = None,
        **kwargs: object,
    ) -> list[int] | str:
        """Render a conversation, and encode it.

        A default system message is put first if there is none. Only the template writes control tokens: their
        names, and `<n>`, in messages, tools, response formats and `kwargs` are encoded as plain text. With
        `tokenize=False` that distinction is lost: encoding the text gives control tokens for both.

        Args:
            messages: `{"role", "content"}` dicts, see `chat_messages.checked_messages`.
            tools: tool definitions; pass None for the system message's `tools`.
            add_generation_prompt: end with the start of an answer. A final assistant message is then left
                out: it is the answer to be generated again, as in tamm.
            tokenize: True for ids; False for the text, without the separator.
            continue_final_message: leave the last message open, to be continued.
            chat_template: another Jinja template for this call.
            images: the images whose marks the messages have, for a model that reads images. In the ids, an
                image is as many `image_token_id` as it has tokens, and `images.placed` has the images in their
                order. In the text (`tokenize=False`) the marks stay.
            kwargs: variables for the template, such as `enable_thinking`; AFM's own uses none. Arguments of
                transformers, such as `padding`, are accepted with the values that change nothing.

        Raises:
            TokenizerError: for messages, tools or arguments that can't be honoured.
        """
        drop_neutral_arguments(kwargs)
        if add_generation_prompt and continue_final_message:
            raise TokenizerError(
                "add_generation_prompt starts a new answer and continue_final_message writes the last "
                "message further: only one of them can be true."
            )
        if images is not None and self.vision_config is None:
            raise TokenizerError("This model reads text only. Leave the images out.")
        checked = checked_messages(messages, images)
        own_tools = checked[0].pop("tools", None)
        if own_tools and tools:
            raise TokenizerError(
                "Tool definitions are given twice, as tools= and as messages[0]['tools']. Leave one out."
            )
        # If the caller gives another value for one of these two, that value is the caller's text.
        own: dict[str, object] = {"target_role": "assistant", "eos_token": self.eos_token}
        own = {name: value for name, value in own.items() if kwargs.get(name, value) == value}
        own |= {
            "bos_token": "",
            "arguments_are_decoded": True,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        chat = Chat(
            ChatTemplate(chat_template) if chat_template is not None else self._chat_template,
            checked,
            {**kwargs, "tools": checked_tools(tools) if tools else own_tools},
            own,
            self._separator,
            self.eos_token if continue_final_message else None,
        )
        if images is not None and self.vision_config is not None and tokenize:
            named = ImageChat(chat, images, self._controls.image_name)
            text = named.render()
            ids = self._controls.encode_chat(named, text, self._controls.encode(text, ""))
            ids = self._behind_separator(ids, text)
            return images.expand(ids, self.vision_config.image_token_id, named.with_marks)
        text = chat.render()
        if not tokenize:
            return text
        # Only the template's own text can start with a marker's token.
        return self._behind_separator(
            self._controls.encode_chat(chat, text, self.encode(text)), text
        )

    # Ids to text

    def decode(
        self, tokens: int | Iterable[int], skip_special_tokens: bool = False, **kwargs: object
    ) -> str:
        """Decode an id, ids or an array of ids to text, equal to tamm's `AFMTokenizer.decode`.

        Control pieces (padding, separator, images outside the vocabulary) have no text; markers such as
        `<turn_end>` have.
        `skip_special_tokens` leaves out `all_special_ids`; `kwargs` takes others of transformers'
        `decode`, and ignores them.

        Raises:
            TokenizerError: if an id is outside the vocabulary.
        """
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        ids = [token for token in ids if not self._is_placeholder(token)]
        for token in ids:
            self._check_id(token)
        if skip_special_tokens:
            special = set(self.all_special_ids)
            ids = [token for token in ids if token not in special]
        return self._vocabulary.decode(ids)

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer for one sequence."""
        return StreamingDetokenizer(self)

    @property
    def inner_detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer for text under a constraint, exact to the character.

        It keeps a space at the beginning, and a `<n>` that several pieces spell stays `<n>`.
        """
        spacing = Spacing(dummy_prefix=False, strip_all=False)
        return StreamingDetokenizer(self, spacing, spells_newlines=False)

    def piece(self, token: int) -> Piece:
        """Return the vocabulary entry of one id; raise `TokenizerError` for an id outside the vocabulary."""
        piece = self._pieces.get(token)
        if piece is None and self._is_placeholder(token):
            return Piece(PieceKind.CONTROL, "")
        if piece is None:
            self._check_id(token)
            piece = self._pieces[token] = self._vocabulary.piece(token)
        return piece

    def _is_placeholder(self, token: int) -> bool:
        """True for the model's `image_token_id` if the vocabulary has no such id."""
        config = self._vision_config
        return config is not None and token == config.image_token_id >= self.vocab_size

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"Token id {token} is outside the vocabulary of {self.name_or_path or 'the tokenizer'}: "
                f"0 to {self.vocab_size - 1}. Do the tokenizer and the model belong together?"
            )

    # Vocabulary

    @property
    def vision_config(self) -> VisionConfig | None:
        """The config of the model's vision part; None if the model reads text only.

        Loading sets it. Raises `TokenizerError` if a text can make its `image_token_id`.
        """
        return self._vision_config

    @vision_config.setter
    def vision_config(self, config: VisionConfig | None) -> None:
        image = None if config is None else config.image_token_id
        self._controls = ControlTokens(self._vocabulary, self.all_special_ids, image_token_id=image)
        self._vision_config = config

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self._vocabulary, self.all_special_ids)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of padding, unknown, separator, turn start, turn end and `eos_token`, if they exist."""
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
        """Ids of the tokens that only a chat template writes: markers, special ids, added names in brackets."""
        return self._controls.ids

    @property
    def all_special_tokens(self) -> list[str]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every piece by name."""
        return {self._vocabulary.name(token): token for token in range(self.vocab_size)}

    @overload
    def convert_ids_to_tokens(self, tokens: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, tokens: Iterable[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, tokens: int | Iterable[int]) -> str | list[str]:
        """Return the piece of one id, or a list of pieces for several."""
        if not isinstance(tokens, int):
            return [self.convert_ids_to_tokens(int(token)) for token in tokens]
        if self._is_placeholder(tokens):
            return IMAGE_NAME
        self._check_id(tokens)
        return self._vocabulary.name(tokens)

    @overload
    def convert_tokens_to_ids(self, names: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, names: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(
        self, names: str | list[str] | tuple[str, ...]
    ) -> int | list[int | None] | None:
        """Return the id of one piece, or None if there is no such piece; or a list for several."""
        if isinstance(names, str):
            return self._vocabulary.id_of(names)
        return [self._vocabulary.id_of(name) for name in names]

    def add_eos_token(self, token: str | int) -> None:
        """Let another piece, by name or id, end an answer; raise `TokenizerError` if there is no such piece."""
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
        """The chat template's source."""
        return self._chat_template.source


def load_tokenizer(folder: str | Path) -> AFMTokenizer:
    """Load the tokenizer of a model folder.

    Reads `tokenizer.model` (SentencePiece), else `tokenizer.json` (Hugging Face); `eos_token` of
    `tokenizer_config.json`; and the chat template of `chat_template.jinja`, else of `tokenizer_config.json`,
    else AFM's V6. A draft model (`draft` in its target's folder) without these files has its target's. Of
    `config.json`, `vision_config` says whether the model reads images.

    Raises:
        TokenizerError: if the folder or its tokenizer files are missing or damaged.
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
    tokenizer = AFMTokenizer(
        vocabulary,
        eos_token=token_name(config, "eos_token"),
        chat_template=read_chat_template(folder, config),
        name_or_path=str(folder),
    )
    if (vision := read_config(folder / "config.json").get("vision_config")) is not None:
        from afm_mlx.vision_config import VisionConfig

        tokenizer.vision_config = VisionConfig.from_dict(vision)
    return tokenizer
