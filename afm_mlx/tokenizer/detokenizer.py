"""Token ids to text, a piece at a time: the concatenated segments equal `decode` of all ids.

SentencePiece decodes a whole list; generation needs the text so far without decoding it again. Three
things keep a token's text from being simply its piece:

- a byte piece (`<0xE2>`) is part of a UTF-8 sequence; nothing is shown until the sequence is whole or
  can't become valid any more, and then each invalid byte is one U+FFFD, as SentencePiece does it;
- the space that encoding puts before a text (the dummy prefix) is dropped at the start;
- `<n>` stands for a newline, also when it is spelled by several pieces, so a trailing `<` waits.
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
    """One vocabulary entry: its kind, its text (with `SPACE` for a space), its value if a byte piece."""

    kind: PieceKind
    text: str
    byte: int = -1


class Spacing(NamedTuple):
    """Which leading spaces decoding drops, from the SentencePiece model's normalizer.

    dummy_prefix: one `SPACE` at the start of the first piece that has text.
    strip_all: the model removes repeated spaces, so each piece loses one until there is text.
    """

    dummy_prefix: bool
    strip_all: bool


class PieceSource(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    spacing: Spacing

    def piece(self, token: int) -> Piece: ...


class PieceJoiner:
    """Joins pieces into text, O(1) per piece; follows `SentencePieceProcessor::Decode`."""

    def __init__(self, spacing: Spacing, spells_newlines: bool = True) -> None:
        self._spacing, self._spells_newlines = spacing, spells_newlines
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        self._held = ""  # may be the beginning of NEWLINE
        self._at_start = True  # a leading SPACE would still be the dummy prefix
        self._dropped_space = False
        self._empty = True

    def feed(self, piece: Piece) -> str:
        """The text that `piece` completes, possibly empty."""
        if piece.kind is PieceKind.BYTE:
            return self._release(self._characters(bytes([piece.byte])))
        return self._release(self._characters(ended=True) + self._surface(piece))

    def finish(self) -> str:
        """What was held back; U+FFFD for each byte of a sequence that never became whole."""
        text = self._held + self._characters(ended=True)
        self._held = ""
        return text.replace(NEWLINE, "\n") if self._spells_newlines else text

    def _surface(self, piece: Piece) -> str:
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
        """The characters that these bytes complete, behind those that waited."""
        text = self._utf8.decode(more, ended)
        self._empty = self._empty and not text
        return text

    def _release(self, text: str) -> str:
        if not self._spells_newlines:
            return text
        text = (self._held + text).replace(NEWLINE, "\n")
        self._held = next((b for b in _BEGINNINGS_OF_NEWLINE if text.endswith(b)), "")
        return text[: len(text) - len(self._held)]


class StreamingDetokenizer:
    """Text of a growing token sequence, with the protocol of mlx-lm's detokenizers.

    `add_token` takes the next id; `last_segment` is the text completed since it was last read; `text` is
    all of it; `finalize` ends the sequence. After `finalize`, the segments joined are
    `tokenizer.decode(tokens)`, for any ids.
    """

    def __init__(
        self, tokenizer: PieceSource, spacing: Spacing | None = None, spells_newlines: bool = True
    ) -> None:
        """Begin a sequence.

        Args:
            spacing: which leading spaces are dropped; the tokenizer's own when not given.
            spells_newlines: whether pieces that make `<n>` together are a newline, as in `tokenizer.decode`.
        """
        self._spells_newlines = spells_newlines
        self._piece: Callable[[int], Piece] = tokenizer.piece
        self._spacing = spacing or tokenizer.spacing
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.tokens: list[int] = []
        self._joiner = PieceJoiner(self._spacing, self._spells_newlines)
        self._segments: list[str] = []
        self._read = 0

    def add_token(self, token: int) -> None:
        """Append one id.

        Raises:
            TokenizerError: when the id is outside the vocabulary.
        """
        piece = self._piece(token)
        self.tokens.append(token)
        self._append(self._joiner.feed(piece))

    def finalize(self) -> None:
        """End the sequence: what was held back becomes text."""
        self._append(self._joiner.finish())

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

    def _append(self, text: str) -> None:
        if text:
            self._segments.append(text)
