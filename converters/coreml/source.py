"""The matrices of a model folder: where they lie, and which of their rows a program takes in what order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.architecture import Matrix, blocks
from afm_mlx.config import ModelConfig
from afm_mlx.converters.stored_parameters import StoredLayer, StoredParameter
from afm_mlx.errors import AFMError, named
from afm_mlx.kernels import PackedWeight
from afm_mlx.quantization.rule import QuantizationRule

_ROWS_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of the folder, and the order in which a program has its rows.

    Args:
        path: its path in the model.
        shape: (N, K).
        stored: where it lies.
        order: (N,) the folder's row of each of the program's; None for the same order.
    """

    path: str
    shape: tuple[int, int]
    stored: StoredParameter | StoredLayer
    order: np.ndarray | None = None

    @property
    def rule(self) -> QuantizationRule | None:
        """How it is packed; None for a float one."""
        return self.stored.rule if isinstance(self.stored, StoredLayer) else None

    def packed(self) -> PackedWeight | None:
        """The packed matrix, in the folder's order; None for a float one."""
        return self.stored.packed() if isinstance(self.stored, StoredLayer) else None

    def floats(self, rows: slice, dtype: np.dtype[Any]) -> np.ndarray:
        """Some rows of a float matrix, in the program's order.

        Raises:
            AFMError: for numbers that the type can't hold.
        """
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


class Source:
    """The parameters of a model folder.

    Args:
        config: the architecture.
        parameters: every parameter, by name.
        folder: the folder, for errors.

    `matrices` has what the rows of each block's matrix compute, by the matrix' path.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, StoredParameter | StoredLayer],
        folder: Path,
    ) -> None:
        self.config, self.folder, self._parameters = config, folder, parameters
        self.matrices = {
            f"{path}.{matrix.name}": matrix
            for path, kind in blocks(config)
            for matrix in kind.matrices
        }
        for name, parameter in parameters.items():
            if isinstance(parameter, StoredLayer) and parameter.rule is None:
                raise AFMError(
                    f"{folder}: {named(name)} has {dict(parameter.settings)}, for which Core ML has no "
                    "operation. Write float weights first (afm-mlx convert -d)."
                )

    def matrix(self, path: str) -> StoredMatrix:
        """The matrix at a path, with each head's rows in the order of `half_split`."""
        stored = self._parameters[f"{path}.weight"]
        if path not in self.matrices:
            shape = (self.config.vocab_size, self.config.hidden_dim)
            return StoredMatrix(path, shape, stored)
        matrix = self.matrices[path]
        order = half_split_rows(matrix, self.config.head_dim)
        return StoredMatrix(path, (matrix.outputs, matrix.inputs), stored, order)

    def vector(self, name: str) -> np.ndarray:
        """A parameter of one axis or none, float32."""
        stored = self._parameters[name]
        assert isinstance(stored, StoredParameter)
        return np.array(stored.array().astype(mx.float32))


def half_split(head_dim: int) -> np.ndarray:
    """A head's dimensions as RoPE of halves has them: the first of each pair, then the second of each."""
    return np.arange(head_dim).reshape(-1, 2).T.reshape(-1)


def half_split_rows(matrix: Matrix, head_dim: int) -> np.ndarray | None:
    """The order of a matrix' rows by `half_split`, in each head that RoPE turns; None where there is none."""
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


def check_held(array: np.ndarray, name: str) -> None:
    """Raise `AFMError` when an array holds NaN or infinity: its type may be too narrow for its numbers."""
    if not np.isfinite(array).all():
        raise AFMError(
            f"{named(name)} holds NaN, infinity, or numbers that {array.dtype} can't hold. Check the "
            "source; a package of float32 holds greater numbers (--to coreml --dtype float32)."
        )
