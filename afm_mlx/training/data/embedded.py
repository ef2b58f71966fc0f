"""The inputs of a model for a training batch: token ids, or embeddings where the batch has images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from afm_mlx.model.model import Model


def embedded(model: Model, batch: Any) -> mx.array:
    """Return a batch's ids (B, L), or embeddings (B, L, D) with its images' features; differentiable.

    The batch's `images` are as `data.batch_images` says; batches without images need not have the attribute.
    """
    images: Mapping[str, Mapping[str, mx.array]] = getattr(batch, "images", None) or {}
    if not images:
        return batch.inputs
    h = model.embed(batch.inputs)
    rows, length, width = h.shape
    flat = mx.concatenate([h.reshape(-1, width), mx.zeros((1, width), h.dtype)])  # one for padding
    for name, each in images.items():
        flat[each["places"]] = _features(model, name, each["inputs"]).astype(h.dtype)
    return flat[:-1].reshape(rows, length, width)


def _features(model: Model, name: str, inputs: mx.array) -> mx.array:
    """Return the features (N, D) of a batch's images, which are given as `name` says."""
    if name == "features":
        return inputs
    assert model.vision is not None
    if name.endswith("states"):
        return model.vision.adaptor(inputs).flatten(0, 1)
    return model.vision(model.vision.whiten(inputs)).flatten(0, 1)
