"""Batches of preference pairs for a reward model: whole texts, how sure each preference is, and grades.

    {"prompt": ..., "chosen": ..., "rejected": ..., "strength"?: ...,
     "grades"?: {"chosen": {"truthfulness": 2, ...}, "rejected": {...}}}

A grade is 0, 1 or 2, from worst to best, for any of `GRADED_AXES`. A pair without a strength counts as certain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import GRADED_AXES
from afm_mlx.adapters.reward_head import LEVELS, NO_GRADE
from afm_mlx.errors import DataError, shown
from afm_mlx.training.data.preferences import PreferenceBatches, PreferencePair


class RewardBatch(NamedTuple):
    """A batch of P pairs: 2 P rows of L tokens, the chosen answers first, each with its prompt before it.

    Args:
        inputs: (2 P, L) int32; 0 where padded, on the right.
        lengths: (2 P,) int32: tokens of each row.
        certainty: (P,) float32: probability that the chosen answer is the better one.
        grades: (2 P, 4) int32: grades in the order of `GRADED_AXES`, or `NO_GRADE`.
        weights: (P,) float32: ones.
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
        self._grades = np.array(
            [grades_of(p.grades, p.where) for p in pairs], np.int32
        )  # (pairs, 2, 4)
        found = (self._grades != NO_GRADE).any(axis=(0, 1))
        self.axes = tuple(
            axis for axis, is_there in zip(GRADED_AXES, found, strict=True) if is_there
        )
        # A batch's inputs lack each answer's last token, whose state is wanted here: it stands there twice.
        whole = [
            dataclasses.replace(
                pair,
                chosen=np.append(pair.chosen, pair.chosen[-1]),
                rejected=np.append(pair.rejected, pair.rejected[-1]),
            )
            for pair in pairs
        ]
        longest = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in whole)
        self._batches = PreferenceBatches(
            whole,
            batch_size=batch_size,
            max_seq_length=longest,
            packed=False,
            seed=seed,
            shuffle=shuffle,
        )
        # Of all chosen answers' tokens, a pair's are the ones before its border.
        self._borders = np.cumsum([len(pair.chosen) for pair in whole])
        self.per_epoch = self._batches.per_epoch
        self.n_tokens = self._batches.n_tokens - 2 * len(pairs)

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
        rows, length, _ = self._batches.shape
        return rows, length, 0

    @property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal batches."""
        grades = self._grades.astype("<i4").tobytes()
        return sha256(self._batches.fingerprint.encode() + grades).hexdigest()

    def __call__(self, step: int) -> RewardBatch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        batch = self._batches(step)
        count = batch.weights.size
        answers, numbers, positions = map(np.array, (batch.answers, batch.numbers, batch.positions))
        # The targets of an answer are neighbours.
        last = np.searchsorted(answers, np.arange(2 * count), side="right") - 1
        pairs = np.searchsorted(self._borders, numbers[last[:count]], side="right")
        grades = self._grades[pairs].transpose(1, 0, 2).reshape(2 * count, len(GRADED_AXES))
        lengths = positions[last] % batch.inputs.shape[1] + 1
        return RewardBatch(
            batch.inputs,
            mx.array(lengths.astype(np.int32)),
            batch.strengths,
            mx.array(grades),
            batch.weights,
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
