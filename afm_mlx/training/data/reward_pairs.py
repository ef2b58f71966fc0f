"""Batches of preference pairs for a reward model: whole texts, how sure each preference is, and grades.

    {"prompt": ..., "chosen": ..., "rejected": ..., "strength"?: ...,
     "grades"?: {"chosen": {"truthfulness": 2, ...}, "rejected": {...}}}

A grade is 0, 1 or 2, from worst to best, for any of `GRADED_AXES`. A pair without a strength counts as certain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import GRADED_AXES
from afm_mlx.adapters.reward_head import LEVELS, NO_GRADE
from afm_mlx.errors import DataError, shown
from afm_mlx.training.data.batches import ROW_MULTIPLE
from afm_mlx.training.data.preferences import PreferenceBatches, PreferencePair
from afm_mlx.training.data.rounding import round_up


class RewardBatch(NamedTuple):
    """A batch of P pairs: 2 P rows of L tokens, the chosen answers first, each with its prompt before it.

    Args:
        inputs: (2 P, L) int32; 0 where padded, on the right.
        lengths: (2 P,) int32: tokens of each row.
        certainty: (P,) float32: probability that the chosen answer is the better one.
        grades: (2 P, 4) int32: grades in the order of `GRADED_AXES`, or `NO_GRADE`.
        weights: (P,) float32: see `PreferenceBatch`.
    """

    inputs: mx.array
    lengths: mx.array
    certainty: mx.array
    grades: mx.array
    weights: mx.array


class RewardBatches:
    """Batches of pairs by their number; see `PreferenceBatches`, which makes their order.

    Args:
        pairs: pairs, one at least; their `grades` are checked.
        batch_size, seed, shuffle: see `PreferenceBatches`.

    Attributes:
        axes: the axes that some answer is graded for.

    Raises:
        DataError: for grades of another form.
    """

    packed = False
    unit = "pairs"

    def __init__(
        self,
        pairs: Sequence[PreferencePair],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        for pair in pairs:
            if pair.images:
                raise DataError(
                    f"{pair.where}: a prompt with images; a reward model reads text only. Leave it out."
                )
        self._grades = np.array(
            [grades_of(p.grades, p.where) for p in pairs], np.int32
        )  # (pairs, 2, 4)
        found = (self._grades != NO_GRADE).any(axis=(0, 1))
        self.axes = tuple(
            axis for axis, is_there in zip(GRADED_AXES, found, strict=True) if is_there
        )
        texts = [(pair.prompt, pair.chosen) for pair in pairs]
        texts += [(pair.prompt, pair.rejected) for pair in pairs]
        self._texts = [np.concatenate(text) for text in texts]
        self._longest = max(map(len, self._texts))
        self._batches = PreferenceBatches(
            pairs,
            batch_size=batch_size,
            max_seq_length=self._longest,
            packed=False,
            seed=seed,
            shuffle=shuffle,
        )
        self._certainty = np.array([1 if p.strength is None else p.strength for p in pairs])
        self.per_epoch, self.n_tokens = self._batches.per_epoch, self._batches.n_tokens

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._batches)

    @property
    def summary(self) -> str:
        """The numbers of pairs, tokens and graded answers, for people."""
        graded = int((self._grades != NO_GRADE).any(axis=2).sum())
        return f"{len(self):,} pairs, {self.n_tokens:,} tokens, {graded:,} graded answers"

    @property
    def layout(self) -> str:
        """The rows of a batch, for people."""
        return self._batches.layout

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows and tokens of the first batch, and 0 targets of a head."""
        return *self(0).inputs.shape, 0

    @property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal batches."""
        grades = self._grades.astype("<i4").tobytes()
        return sha256(self._batches.fingerprint.encode() + grades).hexdigest()

    def share(self, rank: int, size: int) -> RewardBatches:
        """Return the share of a rank, see `PreferenceBatches.share`."""
        found = copy.copy(self)
        found._batches = self._batches.share(rank, size)
        return found

    def __call__(self, step: int) -> RewardBatch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        pairs, weights = self._batches.samples_of(step)
        texts = [self._texts[i] for i in np.concatenate([pairs, pairs + len(self)])]
        lengths = np.array([len(text) for text in texts], np.int32)
        width = min(round_up(int(lengths.max()), ROW_MULTIPLE), self._longest)
        inputs = np.zeros((len(texts), width), np.int32)
        for row, text in zip(inputs, texts, strict=True):
            row[: len(text)] = text
        grades = self._grades[pairs].transpose(1, 0, 2).reshape(len(texts), len(GRADED_AXES))
        return RewardBatch(
            mx.array(inputs),
            mx.array(lengths),
            mx.array(self._certainty[pairs].astype(np.float32)),
            mx.array(grades),
            weights,
        )


def grades_of(value: Any, where: str) -> list[list[int]]:
    """Return the grades (2, 4) of the chosen and the rejected answer, by `GRADED_AXES`, or `NO_GRADE`.

    Raises `DataError` for another value of a record's "grades"; `where` is the record's file and line.
    """
    sides = {} if value is None else value
    is_right = isinstance(sides, dict) and sides.keys() <= {"chosen", "rejected"}
    for grades in sides.values() if is_right else ():
        is_right = is_right and isinstance(grades, dict) and grades.keys() <= {*GRADED_AXES}
        is_right = is_right and all(
            type(grade) is int and 0 <= grade < LEVELS for grade in grades.values()
        )
    if not is_right:
        raise DataError(
            f"{where}: 'grades' is {shown(value)}; allowed is "
            '{"chosen": {axis: 0, 1 or 2}, "rejected": {...}}, with the axes '
            f"{', '.join(GRADED_AXES)}."
        )
    return [
        [sides.get(side, {}).get(axis, NO_GRADE) for axis in GRADED_AXES]
        for side in ("chosen", "rejected")
    ]
