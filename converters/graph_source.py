"""The matrices and adapters of a model folder as the graphs of Core ML and Core AI take them.

Neither framework is imported: a folder is checked first, and importing coremltools takes seconds.

Core ML has no operation that rotates neighbouring dimensions, so rows of the query and key projections are
reordered: RoPE rotates the first half of a head against the second (`half_split`). Scores stay the same.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, load_adapter
from afm_mlx.checkpoint.stored_layers import check_folder_tensors, quantization_of
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import (
    Matrix,
    ModelConfig,
    Projection,
    blocks,
    parameter_shapes,
    read_config_json,
)
from afm_mlx.converters.folder_writer import StoredLayer, StoredParameter
from afm_mlx.converters.mlx_lm import read_config, stored_parameters
from afm_mlx.errors import AFMError, CheckpointError, named
from afm_mlx.kernels import PackedWeight
from afm_mlx.quantization.rule import QuantizationRule

Float: TypeAlias = "np.dtype[np.floating]"
"""float16 or float32, the type that a graph computes in."""

_ROWS_BYTES = 32 << 20


def check_held(array: np.ndarray, name: str) -> None:
    """Raise `AFMError` for NaN or infinity: the array's type may be too narrow for its numbers."""
    if not np.isfinite(array).all():
        raise AFMError(
            f"{named(name)} holds NaN, infinity, or numbers that {array.dtype} can't hold. Check the "
            "source; float32 holds greater numbers (--dtype float32)."
        )


def half_split(head_dim: int) -> np.ndarray:
    """Return the order of a head's dimensions for RoPE of halves: the first of each pair, then the second."""
    return np.arange(head_dim).reshape(-1, 2).T.reshape(-1)


