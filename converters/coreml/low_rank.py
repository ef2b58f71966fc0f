"""Adapters as constants of a program: what they add to a product."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.converters.coreml.source import Source, check_held, half_split
from afm_mlx.errors import CheckpointError, named


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one matrix: each projection's rows get `B (A x)`.

    Args:
        key: name of its constants.
        a: (projections * rank, K), the A of each projection below the one before.
        b: (N_i, rank) of each projection, times the adapter's scale; rows in the program's order.
    """

    key: str
    a: np.ndarray
    b: tuple[np.ndarray, ...]


class AdapterConstants:
    """An adapter of a folder.

    Args:
        folder: the adapter's folder, of mlx-lm's format.
        source: the model that it is for.
        dtype: type of its numbers in the program.

    Raises:
        CheckpointError: when it has a pair that no matrix of the model has.
        AFMError: when it can't be read, or has numbers that `dtype` can't hold.
    """

    def __init__(self, folder: Path, source: Source, dtype: np.dtype[Any]) -> None:
        self.name = folder.name
        self._tensors, self._config = load_adapter(folder)
        self._source, self._dtype = source, dtype
        known = {
            f"{path}.lora_a{end}": (matrix.inputs, outputs)
            for path, matrix in source.matrices.items()
            for end, outputs in _ends(matrix.projections)
        }
        for name, tensor in self._tensors.items():
            if ".lora_a" not in name:
                continue
            shape = (tensor.shape[0], self._tensors[name.replace("lora_a", "lora_b")].shape[1])
            if known.get(name) != shape:
                fits = f"which takes {list(known[name])}" if name in known else "which it has not"
                raise CheckpointError(
                    f"{folder}: {named(name)} and its B are for {list(shape)} of the model's matrix, {fits}. "
                    "The adapter was made for another model."
                )

    def of(self, path: str) -> LowRank | None:
        """What the adapter adds to the matrix at a path; None for nothing."""
        matrix, head = self._source.matrices[path], self._source.config.head_dim
        rank = self._config.rank
        a, b, found = [], [], False
        for projection, (end, outputs) in zip(
            matrix.projections, _ends(matrix.projections), strict=True
        ):
            left = self._tensors.get(f"{path}.lora_a{end}")
            if left is None:
                a.append(np.zeros((rank, matrix.inputs), self._dtype))
                b.append(np.zeros((outputs, rank), self._dtype))
                continue
            found = True
            right = self._floats(f"{path}.lora_b{end}").T * np.float32(self._config.scale)
            if projection.rotary_heads:
                right = right.reshape(projection.rotary_heads, head, rank)[:, half_split(head)]
            a.append(self._floats(f"{path}.lora_a{end}").T.astype(self._dtype))
            b.append(right.reshape(outputs, rank).astype(self._dtype))
        if not found:
            return None
        for array in (*a, *b):
            check_held(array, f"{self.name}: {path}")
        return LowRank(f"{self.name}:{path}", np.concatenate(a), tuple(b))

    def _floats(self, name: str) -> np.ndarray:
        return np.array(self._tensors[name].astype(mx.float32))


def _ends(projections: tuple[Any, ...]) -> list[tuple[str, int]]:
    """The ends of the names of each projection's tensors, and its rows."""
    if len(projections) == 1:
        return [("", projections[0].outputs)]
    return [(f".{i}", projection.outputs) for i, projection in enumerate(projections)]
