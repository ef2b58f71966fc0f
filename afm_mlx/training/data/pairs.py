"""Pairs of a query and the text that answers it: JSONL to token ids, and batches for contrastive training.

    {"query": ..., "positive": ..., "negative"?: [...]}

All texts of a batch are candidates for each of its queries: the positives of other pairs, and all hard
negatives. Another positive of the same query is no candidate, nor is a text that equals the pair's positive.

A batch's texts are sorted by length and computed in groups, so that little is padding. Like `batches.Batches`,
a batch depends only on the seed and its number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.errors import AFMError, DataError, shown
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import read_records

WIDTH_MULTIPLE = 16
GROUP_ROWS = 32
"""Texts of a group, where memory allows all groups of a batch at a time."""

PAIR_FORM = '{"query": ..., "positive": ..., "negative"?: [...]}'

Encode = Callable[[str, bool], list[int]]
"""Maps a text, and whether it is a query, to token ids."""


@dataclass(frozen=True)
class Pair:
    """A query, the text that answers it, and texts that don't; `where` is "file:line"."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    where: str


def load_pairs(path: str | Path, split: str) -> list[Pair]:
    """Read a split of a data set of pairs, in the files that `samples.load_split` takes.

    Raises `DataError`, which names the first lines that can't be used, with reasons.
    """
    return read_records(path, split, lambda record, where: [_pair(record, where)], PAIR_FORM)


def _pair(record: object, where: str) -> Pair:
    keys = {"query", "positive"}
    if not isinstance(record, dict) or not keys <= record.keys() <= keys | {"negative"}:
        found = (
            f"has the keys {', '.join(record) or 'none'}" if isinstance(record, dict) else "is none"
        )
        raise DataError(f"a pair is {PAIR_FORM}, and this {found}.")
    negatives = record.get("negative")
    if negatives is None or isinstance(negatives, str):
        negatives = [] if negatives is None else [negatives]
    if not isinstance(negatives, list):
        raise DataError(f"'negative' is {shown(negatives)}; a list of texts is needed.")
    texts = [("query", record["query"]), ("positive", record["positive"])]
    texts += [(f"negative[{i}]", text) for i, text in enumerate(negatives)]
    for name, text in texts:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{name!r} is {shown(text)}; a text that is not empty is needed.")
    if record["positive"] in negatives:
        raise DataError("the positive is also a negative. Remove it from one of them.")
    return Pair(record["query"], record["positive"], tuple(negatives), where)


class PairBatch(NamedTuple):
    """A batch of B pairs with C candidates, the first B of which are the pairs' positives.

    Args:
        tokens: of each group of texts, (R, L) int32, padded on the right by 0; L is a multiple of 16.
        lengths: of each group, (R,) int32: tokens of each text.
        rows: (B + C,) int32: indices of the queries, then of the candidates, into the groups' texts.
        excluded: (B, C) bool: candidates that a query is not compared with.
        weights: (B,) float32: ones.
    """

    tokens: list[mx.array]
    lengths: list[mx.array]
    rows: mx.array
    excluded: mx.array
    weights: mx.array


