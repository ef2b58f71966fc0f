"""LoRA layers, to train: `y = linear(x) + scale * (x A) B` with a frozen `linear`.

Notable choices:

- `LoRALinear` wraps any linear layer, packed ones too, and is plain MLX, so gradients pass. To run adapters,
  `afm_mlx.adapters.active` makes the layers' kernels add them.
- Trainable parameters have the names that adapter files have, which are mlx-lm's.
- A fused layer of queries, keys and values has three pairs, one for each projection.
- An adapter is never merged: at 2 bits, rounding would lose it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.target_modules import (
    PARTS,
    TEXT,
    linear_shape,
    replace_layers,
    target_modules,
)
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.errors import CheckpointError, RequestError, named, shown
from afm_mlx.model.fused_layers import ACTIVE, LinearWrapper
from afm_mlx.model.model import is_afm


class LoRALinear(LinearWrapper):
    """`y = linear(x) + scale * (dropout(x) A_i) B_i`, with a pair A_i, B_i for every section of the output.

    `lora_a` (K, rank) and `lora_b` (rank, N_i) are arrays; of a fused layer, whose projections' outputs end at
    `sections`, lists of arrays. At the start A is normal with variance 1 / K, drawn with `key` (None for MLX's
    global random state), and B is zero, so that the layer computes what `linear` does, which is frozen. `scale`
    is alpha / rank, and `dropout` is for training mode.

    Source: `tamm` 0.2.0, `LoRA` and `LoRAFusedMultiOutputLinear`.
    """

    def __init__(
        self,
        linear: nn.Module,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        sections: Sequence[int] | None = None,
        key: mx.array | None = None,
    ):
        super().__init__(linear)
        inputs, outputs = linear_shape(linear)
        ends = [outputs] if sections is None else list(sections)
        keys = [None] * len(ends) if key is None else list(mx.random.split(key, len(ends)))
        a = [mx.random.normal((inputs, rank), scale=inputs**-0.5, key=each) for each in keys]
        b = [mx.zeros((rank, end - start)) for start, end in pairwise([0, *ends])]
        self.linear.freeze()
        self.scale = scale
        self.dropout = nn.Dropout(dropout).train(linear.training)
        self.dropout_rate = dropout
        self.lora_a = a[0] if sections is None else a
        self.lora_b = b[0] if sections is None else b

    @property
    def rank(self) -> int:
        return self.pairs[0][0].shape[1]

    @property
    def pairs(self) -> list[tuple[mx.array, mx.array]]:
        """A and B of every section."""
        if isinstance(self.lora_a, list):
            return list(zip(self.lora_a, self.lora_b, strict=True))
        return [(self.lora_a, self.lora_b)]

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., K) to (..., N), in the dtype that `linear` returns."""
        y, dropped = self.linear(x), self.dropout(x)
        parts = [(dropped @ a) @ b for a, b in self.pairs]
        added = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        return y + (self.scale * added).astype(y.dtype)

    def _extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, sections={len(self.pairs)}"


