"""The contrastive loss of embeddings (InfoNCE), with in-batch negatives and in small memory.

    s(q, d) = cos(q, d) / T
    L(i)    = -log  exp s(q_i, d_i)  /  sum over candidates d of  exp s(q_i, d)

where d_i is the positive of query q_i. With both directions, L(i) is the mean of this and of the same for d_i
among all queries. With several dimensions m (Matryoshka), it is the sum over m of the losses of the vectors'
first m numbers.

`cached` saves memory (Gao et al. 2021, arXiv 2101.06983, "GradCache"): a group of texts keeps nothing but its
vectors; the gradient of the vectors is computed from the whole batch, and then each group runs again for the
gradients of the weights, one group after the other. The gradients equal the plain batch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import ConfigError
from afm_mlx.model.pooling import POOLINGS, normalize, pooled_states
from afm_mlx.training.data.pairs import PairBatch, PairBatches
from afm_mlx.training.loop.gradient_checkpointing import Tree, recomputed


@dataclass(frozen=True)
class ContrastiveLoss:
    """The sum of InfoNCE over the pairs of a batch; see the module's formula.

    Args:
        pooling: "last" or "mean", see `model.pooling.pool`.
        temperature: T > 0.
        dimensions: lengths of the vectors' beginnings whose losses are added; None for the whole width and its
            halves down to 64.
        both_directions: also find the query of each positive.
        cached: compute the groups of a batch twice, and keep the activations of one group at a time. The model
            must give the same numbers both times: it has no dropout.

    Raises:
        ConfigError: for an argument out of range.
    """

    pooling: str = "last"
    temperature: float = 0.05
    dimensions: tuple[int, ...] | None = None
    both_directions: bool = False
    cached: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ConfigError(
                f"The pooling is {self.pooling!r}; allowed are {' and '.join(map(repr, POOLINGS))}."
            )
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"The temperature is {self.temperature}; allowed are numbers over 0, 0.02 to 0.1 as a rule."
            )
        given = self.dimensions
        if given is not None and (not given or min(given) < 1 or len(set(given)) < len(given)):
            raise ConfigError(
                f"dimensions are {list(given)}; allowed are different numbers from 1."
            )

    def __call__(self, model: nn.Module, batch: PairBatch) -> mx.array:
        vectors, after = self._vectors(model, batch)
        count = batch.weights.size
        total = after
        for m in self.lengths(vectors.shape[-1]):
            unit = normalize(vectors, m)
            scores = (unit[:count] @ unit[count:].T) / self.temperature
            losses = info_nce(scores, batch.excluded, self.both_directions)
            total = total + mx.sum(batch.weights * losses)
        return total

    def split_metrics(
        self, model: nn.Module, batches: PairBatches, count: int = -1
    ) -> dict[str, float]:
        return {"recall_at_1": self.recall_at_1(model, batches, count)}

    def recall_at_1(self, model: nn.Module, batches: PairBatches, count: int = -1) -> float:
        """Return the share of queries for which a positive is the most similar of all texts.

        Queries and texts are taken from the first `count` batches, or all for -1; vectors are whole. The model
        is in eval mode afterwards.
        """
        model.eval()
        queries: list[int] = []
        asked: list[mx.array] = []
        texts: dict[int, mx.array] = {}
        n = batches.per_epoch if count == -1 else min(count, batches.per_epoch)
        for step in range(n):
            vectors = normalize(self._vectors(model, batches(step))[0])
            mx.eval(vectors)
            numbers, candidates = batches.texts(step)
            queries += numbers
            asked.append(vectors[: len(numbers)])
            texts |= dict(zip(candidates, vectors[len(numbers) :], strict=True))
        scores = mx.concatenate(asked) @ mx.stack(list(texts.values())).T
        numbers = list(texts)
        found = [numbers[i] for i in mx.argmax(scores, axis=-1).tolist()]
        hits = [
            text in batches.positives[query] for query, text in zip(queries, found, strict=True)
        ]
        return sum(hits) / len(hits)

    def _vectors(self, model: nn.Module, batch: PairBatch) -> tuple[mx.array, mx.array]:
        """Return the vectors of queries and candidates, (B + C, D) float32, and a 0 to add to the loss.

        The 0 orders the groups: it is an input and an output of each, so that forward passes run one after the
        other, and so do backward passes, in the reverse order.
        """
        parts, after = [], mx.array(0.0)
        parameters = model.trainable_parameters()

        def embed(
            parameters: Tree, tokens: mx.array, lengths: mx.array, after: mx.array
        ) -> tuple[mx.array, mx.array]:
            before = model.trainable_parameters()
            model.update(parameters)
            try:
                tokens = mx.stop_gradient(mx.depends([tokens], [after])[0])
                found = pooled_states(model, tokens, lengths, self.pooling)
                return found, mx.depends([after], [found])[0]
            finally:
                # The model must not keep traced arrays.
                model.update(before)

        for tokens, lengths in zip(batch.tokens, batch.lengths, strict=True):
            if self.cached:
                found, after = recomputed(embed)(parameters, tokens, lengths, after)
            else:
                found = pooled_states(model, tokens, lengths, self.pooling)
            parts.append(found)
        return mx.concatenate(parts)[batch.rows], after

    def lengths(self, width: int) -> Sequence[int]:
        """Return the lengths whose losses are added, for vectors of `width` numbers."""
        if self.dimensions is None:
            return [
                m for m in (width >> i for i in range(width.bit_length())) if m == width or m >= 64
            ]
        if max(self.dimensions) > width:
            raise ConfigError(
                f"dimensions are {list(self.dimensions)}, and the model's vectors have {width} numbers; "
                f"allowed are 1 to {width}."
            )
        return self.dimensions


def info_nce(scores: mx.array, excluded: mx.array, both_directions: bool = False) -> mx.array:
    """Return the losses (B,) of queries, from scores (B, C), the first B candidates being the positives.

    `excluded` (B, C), bool, marks candidates that a query is not compared with; never its own positive.
    """
    scores = mx.where(excluded, -mx.inf, scores)
    own = mx.diagonal(scores)
    losses = mx.logsumexp(scores, axis=1) - own
    if both_directions:
        back = mx.logsumexp(scores[:, : len(own)], axis=0) - own
        losses = (losses + back) / 2
    return losses
