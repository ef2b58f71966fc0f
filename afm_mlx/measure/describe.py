"""Facts about a model folder, and about the machine and libraries that would run it.

Nothing is loaded: sizes come from the headers of the weight files. Every function returns values that
JSON can hold.
"""

from __future__ import annotations

import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx import __version__, blas
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.safetensors_file import StoredTensor
from afm_mlx.checkpoint.stored_layers import check_folder_tensors, quantization_of, stored_settings
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import MODEL_TYPE, ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import ConfigError, named, shown
from afm_mlx.loading.missing_kernels import missing_kernels
from afm_mlx.loading.resolve import model_draft
from afm_mlx.quantization.packed_layers import PARTS, activation_dtype
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import tokenizer_folder
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL
from afm_mlx.track_config import TrackConfig
from afm_mlx.vision_config import MODES, VisionConfig

_PRODUCT = 512  # rows and columns of the product that is timed
_SECONDS_TO_TIME = 0.1

Facts = dict[str, Any]


def describe_folder(folder: Path) -> Facts:
    """Describe a model folder.

    Raises:
        AFMError: if the folder is not a model, or its files are damaged or don't belong together.
    """
    source = folder / "config.json"
    values = read_config_json(source)
    tensors = stored_tensors(folder)
    quantization = quantization_of(values, source)
    config = ModelConfig.from_dict(values, source=str(source)) if is_afm_config(values) else None
    if config is not None:
        check_folder_tensors(config, quantization, tensors, source)
        facts = describe_config(config)
    elif values.get("model_type") == TRACK_MODEL:
        facts = describe_tracks(TrackConfig.from_dict(values))
    else:
        facts = {
            "model_type": values.get("model_type"),
            "runs_with": "the architecture of mlx-lm, in this package's engine",
        }
    facts["weights"] = describe_weights(tensors, _count_parameters(tensors, values, source))
    if packed := describe_packed_layers(tensors, quantization, source):
        facts["packed_layers"] = packed
    if config is not None:
        facts["tokenizer"] = describe_tokenizer(folder)
        facts["fingerprint"] = folder_fingerprint(config, folder)
    if (draft := model_draft(folder)) is not None:
        weights = describe_stored_weights(draft)
        values = read_config_json(draft / "config.json")
        described = {"folder": str(draft), "model_type": values.get("model_type")}
        if is_afm_config(values):
            config = ModelConfig.from_dict(values, source=str(draft / "config.json"))
            described |= {"layers": config.num_layers, "hidden_dim": config.hidden_dim}
        described |= {name: weights[name] for name in ("parameters", "bytes", "bits_per_weight")}
        facts["draft_model"] = described
    return facts


def describe_config(config: ModelConfig) -> Facts:
    """Describe an architecture."""
    widths = {"bfloat16": 2, "float32": 4}
    if config.kv_bits == 8:
        widths = {"int8": 1, **widths}
    per_token = {name: width * config.kv_values_per_token for name, width in widths.items()}
    facts: Facts = {
        "model_type": MODEL_TYPE,
        "architecture": {
            "layers": config.num_layers,
            "layers_that_write_kv": config.num_kv_layers,
            "layers_that_reuse_kv": config.num_kv_reuse_layers,
            "hidden_dim": config.hidden_dim,
            "ffn_dim": config.ffn_dim,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "rope_theta": config.rope_theta,
            "context_length": config.context_length,
            "parameters": config.num_parameters,
        },
        "kv_cache": {
            "bytes_per_token": per_token,
            "bytes_at_full_context": {k: v * config.context_length for k, v in per_token.items()},
        },
    }
    if config.vision_config is not None:
        facts["images"] = describe_vision(config.vision_config, config.hidden_dim)
    return facts


def describe_vision(config: VisionConfig, text_dim: int) -> Facts:
    """Describe an image encoder and its adaptor, for a language model of width `text_dim`."""
    shapes = config.parameter_shapes(text_dim).items()
    parameters = {
        part: sum(math.prod(s) for name, s in shapes if name.startswith(f"vision.{part}."))
        for part in ("encoder", "adaptor")
    }
    return {
        "parameters": parameters,
        "layers": config.num_layers,
        "layers_that_see_all_windows": len(config.global_layers),
        "hidden_dim": config.hidden_dim,
        "heads": config.num_heads,
        "patch": config.patch_size,
        "patches_on_a_side_of_a_window": config.window_size,
        "registers": config.num_registers,
        "adaptor": config.adaptor.kind,
        "fit": config.images.fit,
        "image_token_id": config.image_token_id,
        "tiles": {mode: config.num_tiles(mode) for mode in MODES},
        "pixels_on_a_side_of_a_tile": {mode: config.tile_size(mode) for mode in MODES},
        "tokens": {mode: config.tokens(mode) for mode in MODES},
        "encoder_tflops": {mode: config.encoder_flops(mode) / 1e12 for mode in MODES},
    }


def describe_tracks(config: TrackConfig) -> Facts:
    """Describe an architecture of parallel tracks."""
    layers = range(config.num_layers_per_track)
    context, widths = config.max_position_embeddings, {"bfloat16": 2, "float32": 4}
    return {
        "model_type": TRACK_MODEL,
        "architecture": {
            "tracks": config.num_tracks,
            "layers_per_track": config.num_layers_per_track,
            "exchanges_between_tracks": config.num_segments,
            "layers_with_a_window": sum(map(config.is_local, layers)),
            "window": config.window,
            "layers_with_experts": sum(map(config.is_sparse, layers)),
            "experts_per_track": config.num_experts,
            "experts_per_token": config.num_experts_per_token,
            "hidden_dim": config.hidden_dim,
            "ffn_dim": config.dense_feed_forward_hidden_dim,
            "expert_ffn_dim": config.sparse_feed_forward_hidden_dim,
            "heads_per_track": config.num_heads,
            "kv_heads_per_track": config.kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "rope_theta": config.rope_theta,
            "context_length": context,
            "parameters": config.num_parameters,
            "active_parameters": config.num_active_parameters,
        },
        "kv_cache": {
            "bytes_per_token_within_the_window": {
                k: w * config.kv_values(1) for k, w in widths.items()
            },
            "bytes_at_full_context": {k: w * config.kv_values(context) for k, w in widths.items()},
        },
    }


