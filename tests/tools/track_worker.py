"""A rank with its share of a PT-MoE model's tracks: logits, gradients, and the exchanges of a forward pass."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from afm_mlx.kernels import dispatch
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.tracks import random_tracks


def made(config: Any, packed: bool) -> Any:
    """The model, 8-bit if `packed`."""
    model = random_tracks(config, 5)
    if packed:
        quantize_model(model, {}, QuantizationRule(8, "affine", "group", 32))
    return model.eval()


def results(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits at once, and in chunks past the window; and gradients of a float model.

    Packed layers run by the reference: kernels round in an order that depends on the number of tracks.
    """
    with dispatch.force("reference"):
        return _results(model, tokens)


def _results(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    at_once = model(mx.array(tokens))
    cache, parts = make_prompt_cache(model), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, tokens.shape[1])):
        parts.append(model(mx.array(tokens[:, start:stop]), cache))
    found = {"at once": at_once, "in chunks": mx.concatenate(parts, axis=1)}
    if model.model.embed_tokens.weight.dtype == mx.float32:

        def loss(model: Any) -> mx.array:
            logits = model(mx.array(tokens[:, :-1]))
            return nn.losses.cross_entropy(logits, mx.array(tokens[:, 1:]), reduction="mean")

        found |= tree_flatten(nn.value_and_grad(model, loss)(model)[1], destination={})
    return {name: np.array(array) for name, array in found.items()}


def main(folder: Path) -> None:
    tokens, jobs = pickle.loads((folder / "jobs").read_bytes())
    group, found = mx.distributed.init(strict=True, backend="ring"), []
    for job in jobs:
        model = made(*job)
        model.shard(group)
        counted = mock.patch.object(mx.distributed, "all_sum", wraps=mx.distributed.all_sum)
        with counted as exchanges:
            mx.eval(model(mx.array(tokens)))
        found.append({"exchanges": exchanges.call_count, **results(model, tokens)})
    (folder / f"rank-{group.rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
