"""Model folders that take images, and chats about pictures, for tests of training and measuring."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx.config import ModelConfig
from tests.tools.cli import lines
from tests.tools.training_data import TRAINABLE
from tests.tools.vision import TINY, picture

# <unk>, which no text gives: the vocabulary has a piece for each byte.
SEEING: ModelConfig = dataclasses.replace(
    TRAINABLE, vision_config=dataclasses.replace(TINY, image_token_id=1)
)
ANSWERS = ("red", "blue", "the", "of")


def write_pictures(folder: Path, rng: np.random.Generator, count: int = 4) -> list[str]:
    """Write pictures in the modes rapid and balanced, by their size; return their names."""
    names = [f"{index}.png" for index in range(count)]
    for index, name in enumerate(names):
        side = 20 if index % 2 else 40
        (folder / name).write_bytes(picture(rng, side, side - 3))
    return names


def question(*names: str) -> dict[str, Any]:
    """A user's message with pictures before and behind its text."""
    parts: list[dict[str, Any]] = [{"type": "image", "path": name} for name in names]
    return {
        "role": "user",
        "content": [*parts[:1], {"type": "text", "text": "What is it?"}, *parts[1:]],
    }


def write_image_data(
    folder: Path, rng: np.random.Generator, splits: str = "train valid test"
) -> Path:
    """Chats about pictures, one of which is in two chats, and a chat without: `train.jsonl` and others."""
    folder.mkdir()
    names = write_pictures(folder, rng)
    for split in splits.split():
        chats: list[list[dict[str, Any]]] = []
        for index, answer in enumerate(ANSWERS):
            asked = question(names[index], names[0]) if index == 2 else question(names[index])
            chats.append([asked, {"role": "assistant", "content": answer}])
        chats.append([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the"}])
        lines(folder / f"{split}.jsonl", *({"messages": chat} for chat in chats))
    return folder
