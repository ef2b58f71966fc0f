"""From files to an adapter that can be loaded: adapters of any format, and weighted sums of them.

Opening reads headers and checks all that can be known without the numbers, the size in memory above all;
reading fills the array that the kernels take. Both may happen in a thread of their own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME, AdapterConfig, check_pairs
from afm_mlx.adapters.compose import Term, is_a, weighted_sum
from afm_mlx.adapters.layer_places import Shapes, place_shapes
from afm_mlx.adapters.resident import (
    ResidentAdapter,
    TensorReader,
    build_resident,
    for_numpy,
    plan_layout,
)
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.safetensors_file import read_header, reading
from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.errors import CheckpointError, named
from afm_mlx.model.model import is_afm


class Base(NamedTuple):
    """The model that adapters have to fit.

    Args:
        shapes: shapes of its linear layers, see `place_shapes`.
        fingerprints: fingerprints that an adapter for it may name; None takes any adapter.
        config: architecture of the model; None for a model of mlx-lm's zoo.
    """

    shapes: Shapes
    fingerprints: Collection[str] | None
    config: ModelConfig | None = None

    @classmethod
    def of(
        cls, model: nn.Module, base_folder: str | Path | None = None, force: bool = False
    ) -> Base:
        """Return what adapters of a model in memory have to fit.

        Args:
            model: a model with LoRA layers or without.
            base_folder: folder of the model. Its fingerprint counts too, since that of the arrays in memory
                depends on the type that the device computes in.
            force: take adapters that were made for another model.
        """
        if not is_afm(model):
            return cls(place_shapes(model), None)
        fingerprints = None
        if not force:
            fingerprints = {base_model_fingerprint(model)}
            if base_folder is not None:
                fingerprints.add(folder_fingerprint(model.args, base_folder))
        return cls(place_shapes(model), fingerprints, model.args)


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter whose headers were read and found to fit.

    Args:
        tensors: stored tensors, by their names in an adapter folder.
        scale: alpha / rank.
        base: the model that they fit.
        source: where they come from, for errors.
        stamps: what tells whether a file was changed since, by its path.
        nbytes: bytes that it will take in memory.
    """

    tensors: Mapping[str, Any]
    scale: float
    base: Base
    source: str
    stamps: Mapping[Path, tuple[int, ...]]
    nbytes: int

    def read(self) -> ResidentAdapter:
        """Read the numbers.

        Raises:
            CheckpointError: when a file was changed or deleted meanwhile, or holds NaN or infinity.
        """
        resident = build_resident(self.tensors, self.scale, self.base.shapes, self.source)
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise CheckpointError(
                    f"{path} was changed while it was read. Load the adapter again once it is whole."
                )
        return resident


def open_adapter(path: Path, base: Base) -> OpenAdapter:
    """Open an adapter of any format.

    Of an mlx-lm folder only headers are read. Other formats are read whole, for they have to be converted.

    Raises:
        CheckpointError: when files are missing or damaged, hold no LoRA pairs, or are for another model.
        ConfigError: when the config can't be used.
    """
    stamps = {file: _stamp(file) for file in _files(path)}
    tensors: Mapping[str, Any]
    if (path / TENSORS_NAME).is_file() and (path / CONFIG_NAME).is_file():
        config = AdapterConfig.from_dict(read_config_json(path / CONFIG_NAME), path / CONFIG_NAME)
        tensors = read_header(path / TENSORS_NAME)
        check_pairs(tensors, config, path)
    else:
        # Formats build upon this package, and are not needed by most who run it.
        from afm_mlx.adapters.formats import read_adapter

        tensors, config = read_adapter(path, base.config, finite=False)
        with reading(path):
            mx.eval(tensors)
    check_fingerprint(config, base.fingerprints, path)
    nbytes = plan_layout(tensors, base.shapes, path).nbytes
    return OpenAdapter(tensors, config.scale, base, str(path), stamps, nbytes)


def _files(path: Path) -> list[Path]:
    try:
        if not path.exists():
            raise CheckpointError(f"There is no adapter {path}. Was it moved or deleted?")
        return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from None


def open_sum(parts: Sequence[tuple[OpenAdapter, float]], base: Base, source: str) -> OpenAdapter:
    """Open the adapter that adds `weight` times what each of the given ones adds; see `compose`.

    Raises:
        RequestError: for a weight that can't be used.
    """
    adapters = [(for_numpy(part.tensors, part.source), part.scale) for part, _ in parts]
    scale, terms = weighted_sum(adapters, [weight for _, weight in parts])
    tensors = {name: _Joined(tuple(each), int(is_a(name))) for name, each in terms.items()}
    stamps = {path: stamp for part, _ in parts for path, stamp in part.stamps.items()}
    nbytes = plan_layout(tensors, base.shapes, source).nbytes
    return OpenAdapter(tensors, scale, base, source, stamps, nbytes)


def check_fingerprint(
    config: AdapterConfig, known: Collection[str] | None, source: str | Path
) -> None:
    """Compare the base that an adapter names with those that the model goes by.

    Args:
        config: config of the adapter; one that names no base passes.
        known: the model's fingerprints, in memory and as it was stored; None takes any.
        source: where the adapter comes from, for errors.

    Raises:
        CheckpointError: shows both.
    """
    wanted = config.base_model_fingerprint
    if wanted is not None and known is not None and wanted not in known:
        raise CheckpointError(
            f"The adapter {source} was made for the model with fingerprint {named(wanted)}, and this one has "
            f"{' or '.join(sorted(known))}. Take the model that it was trained on, train an adapter "
            "for this one, or force it (--force) to try."
        )


class _Joined(NamedTuple):
    """Tensors to be put side by side along an axis once they are read; NumPy takes it for an array."""

    terms: tuple[Term, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        size = [0, 0]
        for tensor, _ in self.terms:
            size[self.axis] += tensor.shape[self.axis]
            size[1 - self.axis] = tensor.shape[1 - self.axis]
        return size[0], size[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(
            [
                np.asarray(TensorReader()(tensor), np.float32) * np.float32(factor)
                for tensor, factor in self.terms
            ],
            self.axis,
        )


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from None
    return found.st_ino, found.st_size, found.st_mtime_ns
