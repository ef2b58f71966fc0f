"""Training batches: samples packed into rows of one length, or one sample in each row.

A batch depends only on the seed and its number, so a resumed run gets the same batches. Samples are never cut,
and each is in an epoch once; the rest of a row, and missing rows of the last batch, are padding without
weight.

With packing, all steps of an epoch have the same shapes, and little is padding. The samples of a row don't
attend to each other: the model masks by `segments`. Rows are laid out once, by lengths; in each epoch samples
of the same length are exchanged, and the rows are shuffled. So every epoch has the same number of batches.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.training.data.batch_images import BatchImages, SampleImages
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import Sample

TARGET_MULTIPLE = 256
ROW_MULTIPLE = 64
_OPEN_ROWS = 1024  # rows that are filled at the same time
_BATCHES_SORTED = 32  # unpacked: batches whose samples are sorted by length together

SAMPLES_OF_A_ROW = 4
"""Samples of the mean length that fit into a packed row whose length nobody has given."""


class AnyBatch(Protocol):
    """A named tuple of arrays and of trees of arrays, or None; `weights` are of what is predicted."""

    _fields: ClassVar[tuple[str, ...]]

    @property
    def weights(self) -> mx.array: ...
    def _asdict(self) -> dict[str, Any]: ...


class AnyBatches(Protocol):
    """Batches by their number, of any kind of data; see `Batches`, which is one of these, for the names."""

    per_epoch: int
    n_tokens: int

    @property
    def unit(self) -> str: ...
    @property
    def packed(self) -> bool: ...
    @property
    def summary(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __call__(self, step: int) -> Any: ...


class Batch(NamedTuple):
    """A micro-batch of B rows of L tokens, with T targets.

    Args:
        inputs: (B, L) int32; 0 where padded.
        segments: (B, L) int32: in a packed row, 1, 2, ... for its samples and 0 for padding. None when
            each row is one sample with its padding on the right.
        positions: (T,) int32: indices into the flat (B * L) of tokens whose successor is scored. T is a
            multiple of 256; padding is 0 in all three arrays.
        labels: (T,) int32: the successors.
        weights: (T,) float32: weights of their losses; above 0, except for padding.
        images: see `batch_images`; None where no sample has an image.
    """

    inputs: mx.array
    segments: mx.array | None
    positions: mx.array
    labels: mx.array
    weights: mx.array
    images: BatchImages | None = None


class Batches:
    """Batches by their number, over any number of epochs.

    Args:
        samples: samples, each with at least one target.
        batch_size: B, rows of a batch.
        length: L, maximum number of input tokens of a row. A sample of n tokens has n - 1 input tokens.
        packed: put as many samples into a row as fit. Otherwise a row has one sample, a batch has samples of
            similar length, and L is the longest sample's, rounded up to 64 (at most `length`).
        seed: seed of the shuffle; 0 or more.
        shuffle: shuffle the samples in each epoch; otherwise they are in about the given order.

    Attributes:
        images: the samples' images, and as what a batch has them.
        per_epoch: number of batches in an epoch.
        n_tokens: number of tokens of all samples.
        n_targets: number of tokens that are predicted.
        fill: share of the first epoch's (B, L) tokens that are no padding.

    Raises:
        DataError: when there are no samples, or one is longer than a row or has no target.
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
                f"Batches of {batch_size} rows of {length} tokens are impossible; both must be 1 or more."
            )
        if not samples:
            raise DataError("There are no samples to make batches from; at least one is needed.")
        self.batch_size, self.length, self.packed = batch_size, length, packed
        self.seed, self.shuffle = seed, shuffle
        self._rows = slice(None)  # of each batch
        sizes = np.array([len(sample.tokens) for sample in samples])
        self._starts = np.cumsum(sizes) - sizes
        self._inputs = sizes - 1  # input tokens of each sample
        self.images = SampleImages([sample.images for sample in samples])
        self._tokens = np.concatenate([np.asarray(s.tokens, np.int32) for s in samples])
        self._weights = np.concatenate([np.asarray(s.weights, np.float32) for s in samples])
        reason = f"rows take at most {length + 1}, and samples are not cut. Shorten it"
        _refuse(samples, self._inputs > length, reason)
        _refuse(samples, self._inputs < 1, "nothing is left to predict. Remove it")
        self._targets = np.add.reduceat(self._weights > 0, self._starts, dtype=np.int32)
        _refuse(samples, self._targets < 1, "none of them has a weight. Remove it")
        self.n_tokens, self.n_targets = len(self._tokens), int(self._targets.sum())
        # Row r holds the samples `order[bounds[r] : bounds[r + 1]]`.
        self._order, self._bounds = self._pack()
        self._epoch, self._plan = 0, self._plan_epoch(0)
        self.per_epoch = len(self._plan.batches)
        self.fill = int(self._inputs.sum()) / (batch_size * sum(self._plan.widths))

    unit = "tokens"
    """What is predicted."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._starts)

    @property
    def summary(self) -> str:
        """The numbers of samples and tokens, for people."""
        return (
            f"{len(self):,} samples, {self.n_tokens:,} tokens, {self.n_targets:,} of them predicted"
        )

    @property
    def layout(self) -> str:
        """The rows of a batch, for people."""
        kind = "packed rows" if self.packed else "rows of one sample"
        return f"{self.batch_size} {kind} of up to {self.length:,} tokens, {self.fill:.1%} full"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, tokens of a row and targets of the first batch: B, L and T."""
        batch = self(0)
        rows, length = batch.inputs.shape
        return rows, length, batch.labels.size

    def share(self, rank: int, size: int) -> Batches:
        """Return the same batches with every row number `rank + i * size` alone, for i = 0, 1, ...

        A batch that has no such row is padding. Raises `ConfigError` when no batch has a row for each rank.
        """
        check_rows(self.batch_size, size)
        found = copy.copy(self)
        found._rows = slice(rank, None, size)
        found._epoch, found._plan = 0, found._plan_epoch(0)
        return found

    def __call__(self, step: int) -> Batch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        placed = self.placed(step)
        plan, index = self._plan, step % self.per_epoch
        width = plan.widths[index]
        rows = len(range(self.batch_size)[:: self._rows.step])
        inputs, segments = np.zeros((2, rows, width), np.int32)
        positions, labels = np.zeros((2, plan.targets[index]), np.int32)
        weights = np.zeros(plan.targets[index], np.float32)
        done = 0
        for line, offset, sample in placed:
            start, n = self._starts[sample], self._inputs[sample]
            inputs[line, offset : offset + n] = self._tokens[start : start + n]
            # Samples of a row are numbered from 1.
            segments[line, offset : offset + n] = segments[line, offset - 1] + 1 if offset else 1
            scored = np.flatnonzero(self._weights[start + 1 : start + 1 + n] > 0)
            target = slice(done, done + len(scored))
            positions[target] = line * width + offset + scored
            labels[target] = self._tokens[start + 1 + scored]
            weights[target] = self._weights[start + 1 + scored]
            done = target.stop
        images = self.images.of_batch(
            ((line * width + offset, sample) for line, offset, sample in placed), rows * width
        )
        return Batch(
            mx.array(inputs),
            mx.array(segments) if self.packed else None,  # rows of one sample need none
            mx.array(positions),
            mx.array(labels),
            mx.array(weights),
            images,
        )

    def placed(self, step: int) -> list[tuple[int, int, int]]:
        """Return the row, the first token in it, and the index of each sample of micro-batch `step`."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._plan_epoch(epoch)
        found = []
        for line, row in enumerate(self._plan.batches[index]):
            offset = 0
            for sample in self._plan.order[self._bounds[row] : self._bounds[row + 1]].tolist():
                found.append((line, offset, sample))
                offset += int(self._inputs[sample])
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal batches."""
        order = self.seed if self.shuffle else None
        digest = sha256(repr((self.batch_size, self.length, self.packed, order)).encode())
        for array in (self._tokens, self._weights, self._starts):
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        digest.update(self.images.fingerprint.encode())
        return digest.hexdigest()

    def _pack(self) -> tuple[np.ndarray, np.ndarray]:
        """Assign samples to rows: best fit, in a random order; unpacked, one sample to a row."""
        order = np.arange(len(self))
        if not self.packed:
            return order, np.arange(len(self) + 1)
        if self.shuffle:
            order = np.random.default_rng([self.seed, 0, 0]).permutation(len(self))
        lengths = self._inputs[order]
        smallest = int(lengths.min())
        open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
        row_of = np.empty(len(order), np.int64)
        n_rows = 0
        for i, n in enumerate(lengths.tolist()):
            found = bisect_left(open_rows, (n, -1))
            if found < len(open_rows):
                free, row = open_rows.pop(found)
            else:
                free, row = self.length, n_rows
                n_rows += 1
            row_of[i] = row
            if free - n >= smallest:
                insort(open_rows, (free - n, row))
                if len(open_rows) > _OPEN_ROWS:
                    del open_rows[0]
        by_row = np.argsort(row_of, kind="stable")
        return order[by_row], np.searchsorted(row_of[by_row], np.arange(n_rows + 1))

    def _plan_epoch(self, epoch: int) -> _Plan:
        random = np.random.default_rng([self.seed, 1, epoch]) if self.shuffle else None
        order = self._order
        if self.packed:
            rows = np.arange(len(self._bounds) - 1)
            if (
                random is not None
            ):  # exchange samples of equal length between rows, and shuffle the rows
                by_length = np.argsort(self._inputs[order], kind="stable")
                shuffled = random.permutation(len(self))
                order = np.empty_like(order)
                order[by_length] = shuffled[np.argsort(self._inputs[shuffled], kind="stable")]
                rows = random.permutation(len(rows))
            batches = _split(rows, self.batch_size)
        else:  # sort by length within windows of several batches, and shuffle the batches
            order = order if random is None else random.permutation(len(self))
            order = sorted_by_length(order, self._inputs, self.batch_size)
            batches = _split(np.arange(len(self)), self.batch_size)
            if random is not None:
                batches = [batches[i] for i in random.permutation(len(batches))]
        batches = [rows[self._rows] for rows in batches]
        targets = np.add.reduceat(self._targets[order], self._bounds[:-1])
        widths, sizes = [self.length] * len(batches), [targets[rows].sum() for rows in batches]
        if self.packed:
            sizes = [max(sizes)] * len(batches)  # one shape for all steps
        else:
            longest = [int(self._inputs[order[rows]].max(initial=1)) for rows in batches]
            widths = [min(round_up(n, ROW_MULTIPLE), self.length) for n in longest]
        sizes = [round_up(max(int(n), 1), TARGET_MULTIPLE) for n in sizes]
        return _Plan(order, batches, widths, sizes)


class _Plan(NamedTuple):
    """The layout of an epoch: the samples in the order of their rows; the rows, L and T of each batch."""

    order: np.ndarray
    batches: list[np.ndarray]
    widths: list[int]
    targets: list[int]


def _refuse(samples: Sequence[Sample], bad: np.ndarray, reason: str) -> None:
    if bad.any():
        sample = samples[int(bad.argmax())]
        raise DataError(f"{sample.where}: a sample of {len(sample.tokens)} tokens; {reason}.")


def _split(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def sorted_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> np.ndarray:
    """Sort the samples of an epoch by length within windows of several batches, whose rows are then alike.

    `order` (n,) are indices of samples, and `lengths` the lengths by index.
    """
    windows = _split(order, batch_size * _BATCHES_SORTED)
    return np.concatenate([w[np.argsort(lengths[w], kind="stable")] for w in windows])


def check_rows(batch_size: int, ranks: int) -> None:
    """Raise `ConfigError` if a batch has fewer rows than there are ranks to split it."""
    if batch_size < ranks:
        raise ConfigError(
            f"batch_size is {batch_size}, and {ranks} ranks split each batch; allowed are {ranks} and more. "
            "Use larger batches (--batch-size), or fewer ranks."
        )
