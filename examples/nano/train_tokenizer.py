"""Train the SentencePiece tokenizer and write it the way the adapter toolkit ships one.

BPE with byte fallback, digits apart, no Unicode normalisation, and the prompt format's tokens as
user-defined symbols. One choice is ours: the space before a digit or a capital letter (except "I") is a
token of its own. A name has then the same tokens in a sentence, in JSON and at the start of an answer,
and a model of this size can copy it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import sentencepiece
import tasks
from tamm.tokenizers.afm import AFMTokenizer
from tamm.utils import json as tamm_json

PROMPT_TOKENS = ("<turn_start>", "<turn_end>", "<executable_start>", "<executable_end>", "<n>")
PAD_ID, UNK_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 4096
_TASK_SAMPLES = 12_000
# Never part of a merge while training; encoding needs nothing, since no such merge exists.
_DELIMITER = "\x01"


def _training_lines(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield re.sub(r"(?:^|(?<= ))(?=[A-Z0-9])(?!I\b)", _DELIMITER, text.replace("\n", "<n>"))


def train_tokenizer(folder: Path, docstrings: list[str], seed: int) -> AFMTokenizer:
    """Train on docstrings and task samples; write `tokenizer.model` and `tokenizer-config.json` into a folder.

    The tokenizer that it returns has `<turn_end>` as its `eot_id`.
    """
    samples = islice(tasks.training_samples(seed), _TASK_SAMPLES)
    texts = [*docstrings, *map(tasks.render, samples)]
    path = folder / "tokenizer.model"
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_training_lines(texts)),
            model_writer=model,
            model_type="bpe",
            vocab_size=VOCAB_SIZE,
            user_defined_symbols=list(PROMPT_TOKENS),
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            eos_id=EOS_ID,
            bos_id=-1,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            pretokenization_delimiter=_DELIMITER,
            max_sentence_length=16384,
            num_threads=2,
            minloglevel=2,
        )
    # The file names its neighbour, whatever folder the checkpoint is in.
    (folder / "tokenizer-config.json").write_text(
        tamm_json.dumps(_config("tokenizer.model"), indent=2)
    )
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> AFMTokenizer:
    """Load the tokenizer of a checkpoint folder."""
    return _config(str(folder / "tokenizer.model")).create_tokenizer()


def _config(vocab_path: str) -> AFMTokenizer.Config:
    # User-defined symbols follow the three control tokens, in order.
    eot_id = EOS_ID + 1 + PROMPT_TOKENS.index("<turn_end>")
    ids = {"pad_id": PAD_ID, "unk_id": UNK_ID, "eos_id": EOS_ID, "eot_id": eot_id}
    return AFMTokenizer.Config(vocab_path=vocab_path, extra_properties=ids)
