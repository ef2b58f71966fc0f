"""From a path, a hub id, or the name of the embedded model to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.config import MODEL_TYPE, ModelConfig, read_config_json
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.model import Model
from afm_mlx.tokenizer import load_tokenizer
from afm_mlx.weights import check_weights, load_weights

EMBEDDED_MODEL = "afm-nano"
_EMBEDDED_FOLDER = Path(__file__).parent / "models"


def activation_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on MLX's CPU backend, whose half types are 10 to 100 times slower."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def resolve_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a model.

    A path that exists is used; the name of the embedded model is its folder; anything else is a hub id,
    which is fetched (`HF_HUB_OFFLINE=1` forbids that).

    Raises:
        AFMError: when it is none of the three.
    """
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir():
        return path
    if str(path_or_hf_repo) == EMBEDDED_MODEL:
        return _EMBEDDED_FOLDER / EMBEDDED_MODEL
    name = str(path_or_hf_repo)
    if path.exists():
        raise AFMError(
            f"{path} is a file; a model is a folder with config.json. A checkpoint file is converted "
            "first: afm-mlx convert --model CHECKPOINT --mlx-path OUT."
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise AFMError(
            f"There is no folder {name}. Give a model folder, {EMBEDDED_MODEL!r} for the embedded model, "
            "or a hub id of the form owner/name."
        )
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.tiktoken", "*.txt", "*.jsonl"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AFMError(
            f"{name} is no folder here, and could not be fetched from the hub: {reason}. "
            "Check the name, the connection, and HF_HUB_OFFLINE."
        ) from None


def load(
    path_or_hf_repo: str | Path = EMBEDDED_MODEL,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a model and its tokenizer, with mlx-lm's signature.

    Folders of the AFM architecture (`model_type` "afm7") run through this package; any other
    architecture is loaded by mlx-lm, and runs in this package's engine all the same.

    Args:
        path_or_hf_repo: folder, hub id, or "afm-nano", the model that this package carries.
        tokenizer_config: options of the tokenizer; for mlx-lm's zoo only.
        model_config: keys that replace those of config.json.
        adapter_path: folder of a LoRA adapter; for mlx-lm's zoo only.
        lazy: leave the weights unread until they are used.
        return_config: return config.json's content too.
        revision: of a hub id.
        trust_remote_code: let a folder's own code run; for mlx-lm's zoo only.

    Returns:
        (model, tokenizer), or (model, tokenizer, config).

    Raises:
        AFMError: what is wrong with the folder, and where.
    """
    folder = resolve_model(path_or_hf_repo, revision)
    values = read_config_json(folder / "config.json") | dict(model_config or {})
    if values.get("model_type") != MODEL_TYPE:
        return _load_zoo(
            folder,
            tokenizer_config=dict(tokenizer_config or {}),
            model_config=dict(model_config or {}),
            adapter_path=adapter_path,
            lazy=lazy,
            return_config=return_config,
            trust_remote_code=trust_remote_code,
        )
    if adapter_path is not None:
        raise AFMError(
            f"adapter_path is {adapter_path}: adapters for AFM models are not available in this version."
        )
    if tokenizer_config:
        raise AFMError(
            f"tokenizer_config is {dict(tokenizer_config)}: an AFM folder's tokenizer has no options."
        )
    model = load_model(folder, values, lazy=lazy)
    tokenizer = load_tokenizer(folder)
    return (model, tokenizer, values) if return_config else (model, tokenizer)


def _load_zoo(folder: Path, **options: Any) -> Any:
    import mlx_lm

    try:
        return mlx_lm.load(str(folder), **options)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"mlx-lm can't load {folder}: {' '.join(str(error).split())}. Check that the folder is whole, "
            "and that mlx-lm knows its model_type."
        ) from error


def load_model(folder: Path, values: Mapping[str, Any] | None = None, lazy: bool = False) -> Model:
    """Load the model of an AFM folder, without its tokenizer.

    Float weights take the activation dtype, but for the int8 scales, which stay float32.

    Args:
        folder: holds config.json and safetensors.
        values: content of config.json, when it was read already.
        lazy: leave the weights unread until they are used.

    Raises:
        ConfigError, CheckpointError: name the file, and the key or the tensor.
    """
    source = folder / "config.json"
    values = read_config_json(source) if values is None else values
    model = Model(ModelConfig.from_dict(values, source=str(source)))
    weights = load_weights(folder)
    _quantize_as_stored(model, values, weights, source)
    expected = {name: array.shape for name, array in tree_flatten(model.parameters())}
    check_weights(expected, weights, source=folder)
    dtype = activation_dtype()
    model.load_weights([(name, _cast(name, array, dtype)) for name, array in weights.items()])
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    return model


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    if name.endswith(("quant_key_scale", "quant_value_scale")):
        return array.astype(mx.float32)
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _quantize_as_stored(
    model: Model, values: Mapping[str, Any], weights: Mapping[str, mx.array], source: Path
) -> None:
    """Give the layers that the folder stores in MLX's own quantized format that form."""
    quantization = values.get("quantization") or values.get("quantization_config")
    if not quantization:
        return

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return quantization.get(path, True)

    try:
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=predicate,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: the quantization {quantization} can't be used: {error}. It needs group_size, bits "
            "and mode, as mlx-lm writes them."
        ) from None
