"""Control tokens, and how to keep a caller's text from becoming one.

A vocabulary turns the name of a control token into that token in any text. A chat's template may write such
names; its messages, tools and variables must not. If a caller's text has parts of a name:

1. The chat is rendered with a mark after every character of the caller's text (`CallerText`). A mark is a
   character that is nowhere in the chat. A name with a mark inside was not written by the template.
2. The rendered text is encoded by a second vocabulary with the same ids, in which control tokens have secret
   names. The template's names are replaced with the secret ones; the caller's `<turn_end>` becomes the pieces
   `<`, `turn` and so on.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Protocol, SupportsIndex, TypeVar

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.tokenizer.detokenizer import NEWLINE
from afm_mlx.tokenizer.vocabulary import MARKERS

# `<turn_end>`, `[INST]`, `<|im_end|>`; one letter in brackets other than `<>` is code.
_BRACKETED = re.compile(r"<[^<>]*\w[^<>]*>|[\[{|【◁«＜].*\w\w.*[\]}|】▷»＞]", re.DOTALL)
_ESCAPE = re.compile(r"\\[xuUN0-7]")  # in a template's string literals
_SECRET_LENGTH = 5  # of 65,534 characters each: nobody types it
_PRIVATE_USE = 0xF0000

_NONCHARACTERS = (*range(0xFDD0, 0xFDF0), *(p << 16 | 0xFFFE for p in range(17)))
_PRIVATE = range(0x100000, 0x10FFFE)

_Value = TypeVar("_Value")


class NamedVocabulary(Protocol):
    """A vocabulary that finds names of control tokens in text, see `vocabulary.SentencePieceVocabulary`."""

    size: int
    unk_id: int | None

    @property
    def symbols(self) -> Mapping[str, int]: ...
    @property
    def is_literal(self) -> bool: ...
    def encode(self, text: str) -> list[int]: ...
    def name(self, token: int) -> str: ...
    def id_of(self, name: str) -> int | None: ...
    def is_hidden(self, token: int) -> bool: ...
    def renamed(self, names: Mapping[int, str]) -> Any: ...


class MarkedChat(Protocol):
    """A chat that can be rendered with marks, see `chat_template.Chat`.

    Attributes:
        texts: every text of the caller.
        source: the template's source; None for AFM's own.
    """

    @property
    def texts(self) -> list[str]: ...
    @property
    def source(self) -> str | None: ...
    def render(self, mark: str = "") -> str: ...


class ControlTokens:
    """The control tokens of a vocabulary.

    These are the markers of the prompt format, special ids, and user-defined symbols (added tokens) whose name
    is in brackets. `special_ids` are the tokenizer's separator, padding and end-of-answer ids. `newline` is how
    the vocabulary reads a newline. For AFM that is `<n>`, which is not a control token; but a caller's `<n>` is
    three characters, too. `image_token_id`, in the vocabulary or outside of it, stands for images
    (`chat_images`); pass None for a model that reads text only. Raises `TokenizerError` if a text can make it.

    Attributes:
        image_name: the name of `image_token_id` in rendered chats.
        names: ids by name, for the control tokens that the vocabulary finds in text.
        ids: ids of all control tokens.
    """

    def __init__(
        self,
        vocabulary: NamedVocabulary,
        special_ids: Iterable[int],
        newline: str = NEWLINE,
        image_token_id: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        special = {token for token in special_ids if token != vocabulary.unk_id}
        if image_token_id is not None and image_token_id < vocabulary.size:
            special.add(image_token_id)
        self.names: dict[str, int] = {
            name: token
            for name, token in vocabulary.symbols.items()
            if name != NEWLINE and (name in MARKERS or token in special or is_bracketed(name))
        }
        for token in special - set(self.names.values()):
            name = vocabulary.name(token)
            if is_bracketed(name) and not vocabulary.is_hidden(token):
                self.names[name] = token
        self.image_name, self._image_token_id, self._stand_in = private_name(), image_token_id, ""
        if image_token_id is not None:
            self._check_image_token(image_token_id)
            self._stand_in = next(n for n in (*MARKERS, *self.names) if n in self.names)
            self.names[self.image_name] = image_token_id
        self.ids = frozenset(special | set(self.names.values()))
        self._newline_text = newline
        self._newline = vocabulary.id_of(NEWLINE) if newline == NEWLINE else None
        newlines = {} if self._newline is None else {NEWLINE: self._newline}
        self._found = self.names | newlines  # every name that the vocabulary finds in text
        self._name = _pattern(tuple(self.names), "")
        self._firsts = {name[0] for name in self.names}

    def _check_image_token(self, token: int) -> None:
        """Raise `TokenizerError` if text can make the token that stands for images."""
        vocabulary = self._vocabulary
        is_safe = token >= vocabulary.size or vocabulary.is_hidden(token)
        if not is_safe and token not in self.names.values():
            raise TokenizerError(
                f"image_token_id is {token}, which is {shown(vocabulary.name(token))} in the vocabulary: a "
                "text may hold it. Take an id of a control token, such as <image>, or one outside of it."
            )
        if not self.names:
            raise TokenizerError(
                f"The vocabulary has none of AFM's markers ({', '.join(MARKERS)}), so it can't be used for "
                "images. Use the tokenizer that belongs to the model."
            )

    def ids_in(self, tokens: Iterable[int]) -> list[int]:
        """List the control tokens among ids, in order."""
        return [token for token in tokens if token in self.ids]

    def written_in(self, text: str, mark: str = "") -> list[int]:
        """List the ids of the names in a text, in order; names with a mark inside or after them don't count."""
        pattern = _pattern(tuple(self.names), mark) if mark else self._name
        return [self.names[name] for name in pattern.findall(text)]

    def match(self, text: str, tokens: list[int]) -> bool:
        """True if `tokens`, the ids of `text`, have exactly the control tokens and newlines that it names.

        They can differ because a normalizer may turn text without a control token's name into the name.
        """
        if self._vocabulary.is_literal:
            return True
        return self.ids_in(tokens) == self.written_in(text) and self.has_newlines(text, tokens)

    def has_newlines(self, text: str, tokens: list[int], mark: str = "") -> bool:
        """True if ids have as many newlines as the text; a `<n>` with a mark inside doesn't count."""
        if self._newline is None:
            return True
        written = len(_pattern((NEWLINE,), mark).findall(text)) + text.count("\n")
        return tokens.count(self._newline) == written

    def may_come_from(self, texts: list[str], template: str | None) -> bool:
        """True if a part of a control token's name in a rendered chat may be from the caller's `texts`.

        `template` is the chat template's source, or None for AFM's own, which writes no two texts side by side.
        """
        if template is None:
            return _any_in(self._found, texts)
        # A template that has parts of names may write a `<` before a text that goes on with `turn_end>`.
        rest = self._name.sub("", template).replace(NEWLINE, "")
        has_parts = _any_in(self._firsts, [rest]) or _ESCAPE.search(rest) is not None
        return has_parts or _any_in(self._firsts, texts)

    def are_in(self, texts: Iterable[str]) -> bool:
        """True if any of the texts has the whole name of a control token, as the vocabulary reads it."""
        encode = self._vocabulary.encode
        return any(
            self.written_in(text) or self.ids_in(encode(text.replace("\n", self._newline_text)))
            for text in texts
        )

    def encode_chat(self, chat: MarkedChat, text: str, tokens: list[int]) -> list[int]:
        """Return the ids of a chat rendered as `text`, with its template's control tokens and no others.

        `tokens` are the ids of `text`; they are returned unless the caller's text changes its control tokens.

        Raises:
            TokenizerError: if the caller's text has names that can't be distinguished from the template's.
        """
        if not self.may_come_from(chat.texts, chat.source) and self.match(text, tokens):
            return tokens
        mark = free_mark([text, chat.source or "", *chat.texts])
        try:
            rendered = chat.render(mark)
        except TokenizerError:  # the template takes texts apart in a way that marks don't survive
            if self.are_in(chat.texts):
                raise
            return tokens
        written = self.written_in(rendered, mark)
        # Marks may disturb a template that looks into texts, so that it writes something else.
        is_same = rendered.replace(mark, "") == text
        is_right = self.ids_in(tokens) == written and self.has_newlines(rendered, tokens, mark)
        if is_right and (is_same or not self.are_in(chat.texts)):
            return tokens
        tokens = self.encode(rendered, mark)
        rest = iter(written)
        if not all(token in rest for token in self.ids_in(tokens)):
            raise TokenizerError(
                "The chat template mixes its control tokens with the messages' text, which has names of "
                "control tokens. Remove the names from the text, or use another template."
            )
        return tokens

    def encode_plain(self, text: str) -> list[int]:
        """Encode a caller's text, in which names of control tokens and `<n>` are plain text."""
        if not _any_in(self._found, [text]):
            tokens = self._vocabulary.encode(text.replace("\n", self._newline_text))
            if self.match(text, tokens):
                return tokens
        mark = free_mark([text])
        return self.encode(mark.join(text), mark)

    def encode(self, text: str, mark: str) -> list[int]:
        """Encode a rendered chat in which the caller's characters are marked; pass "" if none are.

        The ids equal `Vocabulary.encode`'s, except that names and newlines with a mark inside are plain text.
        """
        names, vocabulary = self._secret
        text = _pattern(tuple(self._found), mark).sub(lambda match: names[match[0]], text)
        newline = names.get(self._newline_text, self._newline_text)
        text = text.replace(mark, "").replace("\n", newline)
        image, stand_in = self._image_token_id, self._stand_in
        if image is None or self.image_name not in text:
            return vocabulary.encode(text)
        # Another symbol takes the places of images: theirs may have no text, or be outside the vocabulary.
        name = names[stand_in]
        found = re.findall(f"{name}|{self.image_name}", text)
        are_images = iter([each == self.image_name for each in found])
        tokens = vocabulary.encode(text.replace(self.image_name, name))
        other = self.names[stand_in]
        return [image if t == other and next(are_images, False) else t for t in tokens]

    @cached_property
    def _secret(self) -> tuple[Mapping[str, str], NamedVocabulary]:
        """The secret names by the control tokens' names, and the vocabulary with the secret names.

        Secret names are private-use characters: no vocabulary has such pieces, no normalizer changes them.
        """
        names = {name: private_name() for name in self._found if name != self.image_name}
        new_names = {self._found[name]: secret for name, secret in names.items()}
        names[self.image_name] = self.image_name
        return names, self._vocabulary.renamed(new_names)


