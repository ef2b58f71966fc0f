"""Training checkpoints of Apple's toolkit: the `.pt` file, its config, and the names of its tensors.

**The file** is an uncompressed zip archive of a pickle, which describes the tensors, and of one record of raw
data for each storage. PyTorch's restricted unpickler reads the pickle, and builds only tensors and plain
containers. The data is mapped: a page of it takes memory only while it is used.

**The config** is plain JSON. `tamm` writes only what differs from its defaults, which are repeated here. The
type tag has had several spellings: `models:AFMTextV7Config` in the adapter toolkit 26.0,
`module_configs:AFMTextV7Config` in tamm 0.2.0, each with or without `tamm:` before it.

**The names**: tamm calls a block's parts after their position in a sequence of transforms; ours are mlx-lm's
for `afm7`. With K and V reuse there are two segments of blocks, without it a single sequence. A layer with
adapters keeps its own weight under `wrapped`, and a LoRA pair for each adapter under `adapters.<id>`:
`a_transpose` [in, rank] and `b_transpose` [rank, out], which already is MLX's orientation. The fused query, key
and value layer has three pairs.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html; `tamm` 0.2.0,
`tamm/models/afm_text/afm_text_v7.py`, `tamm/layers/common/config.py`,
`tamm/_adapters_v1/model_adapters/lora.py`, `tamm/ao/arch_optimizers/kv_quant.py`, state dicts of `AFMTextV7`;
mlx-lm 0.32.2, `mlx_lm/models/afm7.py`.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, shown
from afm_mlx.installation import package_problem
from afm_mlx.json_values import MAX_RANK, is_number, is_rank

if TYPE_CHECKING:
    import torch

# A state dict of 1,326 tensors takes 0.2 MB; the unpickler holds all of it in memory.
_MAX_PICKLE_BYTES = 64 << 20
_CHUNK_ELEMENTS = 8 << 20


def import_torch() -> Any:
    """Import PyTorch, which only `.pt` files need; raise `AFMError`, which says how to install it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise AFMError(
            f"Reading a .pt checkpoint needs PyTorch. {package_problem(error) or error}"
        ) from error
    return torch


def open_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Open a state dict that `torch.save` wrote, its tensors mapped into memory, by their keys.

    Raises:
        CheckpointError: if the file is missing, cut off, damaged, no such checkpoint, or holds anything that
            could run code.
        AFMError: without PyTorch.
    """
    path = Path(path)
    check_archive(path)
    torch = import_torch()
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "WeightsUnpickler" in line), "")
        raise CheckpointError(
            f"{path} holds more than tensors, and loading that could run code of whoever made the file; "
            f"refused. {reason.strip()} Save the state dict alone: torch.save(model.state_dict(), path)."
        ) from None
    except Exception as error:
        # A damaged archive may make PyTorch raise RuntimeError, EOFError, KeyError, ValueError, ...
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} can't be read as a PyTorch checkpoint: {reason}. "
            "It is damaged: copy or download it again."
        ) from None
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}; a state dict (names to tensors) is needed."
        )
    others = [str(k) for k, v in state.items() if not isinstance(v, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{path} holds other things than tensors at its top level: {', '.join(others[:5])}. "
            "Save the state dict alone: torch.save(model.state_dict(), path)."
        )
    for key, tensor in state.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{path}: the name {shown(key)} is no text. A state dict is needed."
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(f"{path}: {key} is no dense tensor, and only those are read.")
    # Data of another size than described: reads would go beyond it.
    with zipfile.ZipFile(path) as archive:
        records = Counter(e.file_size for e in archive.infolist() if "/data/" in e.filename)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in state.values())}
    if missing := Counter(size for size in storages.values() if size) - records:
        raise CheckpointError(
            f"{path} describes tensors of {min(missing):,} bytes that no record in it has. It is damaged: "
            "copy or download it again."
        )
    return state


def mlx_dtype(tensor: torch.Tensor) -> mx.Dtype | None:
    """Return the MLX type of a floating-point tensor, float32 for float64; None for other types and 8 bits."""
    types = {"float16": mx.float16, "bfloat16": mx.bfloat16}
    types |= {"float32": mx.float32, "float64": mx.float32}
    return types.get(str(tensor.dtype).removeprefix("torch."))


def tensor_chunks(tensor: torch.Tensor, dtype: mx.Dtype, name: str) -> Iterator[Any]:
    """Yield a floating-point tensor's elements, row-major, as little-endian bytes of `dtype`.

    Raises:
        CheckpointError: for NaN, infinity, and numbers that `dtype` can't hold.
    """
    torch = import_torch()
    target = getattr(torch, str(dtype).removeprefix("mlx.core."))
    limit = torch.finfo(target).max
    for part in _parts(tensor):
        low, high = (value.item() for value in torch.aminmax(part))
        if not math.isfinite(low) or not math.isfinite(high):
            raise CheckpointError(
                f"{name} holds NaN or infinity: the checkpoint is damaged, or its training diverged."
            )
        if max(-low, high) > limit:
            raise CheckpointError(
                f"{name} holds {max(-low, high):.4g}, and {target} ends at {limit:.4g}. "
                "Choose bfloat16 or float32."
            )
        yield part.to(target).contiguous().reshape(-1).view(torch.uint8).numpy()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of the same shape hold the same numbers, without copying either."""
    torch = import_torch()
    if (one.data_ptr(), one.stride(), one.dtype) == (other.data_ptr(), other.stride(), other.dtype):
        return True
    return all(torch.equal(a, b) for a, b in zip(_parts(one), _parts(other), strict=True))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield groups of rows of a few megabytes."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    yield from rows.split(max(1, _CHUNK_ELEMENTS * len(rows) // rows.numel()))


