"""A model folder's tokenizer files, and the vocabulary that is in them.

`SentencePieceVocabulary` reads `tokenizer.model`, the file Apple ships; `HubVocabulary` reads the Hugging
Face `tokenizer.json` that converters write. Both take text in which newlines are `<n>`.

Functions that read files raise `TokenizerError`, which names the file or the key, what it holds and what is
allowed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.files import read_file
from afm_mlx.installation import package_problem
from afm_mlx.tokenizer.detokenizer import (
    NEWLINE,
    SPACE,
    Piece,
    PieceKind,
    Spacing,
    StreamingDetokenizer,
)

TURN_START, TURN_END = "<turn_start>", "<turn_end>"
EXECUTABLE_START, EXECUTABLE_END = "<executable_start>", "<executable_end>"
MARKERS = (TURN_START, TURN_END, EXECUTABLE_START, EXECUTABLE_END)  # of the prompt format

USER_DEFINED = 4  # a type of pieces in sentencepiece_model.proto
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

VOCABULARY_BYTES, CONFIG_BYTES = 128 << 20, 16 << 20
"""Bytes that a vocabulary's file and a configuration may have. The largest vocabularies (262,144 tokens) take
35 MB."""
DRAFT_FOLDER = "draft"
"""Folder of a draft model inside its target model's folder; the two share the target's tokenizer."""
_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)

# Files


def has_tokenizer(folder: Path) -> bool:
    """True if a folder has a vocabulary of its own."""
    return any((folder / name).exists() for name in ("tokenizer.model", "tokenizer.json"))


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a model's tokenizer: the target's for a draft model without one, else its own."""
    if not has_tokenizer(folder) and folder.resolve().name == DRAFT_FOLDER:
        target = folder.resolve().parent
        if has_tokenizer(target):
            return target
    return folder


def tokenizer_files(folder: Path) -> list[Path]:
    """List the tokenizer's files in a model folder of any architecture, sorted by name.

    Raises `TokenizerError` for one that is not a regular file, or larger than any tokenizer's.
    """
    found = {file for pattern in _FILES for file in folder.glob(pattern) if not file.is_dir()}
    for file in found:
        if not file.is_file():
            raise TokenizerError(f"{file} is not a file; copy the model folder again.")
        if (size := file.stat().st_size) > VOCABULARY_BYTES:
            raise TokenizerError(
                f"{file} has {size:,} bytes, and files of tokenizers have {VOCABULARY_BYTES:,} at most. Copy "
                "the model folder again."
            )
    return sorted(found)


def read_bytes(path: Path, limit: int = VOCABULARY_BYTES) -> bytes:
    """Read a file of up to `limit` bytes; raise `TokenizerError` for any other."""
    try:
        return read_file(path, limit)
    except OSError as error:
        raise TokenizerError(f"{path} can't be read: {error.strerror or error}.") from error


def read_text(path: Path, limit: int = VOCABULARY_BYTES) -> str:
    """Read a UTF-8 file of up to `limit` bytes; raise `TokenizerError` for any other."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    text = read_text(path, CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} must be a JSON object, got {type(config).__name__}.")
    return config


def token_name(config: Mapping[str, object], key: str) -> str | None:
    """Return a token's name from tokenizer_config.json, or None if `key` is unset.

    A token is written as a string, or as an object whose `content` is the string.
    """
    token = config.get(key)
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise TokenizerError(
            f"{key!r} of tokenizer_config.json must be a string, or an object with a string as 'content', "
            f"got {shown(token)}."
        )
    return name


def refuse_surrogates(text: str) -> None:
    """Raise `TokenizerError` if a text has surrogates, which UTF-8 can't hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"The text has {text[error.start]!r} at position {error.start}, half of a surrogate "
            "pair, which is not valid Unicode text. Read it with errors='replace', or remove it."
        ) from None


