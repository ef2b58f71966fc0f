"""Training batches: chats and docstrings packed into rows of equal length.

A batch is a function of the seed and the step alone, so a run that resumes sees what it would have seen.
Most steps use short rows, which attend cheaply; every eighth uses longer ones, every thirty-second rows
as long as the context.
Chats are never cut. The rest of a row is filled with a piece of a text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import tasks
import torch
from docstrings import Texts
from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor
from tamm.tokenizers.afm import AFMTokenizer
from values import Values

TOKENS_PER_STEP = 4096
_SHORT_ROW, _LONG_ROW, _FULL_ROW = 256, 512, 1024
_LONG_TASKS = ("call_tool", "call_tool", "conversation", "conversation", "extract_event")
_TARGETS_PER_STEP = TOKENS_PER_STEP // 2
_PROMPT_WEIGHT = 0.1
_IGNORED = -100
_MIN_PIECE = 12  # shorter gaps become padding


@dataclass(frozen=True)
class Batch:
    """One step's input. Shapes: `(rows, length)`, or `(targets,)` for the flat positions with a loss."""

    ids: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


class _Row:
    """A row while it is being packed: parallel lists of ids, labels, segments and loss weights."""

    def __init__(self, length: int):
        self.length = length
        self.ids: list[int] = []
        self.labels: list[int] = []
        self.segments: list[int] = []
        self.weights: list[float] = []

    @property
    def room(self) -> int:
        return self.length - len(self.ids)

    def add_chat(self, chat: list[int], answers: list[int]) -> None:
        """Add a chat and its shifted labels; outside the answers, the next token at a low weight."""
        following = [*chat[1:], _IGNORED]
        labels = [
            token if label == _IGNORED else label
            for token, label in zip(following, answers, strict=True)
        ]
        self._add(chat, labels, [_PROMPT_WEIGHT if i == _IGNORED else 1.0 for i in answers])

    def add_text(self, text: list[int]) -> None:
        """Add a text of which the last token is only a label."""
        self._add(text[:-1], text[1:], [1.0] * (len(text) - 1))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Pad the row; return ids, labels, segments and weights, each `(length,)`."""
        self._add([0] * self.room, [_IGNORED] * self.room, [0.0] * self.room)
        weights = np.array(self.weights, dtype=np.float32)
        return np.array(self.ids), np.array(self.labels), np.array(self.segments), weights

    def _add(self, ids: list[int], labels: list[int], weights: list[float]) -> None:
        self.segments.extend([len(self.ids) + 1] * len(ids))
        self.ids.extend(ids)
        self.labels.extend(labels)
        self.weights.extend(weights)


class Batches:
    """Makes the batch of any step: seed and step decide all draws."""

    def __init__(self, tokenizer: AFMTokenizer, texts: Texts, seed: int):
        self.eos_id = tokenizer.eos_id
        self.preprocessor = AFMChatTemplateV6Preprocessor(tokenizer, prepend_system_message=False)
        self.texts = self._encode_texts(texts.docstrings + texts.further)
        self.seed = seed

    def __call__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}-{step}")
        length = _FULL_ROW if step % 32 == 31 else _LONG_ROW if step % 8 == 7 else _SHORT_ROW
        rows = [self._row(rng, length) for _ in range(TOKENS_PER_STEP // length)]
        ids, labels, segments, weights = (np.stack(part) for part in zip(*rows, strict=True))
        chosen = self._choose_targets(rng, labels.ravel(), weights.ravel())
        return Batch(
            ids=torch.from_numpy(ids),
            segments=torch.from_numpy(segments),
            positions=torch.from_numpy(chosen),
            labels=torch.from_numpy(labels.ravel()[chosen]),
            weights=torch.from_numpy(weights.ravel()[chosen]),
        )

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        # Without the dummy prefix, between end-of-sequence tokens.
        encoded = self.preprocessor.tokenizer.encode(texts)
        return [[self.eos_id, *ids[1:], self.eos_id] for ids in encoded]

    def _row(self, rng: random.Random, length: int) -> tuple[np.ndarray, ...]:
        """Pack one row; return ids, labels, segments and loss weights, each `(length,)`."""
        row = _Row(length)
        misses = 0
        values = Values(rng, "train")
        only_text = length > _SHORT_ROW and rng.random() < 0.2
        while misses < 2 and not only_text:
            chat, answers = self._chat(values, length)
            if len(chat) > row.room:
                misses += 1
            else:
                row.add_chat(chat, answers)
        while row.room >= _MIN_PIECE:
            text = rng.choice(self.texts)
            fits = len(text) <= row.room + 1
            start = 0 if fits else rng.choice((0, rng.randrange(len(text) - row.room)))
            row.add_text(text[start : start + row.room + 1])
        return row.arrays()

    def _chat(self, values: Values, length: int) -> tuple[list[int], list[int]]:
        task = (
            values.rng.choice(_LONG_TASKS) if length > _SHORT_ROW else tasks.draw_task(values.rng)
        )
        return tasks.encode(self.preprocessor, tasks.draw_sample(task, values))

    @staticmethod
    def _choose_targets(rng: random.Random, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the positions that get logits: all answers and docstrings, then prompts up to a number.

        The number is fixed because the compiled training step needs one shape.
        """
        order = np.random.default_rng(rng.getrandbits(32)).random(len(labels))
        priority = np.where(labels == _IGNORED, 0.0, weights) + order * 0.01
        return np.sort(np.argsort(-priority)[:_TARGETS_PER_STEP])
