"""What a method trains of a model that takes images, and what its batches then hold of the images.

Whatever comes before the first trained part is computed once for each picture: features of images if only the
text model is trained, the encoder's states if the adaptor is. Pictures are known by their digests.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.adapters.target_modules import ADAPTOR, ENCODER, PARTS, TEXT
from afm_mlx.errors import ConfigError
from afm_mlx.model.model import Model, is_afm
from afm_mlx.training.data.batches import AnyBatches, Batches
from afm_mlx.training.data.preferences import PreferenceBatches
from afm_mlx.training.loop.trainer import OnEvent, Preparing
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import DataSplits
from afm_mlx.vision.prompt_image import PromptImage

_T = TypeVar("_T", bound="AnyBatches | None")


def check_parts(parts: Sequence[str], source: ModelSource) -> None:
    """Raise `ConfigError` unless a model has all of some parts, one at least."""
    if not parts or len(set(parts)) < len(parts) or not set(parts) <= set(PARTS):
        raise ConfigError(
            f"train_parts is {', '.join(parts) or 'empty'}; allowed are {', '.join(PARTS)}, each once."
        )
    if set(parts) - {TEXT} and not (source.is_afm and source.values.get("vision_config")):
        raise ConfigError(
            f"train_parts is {', '.join(parts)}, and {source.folder} reads text only. Leave it out, or choose "
            "a model with a vision part."
        )


def freeze_others(model: nn.Module, parts: Sequence[str]) -> None:
    """Freeze the parts of a model that are not among `parts`, in place; the others stay as they are."""
    if not is_afm(model) or model.vision is None:
        return
    vision = model.vision
    modules: dict[str, nn.Module] = {
        TEXT: model.model,
        ADAPTOR: vision.adaptor,
        ENCODER: vision.encoder,
    }
    for name, module in modules.items():
        if name not in parts:
            module.freeze()


def unfreeze_vision(model: nn.Module) -> None:
    """Make the whole vision part of a model trainable, in place, if it has one."""
    if is_afm(model) and model.vision is not None:
        model.vision.unfreeze()


def parts_manifest(parts: Sequence[str]) -> dict[str, object]:
    """Return what a run's manifest says of trained parts: nothing, if it is the text model alone."""
    return {} if tuple(parts) == (TEXT,) else {"train_parts": sorted(parts)}


def with_image_inputs(model: nn.Module, data: DataSplits, on_event: OnEvent) -> DataSplits:
    """Return data sets whose batches hold of images what the model's first trained part takes.

    `model` is prepared: its trainable parameters are the ones to train.
    """
    images = _distinct([data.train, data.valid, data.test])
    if not images or not is_afm(model):
        return data
    assert model.vision is not None
    if tree_flatten(model.vision.encoder.trainable_parameters()):
        return data  # the batches hold tiles
    kind = "states" if tree_flatten(model.vision.adaptor.trainable_parameters()) else "features"
    training, found = model.training, {}
    model.eval()
    for done, (digest, image) in enumerate(images.items(), start=1):
        found[digest] = _encoded(model, image, kind)
        on_event(Preparing(f"{len(images):,} images", done, len(images)))
    model.train(training)
    return DataSplits(
        _given(data.train, kind, found),
        _given(data.valid, kind, found),
        _given(data.test, kind, found),
    )


def _distinct(splits: Sequence[AnyBatches | None]) -> dict[bytes, PromptImage]:
    found: dict[bytes, PromptImage] = {}
    for batches in splits:
        if isinstance(batches, Batches | PreferenceBatches):
            found |= batches.images.distinct
    return found


def _encoded(model: Model, image: PromptImage, kind: str) -> np.ndarray:
    """Return an image's states (T, G, G, C) or features (tokens, D), a tile at a time."""
    vision, parts = model.vision, []
    assert vision is not None
    for tile in image.tiles:
        x = vision.encoder(vision.whiten(mx.array(tile[None])))
        x = x if kind == "states" else vision.adaptor(x)[0]
        parts.append(np.array(x.astype(mx.float32)))
    return np.concatenate(parts)


def _given(batches: _T, kind: str, inputs: Mapping[bytes, np.ndarray]) -> _T:
    if not isinstance(batches, Batches | PreferenceBatches):
        return batches
    found = copy.copy(batches)
    found.images = batches.images.given_as(kind, inputs)
    return found
