"""Checkpoints of tamm's parallel-track mixture of experts (PT-MoE), to a model folder and back.

tamm's matrices are (tracks, inputs, outputs), and (tracks, experts, inputs, outputs) for experts. Ours are
(tracks, outputs, inputs), and (tracks * experts, outputs, inputs). The head is the embedding.

Source: `tamm` 0.2.0, state dicts and configs of `AFMParallelTrackMoEConfig`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from afm_mlx.checkpoint.folder_texts import write_config
from afm_mlx.checkpoint.safetensors_file import StoredTensor, TensorSpec, float_values
from afm_mlx.checkpoint.toolkit_checkpoint import (
    WITHOUT_EFFECT,
    equal,
    import_torch,
    mlx_dtype,
    open_state_dict,
    tensor_chunks,
    type_name,
)
from afm_mlx.checkpoint.weights import check_space, check_weights, stored_tensors, write_weights
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.tokenizer_export import save_tokenizer
from afm_mlx.tokenizer.vocabulary import SentencePieceVocabulary
from afm_mlx.track_config import TrackConfig, parameter_shapes

if TYPE_CHECKING:
    import torch

TAMM_TYPE = "AFMParallelTrackMoEConfig"
_TIED_HEAD = "output_transform.weight"
_OURS_ALONE = ("model_type", "max_position_embeddings")
_PARTS = (
    {
        "self_attn.qkv_proj": "attention.qkv_transform.fused_linear",
        "self_attn.out_proj": "attention.output_transform",
        "self_attn.q_norm": "attention.qk_norm.query_norm",
        "self_attn.k_norm": "attention.qk_norm.key_norm",
        "mlp.router": "feed_forward.router.input_transform",
    }
    | {
        f"{ours}.{name}_proj": f"{theirs}.{source}"
        for ours, theirs in (("mlp", "feed_forward"), ("mlp.experts", "feed_forward.experts"))
        for name, source in (
            ("gate", "hidden_transform.linear_0"),
            ("up", "hidden_transform.linear_1"),
            ("down", "output_transform"),
        )
    }
    | {
        f"{ours}_{norm}": f"{theirs}.{source}"
        for ours, theirs in (("attention", "attention"), ("mlp", "feed_forward"))
        for norm, source in (
            ("pre_norm", "norm"),
            ("pre_residual_norm", "residual_connection.pre_residual_norm"),
            ("post_norm", "residual_connection.post_norm"),
        )
    }
)
"""A layer's part in tamm's state dicts, by its path in ours."""


def tamm_keys(config: TrackConfig) -> dict[str, str]:
    """Return the key of each parameter in tamm's state dict, by our name."""
    size, keys = config.num_layers_per_track_per_sync_point, {}
    for name in parameter_shapes(config):
        kind, *rest = name.removeprefix("model.").removesuffix(".weight").split(".")
        if kind == "layers":
            segment, layer = divmod(int(rest[0]), size)
            path = f"layers.segment_{segment}.layer_{layer}.{_PARTS['.'.join(rest[1:])]}"
        elif kind in ("dispatch_norms", "combine_norms"):
            end = "input" if kind == "dispatch_norms" else "output"
            path = f"layers.segment_{rest[0]}.{end}_transform.norm"
        else:
            path = {"embed_tokens": "embedding", "norm": "output_norm"}[kind]
        keys[name] = f"{path}.weight"
    return keys


