"""A vocabulary as large as the 3B's, of pieces that occur in text, for what costs time by the size of it."""

from __future__ import annotations

import itertools
import math
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE
from afm_mlx.tokenizer.tokenizer import AFMTokenizer
from afm_mlx.tokenizer.vocabulary import MARKERS, SentencePieceVocabulary

_TYPES = {"normal": 1, "unknown": 2, "control": 3, "symbol": 4, "byte": 6}
_SPECIAL = (("<pad>", "control"), ("<unk>", "unknown"), ("</s>", "control"))


def large_tokenizer(size: int, seed: int = 0) -> AFMTokenizer:
    """Make a tokenizer of `large_vocabulary`."""
    return AFMTokenizer(
        SentencePieceVocabulary(large_vocabulary(size, seed), "a made-up vocabulary")
    )


def large_vocabulary(size: int, seed: int = 0) -> bytes:
    """Make a `tokenizer.model`: bytes, AFM's markers, and frequent words of Python's sources and their parts.

    Args:
        size: number of pieces; 153,600 for the 3B.
        seed: seed of the made-up words that fill it where the sources have too few.
    """
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.trainer_spec.model_type = 1  # Unigram: it needs scores alone, no order of merges
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id, model.trainer_spec.unk_id = 0, 1
    model.trainer_spec.bos_id, model.trainer_spec.eos_id = -1, 2
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    fixed = [*_SPECIAL, *((name, "symbol") for name in (*MARKERS, NEWLINE))]
    fixed += [(f"<0x{byte:02X}>", "byte") for byte in range(256)]
    words = itertools.islice(_words(random.Random(seed)), size - len(fixed))
    for rank, (name, kind) in enumerate([*fixed, *((word, "normal") for word in words)]):
        model.pieces.add(piece=name, score=-math.log(rank + 10), type=_TYPES[kind])
    serialized: bytes = model.SerializeToString()
    return serialized


def _words(rng: random.Random) -> Iterator[str]:
    """Yield pieces, each once: characters, words with and without a space, their beginnings, made-up words."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text("utf-8", "replace")
        counts.update(re.findall(r"[\t ]?\w+|[^\w\s]+", text))
    frequent = [word.replace(" ", SPACE) for word, _ in counts.most_common()]
    characters = [SPACE, *(chr(code) for code in range(33, 127))]
    parts = (word[:end] for word in frequent for end in range(2, len(word)))
    made_up = (
        rng.choice((SPACE, "")) + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
        for _ in itertools.count()
    )
    seen: set[str] = set()
    for word in itertools.chain(characters, frequent, parts, made_up):
        if word not in seen and len(word) <= 24:
            seen.add(word)
            yield word
