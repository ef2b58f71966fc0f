"""Tokenizers for llguidance: the bytes of each token, and an encoder of forced text.

llguidance can read `tokenizer.json`, but with SentencePiece it then encodes forced text with the dummy prefix,
which no grammar allows. So it is given the bytes of each piece, and an encoder that encodes after a newline,
where there is no prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLTokenizer, TokenizerWrapper

from afm_mlx.errors import ConstraintError
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer


@dataclass
class _Pieces:
    """The attributes and the call that llguidance needs.

    Attributes:
        tokens: bytes of each token; of a special token, its name.
        special_token_ids: ids of tokens that no text has.
        encode: encodes text as inside an answer.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: None = None

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.tokens) if len(text) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.encode() if isinstance(text, str) else text
        ids = self.encode(whole.decode("utf-8", "replace"))
        is_same = b"".join(self.tokens[token] for token in ids) == whole
        if is_same and set(self.special_token_ids).isdisjoint(ids):
            return ids
        # Encoding changed it: SentencePiece takes the visible space for a space, and `<n>` for a newline.
        # Or the text has the name of a control token.
        return [self._id_of[whole[i : i + 1]] for i in range(len(whole))]


def ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Return llguidance's tokenizer, cached, for one of AFM or mlx-lm; refuse one that can't be constrained."""
    key = getattr(tokenizer, "_tokenizer", tokenizer)  # mlx-lm's wrapper is made for each load
    ends = tuple(sorted(tokenizer.eos_token_ids))
    made = _made.setdefault(key, {})
    if ends not in made:  # callers may add end tokens
        is_own = type(tokenizer) is AFMTokenizer
        controls = set(getattr(tokenizer, "control_names", {}).values())
        pieces = _own_pieces(tokenizer) if is_own else _zoo_pieces(key, ends, controls)  # type: ignore[arg-type]
        made[ends] = LLTokenizer(pieces, eos_token=list(ends))
    return made[ends]


_made: WeakKeyDictionary[Any, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()


def _own_pieces(tokenizer: AFMTokenizer) -> TokenizerWrapper:
    special = set(tokenizer.all_special_ids) | set(tokenizer.control_ids)
    tokens = []
    for token in range(len(tokenizer)):
        piece = tokenizer.piece(token)
        if piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN):
            special.add(token)
        if token in special:
            tokens.append(tokenizer.convert_ids_to_tokens(token).encode())
        elif piece.kind is PieceKind.BYTE:
            tokens.append(bytes([piece.byte]))
        else:
            tokens.append(piece.text.replace(SPACE, " ").replace(NEWLINE, "\n").encode())
    return TokenizerWrapper(
        _Pieces(tokens, sorted(special), tokenizer.eos_token_id, after_newline(tokenizer.encode))
    )


def after_newline(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """Wrap an encoder to encode after a newline, always a separate piece, and so without the dummy prefix."""
    newline = encode("\n")

    def encode_after_newline(text: str) -> list[int]:
        ids = encode("\n" + text)
        if ids[: len(newline)] != newline:
            raise ConstraintError(
                "The tokenizer joins a newline with what follows, so forced text can't be encoded. Use the "
                "tokenizer.model that belongs to the model."
            )
        return ids[len(newline) :]

    return encode_after_newline


def _zoo_pieces(
    tokenizer: Any, ends: tuple[int, ...], controls: set[int]
) -> TokenizerWrapper | str:
    """Return llguidance's input for a tokenizer of transformers: JSON if read correctly, else pieces.

    `controls` are ids of tokens that no text has, besides those that the tokenizer says are special.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConstraintError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so the text of its tokens is not known, "
            "and answers can't be constrained. Use a model folder with a tokenizer.json."
        )
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["id"] in controls
    if "ByteLevel" in json.dumps(content.get("decoder")):
        return json.dumps(content)
    special = [token["id"] for token in content["added_tokens"] if token["special"]]
    tokens = []
    for token in range(backend.get_vocab_size()):
        name = backend.id_to_token(token) or ""
        is_byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
        tokens.append(bytes([int(name[3:5], 16)]) if is_byte else name.replace(SPACE, " ").encode())

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    return TokenizerWrapper(_Pieces(tokens, special, ends[0], after_newline(encode)))


@lru_cache(maxsize=4)
def token_texts(tokenizer: LLTokenizer) -> list[bytes]:
    """Return each token's bytes, empty for control tokens; cached for the last four tokenizers."""
    tokens = range(tokenizer.vocab_size)
    return [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in tokens]


@lru_cache(maxsize=4)
def byte_tokens(tokenizer: LLTokenizer) -> dict[bytes, int]:
    """Map each single byte to its first token."""
    texts = token_texts(tokenizer)
    return {texts[i]: i for i in reversed(range(len(texts))) if len(texts[i]) == 1}
