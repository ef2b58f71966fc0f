"""Batches for Instruction-Following Pruning: which prompt's mask each token runs with.

Two stages share the form of a batch:

- "chunk", for continued pre-training: a sample is cut into chunks, and the tokens of chunk k + 1 are predicted
  with the mask of chunk k. The first chunk runs with its own mask and is not predicted, since that mask knows
  its tokens.
- "prompt", for fine-tuning: all tokens of a chat run with the mask of its first prompt: what is before the
  assistant's first answer, with the start of that answer, as at inference.

Source: arXiv 2501.02086, section 3. There all tokens before a predicted one have its mask; here tokens of
earlier chunks keep their own, so that a text takes one pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.tokenizer.first_prompt import first_prompt
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.training.data.batches import ROW_MULTIPLE, Batch, Batches
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import Sample

STAGES = ("chunk", "prompt")
CHUNK = 256
"""Default tokens of a chunk."""

_PROMPTS_MULTIPLE = 16


class MaskBatch(NamedTuple):
    """A `Batch` of B rows of L tokens with the M prompts that choose its masks.

    Args:
        inputs, segments, positions, labels, weights: see `Batch`.
        prompts: (M, P) int32, padded on the right; unused rows are a token 0.
        lengths: (M,) int32, tokens of each prompt, 1 or more.
        is_prompt: (M,) bool, False for unused rows.
        mask_of: (B, L) int32, the prompt whose mask a token runs with; 0 where padded.
    """

    inputs: mx.array
    segments: mx.array | None
    positions: mx.array
    labels: mx.array
    weights: mx.array
    prompts: mx.array
    lengths: mx.array
    is_prompt: mx.array
    mask_of: mx.array

    @property
    def batch(self) -> Batch:
        return Batch(*self[:5])


class _Prompts(NamedTuple):
    """A sample's prompts as spans of its tokens, and the first input token that runs with each one's mask."""

    spans: list[tuple[int, int]]
    starts: list[int]


class MaskBatches:
    """`MaskBatch`es by their number, in the order and rows of `Batches`.

    Args:
        samples: samples of one stage.
        stage: one of `STAGES`.
        tokenizer: finds the first prompt of chats.
        chunk: most tokens of a chunk; a sample of fewer than two chunks is cut in the middle.
        options: further arguments of `Batches`.

    Raises:
        ConfigError: for another stage, or a chunk of less than a token.
        DataError: names a sample that has no prompt, or no target behind its first chunk.
    """

    unit = Batches.unit

    def __init__(
        self,
        samples: Sequence[Sample],
        stage: str,
        tokenizer: Tokenizer,
        chunk: int = CHUNK,
        **options: object,
    ):
        if stage not in STAGES:
            raise ConfigError(f"The stage is {stage!r}; allowed are {' and '.join(STAGES)}.")
        if chunk < 1:
            raise ConfigError(
                f"A chunk of {chunk} tokens can't choose a mask; allowed are 1 and more."
            )
        for sample in samples:
            if sample.images:
                raise DataError(
                    f"{sample.where}: a chat with images; masks are chosen by text. Leave it out."
                )
        if stage == "chunk":
            cut = [_chunks(sample, chunk) for sample in samples]
            samples = [sample for sample, _ in cut]
            self._prompts = [prompts for _, prompts in cut]
        else:
            self._prompts = [_first_prompt(sample, tokenizer) for sample in samples]
        self._tokens = [np.asarray(sample.tokens, np.int32) for sample in samples]
        self._of = (stage, chunk if stage == "chunk" else None)
        self._batches = Batches(samples, **options)  # type: ignore[arg-type]
        self.per_epoch, self.n_tokens = self._batches.per_epoch, self._batches.n_tokens

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def packed(self) -> bool:
        return self._batches.packed

    @property
    def summary(self) -> str:
        count = sum(len(prompts.spans) for prompts in self._prompts)
        return f"{self._batches.summary}; {count:,} masks"

    @property
    def layout(self) -> str:
        return self._batches.layout

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._batches.shape

    @property
    def prompts_shape(self) -> tuple[int, int]:
        """The mean number of prompts of a batch, and the tokens of the longest prompt, both padded."""
        lengths = [last - first for own in self._prompts for first, last in own.spans]
        count = math.ceil(len(lengths) / self.per_epoch)
        return round_up(count, _PROMPTS_MULTIPLE), round_up(max(lengths), ROW_MULTIPLE)

    @cached_property
    def fingerprint(self) -> str:
        return sha256(repr((self._batches.fingerprint, self._of)).encode()).hexdigest()

    def __call__(self, step: int) -> MaskBatch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        batch = self._batches(step)
        mask_of = np.zeros(batch.inputs.shape, np.int32)
        prompts: list[np.ndarray] = []
        for row, offset, index in self._batches.placed(step):
            tokens, own = self._tokens[index], self._prompts[index]
            bounds = [*own.starts, len(tokens) - 1]
            for (first, last), (start, end) in zip(own.spans, pairwise(bounds), strict=True):
                mask_of[row, offset + start : offset + end] = len(prompts)
                prompts.append(tokens[first:last])
        width = round_up(max(map(len, prompts)), ROW_MULTIPLE)
        padded = np.zeros((round_up(len(prompts), _PROMPTS_MULTIPLE), width), np.int32)
        lengths = np.ones(len(padded), np.int32)
        for line, prompt in enumerate(prompts):
            padded[line, : len(prompt)] = prompt
            lengths[line] = len(prompt)
        is_prompt = np.arange(len(padded)) < len(prompts)
        arrays = map(mx.array, (padded, lengths, is_prompt, mask_of))
        return MaskBatch(*batch[:5], *arrays)


def _chunks(sample: Sample, chunk: int) -> tuple[Sample, _Prompts]:
    """Return a sample without targets in its first chunk, and its chunks but the last as prompts."""
    n = len(sample.tokens)
    size = min(chunk, (n + 1) // 2)
    weights = np.array(sample.weights, np.float32)
    weights[:size] = 0
    if not weights.any():
        raise DataError(
            f"{sample.where}: all targets are among the first {size} tokens, whose mask is not chosen by "
            "tokens before them. Take a smaller chunk, or remove the line."
        )
    edges = [*range(0, n, size), n]
    # The token before a chunk predicts the chunk's first one, so it runs with the chunk's mask.
    starts = [0, *(edge - 1 for edge in edges[2:-1])]
    return dataclasses.replace(sample, weights=weights), _Prompts(
        list(pairwise(edges[:-1])), starts
    )


def _first_prompt(sample: Sample, tokenizer: Tokenizer) -> _Prompts:
    end = first_prompt(sample.tokens, tokenizer)
    if end is None:
        raise DataError(
            f"{sample.where}: a text has no prompt that chooses its mask. Give chats, or train on texts in the "
            "stage before (--ifp-stage chunk)."
        )
    return _Prompts([(0, end)], [0])
