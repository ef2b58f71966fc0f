"""What a method trains of a model that takes images, and what its batches then hold of the images.

Whatever comes before the first part that varies is computed once for each picture: features of images if the
vision part stays as it is, the encoder's states if the adaptor varies. A part varies if it is trained, if it
has an adapter, which some measurements leave out, or if a teacher's has other numbers. Pictures are known by
their digests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import lora_layers
from afm_mlx.adapters.target_modules import ADAPTOR, ENCODER, PARTS, TEXT
from afm_mlx.errors import ConfigError
from afm_mlx.model.model import is_afm
from afm_mlx.training.data.batch_images import SampleImages
from afm_mlx.training.data.batches import AnyBatches, Batches
from afm_mlx.training.data.preferences import PreferenceBatches
from afm_mlx.training.loop.trainer import OnEvent, Preparing
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import DataSplits
from afm_mlx.vision.prompt_image import PromptImage
from afm_mlx.vision.vision import Vision

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


def parts_manifest(parts: Sequence[str]) -> dict[str, object]:
    """Return what a run's manifest says of trained parts: nothing, if it is the text model alone."""
    return {} if tuple(parts) == (TEXT,) else {"train_parts": sorted(parts)}


def check_teacher(data: DataSplits, teacher: nn.Module) -> None:
    """Raise `ConfigError` unless a teacher takes the images of the data as they are fitted to the student."""
    vision = teacher.vision if is_afm(teacher) else None
    for image in _distinct(data).values():
        if vision is None:
            raise ConfigError(
                "The data has images, and the teacher reads text only. Choose a teacher with a vision part, or "
                "leave the chats with images out."
            )
        config, mode, (tiles, side) = vision.config, image.mode, image.tiles.shape[:2]
        wanted = config.num_tiles(mode), config.tile_size(mode), config.tokens(mode)
        if wanted != (tiles, side, image.tokens):
            raise ConfigError(
                f"The model takes {tiles} tiles of {side} pixels as {image.tokens} tokens (mode {mode}), and "
                f"the teacher {wanted[0]} of {wanted[1]} as {wanted[2]}. Choose a teacher that takes images "
                "alike, or leave the chats with images out."
            )


def with_image_inputs(
    model: nn.Module, data: DataSplits, on_event: OnEvent, teacher: nn.Module | None = None
) -> DataSplits:
    """Return data sets whose batches hold of images what the first part that varies takes.

    `model` is prepared: its trainable parameters are the ones to train. `teacher` sees the same batches.
    """
    images = _distinct(data)
    if not images or not is_afm(model):
        return data
    vision = model.vision
    assert vision is not None
    taught = teacher.vision if is_afm(teacher) else None
    if _varies(vision.encoder, taught and taught.encoder):
        return data  # the batches hold tiles
    kind = "states" if _varies(vision.adaptor, taught and taught.adaptor) else "features"
    training, found = model.training, {}
    model.eval()
    for done, (digest, image) in enumerate(images.items(), start=1):
        found[digest] = _encoded(vision, image, kind)
        on_event(Preparing(f"{len(images):,} images", done, len(images)))
    model.train(training)

    def given(batches: Any) -> Any:
        return _with_images(batches, lambda own: own.given_as(kind, found))

    return DataSplits(given(data.train), given(data.valid), given(data.test))


def with_pixels(batches: _T) -> _T:
    """Return the same batches with images as tiles, which models of any vision part take."""
    return _with_images(batches, SampleImages.as_tiles)


def _with_images(batches: _T, change: Callable[[SampleImages], SampleImages]) -> _T:
    if not isinstance(batches, Batches | PreferenceBatches):
        return batches
    found = copy.copy(batches)
    found.images = change(batches.images)
    return found


def _distinct(data: DataSplits) -> dict[bytes, PromptImage]:
    found: dict[bytes, PromptImage] = {}
    for batches in (data.train, data.valid, data.test):
        if isinstance(batches, Batches | PreferenceBatches):
            found |= batches.images.distinct
    return found


def _varies(part: nn.Module, taught: nn.Module | None) -> bool:
    """Return True if a part of the vision model is trained, has an adapter, or differs from the teacher's."""
    if tree_flatten(part.trainable_parameters()) or lora_layers(part):
        return True
    if taught is None:
        return False
    own, other = (dict(tree_flatten(each.parameters())) for each in (part, taught))
    return own.keys() != other.keys() or not all(
        mx.array_equal(array, other[name]) for name, array in own.items()
    )


def _encoded(vision: Vision, image: PromptImage, kind: str) -> np.ndarray:
    """Return an image's states (T, G, G, C) or features (tokens, D), a tile at a time."""
    part = vision.encoder if kind == "states" else vision
    tiles = (part(vision.whiten(mx.array(tile[None]))) for tile in image.tiles)
    found = np.concatenate([np.array(tile.astype(mx.float32)) for tile in tiles])
    return found if kind == "states" else found.reshape(-1, found.shape[-1])
