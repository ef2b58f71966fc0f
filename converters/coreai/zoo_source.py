"""mlx-lm's Llama and Qwen3 as what a Core AI bundle is made of, without importing coreai-core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.converters.conversion_options import prompt_lengths
from afm_mlx.converters.coreai.plan import BundlePlan, check_context
from afm_mlx.converters.graph_source import Float, Source, StoredMatrix, check_held
from afm_mlx.coreai.bundle import ZooConfig
from afm_mlx.errors import AFMError, named, shown
from afm_mlx.kernels import PackedWeight
from afm_mlx.loading.mlx_lm_models import open_mlx_lm_model, read_model
from afm_mlx.quantization.rule import QuantizationRule

CONTEXT = 4096
"""Default number of columns of the states; many models have a context that takes gigabytes."""


@dataclass(frozen=True)
class _ZooMatrix(StoredMatrix):
    """A matrix of a model in memory; `stored` is its layer."""

    stored: Any

    @property
    def rule(self) -> QuantizationRule | None:
        packed = getattr(self.stored, "packed", None)
        return None if packed is None else QuantizationRule(packed.bits, packed.mode)

    def packed(self) -> PackedWeight:
        return self.stored.packed

    def floats(self, rows: slice, dtype: Float) -> np.ndarray:
        with np.errstate(over="ignore"):
            found = np.array(self.stored.weight[rows].astype(mx.float32)).astype(dtype)
        check_held(found, self.path)
        return found


class ZooSource(Source):
    """The parameters of a model of mlx-lm's Llama or Qwen3, by their names there.

    Raises:
        AFMError: if the model is another one, or has a part that its Core AI functions have not.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        from mlx_lm.models import llama, qwen3

        if not isinstance(model, llama.Model | qwen3.Model):
            raise AFMError(
                f"{folder} is a model of type {shown(model.model_type)}; Core AI bundles are made of AFM "
                "models and of models with mlx-lm's llama or qwen3 blocks."
            )
        self.matrices = {}
        self._modules = dict(model.named_modules())
        self._arrays = dict(tree_flatten(model.parameters()))
        for path, module in self._modules.items():
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                kind = f"{module.bits} bits of the mode {module.mode}"
                raise AFMError(
                    f"{folder}: {named(path)} has {kind}; Core AI bundles can have 2, 4 or 8 bits of the "
                    "modes affine, balanced and palette."
                )
            if "bias" in module or getattr(module, "use_sliding", False):
                what = "biases" if "bias" in module else "a sliding window"
                raise AFMError(
                    f"{folder}: {named(path)} has {what}, which Core AI bundles can't have."
                )
        self._rope = self._modules["model.layers.0.self_attn"].rope

    @property
    def has_head(self) -> bool:
        """True if the head is another matrix than the embedding."""
        return "lm_head" in self._modules

    def matrix(self, path: str) -> StoredMatrix:
        module = self._modules[path]
        packed = getattr(module, "packed", None)
        shape = module.weight.shape if packed is None else (packed.out_dims, packed.in_dims)
        return _ZooMatrix(path, (shape[0], shape[1]), module)

    def has(self, name: str) -> bool:
        return name in self._arrays

    def vector(self, name: str) -> np.ndarray:
        return np.array(self._arrays[name].astype(mx.float32))

    def rope(self, length: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines (length, head_dim / 2), times the factor of some kinds of RoPE.

        Raises:
            AFMError: if RoPE does more than rotate the first half of a head against the second.
        """
        half = head_dim // 2
        # The first half of the result has cosines, the second sines.
        turned = np.arange(head_dim) < half
        heads = np.stack(np.broadcast_arrays(turned, np.linspace(-1, 1, head_dim)))
        of_all = mx.broadcast_to(
            mx.array(heads, mx.float32)[None, :, None], (1, 2, length, head_dim)
        )
        found = np.array(self._rope(of_all))[0]
        cos, sin = found[0, :, :half], found[0, :, half:]
        one, two = heads[1, :half], heads[1, half:]
        wanted = np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=1)
        if np.abs(found[1] - wanted).max() > 1e-4 * np.abs(wanted).max():
            raise AFMError(
                "The model's RoPE rotates neighbouring dimensions, or a part of a head, which Core AI bundles "
                "of mlx-lm's models can't do."
            )
        return cos, sin


def plan_zoo_bundle(
    folder: Path,
    *,
    dtype: str = "float16",
    context: int | None = None,
    lengths: Sequence[int] | None = None,
    minimum_os: str = "27",
) -> BundlePlan:
    """Check that a Core AI bundle can hold a folder of mlx-lm's Llama or Qwen3; see `plan_bundle`.

    The model is read into memory. By default, the states hold `CONTEXT` tokens, or the model's context if that
    is less.
    """
    model, _ = open_mlx_lm_model(folder)
    source = ZooSource(model, folder)
    read_model(model, folder)
    args: Any = model.args
    most = args.max_position_embeddings or CONTEXT
    check_context(context, most)
    attention = model.layers[0].self_attn
    config = ZooConfig(
        vocab_size=args.vocab_size,
        context_length=context or min(most, CONTEXT),
        hidden_dim=args.hidden_size,
        num_kv_layers=len(model.layers),
        num_heads=attention.n_heads,
        num_kv_heads=attention.n_kv_heads,
        head_dim=args.head_dim or args.hidden_size // attention.n_heads,
        rms_norm_eps=float(args.rms_norm_eps),
    )
    return BundlePlan(
        folder,
        source,
        config,
        base_model_fingerprint(model),
        np.dtype(dtype),
        prompt_lengths(lengths, config.context_length, False),
        None,
        (),
        minimum_os,
    )
