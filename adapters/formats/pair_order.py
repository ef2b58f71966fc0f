"""The LoRA pairs of a model; of an AFM model in the order of tamm's state dicts and `.fmadapter` packages.

| block | its pairs, in order |
| --- | --- |
| writes keys and values | qkv_proj: queries, keys, values; out_proj; gate_proj; up_proj; down_proj |
| reuses them | q_proj; out_proj; gate_proj; up_proj; down_proj |

Source: `tamm` 0.2.0, state dicts of `AFMTextV7` with `LoRAModelAdapter`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx

from afm_mlx.adapters.target_modules import ZooBase
from afm_mlx.config import PRESETS, ModelConfig, blocks
from afm_mlx.errors import CheckpointError, named, shown

Tensors = dict[str, mx.array]

Architecture: TypeAlias = ModelConfig | ZooBase
"""An adapter's base model: an AFM model, or one of mlx-lm's zoo."""

_SHOWN = 5


class Shaped(Protocol):
    """A tensor of MLX, PyTorch or a file, of which only the shape is read."""

    @property
    def shape(self) -> Sequence[int]: ...


class PairTarget(NamedTuple):
    """A projection that one LoRA pair, A (inputs, rank) and B (rank, outputs), can change."""

    layer: str  # path of the linear layer, such as `model.layers.0.mlp.up_proj`
    part: str  # ".0", ".1", ".2" for queries, keys and values of a fused layer, else ""
    inputs: int
    outputs: int
    rotary_heads: int = 0  # heads that RoPE rotates among the outputs

    @property
    def a(self) -> str:
        return f"{self.layer}.lora_a{self.part}"

    @property
    def b(self) -> str:
        return f"{self.layer}.lora_b{self.part}"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of A and B for a rank, by their names."""
        return {self.a: (self.inputs, rank), self.b: (rank, self.outputs)}


def pair_targets(config: Architecture) -> list[PairTarget]:
    """Return the targets of all pairs that a model can have; of an AFM model in a checkpoint's order."""
    if isinstance(config, ZooBase):
        shapes = config.shapes.items()
        return [PairTarget(path, part, *s) for path, own in shapes for part, s in own.items()]
    return [
        PairTarget(
            f"{path}.{matrix.name}",
            f".{index}" if len(matrix.projections) > 1 else "",
            matrix.inputs,
            *projection,
        )
        for path, kind in blocks(config)
        for matrix in kind.matrices
        for index, projection in enumerate(matrix.projections)
    ]


def vision_targets(config: Architecture) -> list[PairTarget]:
    """Return the targets of pairs in a model's image encoder and its adaptor; none if it takes no images."""
    if not isinstance(config, ModelConfig) or config.vision_config is None:
        return []
    shapes = config.vision_config.parameter_shapes(config.hidden_dim).items()
    matrices = {n: s for n, s in shapes if n.endswith(".weight") and len(s) == 2}
    return [PairTarget(n.removesuffix(".weight"), "", *reversed(s)) for n, s in matrices.items()]


def _name_pattern() -> re.Pattern[str]:
    """Return the pattern of tensor names in AFM adapters: `model.<list>.<index>.<name in the block>`."""
    names = [name for p in pair_targets(PRESETS["afm-nano"]) for name in (p.a, p.b)]
    lists, in_block = (
        "|".join(sorted({re.escape(name.split(".", 3)[i]) for name in names})) for i in (1, 3)
    )
    return re.compile(rf"model\.(?:{lists})\.\d{{1,5}}\.(?:{in_block})", re.ASCII)


_NAME = _name_pattern()


def layer_of(name: str) -> str:
    """Return a tensor's layer: `model.layers.0.mlp.up_proj` for `model.layers.0.mlp.up_proj.lora_a`."""
    return name[: name.rindex(".lora_")]


def keys_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the adapted layers' names within a block, for `AdapterConfig.keys`."""
    return tuple(sorted({_BLOCK.sub("", layer_of(name), 1) for name in names}))


_BLOCK = re.compile(r".*?\.\d+\.")


def num_layers_of(names: Iterable[str], config: Architecture | None) -> int:
    """Return the number of blocks from the first adapted one to the last; -1 if no AFM model is known."""
    if not isinstance(config, ModelConfig):
        return -1
    first = config.num_layers
    for name in names:
        _, kind, layer, *_ = name.split(".")
        first = min(first, int(layer) + config.num_kv_layers * (kind == "kv_reuse_layers"))
    return config.num_layers - first