# Vocabularies

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _finds_damage(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a vocabulary's method: what libraries raise over a damaged file becomes a `TokenizerError`."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TokenizerError:
            raise
        except BaseException as error:
            if (problem := package_problem(error)) or isinstance(error, ImportError):
                raise TokenizerError(problem or str(error)) from error
            # The panics of `tokenizers`, which is Rust, are not Exceptions.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            path = getattr(args[0], "_path", None)
            raise TokenizerError(
                f"{path} can't be used as a tokenizer ({type(error).__name__}: {shown(str(error))}). "
                "Copy it again: it is damaged, or a placeholder for a file that was not downloaded."
            ) from error

    return run


class SentencePieceVocabulary:
    """A SentencePiece model, Unigram or BPE.

    Attributes:
        size: number of ids, which are 0 .. size - 1.
        separator_id: SentencePiece's end-of-sequence id, which AFM puts before every sequence.
        pad_id, unk_id: padding and unknown ids; None if the file has none.
        spacing: which leading spaces decoding drops.
    """

    @_finds_damage
    def __init__(self, model: bytes, path: str | Path) -> None:
        """Read `model`, the serialized model of the file `path`.

        Raises:
            TokenizerError: for a file that is not a SentencePiece model, or has no end-of-sequence piece.
        """
        self._model, self._path = model, path
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor()
        try:
            loaded = bool(model) and self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            loaded = False
        if not loaded or not len(self._processor):
            raise TokenizerError(
                f"{path} ({len(model)} bytes) is not a SentencePiece model. Copy it again: it is "
                "damaged, or a placeholder for a file that was not downloaded."
            )
        self.size = len(self._processor)
        self.separator_id = self._processor.eos_id()
        if self.separator_id < 0:
            raise TokenizerError(
                f"{path} has no end-of-sequence piece, which AFM puts before every sequence. "
                "Use the tokenizer.model that belongs to the model."
            )
        pad_id, unk_id = self._processor.pad_id(), self._processor.unk_id()
        self.pad_id: int | None = pad_id if pad_id >= 0 else None
        self.unk_id: int | None = unk_id if unk_id >= 0 else None
        word, one_space, two_spaces = map(self._processor.Normalize, ("a", "a a", "a  a"))
        if word.endswith(SPACE):
            raise TokenizerError(
                f"{path} writes spaces behind words (treat_whitespace_as_suffix), which AFM's tokenizers "
                "don't. Use the tokenizer.model that belongs to the model."
            )
        self.spacing = Spacing(
            dummy_prefix=word.startswith(SPACE),
            strip_all=two_spaces.count(SPACE) == one_space.count(SPACE),
        )

    @_finds_damage
    def encode(self, text: str) -> list[int]:
        return self._processor.Encode(text)

    @_finds_damage
    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.Decode(list(tokens)).replace(NEWLINE, "\n")

    @_finds_damage
    def name(self, token: int) -> str:
        return self._processor.IdToPiece(token)

    @_finds_damage
    def id_of(self, name: str) -> int | None:
        token = self._processor.PieceToId(name)
        return token if self._processor.IdToPiece(token) == name else None

    @_finds_damage
    def piece(self, token: int) -> Piece:
        processor = self._processor
        name = processor.IdToPiece(token)
        if processor.IsByte(token):
            return Piece(PieceKind.BYTE, name, int(name[3:5], 16))
        if processor.IsUnknown(token):
            return Piece(PieceKind.UNKNOWN, processor.Decode([token]))
        return Piece(PieceKind.CONTROL if processor.IsControl(token) else PieceKind.TEXT, name)

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """Ids of user-defined pieces by name; encoding finds these in a text first."""
        pieces = parse_model(self._model, self._path).pieces
        ids = [token for token, piece in enumerate(pieces) if piece.type == USER_DEFINED]
        # `name` raises for a damaged piece that is not text.
        return {self.name(token): token for token in ids}

    @cached_property
    def is_literal(self) -> bool:
        """True if no normalizer turns other text into a symbol's name."""
        return not parse_model(self._model, self._path).normalizer_spec.precompiled_charsmap

    def is_hidden(self, token: int) -> bool:
        """True if encoding never gives this id, whatever the text."""
        return self._processor.IsControl(token)

    @_finds_damage
    def renamed(self, names: Mapping[int, str]) -> SentencePieceVocabulary:
        """Return a vocabulary with the same ids, in which the symbols with the given ids have other names."""
        proto = parse_model(self._model, self._path)
        for token, name in names.items():
            proto.pieces[token].piece, proto.pieces[token].type = name, USER_DEFINED
        return SentencePieceVocabulary(proto.SerializeToString(), self._path)


class HubVocabulary:
    """A `tokenizer.json` of any converter; with the attributes of `SentencePieceVocabulary`."""

    UNKNOWN_SURFACE = " \u2047 "  # SentencePiece's default

    @_finds_damage
    def __init__(self, text: str, path: str | Path, config: dict[str, Any]) -> None:
        """Read `text`, the content of the file `path`, and `config`, the content of tokenizer_config.json.

        Raises:
            TokenizerError: for a text that is not a tokenizer file, or a file without a separator.
        """
        self._path = path
        import tokenizers

        content = json.loads(text)
        model = content["model"]
        added = content.get("added_tokens") or []
        # Names of tokens without text: as `save_tokenizer` listed them, else special tokens.
        control = {token["content"] for token in added if token.get("special")}
        control -= {*MARKERS, NEWLINE, "<unk>"}
        if isinstance(noted := config.get("control_tokens"), list):
            control = {name for name in noted if isinstance(name, str)}
        # The text "</s>" is text, as in SentencePiece: only an id makes a control token.
        entries = model["vocab"]  # of a Unigram model, pairs of name and score
        names = entries if isinstance(entries, dict) else [name for name, *_ in entries]
        hidden = control.intersection(names)
        content["added_tokens"] = [token for token in added if token["content"] not in hidden]
        self._content = content
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        self.size = self._tokenizer.get_vocab_size()
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self._names_of_added = {token: added.content for token, added in added_tokens.items()}
        ids = (self._tokenizer.token_to_id(name) for name in control)
        self._control = {token for token in ids if token is not None}
        self._has_bytes = bool(model.get("byte_fallback"))
        # A file that `save_tokenizer` wrote has a true newline where SentencePiece has "<n>".
        self._newline_id = self._tokenizer.token_to_id("\n")
        # There, the normalizer turns a text's `<n>` into a newline.
        self._has_raw_newline = "\n" in set(names)
        bos, eos = (token_name(config, key) for key in ("bos_token", "eos_token"))
        # LLaMA converters write "<s>" even if the model doesn't know it.
        separators = [n for n in (bos, "</s>", eos) if n and n != "<s>" and n not in MARKERS]
        found = [t for n in separators if (t := self._tokenizer.token_to_id(n)) is not None]
        if not found:
            raise TokenizerError(
                f"{path} has no separator token: neither '</s>' nor tokenizer_config.json's bos_token. "
                "Use the files that belong to the model, or its tokenizer.model."
            )
        self.separator_id = found[0]
        self.pad_id = self.id_of(token_name(config, "pad_token") or "<pad>")
        unk_token, unk_id = model.get("unk_token"), model.get("unk_id")
        if not unk_token and unk_id is not None:
            unk_token = entries[unk_id][0]
        self.unk_id = self.id_of(unk_token or "<unk>")
        self._added = {token["content"] for token in content["added_tokens"]}
        first = self._tokenizer.encode("a", add_special_tokens=False).tokens[:1]
        self._prefix_id = self._tokenizer.token_to_id(SPACE) or 0
        has_prefix = "".join(first).startswith(SPACE) and self._prefix_id > 0
        self.spacing = Spacing(dummy_prefix=has_prefix, strip_all=False)

    @_finds_damage
    def encode(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        # A file of `save_tokenizer` puts no dummy prefix before a lone marker.
        if len(tokens) == 1 and text in self._added and self.spacing.dummy_prefix:
            return [self._prefix_id, *tokens]
        return tokens

    @_finds_damage
    def decode(self, tokens: Sequence[int]) -> str:
        detokenizer = StreamingDetokenizer(self)
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text

    @_finds_damage
    def name(self, token: int) -> str:
        if token == self._newline_id:
            return NEWLINE
        # For an added token, `id_to_token` may return its normalized name.
        return self._names_of_added.get(token) or self._tokenizer.id_to_token(token) or ""

    @_finds_damage
    def id_of(self, name: str) -> int | None:
        if name == NEWLINE and self._newline_id is not None:
            return self._newline_id
        return self._tokenizer.token_to_id(name)

    @_finds_damage
    def piece(self, token: int) -> Piece:
        name = self._tokenizer.id_to_token(token) or ""
        byte = _BYTE_PIECE.fullmatch(name) if self._has_bytes else None
        if byte:
            return Piece(PieceKind.BYTE, name, int(byte[1], 16))
        if token == self.unk_id:
            return Piece(PieceKind.UNKNOWN, self.UNKNOWN_SURFACE)
        return Piece(PieceKind.CONTROL if token in self._control else PieceKind.TEXT, name)

    @property
    def symbols(self) -> Mapping[str, int]:
        return {name: token for name in self._added if (token := self.id_of(name)) is not None}

    @cached_property
    def is_literal(self) -> bool:
        outer = self._content.get("normalizer") or {"type": "Sequence", "normalizers": []}
        steps = outer["normalizers"] if outer["type"] == "Sequence" else [outer]
        spaces = ("", " ", SPACE, "\n")
        return all(
            step["type"] in ("Prepend", "Replace", "Strip")
            and step.get("content", step.get("prepend", "")) in spaces
            for step in steps
        )

    def is_hidden(self, token: int) -> bool:
        return token in self._control

    @_finds_damage
    def renamed(self, names: Mapping[int, str]) -> HubVocabulary:
        import tokenizers

        # Control tokens have no text, but a Unigram model would find them by name.
        hidden = {t: f"{self.name(t)}\U0010fffd" for t in self._control if t != self.unk_id}
        new_names = {self.name(t): name for t, name in (hidden | dict(names)).items()}
        content = with_names(self._content, new_names)
        known = {token["content"] for token in content["added_tokens"]}
        content["added_tokens"] += [
            {**_PLAIN_TOKEN, "id": token, "content": name}
            for token, name in names.items()
            if name not in known and not (token == self._newline_id and self._has_raw_newline)
        ]
        other = copy.copy(self)
        other._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        other._added = {token["content"] for token in content["added_tokens"]}
        return other


Vocabulary: TypeAlias = SentencePieceVocabulary | HubVocabulary


def parse_model(model: bytes, path: str | Path) -> Any:
    """Parse a serialized SentencePiece model to its `ModelProto`; raise `TokenizerError` naming `path`."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(model)
    except DecodeError as error:
        raise TokenizerError(f"{path} is not a SentencePiece model ({error}).") from None
    return proto


_PLAIN_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


def with_names(value: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Copy a tokenizer file's content, with other names in the vocabulary, added tokens and normalizer."""
    content = {key: item for key, item in value.items() if key != "post_processor"}
    content["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in value["added_tokens"]
    ]
    model = dict(value["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), *score] for name, *score in vocabulary]
    if "merges" in model:
        # A merge is a pair, or a text with a space between its two parts.
        pairs = ((m, m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"])
        model["merges"] = [merge for merge, pair in pairs if "".join(pair) not in names]
    content["model"] = model
    # A file of `save_tokenizer` has the markers' names in a regular expression.
    normalizer = json.dumps(value.get("normalizer"), ensure_ascii=False)
    for name, new in names.items():
        for spelled in {name, re.escape(name)}:
            normalizer = normalizer.replace(json.dumps(spelled, ensure_ascii=False)[1:-1], new)
    content["normalizer"] = json.loads(normalizer)
    return content