class LoRAStack(LoRALinear):
    """A stack of matrices with a pair for each, called as the stack is."""

    def __call__(  # type: ignore[override]  # as a stack is called
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """Map x (..., M, K) to (..., M, N) with the matrices and pairs at `indices` (...)."""
        y, product = self.linear(x, indices, sorted_indices), self.dropout(x)
        for factors in zip(*self.pairs, strict=True):
            product = mx.gather_mm(
                product, mx.stack(factors), rhs_indices=indices, sorted_indices=sorted_indices
            )
        return y + (self.scale * product).astype(y.dtype)


def add_lora(
    model: nn.Module,
    rank: int,
    scale: float,
    keys: Iterable[str] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    num_layers: int = -1,
    parts: Collection[str] = (TEXT,),
) -> nn.Module:
    """Freeze a model and wrap linear layers of its blocks in LoRA layers, in place.

    Args:
        model: a model of this package or of mlx-lm's zoo; float, packed, or quantized by MLX.
        rank: columns of A and rows of B.
        scale: alpha / rank.
        keys: layers by their names within a block, such as `mlp.up_proj`; pass None for all linear ones.
        dropout: see `LoRALinear`.
        seed: seed of the random numbers in A.
        num_layers: number of blocks to adapt, counted from the last; -1 for all.
        parts: parts of the model to adapt, of `target_modules.PARTS`. `keys` and `num_layers` are for the text
            model's blocks; of the image encoder and its adaptor all linear layers are adapted.

    Returns:
        The model; only LoRA parameters are trainable.

    Raises:
        RequestError: for a setting that can't be honoured, or a model that has an adapter.
    """
    targets, blocks = target_modules(model), len(model.layers)
    if missing := set(parts) - {TEXT} - {target.part for target in targets}:
        raise RequestError(
            f"The model has no {named(', '.join(sorted(missing)))} that an adapter can change; parts are "
            f"{', '.join(PARTS)}, the last two in models that take images."
        )
    wanted = None if keys is None else set(keys)
    are_there = num_layers == -1 or 0 < num_layers <= blocks
    for name, value, holds, allowed in (
        ("rank", rank, rank >= 1, "1 or more"),
        ("dropout", dropout, 0 <= dropout < 1, "in [0, 1)"),
        ("num_layers", num_layers, are_there, f"1 to {blocks}, or -1"),
    ):
        if not holds:
            raise RequestError(f"{name} of LoRA is {shown(value)}; it must be {allowed}.")
    # Layers that look up a pool's adapters count too: LoRA layers around them would hide these.
    if any(isinstance(p.layer, LoRALinear) for p in targets) or ACTIVE in model:
        raise RequestError(
            "The model has an adapter or a pool already; take it off (detach_adapter), or load the model again."
        )
    in_blocks = {target.key for target in targets if target.part == TEXT}
    unknown = (wanted or set()) - in_blocks
    if unknown or not targets:
        raise RequestError(
            f"No block has a linear layer {named(', '.join(sorted(unknown)))} that an adapter can change; "
            f"there are {', '.join(sorted(in_blocks)) or 'none'}."
        )
    first = 0 if num_layers == -1 else blocks - num_layers
    chosen = [
        p
        for p in targets
        if p.part in parts
        and (p.part != TEXT or (p.block >= first and (wanted is None or p.key in wanted)))
    ]
    if not chosen:
        raise RequestError(
            f"No layer is left to adapt: the last {blocks - first} blocks have none of the keys "
            f"{shown(sorted(wanted or ()))}. Name others, or take more blocks (num_layers)."
        )
    model.freeze()
    random = mx.random.split(mx.random.key(seed), len(chosen))
    replace_layers(
        model,
        [
            (
                target.path,
                (LoRAStack if target.is_stack else LoRALinear)(
                    target.layer, rank, scale, dropout, target.sections, key
                ),
            )
            for target, key in zip(chosen, random, strict=True)
        ],
    )
    mx.eval(model.trainable_parameters())
    return model


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return a model's LoRA layers by their paths."""
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}


def lora_tensors(model: nn.Module) -> dict[str, mx.array]:
    """Return the parameters of all LoRA layers, by their names in adapter files."""
    tensors: dict[str, mx.array] = {}
    for path, layer in lora_layers(model).items():
        lora = {name: layer[name] for name in ("lora_a", "lora_b")}
        tensors |= {f"{path}.{name}": array for name, array in tree_flatten(lora)}
    return tensors


def start_lora(
    model: nn.Module, tensors: Mapping[str, mx.array], config: AdapterConfig, folder: str | Path
) -> None:
    """Set LoRA layers to the numbers of an adapter, such as a recovery adapter, to train from there.

    The layers must be the very layers that the adapter changes, of its rank and scale. `tensors` are finite, by
    their names in an adapter folder; `folder` is for errors.

    Raises:
        CheckpointError: names what differs.
    """
    mine = lora_tensors(model)
    scales = {layer.scale for layer in lora_layers(model).values()}
    if scales != {config.scale}:
        raise CheckpointError(
            f"{folder} has scale {config.scale}, and the LoRA layers have {shown(sorted(scales))}; give "
            "both the same."
        )
    there, here = ({name: list(t.shape) for name, t in each.items()} for each in (tensors, mine))
    differing = sorted(name for name in there | here if there.get(name) != here.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{folder} does not fit the LoRA layers: {named(name)} is {there.get(name, 'none')} there and "
            f"{here.get(name, 'none')} here ({len(differing)} tensors differ). Train with the same rank and "
            "the same layers."
        )
    model.load_weights([(n, t.astype(mine[n].dtype)) for n, t in tensors.items()], strict=False)


def lora_config(model: nn.Module, base_folder: str | Path | None = None) -> AdapterConfig:
    """Return the config for an adapter folder of the model's LoRA layers.

    `base_folder` is the folder that the base was loaded from, for its fingerprint; None for the fingerprint of
    the arrays in memory, which depends on the device. Adapters of mlx-lm's models get none.
    """
    layers = lora_layers(model)
    if not layers:
        raise RequestError("The model has no LoRA layers; add_lora makes them.")
    first = next(iter(layers.values()))
    fingerprint = None
    if is_afm(model):
        if base_folder is None:
            fingerprint = base_model_fingerprint(model)
        else:
            fingerprint = folder_fingerprint(model.args, base_folder)
    keys = {target.key for target in target_modules(model) if target.path in layers}
    return AdapterConfig(
        rank=first.rank,
        scale=first.scale,
        num_layers=len(model.layers),
        keys=tuple(sorted(keys)),
        dropout=first.dropout_rate,
        base_model_fingerprint=fingerprint,
    )


def save_lora(model: nn.Module, folder: str | Path, base_folder: str | Path | None = None) -> None:
    """Write the model's LoRA layers as an adapter folder; see `lora_config` and `save_adapter`."""
    save_adapter(folder, lora_tensors(model), lora_config(model, base_folder))