def exact_alpha(rank: int, scale: float) -> float:
    """Return an alpha with `alpha / rank == scale` to the last bit, or else `rank * scale`."""
    alpha = rank * scale
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    alpha = next((each for each in near if each / rank == scale), alpha)
    return int(alpha) if alpha.is_integer() else alpha


def expected_shapes(
    config: Architecture, names: Iterable[str], rank: int
) -> dict[str, tuple[int, int]]:
    """Return the shapes, for a rank, of A and B of every pair that has a tensor among `names`."""
    wanted = set(names)
    pairs = [t for t in pair_targets(config) if not wanted.isdisjoint((t.a, t.b))]
    return {name: shape for target in pairs for name, shape in target.shapes(rank).items()}


def check_names(tensors: Iterable[str], source: object) -> None:
    """Raise `CheckpointError` unless all names are of an AFM model's LoRA tensors."""
    for name in tensors:
        if _NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{source}: {named(name)} is no LoRA tensor of an AFM model; they are named like "
                "model.layers.0.mlp.up_proj.lora_a and model.layers.0.self_attn.qkv_proj.lora_b.2. For "
                "another architecture, name the adapter's model (--model)."
            )


def misfits(tensors: Mapping[str, Shaped], config: Architecture) -> list[str]:
    """Return why an adapter does not fit a model: names without a layer, and wrong shapes; empty if it fits."""
    possible = (*pair_targets(config), *vision_targets(config))
    targets = {name: target for target in possible for name in (target.a, target.b)}
    found = []
    for name, tensor in tensors.items():
        target = targets.get(name)
        if target is None:
            found.append(f"the model has no layer for {named(name)}")
            continue
        is_a = name == target.a
        wanted = target.inputs if is_a else target.outputs
        if len(tensor.shape) != 2 or tensor.shape[0 if is_a else 1] != wanted:
            shape = f"[{wanted}, rank]" if is_a else f"[rank, {wanted}]"
            found.append(
                f"{named(name)} is {shown(list(tensor.shape))}, and the model needs {shape}"
            )
    return found


def check_fits(tensors: Mapping[str, Shaped], config: Architecture, source: object) -> None:
    """Raise `CheckpointError` with the `misfits`, if there are any."""
    if wrong := misfits(tensors, config):
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{source} does not fit the model: {'; '.join(wrong[:_SHOWN])}{more}. It was made for another one."
        )


def config_for(
    tensors: Mapping[str, Shaped], config: ModelConfig | None, source: object
) -> ModelConfig:
    """Return `config`, or the architecture of Apple's 3B model for None; raise if the tensors don't fit it."""
    if config is not None:
        check_fits(tensors, config, source)
    elif misfits(tensors, config := PRESETS["afm-3b"]):
        raise CheckpointError(
            f"{source} is not for Apple's 3B model, and this format needs the architecture. Name the model "
            "folder that the adapter belongs to (--model)."
        )
    return config


def complete(tensors: Mapping[str, mx.array], targets: Sequence[PairTarget], rank: int) -> Tensors:
    """Return the targets' tensors in order; pairs that the adapter leaves out are zeros of this rank."""
    dtype = next(iter(tensors.values())).dtype
    shapes = [item for target in targets for item in target.shapes(rank).items()]
    return {n: tensors[n] if n in tensors else mx.zeros(shape, dtype) for n, shape in shapes}


def without_empty(tensors: Mapping[str, mx.array]) -> Tensors:
    """Return the tensors without layers of zeros, which `complete` adds; all tensors if all are zeros."""
    used = mx.stack([mx.any(tensor) for tensor in tensors.values()]).tolist()
    layers = {layer_of(name) for name, any_number in zip(tensors, used, strict=True) if any_number}
    return {name: t for name, t in tensors.items() if not layers or layer_of(name) in layers}


def complete_fused(tensors: Mapping[str, mx.array], config: Architecture, rank: int) -> Tensors:
    """Return the tensors, with zeros for missing queries, keys or values: MLX's fused layer has all three."""
    fused = {layer_of(name) for name in tensors if name.endswith((".0", ".1", ".2"))}
    targets = [t for t in pair_targets(config) if t.part and t.layer in fused]
    return {**tensors, **complete(tensors, targets, rank)}
