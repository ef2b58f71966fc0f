"""The LoRA pairs of an AFM model, in the order of tamm's state dicts, which `.fmadapter` packages keep.

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
from typing import Any, NamedTuple

import mlx.core as mx

from afm_mlx.config import PRESETS, ModelConfig, blocks
from afm_mlx.errors import CheckpointError, named, shown

Tensors = dict[str, mx.array]

_SHOWN = 5


class PairPlace(NamedTuple):
    """Where a model can carry one LoRA pair.

    Args:
        layer: path of the linear layer, such as `model.layers.0.mlp.up_proj`.
        part: ".0", ".1", ".2" for queries, keys and values of a fused layer, else "".
        inputs: K, rows of A.
        outputs: N, columns of B.
        rotary_heads: heads that RoPE rotates among the outputs; 0 where it rotates none.
    """

    layer: str
    part: str
    inputs: int
    outputs: int
    rotary_heads: int = 0

    @property
    def a(self) -> str:
        """Name of A (inputs, rank)."""
        return f"{self.layer}.lora_a{self.part}"

    @property
    def b(self) -> str:
        """Name of B (rank, outputs)."""
        return f"{self.layer}.lora_b{self.part}"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Shapes of A and B of a rank, by their names."""
        return {self.a: (self.inputs, rank), self.b: (rank, self.outputs)}


def pair_places(config: ModelConfig) -> list[PairPlace]:
    """Every pair that a model can carry, in the order of a checkpoint."""
    return [
        PairPlace(
            f"{path}.{matrix.name}",
            f".{index}" if len(matrix.projections) > 1 else "",
            matrix.inputs,
            *projection,
        )
        for path, kind in blocks(config)
        for matrix in kind.matrices
        for index, projection in enumerate(matrix.projections)
    ]


def _name_pattern() -> re.Pattern[str]:
    """Matches a tensor's name in an adapter of any AFM model: `model.<list>.<index>.<name in the block>`."""
    names = [name for p in pair_places(PRESETS["afm-nano"]) for name in (p.a, p.b)]
    lists, in_block = ({re.escape(name.split(".", 3)[i]) for name in names} for i in (1, 3))
    either = "|".join(sorted(in_block))
    return re.compile(rf"model\.(?:{'|'.join(sorted(lists))})\.\d{{1,5}}\.(?:{either})", re.ASCII)


_NAME = _name_pattern()


def layer_of(name: str) -> str:
    """`model.layers.0.mlp.up_proj` of `model.layers.0.mlp.up_proj.lora_a`, or of `...lora_a.0`."""
    return name[: name.rindex(".lora_")]


def keys_of(names: Iterable[str]) -> tuple[str, ...]:
    """The adapted layers by their names within a block, as `AdapterConfig` has them."""
    return tuple(sorted({".".join(layer_of(name).split(".")[-2:]) for name in names}))


def num_layers_of(names: Iterable[str], config: ModelConfig | None) -> int:
    """Blocks from the first adapted one to the last of all; -1, for all, when the model is unknown."""
    if config is None:
        return -1
    first = config.num_layers
    for name in names:
        _, kind, layer, *_ = name.split(".")
        first = min(first, int(layer) + config.num_kv_layers * (kind == "kv_reuse_layers"))
    return config.num_layers - first


def exact_alpha(rank: int, scale: float) -> float:
    """An alpha whose quotient by the rank is the scale to the last bit, where a float can be one."""
    alpha = rank * scale
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    alpha = next((each for each in near if each / rank == scale), alpha)
    return int(alpha) if alpha.is_integer() else alpha


def expected_shapes(
    config: ModelConfig, names: Iterable[str], rank: int
) -> dict[str, tuple[int, int]]:
    """Shapes of A and B of every pair that `names` has one tensor of."""
    wanted = set(names)
    result: dict[str, tuple[int, int]] = {}
    for place in pair_places(config):
        if not wanted.isdisjoint((place.a, place.b)):
            result |= place.shapes(rank)
    return result


def check_names(tensors: Iterable[str], source: object) -> None:
    """Raise `CheckpointError` when a tensor is not named like one of an AFM model's adapter."""
    for name in tensors:
        if _NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{source}: {named(name)} is no LoRA tensor of an AFM model; they are named like "
                "model.layers.0.mlp.up_proj.lora_a and model.layers.0.self_attn.qkv_proj.lora_b.2."
            )


def misfits(tensors: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """What keeps an adapter from fitting a model: names that it has no layer for, and wrong shapes."""
    places = {name: place for place in pair_places(config) for name in (place.a, place.b)}
    found = []
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None:
            found.append(f"the model has no layer for {named(name)}")
            continue
        is_a = name == place.a
        wanted = place.inputs if is_a else place.outputs
        if len(tensor.shape) != 2 or tensor.shape[0 if is_a else 1] != wanted:
            shape = f"[{wanted}, rank]" if is_a else f"[rank, {wanted}]"
            found.append(
                f"{named(name)} is {shown(list(tensor.shape))}, and the model needs {shape}"
            )
    return found


def check_fits(tensors: Mapping[str, Any], config: ModelConfig, source: object) -> None:
    """Raise `CheckpointError` with the `misfits`."""
    if wrong := misfits(tensors, config):
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{source} does not fit the model: {'; '.join(wrong[:_SHOWN])}{more}. It was made for another one."
        )


def config_for(
    tensors: Mapping[str, Any], config: ModelConfig | None, source: object
) -> ModelConfig:
    """The given architecture, or that of Apple's 3B model when the tensors fit it.

    Raises:
        CheckpointError: when the tensors do not fit, or the architecture is unknown.
    """
    if config is None:
        config = PRESETS["afm-3b"]
        if misfits(tensors, config):
            raise CheckpointError(
                f"{source} is not for Apple's 3B model, and this format needs the architecture. Name the model "
                "folder that the adapter belongs to (--model)."
            )
        return config
    check_fits(tensors, config, source)
    return config


def complete(tensors: Mapping[str, mx.array], places: Sequence[PairPlace], rank: int) -> Tensors:
    """The tensors in the places' order, with zero pairs where the adapter leaves one out."""
    dtype = next(iter(tensors.values())).dtype
    result = {}
    for place in places:
        for name, shape in place.shapes(rank).items():
            result[name] = tensors[name] if name in tensors else mx.zeros(shape, dtype)
    return result


def without_empty(tensors: Mapping[str, mx.array]) -> Tensors:
    """The tensors without layers whose every number is zero: what `complete` has put there."""
    used = mx.stack([mx.any(tensor) for tensor in tensors.values()]).tolist()
    layers = {layer_of(name) for name, any_number in zip(tensors, used, strict=True) if any_number}
    return {name: t for name, t in tensors.items() if not layers or layer_of(name) in layers}


def complete_fused(tensors: Mapping[str, mx.array], config: ModelConfig, rank: int) -> Tensors:
    """The tensors, with zero pairs where an adapter leaves out queries, keys or values of a fused layer.

    MLX's fused layer has all three.
    """
    fused = {layer_of(name) for name in tensors if name.endswith((".0", ".1", ".2"))}
    places = [place for place in pair_places(config) if place.part and place.layer in fused]
    return {**tensors, **complete(tensors, places, rank)}
