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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        toolkit_config: the toolkit's `tokenizer-config.json`; `user_defined_tokens` (pieces to add) and
            `eot_id` (the end of a turn) are read from it. Pass None for the file next to the model.

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
    eot_id = settings.get("eot_id")
    if eot_id is None:
        turn_end = vocabulary.id_of(TURN_END)
        eot_id = vocabulary.separator_id if turn_end is None else turn_end
    elif not isinstance(eot_id, int) or not 0 <= eot_id < vocabulary.size:
        raise TokenizerError(
            f"{toolkit_config} has eot_id {eot_id!r}; the vocabulary's ids are 0 to {vocabulary.size - 1}."
        )
    eos_token = vocabulary.name(eot_id)

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
    """Read `user_defined_tokens` and `eot_id` from a JSON file, wherever they are nested.

    Other settings are ignored, except `replacements` that differ from AFM's own: they raise `TokenizerError`.
    """
    text = read_text(path, CONFIG_BYTES)
    try:
        entries = list(_walk(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON ({error}). Copy it again from the toolkit's assets."
        ) from error
    for key, value in entries:
        if key == "replacements" and value != {"\n": NEWLINE}:
            raise TokenizerError(
                f"{path} replaces {value!r} in texts; only {{'\\n': '{NEWLINE}'}}, AFM's own, is known."
            )
    known = ("user_defined_tokens", "eot_id")
    # The first of several wins.
    return {key: value for key, value in reversed(entries) if key in known and value is not None}


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


# tokenizer.json


class _HubFile:
    """A Hugging Face tokenizer with a SentencePiece model's ids; `separator_id` starts each encoded text."""

    def __init__(self, model: bytes, separator_id: int) -> None:
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            processors,
        )

        proto = parse_model(model, "tokenizer.model")
        pieces, spec = list(proto.pieces), proto.normalizer_spec
        names = [piece.piece for piece in pieces]
        # If the vocabulary has a newline piece already, "<n>" keeps its name.
        newline, spelled = ("\n", NEWLINE) if "\n" not in names else (NEWLINE, "\n")
        names = [newline if name == NEWLINE else name for name in names]
        kinds: list[int] = [piece.type for piece in pieces]
        named = list(zip(names, kinds, strict=True))
        self.control = [name for name, kind in named if kind == _CONTROL]
        self.markers = [name for name, kind in named if kind == USER_DEFINED and name != newline]
        self.separator = names[separator_id]
        self.is_unigram = proto.trainer_spec.model_type == _UNIGRAM
        self._scores: list[float] = [piece.score for piece in pieces]

        unknown, has_bytes = kinds.index(_UNKNOWN), _BYTE in kinds
        if self.is_unigram:
            pairs = list(zip(names, _unigram_scores(pieces), strict=True))
            self.tokenizer: HubTokenizer = Tokenizer(models.Unigram(pairs, unknown, has_bytes))
        else:
            scored = zip(named, self._scores, strict=True)
            bpe = models.BPE(
                {name: token for token, name in enumerate(names)},
                _merges({name: score for (name, kind), score in scored if kind == _NORMAL}),
                unk_token=names[unknown],
                fuse_unk=True,
                byte_fallback=has_bytes,
            )
            self.tokenizer = Tokenizer(bpe)

        replace = normalizers.Replace
        steps: list[Normalizer] = []
        if spec.precompiled_charsmap:
            steps += [replace("\n", NEWLINE), normalizers.Precompiled(spec.precompiled_charsmap)]
        # To AFM, a newline and `<n>` are the same piece, whichever of the two names it has here.
        steps.append(replace(spelled, newline))
        if spec.remove_extra_whitespaces:
            steps += [replace(Regex(f"\\A +|[ {SPACE}]+\\z"), ""), replace(Regex(" {2,}"), " ")]
        if spec.add_dummy_prefix:
            # An added token's own name is normalized, too, and must stay as it is.
            alone = "|".join(re.escape(name) for name in [*self.markers, self.separator])
            start = f"\\A(?!{re.escape(self.separator)}|(?:{alone})\\z)(?=(?m:.))"
            steps.append(replace(Regex(start), SPACE))
        self.tokenizer.normalizer = normalizers.Sequence([*steps, replace(" ", SPACE)])

        # mlx-lm recognizes exactly this list as SentencePiece's, and then streams in linear time.
        decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if spec.add_dummy_prefix:
            decoding.append(decoders.Strip(" ", 1, 0))
        self.tokenizer.decoder = decoders.Sequence(decoding)
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{self.separator} $A", special_tokens=[(self.separator, separator_id)]
        )
        turns = (TURN_START, TURN_END)
        self.tokenizer.add_tokens(
            [AddedToken(name, normalized=True, special=name in turns) for name in self.markers]
        )
        self.tokenizer.add_special_tokens([AddedToken(self.separator, normalized=True)])

    def score(self, tokens: list[int]) -> float:
        """Return the sum of the log probabilities of a Unigram segmentation's pieces."""
        return sum(self._scores[token] for token in tokens)


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """List each way to cut each piece in two: best score first, then the longest left part."""
    ranked = [
        (-score, -cut, name[:cut], name[cut:])
        for name, score in scores.items()
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _unigram_scores(pieces: list[Any]) -> list[float]:
    """List scores, with SentencePiece's bonus for user-defined pieces; other kinds never win."""
    normal = [piece.score for piece in pieces if piece.type == _NORMAL]
    best, never = max(normal), 10 * min(normal) - 1000

    def score(piece: Any) -> float:
        if piece.type == USER_DEFINED:
            return len(piece.piece.encode()) * best - 0.1
        return piece.score if piece.type == _NORMAL else never

    return [score(piece) for piece in pieces]


def _compare(
    vocabulary: SentencePieceVocabulary, hub: _HubFile, path: Path
) -> tuple[bool, list[str]]:
    """Compare the ids of sample texts: return True if all are equal or ties, and warnings for the user.

    Texts that can't agree are left out: the separator's name, a special token in tokenizer.json, and a marker
    alone, which gets no dummy prefix there. Two Unigram segmentations of equal score are a tie: SentencePiece
    adds scores in float32, so that rounding decides, tokenizers in float64.
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