def private_name() -> str:
    """Return a random name that nobody types, of private-use characters."""
    return "".join(chr(_PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(_SECRET_LENGTH))


def _any_in(parts: Iterable[str], texts: list[str]) -> bool:
    joined = "\0".join(texts)
    return any(part in joined for part in parts)


def is_bracketed(name: str) -> bool:
    """True if a piece is a name in brackets, as control tokens are."""
    return _BRACKETED.fullmatch(name) is not None


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...], mark: str) -> re.Pattern[str]:
    """Compile a pattern for any of the names, longest first, without a mark after it."""
    longest = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"(?:{longest or '(?!)'})" + (f"(?!{mark})" if mark else ""))


# The caller's text


def free_mark(texts: list[str]) -> str:
    """Return a character that none of the texts has: a Unicode noncharacter, else one for private use.

    Raises `TokenizerError` if the texts have all of them.
    """
    used = {character for text in texts if not text.isascii() for character in text}
    for code in chain(_NONCHARACTERS, _PRIVATE):
        if chr(code) not in used:
            return chr(code)
    raise TokenizerError(
        "The messages have every private character of Unicode; one is needed to encode them. Leave some out."
    )


def strings_in(value: object) -> list[str]:
    """List every string in nested lists and dicts, keys included."""
    found: list[str] = []
    stack, seen = [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping | list | tuple | Set) and id(item) not in seen:
            seen.add(id(item))
            stack += item
            if isinstance(item, Mapping):
                stack += item.values()
    return found