def describe_weights(tensors: dict[str, StoredTensor], parameters: int) -> Facts:
    """Describe the sizes of stored weights, including scales, given the number of its parameters."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    kinds = {str(tensor.dtype).removeprefix("mlx.core.") for tensor in tensors.values()}
    return {
        "parameters": parameters,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / max(1, parameters),
        "bytes_per_weight": nbytes / max(1, parameters),
        "tensors": len(tensors),
        "files": len({tensor.path for tensor in tensors.values()}),
        "stored_as": sorted(kinds),
    }


def describe_stored_weights(folder: Path) -> Facts:
    """Describe the sizes of a model folder's weights, for any architecture."""
    source = folder / "config.json"
    tensors, values = stored_tensors(folder), read_config_json(source)
    return describe_weights(tensors, _count_parameters(tensors, values, source))


def describe_packed_layers(
    tensors: dict[str, StoredTensor], quantization: Facts, source: Path
) -> Facts:
    """Describe packed layers by format: number of layers and weights, bytes, and bits per weight."""
    formats: dict[str, dict[str, Any]] = {}
    for path in _packed_paths(tensors):
        settings = stored_settings(quantization, path)
        bits = settings.get("bits", 32)
        if type(bits) is not int or not 1 <= bits <= 32:
            raise ConfigError(
                f"{source}: the quantization of {named(path)} has {shown(bits)} bits; 1 to 32 are possible."
            )
        nbytes = sum(tensors[n].nbytes for n in (f"{path}.{p}" for p in PARTS) if n in tensors)
        # Such as "2-bit balanced per row" or "4-bit affine per 64".
        mode, per = settings.get("mode", "affine"), settings.get("granularity") or "group"
        if per == "group":
            per = f"{settings.get('group_size')}" + (" rows" if mode == "palette" else "")
        name = f"{settings.get('bits')}-bit {mode} per {per}"
        found = formats.setdefault(name, {"layers": 0, "weights": 0, "bytes": 0})
        found["layers"] += 1
        found["weights"] += tensors[f"{path}.weight"].size * 32 // bits
        found["bytes"] += nbytes
    for found in formats.values():
        found["bits_per_weight"] = 8 * found["bytes"] / max(1, found["weights"])
    return formats


def describe_tokenizer(folder: Path) -> Facts:
    """Describe an AFM folder's tokenizer."""
    tokenizer, folder = load_tokenizer(folder), tokenizer_folder(folder)
    if (folder / "chat_template.jinja").exists():
        template = "chat_template.jinja"
    else:
        is_own = tokenizer.chat_template == V6_TEMPLATE
        template = "AFM's (V6)" if is_own else "tokenizer_config.json"
    return {
        "file": "tokenizer.model" if (folder / "tokenizer.model").exists() else "tokenizer.json",
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "eos_token": tokenizer.eos_token,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "tool_calls": tokenizer.has_tool_calling,
        "chat_template": template,
    }


def describe_runtime() -> Facts:
    """Describe the device and libraries that would run a model here, and the CPU's speed of a product."""
    metal = mx.metal.is_available()
    return {
        "device": str(mx.default_device()).removeprefix("Device(").rstrip(")").replace(", ", ":"),
        "device_name": mx.device_info().get("device_name", platform.processor()),
        "activation_dtype": str(activation_dtype()).removeprefix("mlx.core."),
        "metal": "available" if metal else "not found; everything runs on the CPU",
        "kernels": f"missing: {reason}" if (reason := missing_kernels()) else "in use",
        "blas": blas.status(),
        "cpu_gflops_float32": measure_gflops(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "afm-mlx": __version__,
            "python": platform.python_version(),
            **{package: version_of(package) for package in ("mlx", "mlx-lm", "numpy")},
        },
    }


def measure_gflops() -> float:
    """Measure GFLOP/s of a dense float32 product on the CPU: the best run in a tenth of a second."""
    a, b = (mx.random.normal((_PRODUCT, _PRODUCT), stream=mx.cpu) for _ in range(2))
    mx.eval(a, b)
    best, deadline = math.inf, time.perf_counter() + _SECONDS_TO_TIME
    while True:
        start = time.perf_counter()
        mx.eval(mx.matmul(a, b, stream=mx.cpu))
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return 2 * _PRODUCT**3 / best / 1e9


def version_of(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _count_parameters(tensors: dict[str, StoredTensor], values: Facts, source: Path) -> int:
    """Count the weights of any model, including those packed into integers."""
    if is_afm_config(values):
        return ModelConfig.from_dict(values, source=str(source)).num_parameters
    formats = describe_packed_layers(tensors, quantization_of(values, source), source)
    parts = {f"{path}.{part}" for path in _packed_paths(tensors) for part in PARTS}
    floats = sum(tensor.size for name, tensor in tensors.items() if name not in parts)
    return floats + sum(found["weights"] for found in formats.values())


def _packed_paths(tensors: dict[str, StoredTensor]) -> list[str]:
    names = [name for name, tensor in tensors.items() if tensor.dtype == mx.uint32]
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
