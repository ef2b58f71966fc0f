"""Small data sets and model folders for tests of training, end to end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from afm_mlx.config import ModelConfig
from tests.tools.cli import CONFIG, lines
from tests.tools.tokenizers import docstrings

# Widths that fill 32-bit words at 2 bits, and int8 keys and values.
TRAINABLE: ModelConfig = dataclasses.replace(CONFIG, hidden_dim_scale_factor=3.0, kv_bits=8)


def write_data(folder: Path, rng: np.random.Generator, splits: str = "train valid test") -> Path:
    """Chats that repeat a word, and a text: `train.jsonl`, `valid.jsonl` and `test.jsonl`."""
    folder.mkdir()
    words = [word for word in docstrings().split() if word.isalpha()][:50]

    def chat() -> dict:
        word = str(rng.choice(words))
        return {
            "messages": [
                {"role": "user", "content": f"say {word}"},
                {"role": "assistant", "content": word},
            ]
        }

    for split in splits.split():
        lines(folder / f"{split}.jsonl", *[chat() for _ in range(8)], {"text": docstrings()[:200]})
    return folder
