"""Token ids to text, a piece at a time; the joined segments equal `decode` of all ids.

SentencePiece decodes whole lists; generation needs the new text after each token. A token's text is its piece,
except that:

- a byte piece (`<0xE2>`) is part of a UTF-8 sequence: its text waits until the sequence is whole or invalid;
  each invalid byte is then one U+FFFD, as in SentencePiece;
- the space that encoding puts before a text (the dummy prefix) is dropped at the start;
- `<n>` is a newline, also if several pieces spell it, so a trailing `<` waits.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

SPACE = "\u2581"  # SentencePiece's visible space
NEWLINE = "<n>"  # how an AFM vocabulary writes a newline
_BEGINNINGS_OF_NEWLINE = (NEWLINE[:2], NEWLINE[:1])

_EACH_BYTE = "afm_mlx.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class PieceKind(enum.Enum):
    TEXT = enum.auto()
    BYTE = enum.auto()
    CONTROL = enum.auto()  # padding, separator: no text
    UNKNOWN = enum.auto()


class Piece(NamedTuple):
    """One vocabulary entry: kind, text (with `SPACE` for a space), and value if it is a byte piece."""

    kind: PieceKind
    text: str
    byte: int = -1


class Spacing(NamedTuple):
    """Which leading spaces decoding drops, as the SentencePiece model's normalizer says.

    With `dummy_prefix`, one `SPACE` at the start of the first piece that has text. With `strip_all`, one
    `SPACE` of each piece until there is text, because the model removes repeated spaces.
    """

    dummy_prefix: bool
    strip_all: bool


class PieceSource(Protocol):
    """The part of `AFMTokenizer` that a detokenizer needs."""

    spacing: Spacing

    def piece(self, token: int) -> Piece: ...


class StreamingDetokenizer:
    """Text of a growing token sequence, in O(1) per token, with the protocol of mlx-lm's detokenizers.

    Follows `SentencePieceProcessor::Decode`: after `finalize`, all segments joined are
    `tokenizer.decode(tokens)`, for any ids.

    Args:
        tokenizer: has the pieces.
        spacing: which leading spaces are dropped; pass None for the tokenizer's own.
        spells_newlines: True if pieces that spell `<n>` together are a newline, as in `tokenizer.decode`.
    """

    def __init__(
        self, tokenizer: PieceSource, spacing: Spacing | None = None, spells_newlines: bool = True
    ) -> None:
        self._spells_newlines = spells_newlines
        self._piece: Callable[[int], Piece] = tokenizer.piece
        self._spacing = spacing or tokenizer.spacing
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.tokens: list[int] = []
        self._segments: list[str] = []
        self._read = 0  # segments that `last_segment` has returned
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        self._held = ""  # may be the beginning of NEWLINE
        self._at_start = True  # a leading SPACE would still be the dummy prefix
        self._dropped_space = False
        self._empty = True

    def add_token(self, token: int) -> None:
        """Append one id; raise `TokenizerError` if the id is outside the vocabulary."""
        piece = self._piece(token)
        self.tokens.append(token)
        if piece.kind is PieceKind.BYTE:
            text = self._characters(bytes([piece.byte]))
        else:
            text = self._characters(ended=True) + self._surface(piece)
        if self._spells_newlines:
            text = (self._held + text).replace(NEWLINE, "\n")
            self._held = next((b for b in _BEGINNINGS_OF_NEWLINE if text.endswith(b)), "")
            text = text[: len(text) - len(self._held)]
        if text:
            self._segments.append(text)

    def finalize(self) -> None:
        """End the sequence: add text that waited, with U+FFFD for each byte of an incomplete character."""
        text = self._held + self._characters(ended=True)
        self._held = ""
        self._segments.append(text.replace(NEWLINE, "\n") if self._spells_newlines else text)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._segments)

    @property
    def last_segment(self) -> str:
        """The text completed since this property was last read."""
        segment = "".join(self._segments[self._read :])
        self._read = len(self._segments)
        return segment

    def _surface(self, piece: Piece) -> str:
        """Return the text of a piece that is no byte."""
        if self._dropped_space or not self._empty:
            self._at_start = False
        self._dropped_space = False
        if piece.kind is PieceKind.CONTROL:
            return ""
        text = piece.text
        if text == NEWLINE:
            text = "\n"
        elif piece.kind is PieceKind.TEXT:
            if self._at_start and (self._spacing.dummy_prefix or self._spacing.strip_all):
                stripped = text.removeprefix(SPACE)
                self._dropped_space = stripped != text and not self._spacing.strip_all
                text = stripped
            text = text.replace(SPACE, " ")
        self._empty = self._empty and not text
        return text

    def _characters(self, more: bytes = b"", ended: bool = False) -> str:
        """Decode further bytes to the characters that they complete; if `ended`, all waiting bytes."""
        text = self._utf8.decode(more, ended)
        self._empty = self._empty and not text
        return text