def half_split_rows(matrix: Matrix, head_dim: int) -> np.ndarray | None:
    """Return the order of a matrix' rows, `half_split` in the heads that RoPE rotates; None without any."""
    if not any(projection.rotary_heads for projection in matrix.projections):
        return None
    order, start = [], 0
    for projection in matrix.projections:
        rows = np.arange(start, start + projection.outputs)
        if projection.rotary_heads:
            rows = rows.reshape(projection.rotary_heads, head_dim)[:, half_split(head_dim)]
        order.append(rows.reshape(-1))
        start += projection.outputs
    return np.concatenate(order)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix (N, K) of the folder, and the order of its rows in a program.

    `order` is (N,), the folder's row of each of the program's rows; None if the order is the same.
    """

    path: str
    shape: tuple[int, int]
    stored: StoredParameter | StoredLayer
    order: np.ndarray | None = None

    @property
    def rule(self) -> QuantizationRule | None:
        return self.stored.rule if isinstance(self.stored, StoredLayer) else None

    def packed(self) -> PackedWeight:
        """Read a packed matrix, in the folder's order of rows."""
        assert isinstance(self.stored, StoredLayer)
        return self.stored.packed()

    def floats(self, rows: slice, dtype: Float) -> np.ndarray:
        """Read rows of a float matrix, in the program's order; raise `AFMError` for numbers that overflow."""
        assert isinstance(self.stored, StoredParameter)
        stored = self.stored.rows()
        wanted = rows if self.order is None else slice(0, self.shape[0])
        found = np.empty((wanted.stop - wanted.start, self.shape[1]), dtype)
        step = max(1, _ROWS_BYTES // (4 * self.shape[1]))
        for start in range(wanted.start, wanted.stop, step):
            stop = min(start + step, wanted.stop)
            with np.errstate(over="ignore"):
                found[start - wanted.start : stop - wanted.start] = stored.read(start, stop)
        check_held(found, self.path)
        return found if self.order is None else found[self.order[rows]]


def matrices_of(config: ModelConfig) -> dict[str, Matrix]:
    """Return the matrices of all blocks, by path."""
    return {
        f"{path}.{matrix.name}": matrix for path, kind in blocks(config) for matrix in kind.matrices
    }


class Source:
    """The parameters of a model folder, all by name; `matrices` has the matrices of all blocks, by path."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, StoredParameter | StoredLayer],
        folder: Path,
    ) -> None:
        self.config, self._parameters = config, parameters
        self.matrices, self._shapes = matrices_of(config), parameter_shapes(config)
        for name, parameter in parameters.items():
            if isinstance(parameter, StoredLayer) and parameter.rule is None:
                raise AFMError(
                    f"{folder}: {named(name)} has {dict(parameter.settings)}, for which Core ML and Core "
                    "AI have no operation. Write float weights first (afm-mlx convert -d)."
                )

    @classmethod
    def read(cls, folder: Path, with_images: bool = False) -> Source:
        """Check an AFM model's folder, float or packed.

        An image encoder is left out with a warning, unless `with_images`.

        Raises:
            AFMError: if the folder is damaged, or holds a format that graphs have no operation for.
        """
        tensors, path = stored_tensors(folder), folder / "config.json"
        config = read_config(folder, tensors)
        quantization = quantization_of(read_config_json(path), path)
        rules = check_folder_tensors(config, quantization, tensors, path)
        parameters = stored_parameters(config, tensors, rules, quantization)
        if config.vision_config is not None and not with_images:
            note = f"{folder}: the text model alone is converted, without its image encoder."
            warnings.warn(note, stacklevel=2)
            config = dataclasses.replace(config, vision_config=None)
        return cls(config, parameters, folder)

    @property
    def rules(self) -> dict[str, QuantizationRule]:
        """The rules of packed layers, by path."""
        layers = {name.removesuffix(".weight"): part for name, part in self._parameters.items()}
        return {
            path: part.rule
            for path, part in layers.items()
            if isinstance(part, StoredLayer) and part.rule is not None
        }

    def matrix(self, path: str) -> StoredMatrix:
        """Return the matrix at a path, with the rows of heads in the order of `half_split`."""
        stored = self._parameters[f"{path}.weight"]
        if path not in self.matrices:
            height, width = self._shapes[f"{path}.weight"]
            return StoredMatrix(path, (height, width), stored)
        matrix = self.matrices[path]
        order = half_split_rows(matrix, self.config.head_dim)
        return StoredMatrix(path, (matrix.outputs, matrix.inputs), stored, order)

    def vector(self, name: str) -> np.ndarray:
        stored = self._parameters[name]
        assert isinstance(stored, StoredParameter)
        return np.array(stored.array().astype(mx.float32))


# -- adapters


@dataclass(frozen=True)
class AdapterMatrices:
    """The matrices of an adapter for one matrix: each projection's rows get `B (A x)`.

    `a` is (projections * rank, K), the A of all projections one below the other. `b` has (N_i, rank) of each
    projection, times the adapter's scale, with rows in the program's order.
    """

    key: str
    a: np.ndarray
    b: tuple[np.ndarray, ...]


class AdapterSource:
    """An adapter's tensors for a model of `config`; its numbers become `dtype`.

    `name` and `origin` are what keys and errors call it.

    Raises:
        CheckpointError: if a pair fits no matrix of the model.
        AFMError: if it has numbers that `dtype` can't hold.
    """

    def __init__(
        self,
        name: str,
        origin: str | Path,
        tensors: Mapping[str, mx.array],
        adapter: AdapterConfig,
        config: ModelConfig,
        dtype: Float,
    ) -> None:
        self.name, self._tensors, self._adapter = name, tensors, adapter
        self._config, self._dtype = config, dtype
        self._matrices = matrices_of(config)
        known = {
            f"{path}.lora_a{suffix}": (matrix.inputs, projection.outputs)
            for path, matrix in self._matrices.items()
            for suffix, projection in _pairs(matrix)
        }
        for name, tensor in tensors.items():
            if ".lora_a" not in name:
                continue
            shape = (tensor.shape[0], tensors[name.replace("lora_a", "lora_b")].shape[1])
            if known.get(name) != shape:
                fits = f"which takes {list(known[name])}" if name in known else "which it has not"
                raise CheckpointError(
                    f"{origin}: {named(name)} and its B are for {list(shape)} of the model's matrix, {fits}. "
                    "The adapter was made for another model."
                )

    def matrices(self, path: str) -> AdapterMatrices | None:
        """Return the adapter's matrices for the matrix at a path; None if it leaves that matrix as it is."""
        matrix, head_dim = self._matrices[path], self._config.head_dim
        rank = self._adapter.rank
        if not any(f"{path}.lora_a{suffix}" in self._tensors for suffix, _ in _pairs(matrix)):
            return None
        a, b = [], []
        for suffix, projection in _pairs(matrix):
            if f"{path}.lora_a{suffix}" not in self._tensors:
                a.append(np.zeros((rank, matrix.inputs), self._dtype))
                b.append(np.zeros((projection.outputs, rank), self._dtype))
                continue
            right = self._floats(f"{path}.lora_b{suffix}").T * np.float32(self._adapter.scale)
            if projection.rotary_heads:
                right = right.reshape(projection.rotary_heads, head_dim, rank)
                right = right[:, half_split(head_dim)]
            a.append(self._floats(f"{path}.lora_a{suffix}").T.astype(self._dtype))
            b.append(right.reshape(projection.outputs, rank).astype(self._dtype))
        for array in (*a, *b):
            check_held(array, f"{self.name}: {path}")
        return AdapterMatrices(f"{self.name}:{path}", np.concatenate(a), tuple(b))

    def _floats(self, name: str) -> np.ndarray:
        return np.array(self._tensors[name].astype(mx.float32))


def _pairs(matrix: Matrix) -> list[tuple[str, Projection]]:
    """Return each projection of a matrix with the suffix of its tensors' names."""
    if len(matrix.projections) == 1:
        return [("", matrix.projections[0])]
    return [(f".{i}", projection) for i, projection in enumerate(matrix.projections)]


def adapter_sources(folder: Path, source: Source, dtype: Float) -> tuple[AdapterSource, ...]:
    """Return the adapters in a model's folder; see `AdapterSource`."""
    folders = [file.parent for file in sorted(folder.glob("adapters/*/adapter_config.json"))]
    return tuple(
        AdapterSource(each.name, each, *load_adapter(each), source.config, dtype)
        for each in folders
    )


# -- scales and tables


def per_row(array: mx.array | None, rows: np.ndarray) -> np.ndarray:
    """Return scales or biases of packed rows as (rows, groups) float32, or (1, 1) if all rows share one."""
    assert array is not None
    values = np.array(array.astype(mx.float32))
    if values.ndim == 0:
        return values.reshape(1, 1)
    return values.reshape(values.shape[0], -1)[rows]


def shared_tables(tables: np.ndarray, height: int, rows: np.ndarray) -> np.ndarray:
    """Return the tables for `rows` of a palette of `height` rows: as few as equal runs of rows share."""
    of_row = rows * tables.shape[0] // height
    shared = height // tables.shape[0]
    while shared > 1 and (
        len(rows) % shared or (of_row.reshape(-1, shared) != of_row[::shared, None]).any()
    ):
        shared //= 2
    return tables[of_row[:: max(shared, 1)]]
