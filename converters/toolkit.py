"""Training checkpoints of Apple's adapter toolkit, as `tamm` writes them, to a model folder.

The source is a folder with `base-model.pt`, `base-model-config.json`, `tokenizer.model` and
`tokenizer-config.json` (the toolkit's `assets`), or the path of one `.pt` file in a folder with its config and
the tokenizer. Adapters inside the checkpoint become folders of their own, `adapters/<id>`.

The static ranges that quantize keys and values become scales, `max(low / -128, high / 127)`, as tamm's observer
computes them (`tamm/ao/layers/fake_quantize.py`).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.formats.pair_order import (
    complete_fused,
    expected_shapes,
    keys_of,
    num_layers_of,
)
from afm_mlx.adapters.formats.toolkit_adapter import read_pairs
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.toolkit_checkpoint import (
    KeyMap,
    LoRASpec,
    ToolkitConfig,
    equal,
    find_toolkit_config,
    import_torch,
    map_keys,
    mlx_dtype,
    open_state_dict,
    read_toolkit_config,
    tensor_chunks,
)
from afm_mlx.checkpoint.weights import check_weights
from afm_mlx.config import ModelConfig, parameter_shapes
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.folder_writer import FolderWriter
from afm_mlx.converters.mlx_lm import check_mlx_lm_computes
from afm_mlx.converters.tracks import is_tamm_config, write_tracks
from afm_mlx.errors import AFMError, CheckpointError, named, shown
from afm_mlx.progress import Progress
from afm_mlx.quantization.float_to_codes import Rows
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.tokenizer_export import save_tokenizer
from afm_mlx.tokenizer.vocabulary import SentencePieceVocabulary

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]


def find_files(path: Path) -> tuple[Path, Path, Path]:
    """Find the weights, config and tokenizer of a checkpoint: a `.pt` file, or a folder with all three."""
    weights = path
    if path.is_dir():
        files = sorted(path.glob("*.pt"))
        weights = path / "base-model.pt"
        if weights not in files:
            if len(files) != 1:
                found = ", ".join(file.name for file in files) or "none"
                raise CheckpointError(
                    f"{path} holds {len(files)} .pt files ({named(found)}), and none is base-model.pt. "
                    "Give the path of the one to convert."
                )
            weights = files[0]
    folder, stem = weights.parent, weights.stem
    names = [f"{stem}-config.json", f"{stem}.json", "config.json"]
    config = find_toolkit_config(folder, names)
    if config is None:
        raise CheckpointError(
            f"{folder} has no config of {weights.name}: one of {', '.join(names)}, written by tamm and with a "
            "__tamm_type__. Copy it from the toolkit's assets."
        )
    tokenizer = folder / "tokenizer.model"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{tokenizer} is missing: the tokenizer that the model was trained with belongs into "
            f"the folder of {weights.name}. Copy it from the toolkit's assets."
        )
    return weights, config, tokenizer


def write_toolkit(
    source: Path,
    folder: Path,
    name: str,
    options: ConversionOptions,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint's weights, tokenizer, adapters, config and card into an empty folder.

    Args:
        name: the folder's name in the card.
        options: how to convert; a folder for mlx-lm itself gets no adapters.
        progress: called with the bytes written and the total number of bytes.

    Raises:
        AFMError: if the checkpoint is damaged, contradicts its config, or can't be converted with the options.
    """
    weights, config_path, spm = find_files(source)
    if is_tamm_config(config_path):
        write_tracks(weights, config_path, spm, folder, options, progress)
        return
    config = read_toolkit_config(config_path)
    if options.for_mlx_lm:
        check_mlx_lm_computes(config.model, weights)
    if options.dequantize:
        raise AFMError(f"{weights} holds float weights: there is nothing to dequantize.")
    notes = save_tokenizer(spm, folder)
    # Of the written model, which may have more pieces than the source: tokenizer-config.json adds some.
    pieces = SentencePieceVocabulary((folder / spm.name).read_bytes(), spm).size
    if pieces > config.model.vocab_size:
        raise CheckpointError(
            f"{spm} has {pieces} pieces, and the model's embedding {config.model.vocab_size} rows. "
            "They belong to different models: a token without a row can't be embedded."
        )
    state, where = open_state_dict(weights), str(weights)
    keys = map_keys(state, where)
    _check_state(config.model, keys, state, where)
    adapters = {} if options.for_mlx_lm else _plan_adapters(config, keys, state, where)
    tensors = {name: (state[key], key) for name, key in keys.weights.items()}
    for scale, pair in keys.kv_ranges.items():
        tensors[scale] = _kv_scale(pair, state, where), pair["range"]
    parameters = {n: _TorchParameter(t, f"{where}: {key}") for n, (t, key) in tensors.items()}
    writer = FolderWriter(config.model, parameters, options)
    writer.write_weights(folder, progress)
    fingerprint = folder_fingerprint(config.model, folder) if adapters else None
    for adapter, plan in adapters.items():
        pairs = read_pairs(state, keys.adapters[adapter], options.mlx_dtype, where)
        pairs = complete_fused(pairs, config.model, plan.rank)
        plan = dataclasses.replace(plan, base_model_fingerprint=fingerprint)
        save_adapter(folder / "adapters" / adapter, pairs, plan)
    tokenizer = load_tokenizer(folder)
    writer.write_texts(
        folder,
        name=name,
        source=weights.name,
        # Without this, mlx-lm itself would stop at the end of a turn only.
        values={"eos_token_id": [tokenizer.eos_token_id, tokenizer.separator_id]},
        adapters=sorted(adapters),
    )
    for note in notes:
        warnings.warn(note, stacklevel=2)


