"""Control tokens: which pieces of a vocabulary they are, and how only a chat's template writes them.

A vocabulary finds the names of its control tokens in any text. For chats in which the caller's text has such
a name, there is a second vocabulary with the same ids, in which these tokens have secret names. There the
caller's `<turn_end>` is a `<`, a `turn` and so on; the template's own become the secret names before encoding.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from afm_mlx.tokenizer.chat import Chat
from afm_mlx.tokenizer.detokenizer import NEWLINE
from afm_mlx.tokenizer.vocabulary import MARKERS, Vocabulary

# `<turn_end>`, `[INST]`, `<|im_end|>`; a letter in brackets other than these is code.
_BRACKETED = re.compile(r"<[^<>]*\w[^<>]*>|[\[{|【◁«＜].*\w\w.*[\]}|】▷»＞]", re.DOTALL)
# In a template's string literals.
_ESCAPE = re.compile(r"\\[xuUN0-7]")
_SECRET_LENGTH = 5  # of 65,534 characters each: nobody types it
_PRIVATE_USE = 0xF0000


class ControlTokens:
    """The control tokens of a vocabulary.

    These are the markers of the prompt format, special ids, and user-defined symbols (added tokens) that are a
    name in brackets. `<n>` is the newline and none of them; but that, too, is written by the template, or by a
    true newline in a text: a caller's `<n>` is three characters.

    Args:
        vocabulary: encodes texts.
        special_ids: the tokenizer's separator, padding, and ends of an answer.

    Attributes:
        names: ids of the control tokens that the vocabulary finds in text, by name.
        ids: ids of all control tokens.
    """

    def __init__(self, vocabulary: Vocabulary, special_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        special = {token for token in special_ids if token != vocabulary.unk_id}
        self.names: dict[str, int] = {
            name: token
            for name, token in vocabulary.symbols.items()
            if name != NEWLINE and (name in MARKERS or token in special or is_bracketed(name))
        }
        for token in special - set(self.names.values()):
            name = vocabulary.name(token)
            if is_bracketed(name) and not vocabulary.is_hidden(token):
                self.names[name] = token
        self.ids = frozenset(special | set(self.names.values()))
        self._newline = vocabulary.id_of(NEWLINE)
        newline = {} if self._newline is None else {NEWLINE: self._newline}
        self._found = self.names | newline  # what the vocabulary finds in text
        self._name = _pattern(tuple(self.names), "")
        self._firsts = {name[0] for name in self.names}

    def ids_in(self, tokens: Iterable[int]) -> list[int]:
        """The control tokens among ids, in order."""
        ids = self.ids
        return [token for token in tokens if token in ids]

    def written_in(self, text: str, mark: str = "") -> list[int]:
        """The ids of the names in a text, in order; without those that have a mark inside or behind them."""
        pattern = _pattern(tuple(self.names), mark) if mark else self._name
        return [self.names[name] for name in pattern.findall(text)]

    def are_those_of(self, text: str, tokens: Iterable[int]) -> bool:
        """True if ids, behind a separator, have exactly the control tokens and newlines that a text has.

        A normalizer may turn a text without a control token's name into one that has it.
        """
        if self._vocabulary.is_literal:
            return True
        tokens = list(tokens)
        return self.ids_in(tokens)[1:] == self.written_in(text) and self.has_newlines(text, tokens)

    def has_newlines(self, text: str, tokens: Iterable[int], mark: str = "") -> bool:
        """True if ids have as many newlines as a text; a `<n>` inside marks doesn't count as one."""
        if self._newline is None:
            return True
        written = len(_pattern((NEWLINE,), mark).findall(text)) + text.count("\n")
        return sum(token == self._newline for token in tokens) == written

    def may_come_from(self, chat: Chat) -> bool:
        """True if the caller's texts may have a part in a name that is in the rendered chat."""
        if chat.template.is_own:  # it writes texts whole, and none beside another
            return _any_in(self._found, chat.texts)
        return _any_in(self._firsts, chat.texts) or not self._are_whole_in(chat.template.source)

    def _are_whole_in(self, source: str) -> bool:
        """True if a template has first characters of names only in whole names.

        If not, it might write a `<` before a text that goes on with `turn_end>`.
        """
        rest = self._name.sub("", source).replace(NEWLINE, "")
        return not _any_in(self._firsts, [rest]) and not _ESCAPE.search(rest)

    def are_in(self, texts: Iterable[str]) -> bool:
        """True if a text has a whole name, as the vocabulary reads it."""
        encode = self._vocabulary.encode
        return any(
            self.written_in(text) or self.ids_in(encode(text.replace("\n", NEWLINE)))
            for text in texts
        )

    def encode(self, text: str, mark: str) -> list[int]:
        """The ids of a rendered chat whose caller's characters have a mark behind them.

        As `Vocabulary.encode` gives them, but that names and newlines with a mark are text.
        """
        names, vocabulary = self._secret
        text = _pattern(tuple(self._found), mark).sub(lambda match: names[match[0]], text)
        text = text.replace(mark, "").replace("\n", names.get(NEWLINE, NEWLINE))
        return vocabulary.encode(text)

    @cached_property
    def _secret(self) -> tuple[Mapping[str, str], Vocabulary]:
        """Secret names by names, and the vocabulary that has them.

        Characters for private use: no vocabulary has a piece with them, and no normalizer changes them.
        """
        names = {
            name: "".join(
                chr(_PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(_SECRET_LENGTH)
            )
            for name in self._found
        }
        return names, self._vocabulary.renamed(
            {token: names[name] for name, token in self._found.items()}
        )


def _any_in(parts: Iterable[str], texts: list[str]) -> bool:
    joined = "\0".join(texts)
    return any(part in joined for part in parts)


def is_bracketed(name: str) -> bool:
    """True if a piece is a name in brackets, as control tokens are."""
    return _BRACKETED.fullmatch(name) is not None


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...], mark: str) -> re.Pattern[str]:
    """Matches any of the names, the longest first, that no mark follows."""
    longest = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"(?:{longest or '(?!)'})" + (f"(?!{mark})" if mark else ""))
