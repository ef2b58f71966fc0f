"""Training batches: samples packed into rows of one length, or one sample in each row.

A batch is a function of the seed and of its number alone, so a run that resumes sees what it would have
seen. Samples are never cut, and in an epoch each is read once; what is left over of a row, and the rows
that the last batch lacks, are padding without weight.

Packing keeps shapes the same in all steps of an epoch, and wastes few tokens. The samples of a row don't
see each other: the model masks by `segments`. Rows are laid out once, by lengths; in each epoch other
samples of the same lengths take their places, and the rows come in another order. So every epoch has the
same number of batches, whatever the shuffle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from afm_mlx.errors import DataError
from afm_mlx.training.data.samples import Sample

TARGET_MULTIPLE = 256
ROW_MULTIPLE = 64
_OPEN_ROWS = 1024  # rows that a sample may go into while they are packed
_BATCHES_SORTED = 32  # unpacked: batches whose samples are sorted by length together


class Batch(NamedTuple):
    """What one micro-batch reads and predicts: B rows, L tokens in a row, T targets.

    Args:
        inputs: (B, L) int32; 0 where padded.
        segments: (B, L) int32: in a packed row, 1, 2, ... for its samples and 0 for padding. None when
            each row is one sample with its padding on the right.
        positions: (T,) int32: indices into the flat (B * L) of tokens whose successor is scored. T is a
            multiple of 256; what fills it up is 0 in all three arrays.
        labels: (T,) int32: the successors.
        weights: (T,) float32: weights of their losses; above 0, but for what fills up.
    """

    inputs: mx.array
    segments: mx.array | None
    positions: mx.array
    labels: mx.array
    weights: mx.array


class Batches:
    """Batches by their number, over as many epochs as a run takes.

    Args:
        samples: the samples; each needs a target.
        batch_size: B, rows of a batch.
        length: L, the most input tokens of a row. A sample of n tokens has n - 1 of them.
        packed: put as many samples into a row as fit. Otherwise a row has one sample, samples of like
            length are in one batch, and L is the longest one's, rounded up to 64 (at most `length`).
        seed: seed of the shuffle; 0 or more.
        shuffle: read samples in another order in each epoch; otherwise in about the given order.

    Attributes:
        per_epoch: number of batches in an epoch.
        n_tokens: number of tokens of all samples.
        n_targets: number of tokens that are predicted.
        fill: share of the (B, L) tokens of the first epoch that is no padding.

    Raises:
        DataError: when there is no sample, or one is longer than a row or has no target.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        batch_size: int,
        length: int,
        packed: bool = True,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1 or length < 1:
            raise DataError(
                f"Batches of {batch_size} rows of {length} tokens can't be; both must be 1 or more."
            )
        if not samples:
            raise DataError("There are no samples to make batches of; at least one is needed.")
        self.batch_size, self.length, self.packed = batch_size, length, packed
        self.seed, self.shuffle = seed, shuffle
        sizes = np.array([len(sample.tokens) for sample in samples])
        self._starts = np.cumsum(sizes) - sizes
        self._inputs = sizes - 1  # input tokens of each sample
        self._tokens = np.concatenate([np.asarray(s.tokens, np.int32) for s in samples])
        self._weights = np.concatenate([np.asarray(s.weights, np.float32) for s in samples])
        reason = f"rows take at most {length + 1}, and samples are not cut. Shorten it"
        self._refuse(samples, self._inputs > length, reason)
        self._refuse(samples, self._inputs < 1, "nothing is left to predict. Remove it")
        self._targets = np.add.reduceat(self._weights > 0, self._starts, dtype=np.int32)
        self._refuse(samples, self._targets < 1, "none of them has a weight. Remove it")
        self.n_tokens, self.n_targets = len(self._tokens), int(self._targets.sum())
        self._layout = self._pack() if packed else None
        rows = len(samples) if self._layout is None else self._layout.n_rows
        self.per_epoch = -(-rows // batch_size)
        self._epoch, self._plan = 0, self._plan_epoch(0)
        cells = sum(batch_size * width for width in self._plan.widths)
        self.fill = int(self._inputs.sum()) / cells

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._starts)

    def __call__(self, step: int) -> Batch:
        """Micro-batch number `step`, counted from 0 over all epochs."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._plan_epoch(epoch)
        return self._build(self._plan, index)

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits that tell whether a run would read the same batches."""
        order = self.seed if self.shuffle else None
        digest = sha256(repr((self.batch_size, self.length, self.packed, order)).encode())
        for array in (self._tokens, self._weights, self._starts):
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def _refuse(self, samples: Sequence[Sample], bad: np.ndarray, reason: str) -> None:
        if bad.any():
            sample = samples[int(bad.argmax())]
            raise DataError(f"{sample.where}: a sample of {len(sample.tokens)} tokens; {reason}.")

    # -- planning

    def _pack(self) -> _Layout:
        """Best fit in a random order: a sample goes into the open row that it leaves the least room in."""
        order = np.arange(len(self))
        if self.shuffle:
            order = np.random.default_rng([self.seed, 0, 0]).permutation(len(self))
        lengths = self._inputs[order]
        smallest = int(lengths.min())
        open_rows: list[tuple[int, int]] = []  # (room, row), sorted
        row_of = np.empty(len(order), np.int64)
        n_rows = 0
        for slot, n in enumerate(lengths.tolist()):
            found = bisect_left(open_rows, (n, -1))
            if found < len(open_rows):
                room, row = open_rows.pop(found)
            else:
                room, row = self.length, n_rows
                n_rows += 1
            row_of[slot] = row
            if room - n >= smallest:
                insort(open_rows, (room - n, row))
                if len(open_rows) > _OPEN_ROWS:
                    del open_rows[0]
        by_row = np.argsort(row_of, kind="stable")
        bounds = np.searchsorted(row_of[by_row], np.arange(n_rows + 1))
        return _Layout(order[by_row], bounds)

    def _plan_epoch(self, epoch: int) -> _Plan:
        random = np.random.default_rng([self.seed, 1, epoch]) if self.shuffle else None
        if self._layout is None:
            samples, bounds, batches = self._plan_unpacked(random)
        else:
            samples, bounds, batches = self._plan_packed(self._layout, random)
        row_targets = np.add.reduceat(self._targets[samples], bounds[:-1])
        targets = np.array([int(row_targets[rows].sum()) for rows in batches])
        if self._layout is None:
            longest = [int(self._inputs[samples[bounds[rows]]].max()) for rows in batches]
            widths = [min(_round_up(n, ROW_MULTIPLE), self.length) for n in longest]
        else:
            widths = [self.length] * len(batches)
            targets[:] = targets.max()  # one shape for all steps
        return _Plan(
            samples, bounds, batches, widths, [_round_up(n, TARGET_MULTIPLE) for n in targets]
        )

    def _plan_packed(
        self, layout: _Layout, random: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        samples, rows = layout.samples, np.arange(layout.n_rows)
        if random is not None:
            places = np.argsort(self._inputs[samples], kind="stable")
            shuffled = random.permutation(len(self))
            exchanged = np.empty_like(samples)
            exchanged[places] = shuffled[np.argsort(self._inputs[shuffled], kind="stable")]
            samples, rows = exchanged, random.permutation(layout.n_rows)
        return samples, layout.bounds, _split(rows, self.batch_size)

    def _plan_unpacked(
        self, random: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        order = np.arange(len(self)) if random is None else random.permutation(len(self))
        windows = _split(order, self.batch_size * _BATCHES_SORTED)
        order = np.concatenate([w[np.argsort(self._inputs[w], kind="stable")] for w in windows])
        batches = _split(np.arange(len(self)), self.batch_size)
        if random is not None:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return order, np.arange(len(self) + 1), batches

    # -- building

    def _build(self, plan: _Plan, index: int) -> Batch:
        width, n_targets = plan.widths[index], plan.targets[index]
        inputs = np.zeros((self.batch_size, width), np.int32)
        segments = np.zeros((self.batch_size, width), np.int32)
        positions: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        for line, row in enumerate(plan.batches[index]):
            offset = 0
            row_samples = plan.samples[plan.bounds[row] : plan.bounds[row + 1]]
            for segment, sample in enumerate(row_samples, start=1):
                start, n = self._starts[sample], self._inputs[sample]
                inputs[line, offset : offset + n] = self._tokens[start : start + n]
                segments[line, offset : offset + n] = segment
                scored = np.flatnonzero(self._weights[start + 1 : start + 1 + n] > 0)
                positions.append(line * width + offset + scored)
                labels.append(self._tokens[start + 1 + scored])
                weights.append(self._weights[start + 1 + scored])
                offset += n
        return Batch(
            inputs=mx.array(inputs),
            segments=mx.array(segments) if self.packed else None,
            positions=_filled(positions, n_targets, np.int32),
            labels=_filled(labels, n_targets, np.int32),
            weights=_filled(weights, n_targets, np.float32),
        )


@dataclass(frozen=True)
class _Layout:
    """Rows: row r holds the samples `samples[bounds[r] : bounds[r + 1]]`."""

    samples: np.ndarray
    bounds: np.ndarray

    @property
    def n_rows(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class _Plan(_Layout):
    """An epoch: the rows of each batch, and its L and T."""

    batches: list[np.ndarray]
    widths: list[int]
    targets: list[int]


def _split(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _filled(parts: list[np.ndarray], size: int, dtype: npt.DTypeLike) -> mx.array:
    values: np.ndarray = np.zeros(size, dtype)
    joined = np.concatenate(parts)
    values[: len(joined)] = joined
    return mx.array(values)