def marked(value: _Value, mark: str) -> _Value:
    """Copy nested lists and dicts; each string becomes `CallerText`, in which control tokens are plain text.

    `mark`, a character that no string has, is put after each character but whitespace. Raises `RecursionError`
    if they are nested too deeply.
    """
    copied: object = value
    if isinstance(value, MixedText):
        copied = value.with_marks(mark)
    elif isinstance(value, str):
        copied = CallerText(str.__str__(value), mark)
    elif isinstance(value, Mapping):
        copied = {marked(key, mark): marked(item, mark) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        items = [marked(item, mark) for item in value]
        copied = items if isinstance(value, list) else tuple(items)
    elif isinstance(value, Set):
        copied = {marked(item, mark) for item in value}
    return copied  # type: ignore[return-value]


class MixedText(str):
    """A text with parts that were written for the template, which may hold control tokens.

    `parts` are the text's pieces in order; every second one, from the second on, is the template's.
    """

    parts: Sequence[str]

    def __new__(cls, *parts: str) -> MixedText:
        text = super().__new__(cls, "".join(parts))
        text.parts = parts
        return text

    def with_marks(self, mark: str) -> str:
        """Return the text with `mark` after each character of the caller's parts."""
        return "".join(
            part if i % 2 else CallerText(part, mark) for i, part in enumerate(self.parts)
        )


class CallerText(str):
    """A string with a mark after each character except whitespace, which templates trim.

    A template sees the string without marks: comparing, searching and look-ups use it, and parts of it are
    `CallerText` again. What C code makes of its characters, such as joined text or JSON, has the marks.
    """

    plain: str
    mark: str

    def __new__(cls, plain: str, mark: str) -> CallerText:
        spread = mark.join(plain) + mark if plain else ""
        text = super().__new__(cls, re.sub(f"(\\s){mark}", r"\1", spread))
        text.plain, text.mark = plain, mark
        return text

    def __str__(self) -> str:
        return self  # so that str() in a filter keeps the class

    def __repr__(self) -> str:
        return CallerText(repr(self.plain), self.mark)

    def __iter__(self) -> Iterator[str]:
        return (CallerText(character, self.mark) for character in self.plain)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        # `new` may be the template's own text.
        return new.join(self.split(old, count)) if old else super().replace(old, new, count)


def _on_plain_text(name: str) -> Callable[..., object]:
    """Wrap a method of str: it reads the text without marks, and marks what it returns."""
    method = getattr(str, name)

    def run(self: CallerText, *args: object, **kwargs: object) -> object:
        plain = [arg.plain if isinstance(arg, CallerText) else arg for arg in args]
        result = method(self.plain, *plain, **kwargs)
        return result if isinstance(result, int) else marked(result, self.mark)

    run.__name__ = name
    return run


for _name in """
    __contains__ __eq__ __ge__ __getitem__ __gt__ __hash__ __le__ __len__ __lt__ __ne__ capitalize casefold
    center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper ljust lower lstrip partition removeprefix removesuffix rfind
    rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
""".split():
    setattr(CallerText, _name, _on_plain_text(_name))