@dataclass(frozen=True)
class _TorchParameter:
    """A tensor of a state dict; see `folder_writer.Parameter`."""

    tensor: torch.Tensor
    name: str

    @property
    def dtype(self) -> mx.Dtype:
        stored = mlx_dtype(self.tensor)
        assert stored is not None  # _check_state has checked it
        return stored

    def rows(self) -> Rows:
        def read(start: int, stop: int) -> np.ndarray:
            return self.tensor[start:stop].float().numpy()

        height, width = self.tensor.shape
        return Rows((height, width), self.dtype, read, self.name)

    def chunks(self, dtype: mx.Dtype) -> Iterable[Any]:
        return tensor_chunks(self.tensor, dtype, self.name)


def _check_state(config: ModelConfig, keys: KeyMap, state: State, source: str) -> None:
    """Raise `CheckpointError` unless a state's tensors fit the config and its head is the embedding."""
    if keys.adapters and not keys.weights:
        raise CheckpointError(
            f"{source} holds the adapters {named(', '.join(sorted(keys.adapters)))} and no base model. "
            "Convert the base-model.pt that they were trained on."
        )
    if config.kv_bits is None and keys.kv_ranges:
        raise CheckpointError(
            f"{source} holds ranges of a KV quantizer, and its config has no KVQuantArchOptimizer. "
            "They are of different models, or the config was edited."
        )
    found: dict[str, Any] = {name: state[key] for name, key in keys.weights.items()}
    found |= {name: np.zeros(()) for name in keys.kv_ranges}
    check_weights(parameter_shapes(config), found, source)
    integers = [k for k in keys.weights.values() if mlx_dtype(state[k]) is None]
    if integers:
        raise CheckpointError(
            f"{source}: {named(integers[0])} is of type {state[integers[0]].dtype}; weights are floating-point."
        )
    if keys.tied_head is not None:
        head, embedding = state[keys.tied_head], state[keys.weights["model.embedding.weight"]]
        if head.shape != embedding.shape or not equal(head, embedding):
            raise CheckpointError(
                f"{source}: {keys.tied_head} {list(head.shape)} is not the same matrix as the embedding "
                f"{list(embedding.shape)}. AFM ties them; a model with its own head can't be converted."
            )


def _kv_scale(keys: dict[str, str], state: State, source: str) -> torch.Tensor:
    """Compute a KV quantizer's float32 scale from its range; `keys` has the state's keys of its tensors."""
    if set(keys) != {"range", "num_samples"}:
        raise CheckpointError(
            f"{source}: {named(next(iter(keys.values())))} stands alone; a KV quantizer has a range and "
            "num_samples."
        )
    observed, samples = state[keys["range"]], state[keys["num_samples"]]
    if tuple(observed.shape) != (2,) or samples.numel() != 1:
        raise CheckpointError(
            f"{source}: {keys['range']} is {list(observed.shape)} and must be [2], lowest and highest."
        )
    # In float32, as tamm computes it: the model was trained with exactly this number.
    low, high = (np.float32(value) for value in observed.float().tolist())
    with np.errstate(invalid="ignore"):
        scale = max(low * np.float32(1 / -128), high * np.float32(1 / 127))
    if samples.item() < 1 or not np.isfinite([low, high]).all() or low > high or not scale > 0:
        raise CheckpointError(
            f"{source}: {keys['range']} is [{low}, {high}] after {samples.item()} samples, which gives "
            "no scale. The model's KV quantizer has not observed any data: run it in training mode over "
            "some text, or convert a model without KVQuantArchOptimizer."
        )
    return import_torch().tensor(scale)


def _plan_adapters(
    config: ToolkitConfig, keys: KeyMap, state: State, source: str
) -> dict[str, AdapterConfig]:
    """Return the configs of the adapters by id, whose tensors fit the config and the base."""
    plans = {}
    for adapter, tensors in keys.adapters.items():
        where = f"{source}: adapter {shown(adapter)}"
        spec = config.adapters.get(adapter)
        # The id names a folder.
        if not re.fullmatch(r"\w[\w.-]*", adapter):
            raise CheckpointError(f"{where}: an id is made of letters, digits, '_', '-' and '.'.")
        if not isinstance(spec, LoRASpec):
            found = f"is of type {shown(spec)} there" if spec else "is not in the model's config"
            raise CheckpointError(
                f"{where} {found}, so its rank and alpha are unknown. LoRAModelAdapter can be converted."
            )
        expected = expected_shapes(config.model, tensors, spec.rank)
        check_weights(expected, {n: state[k] for n, k in tensors.items()}, where)
        plans[adapter] = AdapterConfig(
            rank=spec.rank,
            scale=spec.scale,
            num_layers=num_layers_of(tensors, config.model),
            keys=keys_of(tensors),
            dropout=spec.dropout,
        )
    return plans