def check_archive(path: Path) -> None:
    """Raise `CheckpointError` unless a file is a complete archive as `torch.save` writes it."""
    again = "Give the .pt file that torch.save wrote."
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or no file.")
    with path.open("rb") as file:
        magic = file.read(4)
    size = path.stat().st_size
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path} is a bare pickle, or a checkpoint of a PyTorch before 1.6; only the zip format is "
            "read. Load it where you trust it and save it again with torch.save."
        )
    if magic != b"PK\x03\x04":
        raise CheckpointError(
            f"{path} ({size:,} bytes) is no PyTorch checkpoint: it starts with {magic!r}, a checkpoint with "
            f"b'PK\\x03\\x04'. {again}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} ({size:,} bytes) is cut off or damaged: {error}. Copy or download it again."
        ) from None
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path} is a zip archive, but no PyTorch checkpoint: it has no data.pkl in a folder. {again}"
        )
    if len({entry.filename for entry in entries}) < len(entries):
        raise CheckpointError(
            f"{path} has two entries of one name, and readers differ in which they take. {again}"
        )
    # The data is mapped by the archive's offsets, which compression or a wrong size would break.
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or any(entry.file_size != entry.compress_size for entry in entries):
        raise CheckpointError(f"{path} was packed again with compression. {again}")
    if any(entry.header_offset + entry.file_size > size for entry in entries):
        raise CheckpointError(f"{path} is damaged: it announces more data than its {size:,} bytes.")
    if pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path} describes its tensors in {pickles[0].file_size:,} bytes; {_MAX_PICKLE_BYTES:,} are "
            "allowed. It is no checkpoint of a model that this package knows."
        )


# -- config

_ARCHITECTURE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 153600,
    "hidden_dim": 2048,
    "num_layers": 56,
    "num_kv_reuse_layers": 21,
    "num_heads": 16,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 3.25,
    "rope_theta": 500000.0,
}
# Fields for training or tamm only, which don't change what the trained model computes.
WITHOUT_EFFECT = set(
    """
    attention_dropout_p hidden_dropout_p include_loss_layer output_hidden_states output_attentions
    sdpa_implementation active_adapter pretrained_path pretrained device dtype freeze_params metadata model_id
    description is_deprecated replacement_model_id __package_requirements__
    """.split()
)


@dataclass(frozen=True)
class LoRASpec:
    """Settings of one adapter; `y = W x + scale * B A x` with `scale = alpha / rank`."""

    rank: int
    alpha: float
    dropout: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ToolkitConfig:
    """A parsed config: the architecture and the adapters by id.

    An adapter of another kind than LoRA is represented by the name of its type: it is an error only if the
    checkpoint holds its tensors.
    """

    model: ModelConfig
    adapters: dict[str, LoRASpec | str]


def is_toolkit_config(values: Mapping[str, Any]) -> bool:
    """True if a JSON object has tamm's type tag."""
    return isinstance(values.get("__tamm_type__"), str)


