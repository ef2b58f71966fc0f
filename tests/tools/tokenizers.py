"""Tiny SentencePiece models with AFM's special pieces, trained while the tests run."""

import importlib
import inspect
from functools import lru_cache
from pathlib import Path

import numpy as np

from afm_mlx.tokenizer.vocabulary import parse_model

_UNIGRAM = 1  # of trainer_spec.model_type
MARKERS = ["<turn_start>", "<turn_end>", "<executable_start>", "<executable_end>", "<n>"]
_MODULES = "argparse collections csv datetime decimal json logging pathlib random string textwrap"

# What tokenizers get wrong: markers inside text, newlines, runs of spaces, controls, scripts.
ATOMS = [
    *MARKERS, "\n", "\n\n", "\r\n", " ", "  ", "    ", "\t", "\0", "\x7f", "\u200d", "\ufeff", "\u2581",
    "é", "e\u0301", "ﬁ", "①", "日本語", "العربية", "😀", "👩‍👩‍👧", "<", "n", ">", "<0x41>", "<pad>", "<unk>",
    "turn", "_end>", "aaaa", "abab", "1234", "def f(x):", "return", "the ", "The", ".", ",", "(", ")",
]  # fmt: skip


@lru_cache(maxsize=1)
def docstrings() -> str:
    """English text that every Python has."""
    texts = []
    for name in _MODULES.split():
        # Not of modules, which become members of others when they are imported.
        members = [
            m for m in vars(importlib.import_module(name)).values() if not inspect.ismodule(m)
        ]
        texts += [doc for doc in map(inspect.getdoc, members) if doc]
    return "\n".join(texts)


def train_tiny_spm(path: Path, model_type: str, vocab_size: int = 1000, **options) -> Path:
    """Train a SentencePiece model of AFM's kind into the file `path` (bpe or unigram, under a second)."""
    import sentencepiece

    settings = {
        "pad_id": 0,
        "unk_id": 1,
        "eos_id": 2,
        "bos_id": -1,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "split_digits": True,
        "required_chars": "".join(map(chr, range(33, 127))),
        "user_defined_symbols": MARKERS,
        **options,
    }
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for line in docstrings().splitlines() if line),
            model_writer=file,
            model_type=model_type,
            vocab_size=vocab_size,
            num_threads=1,
            minloglevel=2,
            **settings,
        )
    return path


def random_text(rng: np.random.Generator) -> str:
    """A slice of prose, a mixture of awkward pieces, or arbitrary Unicode."""
    kind = rng.integers(3)
    if kind == 0:
        start = int(rng.integers(len(docstrings()) - 200))
        return docstrings()[start : start + int(rng.integers(200))]
    if kind == 1:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        atoms = [*ATOMS, *letters]
        return "".join(atoms[i] for i in rng.integers(len(atoms), size=rng.integers(1, 25)))
    planes = [(0, 0x80), (0, 0x800), (0, 0xD800), (0xE000, 0x110000)]
    ranges = [planes[i] for i in rng.integers(len(planes), size=rng.integers(1, 12))]
    return "".join(chr(rng.integers(*bounds)) for bounds in ranges)


def plain_text(rng: np.random.Generator) -> str:
    """The same without names of control tokens and `<n>`, which tamm takes for these and a newline."""
    while True:
        text = random_text(rng)
        if not any(marker in text for marker in MARKERS):
            return text


def same_ids(spm_path: Path, first: list[int], second: list[int]) -> bool:
    """True if segmentations are equal, or have the same Unigram score, so that rounding decides which."""
    if first == second:
        return True
    proto = parse_model(spm_path.read_bytes(), spm_path)
    if proto.trainer_spec.model_type != _UNIGRAM:
        return False
    scores = [sum(proto.pieces[token].score for token in ids) for ids in (first, second)]
    return abs(scores[0] - scores[1]) < 1e-3


def random_ids(rng: np.random.Generator, tokenizer) -> list[int]:
    """Ids from the whole vocabulary, with many control, byte and newline pieces among them."""
    special = tokenizer.convert_tokens_to_ids(["<", "n", ">", "\u2581", "<n>", *MARKERS])
    text_bytes = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "€😀é\n<n".encode()]
    any_byte = tokenizer.convert_tokens_to_ids("<0x00>") + np.arange(256)
    pools = [np.arange(tokenizer.vocab_size), np.arange(8), any_byte, text_bytes, special]
    size = int(rng.integers(0, 25))
    drawn = np.stack([np.asarray(pool)[rng.integers(len(pool), size=size)] for pool in pools])
    chosen = rng.choice(len(pools), size=size, p=rng.dirichlet(np.ones(len(pools))))
    return drawn[chosen, np.arange(size)].tolist()
