"""Writes a model folder's tokenizer files from a toolkit's `tokenizer.model`.

Besides the SentencePiece file itself, the folder gets what other programs read: a Hugging Face
`tokenizer.json` with the same ids, and a chat template. Same ids take more than the converters of `tokenizers`
and `transformers` do (theirs give other ids for half of the tests' texts and more):

- The vocabulary has a true newline where SentencePiece has `<n>`, so that text and decoded text are right in
  other programs; a normalizer turns `<n>` in a text into a newline first.
- The dummy prefix comes once, at the start of the text, also before a marker such as `<turn_start>`, but not
  after the separator that starts a rendered chat. A normalizer's regular expression says so; the markers are
  matched in the normalized text.
- SentencePiece merges by the score of the merged piece, so a piece has one merge for each way to cut it.
- User-defined pieces of a Unigram model have SentencePiece's bonus.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.files import atomic_write, read_file
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE
from afm_mlx.tokenizer.vocabulary import (
    CONFIG_BYTES,
    MARKERS,
    TURN_END,
    TURN_START,
    USER_DEFINED,
    VOCABULARY_BYTES,
    SentencePieceVocabulary,
    parse_model,
    read_text,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HubTokenizer
    from tokenizers.models import BPE, Unigram
    from tokenizers.normalizers import Normalizer

# Types of pieces in sentencepiece_model.proto; see also USER_DEFINED.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_UNIGRAM = 1  # of trainer_spec.model_type

_CHECKED_TEXTS = 3000
_TIE = 1e-3  # log probabilities this close are equal: SentencePiece adds some hundred scores in float32
_TIES = (
    "tokenizer.json cuts some texts, such as long runs of spaces, into other pieces of the same score than "
    "tokenizer.model: the two add Unigram scores in different precisions. afm_mlx uses tokenizer.model; other "
    "programs get ids of equal probability."
)


def save_tokenizer(
    source: str | Path, folder: str | Path, toolkit_config: str | Path | None = None
) -> list[str]:
    """Write a model folder's tokenizer files from a SentencePiece model.

    Writes `tokenizer.model`, `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.
    `tokenizer.json` is compared with the SentencePiece model on some thousand texts and left out if it
    disagrees; this package doesn't need it.

    Args:
        source: a `tokenizer.model`, or a folder with one (a toolkit's `assets`).
        folder: the model folder; created if it is missing.
        toolkit_config: the toolkit's `tokenizer-config.json`; None for the one in the folder of the model, if
            any. `user_defined_tokens` (pieces to add) and `eot_id` (the end of a turn) are read from it.

    Returns:
        Warnings for the user about known differences in other programs.

    Raises:
        TokenizerError: if a file is missing or damaged, or the configuration contradicts the model.
    """
    source, folder = Path(source), Path(folder)
    model_path = source / "tokenizer.model" if source.is_dir() else source
    if toolkit_config is None:
        found = model_path.with_name("tokenizer-config.json")
        toolkit_config = found if found.exists() else None
    try:
        model = read_file(model_path, VOCABULARY_BYTES)
    except OSError as error:
        raise TokenizerError(
            f"The SentencePiece model {model_path} can't be read ({error.strerror or error}). "
            "Give the toolkit's tokenizer.model."
        ) from error
    settings = _read_toolkit_config(Path(toolkit_config)) if toolkit_config else {}
    vocabulary = SentencePieceVocabulary(model, model_path)
    added = settings.get("user_defined_tokens")
    model = _with_added_pieces(model, vocabulary, added, toolkit_config)
    vocabulary = SentencePieceVocabulary(model, model_path)
    eos_token = _end_of_turn(vocabulary, settings.get("eot_id"), toolkit_config)

    hub = _HubFile(model, vocabulary.separator_id)
    agrees, warnings = _compare(vocabulary, hub, model_path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Other programs put it first, unless the rendered chat has it already.
        "bos_token": hub.separator,
        "eos_token": eos_token,
        "control_tokens": hub.control,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer_config.json": json.dumps(config, indent=4, ensure_ascii=False) + "\n",
        "chat_template.jinja": V6_TEMPLATE,
    }
    if agrees:
        files["tokenizer.json"] = hub.tokenizer.to_str(pretty=False)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tokenizer.model": model} | {name: text.encode() for name, text in files.items()}
    for name, content in contents.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)
    return warnings


# The toolkit's configuration


def _read_toolkit_config(path: Path) -> dict[str, object]:
    """Read the known settings, wherever they are nested; others are ignored."""
    text = read_text(path, CONFIG_BYTES)
    try:
        entries = list(_walk(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON ({error}). Copy it again from the toolkit's assets."
        ) from error
    settings: dict[str, object] = {}
    for key, value in entries:
        if key in ("user_defined_tokens", "eot_id") and value is not None:
            settings.setdefault(key, value)
        if key == "replacements" and value != {"\n": NEWLINE}:
            raise TokenizerError(
                f"{path} replaces {value!r} in texts; only {{'\\n': '{NEWLINE}'}}, AFM's own, is known."
            )
    return settings


def _walk(value: object) -> Iterator[tuple[str, object]]:
    """Yield every key and value in nested dicts and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)


def _with_added_pieces(
    model: bytes, vocabulary: SentencePieceVocabulary, tokens: object, path: object
) -> bytes:
    """Add user-defined pieces to a serialized model, in tamm's order."""
    if not tokens:
        return model
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TokenizerError(
            f"{path}: user_defined_tokens must be a list of strings, got {shown(tokens)}."
        )
    known = [token for token in tokens if vocabulary.id_of(token) is not None]
    if known:
        raise TokenizerError(
            f"{path}: user_defined_tokens repeats pieces that the SentencePiece model has: {shown(known)}."
        )
    proto = parse_model(model, "tokenizer.model")
    for token in tokens:
        proto.pieces.add(piece=token, score=0.0, type=USER_DEFINED)
    serialized: bytes = proto.SerializeToString()
    return serialized


def _end_of_turn(vocabulary: SentencePieceVocabulary, eot_id: object, path: object) -> str:
    """Return the name of the token that ends a turn: `eot_id`'s, else `<turn_end>`, else the separator."""
    if eot_id is not None:
        if not isinstance(eot_id, int) or not 0 <= eot_id < vocabulary.size:
            raise TokenizerError(
                f"{path} has eot_id {eot_id!r}; the vocabulary's ids are 0 to {vocabulary.size - 1}."
            )
        return vocabulary.name(eot_id)
    if vocabulary.id_of(TURN_END) is not None:
        return TURN_END
    return vocabulary.name(vocabulary.separator_id)


# tokenizer.json


class _HubFile:
    """A Hugging Face tokenizer with the ids of a SentencePiece model."""

    def __init__(self, model: bytes, separator_id: int) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, processors

        self._proto = parse_model(model, "tokenizer.model")
        # If the vocabulary has a newline piece already, "<n>" keeps its name.
        names = [piece.piece for piece in self._proto.pieces]
        newline = "\n" if "\n" not in names else NEWLINE
        self._names = [newline if name == NEWLINE else name for name in names]
        self._types = [piece.type for piece in self._proto.pieces]
        self._newline = newline
        self.control = self._of_type(_CONTROL)
        self.separator = self._names[separator_id]
        self.markers = [name for name in self._of_type(USER_DEFINED) if name != newline]

        self.tokenizer: HubTokenizer = Tokenizer(self._model())
        self.tokenizer.normalizer = self._normalizer()
        # mlx-lm recognizes exactly this list as SentencePiece's, and then streams in linear time.
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._proto.normalizer_spec.add_dummy_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        self.tokenizer.decoder = decoders.Sequence(steps)
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{self.separator} $A", special_tokens=[(self.separator, separator_id)]
        )
        self.tokenizer.add_tokens(
            [
                AddedToken(name, normalized=True, special=name in (TURN_START, TURN_END))
                for name in self.markers
            ]
        )
        self.tokenizer.add_special_tokens([AddedToken(self.separator, normalized=True)])

    @property
    def is_unigram(self) -> bool:
        return self._proto.trainer_spec.model_type == _UNIGRAM

    def score(self, tokens: list[int]) -> float:
        """Compute the log probability of a Unigram segmentation."""
        return float(sum(self._proto.pieces[token].score for token in tokens))

    def _of_type(self, kind: int) -> list[str]:
        return [name for name, type_ in zip(self._names, self._types, strict=True) if type_ == kind]

    def _model(self) -> BPE | Unigram:
        from tokenizers import models

        unknown = self._types.index(_UNKNOWN)
        has_bytes = _BYTE in self._types
        if self.is_unigram:
            return models.Unigram(
                list(zip(self._names, self._unigram_scores(), strict=True)), unknown, has_bytes
            )
        return models.BPE(
            {name: token for token, name in enumerate(self._names)},
            self._merges(),
            unk_token=self._names[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )

    def _merges(self) -> list[tuple[str, str]]:
        """List each way to cut each piece in two: best score first, then the longest left part."""
        scores = {
            name: piece.score
            for name, piece in zip(self._names, self._proto.pieces, strict=True)
            if piece.type == _NORMAL
        }
        ranked = [
            (-score, -cut, name[:cut], name[cut:])
            for name, score in scores.items()
            for cut in range(1, len(name))
            if name[:cut] in scores and name[cut:] in scores
        ]
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _unigram_scores(self) -> list[float]:
        """List scores, with SentencePiece's bonus for user-defined pieces; other kinds never win."""
        normal = [piece.score for piece in self._proto.pieces if piece.type == _NORMAL]
        best, never = max(normal), 10 * min(normal) - 1000
        scores = []
        for piece in self._proto.pieces:
            if piece.type == _NORMAL:
                scores.append(piece.score)
            elif piece.type == USER_DEFINED:
                scores.append(len(piece.piece.encode()) * best - 0.1)
            else:
                scores.append(never)
        return scores

    def _normalizer(self) -> Normalizer:
        from tokenizers import Regex, normalizers

        spec = self._proto.normalizer_spec
        steps: list[Normalizer] = []
        if spec.precompiled_charsmap:
            steps.append(normalizers.Replace("\n", NEWLINE))
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        # To AFM, a newline and `<n>` are the same piece, whichever of the two names it has here.
        spelled = NEWLINE if self._newline == "\n" else "\n"
        steps.append(normalizers.Replace(spelled, self._newline))
        if spec.remove_extra_whitespaces:
            steps.append(normalizers.Replace(Regex(f"\\A +|[ {SPACE}]+\\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if spec.add_dummy_prefix:
            # An added token's own name is normalized, too, and must stay as it is.
            alone = "|".join(re.escape(name) for name in [*self.markers, self.separator])
            start = f"\\A(?!{re.escape(self.separator)}|(?:{alone})\\z)(?=(?m:.))"
            steps.append(normalizers.Replace(Regex(start), SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        return normalizers.Sequence(steps)


def _compare(
    vocabulary: SentencePieceVocabulary, hub: _HubFile, path: Path
) -> tuple[bool, list[str]]:
    """Compare the ids of sample texts.

    Left out is what can't agree: the separator's name as text, which is a special token in tokenizer.json, and
    a marker alone, which gets no dummy prefix there. Two Unigram segmentations of equal score are a tie, which
    agrees: SentencePiece adds scores in float32, so that rounding decides, tokenizers in float64.

    Returns:
        True if all ids are equal or ties; and warnings for the user.
    """
    has_ties = False
    for text in _sample_texts(vocabulary):
        if hub.separator in text or text.strip(" ") in hub.markers:
            continue
        expected = vocabulary.encode(text.replace("\n", NEWLINE))
        got = hub.tokenizer.encode(text, add_special_tokens=False).ids
        if got == expected:
            continue
        if not hub.is_unigram or abs(hub.score(got) - hub.score(expected)) > _TIE:
            return False, [
                f"tokenizer.json was not written: for the text {text!r} it would give other ids than {path}. "
                "afm_mlx uses tokenizer.model; other programs can't load this folder's tokenizer."
            ]
        has_ties = True
    return True, [_TIES] if has_ties else []


def _sample_texts(vocabulary: SentencePieceVocabulary) -> Iterator[str]:
    """Yield texts of a vocabulary's own pieces, code, many scripts, control characters and spaces."""
    random_ = random.Random(0)
    pieces = [vocabulary.name(random_.randrange(vocabulary.size)) for _ in range(1000)]
    words = [piece.replace(SPACE, " ") for piece in pieces]
    odd = [*MARKERS, NEWLINE, SPACE, *"\n\t\0\u200d\ufeff", "\n\n", "  ", "   ", "\r\n"]
    scripts = "é e\u0301 日本語 한국어 العربية हिन्दी ﬁ ① 1234567890 😀 👩‍👩‍👧 < n > aaaaa <0x41>"
    odd += scripts.split()
    odd += ["def f(x):\n    return x", "Hello, world!", " '", "..."]
    yield from words
    for _ in range(_CHECKED_TEXTS):
        yield "".join(
            random_.choice(words if random_.random() < 0.6 else odd)
            for _ in range(random_.randrange(1, 20))
        )
    for _ in range(_CHECKED_TEXTS // 3):
        limit = random_.choice((0x80, 0x800, 0xD800))
        yield "".join(chr(random_.randrange(limit)) for _ in range(random_.randrange(1, 12)))
