"""Which tensor of a toolkit checkpoint becomes which of ours.

tamm names a block's parts after their place in a sequence of transforms; the names wanted are those of
mlx-lm's `afm7`. With K and V reuse there are two segments of blocks, without it a single sequence. An
adapted layer keeps its own weight under `wrapped`, and a LoRA pair per adapter under `adapters.<id>`:
`a_transpose` [in, rank] and `b_transpose` [rank, out], which already is MLX's orientation. The fused
query, key and value layer has three pairs.

Source: `tamm` 0.2.0, state dicts of `AFMTextV7`; mlx-lm 0.32.2, `mlx_lm/models/afm7.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from afm_mlx.errors import CheckpointError, named

_OUTER = {
    "embedding.weight": "model.embedding.weight",
    "output_norm.weight": "model.output_norm.weight",
}
TIED_HEAD = "output_transform.weight"

# Linear layers that can carry an adapter, and norms, by their names within a block.
_LINEARS = {
    "attention.qkv_transform": "self_attn.qkv_proj",
    "attention.q_transform": "self_attn.q_proj",
    "attention.output_transform": "self_attn.out_proj",
    "feed_forward.hidden_transform.linear_0": "mlp.gate_proj",
    "feed_forward.hidden_transform.linear_1": "mlp.up_proj",
    "feed_forward.output_transform": "mlp.down_proj",
}
_MODULES = {ours: theirs for theirs, ours in _LINEARS.items()}
_NORMS = {
    "attention.norm": "input_layernorm",
    "attention.qk_norm.query_norm": "self_attn.q_norm",
    "attention.qk_norm.key_norm": "self_attn.k_norm",
    "attention.q_norm.query_norm": "self_attn.q_norm",
    "feed_forward.norm": "post_attention_layernorm",
}
_WEIGHTS = {f"{k}.weight": f"{v}.weight" for k, v in (_LINEARS | _NORMS).items()}
# tamm's fused layer is a module inside the transform.
_WEIGHTS["attention.qkv_transform.fused_linear.weight"] = "self_attn.qkv_proj.weight"
del _WEIGHTS["attention.qkv_transform.weight"]

_BLOCK = re.compile(r"layers\.(?:segment_(?P<segment>[01])\.)?layer_(?P<layer>\d+)\.(?P<rest>.+)")
_LORA = re.compile(
    r"(?P<module>.+)\.adapters\.(?P<id>[^.]+)\.(?:lora_(?P<part>\d+)\.)?(?P<side>[ab])_transpose"
)
_RANGE = re.compile(
    r"attention\.kv_quantizer\.(?P<kind>key|value)_quantizer\.activation_post_process\."
    r"(?P<what>range|num_samples)"
)


@dataclass
class KeyMap:
    """Keys of a checkpoint by what they become.

    Attributes:
        weights: our parameter name -> key.
        kv_ranges: our scale's name -> {"range": key, "num_samples": key}.
        adapters: adapter id -> our LoRA tensor's name -> key.
        tied_head: key of the output head, which repeats the embedding.
    """

    weights: dict[str, str] = field(default_factory=dict)
    kv_ranges: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    adapters: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    tied_head: str | None = None


def map_keys(keys: Iterable[str], source: str) -> KeyMap:
    """Sort a checkpoint's keys by what they become.

    Raises:
        CheckpointError: names every unknown key, and two keys that mean the same.
    """
    result, unknown = KeyMap(), []
    for key in keys:
        name = key.removeprefix("model.").replace(".wrapped.", ".")
        if name == TIED_HEAD:
            result.tied_head = key
        elif name in _OUTER:
            _put(result.weights, _OUTER[name], key, source)
        elif not ((block := _BLOCK.fullmatch(name)) and _map_block(result, block, key, source)):
            unknown.append(key)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise CheckpointError(
            f"{source}: {len(unknown)} unknown tensors: {named(', '.join(unknown[:5]))}{more}. They may "
            "change what the model computes, so it is not converted. An AFMTextV7 state dict is needed."
        )
    return result


def adapter_key(name: str, adapter: str, segmented: bool) -> str:
    """Key of one of our LoRA tensors in a state dict: what `map_keys` undoes.

    Args:
        name: name of our tensor, such as `model.layers.0.self_attn.qkv_proj.lora_a.0`.
        adapter: the id.
        segmented: whether the model has blocks that reuse keys and values.
    """
    _, kind, layer, group, leaf, matrix, *part = name.split(".")
    segment = f"segment_{int(kind == 'kv_reuse_layers')}." if segmented else ""
    module = _MODULES[f"{group}.{leaf}"]
    lora = f"lora_{part[0]}." if part else ""
    side = matrix.removeprefix("lora_")
    return f"layers.{segment}layer_{layer}.{module}.adapters.{adapter}.{lora}{side}_transpose"


def _map_block(result: KeyMap, block: re.Match[str], key: str, source: str) -> bool:
    # Blocks of segment 1 reuse keys and values.
    kind, rest = "kv_reuse_layers" if block["segment"] == "1" else "layers", block["rest"]
    prefix = f"model.{kind}.{int(block['layer'])}"
    if rest in _WEIGHTS:
        _put(result.weights, f"{prefix}.{_WEIGHTS[rest]}", key, source)
    elif found := _RANGE.fullmatch(rest):
        scale = f"{prefix}.self_attn.quant_{found['kind']}_scale"
        _put(result.kv_ranges[scale], found["what"], key, source)
    elif (found := _LORA.fullmatch(rest)) and found["module"] in _LINEARS:
        module = _LINEARS[found["module"]]
        # mlx-lm numbers the pairs of the fused layer only.
        if (found["part"] is None) == (module == "self_attn.qkv_proj"):
            return False
        part = "" if found["part"] is None else f".{found['part']}"
        name = f"{prefix}.{module}.lora_{found['side']}{part}"
        _put(result.adapters[found["id"]], name, key, source)
    else:
        return False
    return True


def _put(target: dict[str, str], name: str, key: str, source: str) -> None:
    if name in target:
        raise CheckpointError(
            f"{source}: the tensors {named(target[name])} and {named(key)} both mean {named(name)}. "
            "The state dict is a mix of two models."
        )
    target[name] = key