def find_toolkit_config(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of the files `names` in a folder that is a config of tamm; None if none is."""
    files = [folder / name for name in names if (folder / name).is_file()]
    return next((file for file in files if is_toolkit_config(read_config_json(file))), None)


def read_toolkit_config(path: str | Path) -> ToolkitConfig:
    """Parse a `*-config.json` of tamm.

    Raises:
        ConfigError: for another model type, unknown keys, and options that this package can't honour.
    """
    values = read_config_json(path)
    kind = type_name(values)
    if kind != "AFMTextV7Config":
        raise ConfigError(
            f"{path}: __tamm_type__ is {shown(values.get('__tamm_type__'))}; AFMTextV7Config is the "
            "architecture that can be converted."
        )
    known = set(_ARCHITECTURE_DEFAULTS) | WITHOUT_EFFECT
    unknown = sorted(set(values) - known - {"__tamm_type__", "adapters", "arch_optimizers"})
    if unknown:
        raise ConfigError(
            f"{path}: unknown keys {named(', '.join(unknown))}. They may change what the model computes, so it "
            f"is not converted. Known are {', '.join(sorted(_ARCHITECTURE_DEFAULTS))}, adapters and "
            "arch_optimizers."
        )
    fields = {key: values.get(key, default) for key, default in _ARCHITECTURE_DEFAULTS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    optimizers = _objects(values, "arch_optimizers", path)
    for name, entry in optimizers.items():
        if type_name(entry) != "KVQuantArchOptimizer":
            raise ConfigError(
                f"{path}: arch_optimizers {shown(name)} is {shown(entry.get('__tamm_type__'))}; "
                "KVQuantArchOptimizer is the one that can be converted."
            )
        if entry.get("skip_quantize_for_first_token", False):
            raise ConfigError(
                f"{path}: arch_optimizers {shown(name)} sets skip_quantize_for_first_token, which computes "
                "the prompt's logits from unquantized keys and values. This package always reads "
                "what the cache holds; set it to false if that is what you want."
            )
    fields["kv_bits"] = 8 if optimizers else None
    adapters = {
        name: _adapter(entry, f"{path}: adapter {shown(name)}")
        for name, entry in _objects(values, "adapters", path).items()
    }
    return ToolkitConfig(ModelConfig.from_dict(fields, source=str(path)), adapters)


def type_name(values: Mapping[str, Any]) -> str:
    """Return the name of the class that a config of tamm's is for."""
    return str(values.get("__tamm_type__")).split(":")[-1]


def _objects(values: Mapping[str, Any], key: str, path: str | Path) -> dict[str, dict[str, Any]]:
    entries = values.get(key) or {}
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise ConfigError(f"{path}: {key} must be an object of objects.")
    return entries


def _adapter(entry: Mapping[str, Any], where: str) -> LoRASpec | str:
    if type_name(entry) != "LoRAModelAdapter":
        return str(entry.get("__tamm_type__"))
    rank, alpha, dropout = entry.get("rank", 8), entry.get("alpha"), entry.get("dropout_p", 0)
    alpha = rank if alpha is None else alpha
    if not is_rank(rank):
        raise ConfigError(
            f"{where}: rank is {shown(rank)}, and must be a whole number of 1 to {MAX_RANK}."
        )
    for name, value in (("alpha", alpha), ("dropout_p", dropout)):
        if not is_number(value) or value < 0:
            raise ConfigError(
                f"{where}: {name} is {shown(value)}, and must be a number of 0 or more."
            )
    return LoRASpec(rank, float(alpha), float(dropout))


# -- names

_OUTER = {name: f"model.{name}" for name in ("embedding.weight", "output_norm.weight")}
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
    """Keys of a checkpoint, by the parameters that they become.

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
    """Map a checkpoint's keys to our parameters.

    Raises:
        CheckpointError: names unknown keys, and two keys of one parameter.
    """
    result, unknown = KeyMap(), []
    for key in keys:
        name = key.removeprefix("model.").replace(".wrapped.", ".")
        if name == TIED_HEAD:
            result.tied_head = key
        elif (place := _place(result, name)) is None:
            unknown.append(key)
        else:
            target, ours = place
            if ours in target:
                raise CheckpointError(
                    f"{source}: the tensors {named(target[ours])} and {named(key)} both mean {named(ours)}. "
                    "The state dict is a mix of two models."
                )
            target[ours] = key
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise CheckpointError(
            f"{source}: {len(unknown)} unknown tensors: {named(', '.join(unknown[:5]))}{more}. They may "
            "change what the model computes, so it is not converted. An AFMTextV7 state dict is needed."
        )
    return result


def adapter_key(name: str, adapter: str, segmented: bool) -> str:
    """Return the key of one of our LoRA tensors in a state dict: the inverse of `map_keys`.

    `segmented` is True if the model has blocks that reuse keys and values.
    """
    _, kind, layer, group, leaf, matrix, *part = name.split(".")
    segment = f"segment_{int(kind == 'kv_reuse_layers')}." if segmented else ""
    module = _MODULES[f"{group}.{leaf}"]
    lora = f"lora_{part[0]}." if part else ""
    side = matrix.removeprefix("lora_")
    return f"layers.{segment}layer_{layer}.{module}.adapters.{adapter}.{lora}{side}_transpose"


def _place(keys: KeyMap, name: str) -> tuple[dict[str, str], str] | None:
    """Return the mapping of `keys` that the tensor `name` belongs in, and our name there; None if unknown."""
    if name in _OUTER:
        return keys.weights, _OUTER[name]
    if (block := _BLOCK.fullmatch(name)) is None:
        return None
    # Blocks of segment 1 reuse keys and values.
    kind, rest = "kv_reuse_layers" if block["segment"] == "1" else "layers", block["rest"]
    prefix = f"model.{kind}.{int(block['layer'])}"
    if rest in _WEIGHTS:
        return keys.weights, f"{prefix}.{_WEIGHTS[rest]}"
    if found := _RANGE.fullmatch(rest):
        scale = f"{prefix}.self_attn.quant_{found['kind']}_scale"
        return keys.kv_ranges[scale], found["what"]
    if not (found := _LORA.fullmatch(rest)) or found["module"] not in _LINEARS:
        return None
    module = _LINEARS[found["module"]]
    # mlx-lm numbers the pairs of the fused layer only.
    if (found["part"] is None) == (module == "self_attn.qkv_proj"):
        return None
    part = "" if found["part"] is None else f".{found['part']}"
    return keys.adapters[found["id"]], f"{prefix}.{module}.lora_{found['side']}{part}"
