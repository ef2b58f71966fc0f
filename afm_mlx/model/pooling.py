"""Vectors of texts (embeddings), made of a model's hidden states.

    hidden_states -> pool -> normalize

`last` is the state of a text's last token, which has seen all others. It keeps the shortened prefill: reuse
blocks run for one token. `mean` is the average of all states. All functions are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import RequestError
from afm_mlx.model.model import is_afm

POOLINGS = ("last", "mean")

_TRUNKS = ("model", "transformer", "backbone")
# Models of mlx-lm whose trunk returns logits, or states before the final norm, or has no call of its own.
_NO_STATES = ("gemma3n", "gpt_neox", "lille-130m", "muse_spark", "olmo", "phixtral")


def hidden_states(
    model: nn.Module, inputs: mx.array, cache: Sequence[Any] | None = None
) -> mx.array:
    """Return the output of the final norm, (B, L, hidden_dim), for the next L tokens of every row.

    Args:
        model: an AFM `Model`, or one of mlx-lm's.
        inputs: (B, L) integers.
        cache: grows by L tokens; pass None for tokens that begin at position 0.

    Raises:
        RequestError: if a model of mlx-lm has no such states (`check_states`).
    """
    if is_afm(model):
        return model.final_norm(model.hidden(inputs, cache))
    return _trunk(model)(inputs, cache=cache)


def last_states(
    model: nn.Module, inputs: mx.array, lengths: mx.array, cache: Sequence[Any] | None = None
) -> mx.array:
    """Return the output of the final norm, (B, hidden_dim), for the last of each row's next tokens.

    Of an AFM model's reuse blocks, only these tokens run. Rows of `inputs` (B, L) are padded on the right, and
    `lengths` (B,) are integers of 1 to L; for `cache` and errors, see `hidden_states`.
    """
    if is_afm(model):
        return model.final_norm(model.hidden_last(inputs, lengths, cache))
    return _last(hidden_states(model, inputs, cache), lengths)


def _last(hidden: mx.array, lengths: mx.array) -> mx.array:
    return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def check_states(model: nn.Module) -> None:
    """Raise `RequestError` if the final norm's output can't be had from a model."""
    if not is_afm(model):
        _trunk(model)


def hidden_dim_of(model: nn.Module) -> int:
    """Return the width of a model's hidden states: the most dimensions that its embeddings can have."""
    if is_afm(model):
        return model.args.hidden_dim
    return int(hidden_states(model, mx.zeros((1, 1), mx.int32)).shape[-1])  # never computed


def _trunk(model: nn.Module) -> Any:
    """Return the part of a model of mlx-lm that ends with its final norm."""
    kind = type(model).__module__.rpartition(".")[2]
    whole: Any = model
    while "language_model" in whole:  # of a model that also sees
        whole = whole.language_model
    trunk = next((whole[name] for name in _TRUNKS if name in whole), None)
    if trunk is None or kind in _NO_STATES:
        raise RequestError(
            f"No embeddings of {kind}: mlx-lm's model doesn't return the hidden states behind its final norm."
        )
    return trunk


def pooled_states(model: nn.Module, inputs: mx.array, lengths: mx.array, pooling: str) -> mx.array:
    """Return one vector for each row of tokens, (B, D) float32: `pool` of `hidden_states`, without a cache.

    For the other arguments, see `pool`.
    """
    if pooling == "last":
        return last_states(model, inputs, lengths).astype(mx.float32)
    return pool(hidden_states(model, inputs), lengths, pooling)


def pool(hidden: mx.array, lengths: mx.array, pooling: str) -> mx.array:
    """Return one vector for each row of hidden states, (B, D) float32.

    Args:
        hidden: (B, L, D), padded on the right.
        lengths: (B,) integers of 1 or more, the tokens of each row.
        pooling: "last" or "mean".
    """
    if pooling == "last":
        return _last(hidden, lengths).astype(mx.float32)
    if pooling == "mean":
        is_token = mx.arange(hidden.shape[1]) < lengths[:, None]
        kept = mx.where(is_token[..., None], hidden.astype(mx.float32), 0)
        return kept.sum(axis=1) / lengths[:, None]
    raise ValueError(f"[pool] pooling is {pooling!r}; allowed are {' and '.join(POOLINGS)}.")


def normalize(vectors: mx.array, dimensions: int | None = None) -> mx.array:
    """Return the first `dimensions` numbers of vectors (..., D), scaled to an L2 norm of 1.

    Models that were trained for it (Matryoshka) keep most of the meaning there; pass None for all D. A vector
    of zeros becomes NaN.

    Source: Kusupati et al., "Matryoshka Representation Learning" (NeurIPS 2022).
    """
    kept = vectors[..., :dimensions]
    return kept / mx.sqrt(mx.sum(kept * kept, axis=-1, keepdims=True))