def _tamm_shape(config: TrackConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that tamm gives a parameter of our name and shape."""
    if len(shape) < 3:
        return shape
    _, outputs, inputs = shape
    experts = (config.num_experts,) if ".experts." in name else ()
    return (config.num_tracks, *experts, inputs, outputs)


def read_tamm_config(path: Path) -> TrackConfig:
    """Parse a config of tamm's; `ConfigError` names unknown keys, and values that can't be honoured."""
    values = read_config_json(path)
    skipped = WITHOUT_EFFECT | {"__tamm_type__", "output_expert_assignments"}
    given = {key: value for key, value in values.items() if key not in skipped}
    for key in ("adapters", "arch_optimizers"):
        if given.pop(key, None):
            raise ConfigError(
                f"{path}: {key} of a parallel-track model can't be converted. Save the model without them."
            )
    if "attention_layer_pattern" in given:  # tamm takes both names
        renamed = {"local": "local_rope"}
        given["attention_layer_pattern"] = [
            renamed.get(kind, kind) for kind in given["attention_layer_pattern"]
        ]
    try:
        return TrackConfig.from_dict(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_tracks(
    weights: Path,
    config_path: Path,
    spm: Path,
    folder: Path,
    options: ConversionOptions,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint's weights, tokenizer and config into an empty folder, tensor by tensor.

    Raises:
        AFMError: if the checkpoint is damaged, contradicts its config, or can't be converted with the options.
    """
    if options.quantize or options.dequantize or options.for_mlx_lm:
        raise AFMError(
            f"{weights} becomes a folder of float weights for afm-mlx. Leave -q, -d and --to out, then convert "
            "that folder with -q."
        )
    config = read_tamm_config(config_path)
    notes = save_tokenizer(spm, folder)
    pieces = SentencePieceVocabulary((folder / spm.name).read_bytes(), spm).size
    if pieces > config.vocab_size:
        raise CheckpointError(
            f"{spm} has {pieces} pieces, and the model's embedding {config.vocab_size} rows. "
            "They belong to different models: a token without a row can't be embedded."
        )
    state, where, keys = open_state_dict(weights), str(weights), tamm_keys(config)
    head = state.pop(_TIED_HEAD, None)
    expected = {
        keys[name]: _tamm_shape(config, name, shape)
        for name, shape in parameter_shapes(config).items()
    }
    found: dict[str, Any] = dict(state)
    check_weights(expected, found, where)
    if integers := [key for key in state if mlx_dtype(state[key]) is None]:
        raise CheckpointError(
            f"{where}: {named(integers[0])} is of type {state[integers[0]].dtype}; weights are floating-point."
        )
    embedding = state["embedding.weight"]
    if head is not None and (head.shape != embedding.shape or not equal(head, embedding)):
        raise CheckpointError(
            f"{where}: the head is not the embedding, which this architecture ties."
        )

    def ours(name: str) -> torch.Tensor:
        tensor = state[keys[name]]
        tensor = tensor.transpose(-1, -2) if tensor.dim() > 2 else tensor
        return tensor.flatten(0, 1) if tensor.dim() > 3 else tensor

    specs = [
        TensorSpec(name, shape, options.mlx_dtype or _dtype(state[keys[name]]))
        for name, shape in parameter_shapes(config).items()
    ]
    write_weights(
        folder,
        specs,
        lambda spec: tensor_chunks(ours(spec.name), spec.dtype, f"{where}: {keys[spec.name]}"),
        progress=progress,
    )
    tokenizer = load_tokenizer(folder)
    ends = [tokenizer.eos_token_id, tokenizer.separator_id]
    write_config(folder, config.to_dict() | {"eos_token_id": ends})
    for note in notes:
        warnings.warn(note, stacklevel=2)


def _dtype(tensor: torch.Tensor) -> mx.Dtype:
    dtype = mlx_dtype(tensor)
    assert dtype is not None  # checked
    return dtype


# -- back


def write_tamm_checkpoint(source: Path, folder: Path, options: ConversionOptions) -> None:
    """Write a PT-MoE folder of float weights as a checkpoint that tamm loads, into an empty folder.

    Writes `base-model.pt`, `base-model-config.json` and `tokenizer.model`. All weights are in memory at once.

    Raises:
        AFMError: if the folder is damaged, packed, or has no SentencePiece tokenizer; and without PyTorch.
    """
    torch = import_torch()
    values = read_config_json(source / "config.json")
    if values.get("quantization") or options.quantize or options.dequantize:
        raise AFMError(
            f"{source}: a checkpoint of tamm's holds float weights. Convert a packed folder with -d first, and "
            "leave -q and -d out."
        )
    spm = source / "tokenizer.model"
    if not spm.is_file():
        raise CheckpointError(f"{spm} is missing, and tamm reads SentencePiece tokenizers alone.")
    config, tensors = TrackConfig.from_dict(values), stored_tensors(source)
    check_weights(parameter_shapes(config), tensors, source)
    check_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
    dtypes = {name: options.dtype or _name(tensor) for name, tensor in tensors.items()}
    state = {
        key: _theirs(torch, config, tensors[name]).to(getattr(torch, dtypes[name]))
        for name, key in tamm_keys(config).items()
    }
    state[_TIED_HEAD] = state["embedding.weight"]
    torch.save(state, folder / "base-model.pt")
    default = TrackConfig().to_dict()
    fields = {k: v for k, v in config.to_dict().items() if k not in _OURS_ALONE and v != default[k]}
    text = json.dumps({"__tamm_type__": f"module_configs:{TAMM_TYPE}", **fields}, indent=4)
    (folder / "base-model-config.json").write_text(text, encoding="utf-8")
    shutil.copy(spm, folder / spm.name)


def _theirs(torch: Any, config: TrackConfig, tensor: StoredTensor) -> Any:
    """Return a stored tensor as PyTorch's, of tamm's shape."""
    array: np.ndarray = float_values(tensor.read(), tensor.dtype).reshape(tensor.shape)
    shape = _tamm_shape(config, tensor.name, tensor.shape)
    if len(shape) > 2:
        array = array.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    return torch.from_numpy(np.ascontiguousarray(array))


def _name(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("mlx.core.")


def is_tamm_config(path: Path) -> bool:
    """True if a config of tamm's is of a parallel-track model."""
    return type_name(read_config_json(path)) == TAMM_TYPE