class PairBatches:
    """Batches of pairs by their number, over any number of epochs.

    Args:
        pairs: one at least.
        encode: see `Encode`.
        batch_size: most pairs of a batch. The pairs of an epoch are spread evenly over its batches.
        max_seq_length: most tokens of a text.
        group_rows: most texts of a group, if one group at a time is in memory; None for groups of 32 which are
            there together.
        seed: seed of the shuffle; 0 or more.
        shuffle: shuffle the pairs in each epoch.

    Attributes:
        per_epoch: number of batches in an epoch.
        n_tokens: number of tokens of all texts, each counted once.
        length: most tokens of a text, rounded up to 16.
        positives: the positives of each query, all as numbers of texts.

    Raises:
        DataError: for a text that is too long or can't be encoded, and where no query has a second candidate.
    """

    packed = False
    unit = "pairs"
    """What is predicted: which positive belongs to a query."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        encode: Encode,
        *,
        batch_size: int,
        max_seq_length: int,
        group_rows: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.batch_size, self.group_rows = batch_size, group_rows
        self.seed, self.shuffle = seed, shuffle
        self._numbers: dict[tuple[str, bool], int] = {}  # of a text, and whether it is a query
        self._tokens: list[np.ndarray] = []
        self._pairs: list[tuple[int, list[int]]] = []  # a query, its positive and negatives
        self.positives: dict[int, set[int]] = defaultdict(set)
        for pair in pairs:
            try:
                query = self._number(pair.query, True, encode, max_seq_length)
                candidates = [
                    self._number(text, False, encode, max_seq_length)
                    for text in (pair.positive, *pair.negatives)
                ]
            except AFMError as error:
                raise DataError(f"{pair.where}: {error}") from None
            self._pairs.append((query, candidates))
            self.positives[query].add(candidates[0])
        if len({text for _, candidates in self._pairs for text in candidates}) < 2:
            raise DataError(
                "All pairs have one and the same text, so that there is nothing to tell apart."
            )
        self.per_epoch = -(-len(pairs) // batch_size)
        self.n_tokens = sum(map(len, self._tokens))
        self.length = round_up(max(map(len, self._tokens)), WIDTH_MULTIPLE)
        self._epoch, self._plan = -1, [np.arange(0)]

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._pairs)

    @property
    def summary(self) -> str:
        """The numbers of pairs, tokens and negatives, for people."""
        negatives = sum(len(candidates) - 1 for _, candidates in self._pairs)
        return f"{len(self):,} pairs, {self.n_tokens:,} tokens, {negatives:,} hard negatives"

    @property
    def layout(self) -> str:
        """The texts of a batch, for people."""
        return f"{self.batch_size} pairs, texts of up to {self.length:,} tokens"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows and tokens of what is in memory at a time of the first batch, and 0 targets of a head."""
        rows = sum(map(len, self.texts(0)))
        return min(self.group_rows or rows, rows), self.length, 0

    @cached_property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal batches."""
        order = self.seed if self.shuffle else None
        digest = sha256(repr((self.batch_size, self.group_rows, order, self._pairs)).encode())
        for tokens in self._tokens:
            digest.update(tokens.astype("<i4").tobytes() + b";")
        return digest.hexdigest()

    def texts(self, step: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the queries (B) and candidates (C) of a batch; equal texts have one number."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            order = np.arange(len(self))
            if self.shuffle:
                order = np.random.default_rng([self.seed, 2, epoch]).permutation(order)
            self._epoch, self._plan = epoch, np.array_split(order, self.per_epoch)
        chosen = [self._pairs[i] for i in self._plan[index]]
        negatives = [text for _, candidates in chosen for text in candidates[1:]]
        return [query for query, _ in chosen], [c[0] for _, c in chosen] + negatives

    def __call__(self, step: int) -> PairBatch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        queries, candidates = self.texts(step)
        texts = np.array(queries + candidates)
        lengths = np.array([len(self._tokens[text]) for text in texts])
        order = np.argsort(lengths, kind="stable")
        rows = np.empty(len(texts), np.int32)
        rows[order] = np.arange(len(texts))
        tokens = []
        size = self.group_rows or GROUP_ROWS
        for start in range(0, len(order), size):
            group = order[start : start + size]
            width = round_up(int(lengths[group[-1]]), WIDTH_MULTIPLE)
            padded = np.zeros((len(group), width), np.int32)
            for row, index in zip(padded, group, strict=True):
                row[: lengths[index]] = self._tokens[texts[index]]
            tokens.append((mx.array(padded), mx.array(lengths[group].astype(np.int32))))
        excluded = np.array(
            [
                [
                    other != i and text in self.positives[query]
                    for other, text in enumerate(candidates)
                ]
                for i, query in enumerate(queries)
            ]
        )
        return PairBatch(
            [each for each, _ in tokens],
            [each for _, each in tokens],
            mx.array(rows),
            mx.array(excluded),
            mx.ones(len(queries)),
        )

    def _number(self, text: str, is_query: bool, encode: Encode, most: int) -> int:
        """Return the number of a text; a new one is encoded first."""
        number = self._numbers.get((text, is_query))
        if number is None:
            tokens = np.array(encode(text, is_query), np.int32)
            if len(tokens) > most:
                raise DataError(
                    f"a text of {len(tokens)} tokens, and max_seq_length is {most}. Texts are not cut: shorten "
                    "it, or raise max_seq_length."
                )
            number = self._numbers[text, is_query] = len(self._tokens)
            self._tokens.append(tokens)
        return number
