"""Adapters of singular vectors, from which the training of a recovery adapter can start.

With W, a layer's float matrix, Q, packing, and [M]_r, the best approximation of M of rank r:

    error      the base is Q(W), the adapter [W - Q(W)]_r: no adapter of rank r is nearer to W
    weights    the adapter is [W]_r, the base Q(W - [W]_r): needs the adapter to be of use

Both are adapters as training makes them, with scale 1. Sources: LQER, arXiv 2402.02446 (error); Apple's tech
report of 2025, arXiv 2507.13575, section on 3.56-bit server weights (weights).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.target_modules import TargetModule, linear_weight, target_modules
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.safetensors_file import TensorSpec, array_bytes
from afm_mlx.checkpoint.weights import stored_tensors, write_weights
from afm_mlx.config import is_afm_config, read_config_json
from afm_mlx.loading.load import load_model
from afm_mlx.loading.mlx_lm_models import open_mlx_lm_model
from afm_mlx.model.model import is_afm
from afm_mlx.quantization.packed_layers import is_experts

ADAPTER_NAME = "svd"


def low_rank(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A (K, rank) and B (rank, N), float32, with (A B)^T the best approximation of a matrix (N, K).

    The square roots of singular values are in both. Columns past the smaller side of the matrix are zero. The
    singular vectors are eigenvectors of the smaller of M M^T and M^T M in float64, which takes a tenth of the
    time of a full decomposition; a sign is fixed, so that equal matrices give equal bytes.
    """
    m = matrix.astype(np.float64)
    is_wide = m.shape[0] <= m.shape[1]
    side = m if is_wide else m.T  # (S, L), S <= L
    _, vectors = np.linalg.eigh(side @ side.T)  # ascending
    u = vectors[:, ::-1][:, :rank]
    u = u * np.where(np.take_along_axis(u, np.abs(u).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    other = side.T @ u  # (L, r), the other singular vectors times singular values
    roots = np.sqrt(np.linalg.norm(other, axis=0))
    other = np.divide(other, roots, out=np.zeros_like(other), where=roots > 0)
    u = u * roots
    a, b = (other, u.T) if is_wide else (u, other.T)
    missing = rank - u.shape[1]
    a, b = np.pad(a, ((0, 0), (0, missing))), np.pad(b, ((0, missing), (0, 0)))
    return a.astype(np.float32), b.astype(np.float32)


def write_error_adapter(source: Path, packed: Path, rank: int) -> None:
    """Write the adapter of a packed folder's errors into it; `source` is the folder of the float model."""
    floats = {target.path: linear_weight(target.linear) for target in _targets(source)}
    pairs = _Pairs(rank)
    targets = [target for target in _targets(packed) if _is_packed(target.linear)]
    for target in targets:
        pairs.add(target, floats.pop(target.path) - linear_weight(target.linear))
    write_svd_adapter(packed, pairs.tensors, rank)


def split_weights(source: Path, folder: Path, rank: int) -> dict[str, mx.array]:
    """Take the largest singular vectors out of a float folder's linear layers.

    Args:
        source: a folder of float weights, whose tensors have the model's names.
        folder: folder to make: the source with what is left of the weights, without adapters.
        rank: number of singular vectors of each layer.

    Returns:
        The adapter's tensors, float16. The weights keep what rounding takes from them.
    """
    ignored = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "adapters")
    shutil.copytree(source, folder, ignore=ignored)
    targets = {f"{target.path}.weight": target for target in _targets(source)}
    stored, pairs = stored_tensors(source), _Pairs(rank)

    def read(spec: TensorSpec) -> Iterable[np.ndarray]:
        tensor = stored[spec.name]
        if spec.name not in targets:
            return [tensor.read()]
        weight = mx.array(tensor.read()).view(tensor.dtype).reshape(-1, tensor.shape[-1])
        taken = pairs.add(targets[spec.name], weight.astype(mx.float32))
        return [array_bytes((weight.astype(mx.float32) - taken).astype(tensor.dtype))]

    specs = [TensorSpec(t.name, t.shape, t.dtype) for t in stored.values()]
    write_weights(folder, specs, read)
    return pairs.tensors


def write_svd_adapter(folder: Path, tensors: Mapping[str, mx.array], rank: int) -> None:
    """Write an adapter of scale 1 into the folder of its base."""
    model = _open(folder)
    names = {name.rpartition(".lora_")[0] for name in tensors}
    keys = {target.key for target in target_modules(model) if target.path in names}
    fingerprint = folder_fingerprint(model.args, folder) if is_afm(model) else None
    config = AdapterConfig(
        rank=rank,
        scale=1.0,
        num_layers=len(model.layers),
        keys=tuple(sorted(keys)),
        base_model_fingerprint=fingerprint,
    )
    save_adapter(folder / "adapters" / ADAPTER_NAME, tensors, config)


class _Pairs:
    """LoRA pairs that approximate matrices, by their names in adapter folders."""

    def __init__(self, rank: int):
        self._rank = rank
        self.tensors: dict[str, mx.array] = {}

    def add(self, target: TargetModule, matrix: mx.array) -> mx.array:
        """Add the pairs of a layer's matrix (N, K), one for each section; return what they stand for."""
        rows = np.array(matrix)
        ends = target.sections or (rows.shape[0],)
        products = []
        for suffix, (start, end) in zip(target.shapes, pairwise([0, *ends]), strict=True):
            a, b = (
                mx.array(array).astype(mx.float16)
                for array in low_rank(rows[start:end], self._rank)
            )
            self.tensors[f"{target.path}.lora_a{suffix}"] = a
            self.tensors[f"{target.path}.lora_b{suffix}"] = b
            products.append((a.astype(mx.float32) @ b.astype(mx.float32)).T)
        return mx.concatenate(products)


def _is_packed(layer: nn.Module) -> bool:
    return type(layer) is not nn.Linear and not is_experts(layer)


def _open(folder: Path) -> nn.Module:
    """Load a model folder whose arrays are not read yet."""
    values = read_config_json(folder / "config.json")
    if is_afm_config(values):
        return load_model(folder, values, lazy=True)
    return open_mlx_lm_model(folder)[0]


def _targets(folder: Path) -> list[TargetModule]:
    return target_modules(_open(folder))
