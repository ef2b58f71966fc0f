"""Loading a model with its tokenizer, from a path, a hub id or a name; and a draft model for it.

A draft model has its target's vocabulary, token for token: ids go from one to the other as they are. It is a
model folder like any other, in `draft` of its target's folder, or of the folder of the adapter that it was
trained for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.mask_predictor import (
    PREDICTOR_FOLDER,
    MaskPredictor,
    has_predictor,
    read_head,
)
from afm_mlx.adapters.task_mask import has_mask
from afm_mlx.checkpoint.finite import read_parameters
from afm_mlx.checkpoint.safetensors_file import load_stored
from afm_mlx.checkpoint.stored_layers import (
    check_folder_tensors,
    place_stored_layers,
    quantization_of,
    settle_scales,
)
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import KV_SCALES, MODEL_TYPE, ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.kernels.selftest.checks import ensure_checked
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.loading.resolve import (
    AUTO,
    EMBEDDED_MODEL,
    adapter_draft,
    model_draft,
    resolve_adapter,
    resolve_mask,
    resolve_model,
)
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PARTS, activation_dtype, set_activation_bits
from afm_mlx.ranks import Ranks
from afm_mlx.threads import in_main_thread, in_mlx_thread
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import DRAFT_FOLDER, has_tokenizer


@in_mlx_thread
def load(
    path_or_hf_repo: str | Path = EMBEDDED_MODEL,
    tokenizer_config: Mapping[str, object] | None = None,
    model_config: Mapping[str, object] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    activation_bits: int = 16,
    force_adapter: bool = False,
    mask: str | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Load a model and its tokenizer, with mlx-lm's signature.

    Folders of the AFM architecture (`model_type` "afm7") run through this package; any other
    architecture is loaded by mlx-lm, and runs in this package's engine all the same.

    Args:
        path_or_hf_repo: folder, hub id, or "afm-nano", the model that this package carries.
        tokenizer_config: options of the tokenizer; for mlx-lm's models only.
        model_config: keys and values that replace the ones in config.json.
        adapter_path: LoRA adapter that was made for this model: its path, or its name if it comes with the
            model, in its folder `adapters`. All rows use it; see `AdapterPool` for several.
        lazy: leave the weights unread until they are used. Only names, shapes and types are checked then, not
            the numbers; and if a file is cut off before its tensors are read, MLX raises `RuntimeError` and
            the model has to be reloaded. Outside the main thread the weights are read at once, because one
            thread can't continue another's read.
        return_config: return config.json's content too.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: let a folder's own code run; for mlx-lm's models only.
        activation_bits: 16, or 8 to let packed layers round their input to int8 where that is faster.
        force_adapter: run an adapter that was made for another model, if its shapes fit.
        mask: task mask that was made for this model, as a path or a name like `adapter_path`: the model runs
            with a part of its feed-forwards, and with the adapter if there is one.
        ranks: processes (`join_ranks`) of which each loads a part of the model, for an `Engine` on each; pass
            None to load it whole.

    Returns:
        (model, tokenizer), or (model, tokenizer, config).

    Raises:
        AFMError: what is wrong with the folder, and where.

    Warns:
        SlowWarning: that the model runs without kernels made for it, why, and what to do.
    """
    keep_compiler_out()
    lazy = lazy and in_main_thread()
    is_split = ranks is not None and ranks.size > 1
    if is_split and mask is not None:
        raise ConfigError("Task masks are for models that one process holds; leave out the mask.")
    folder = resolve_model(path_or_hf_repo, revision)
    values = _config_values(folder / "config.json", model_config)
    adapter = None if adapter_path is None else resolve_adapter(adapter_path, folder)
    mask_folder = None if mask is None else resolve_mask(mask, folder)
    if not is_afm_config(values):
        from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder

        # mlx-lm's way to run an adapter knows no masks.
        is_masked = mask is not None or (adapter is not None and has_mask(adapter))
        plain = None if is_masked or is_split else adapter
        model, tokenizer, values = load_mlx_lm_folder(
            folder, tokenizer_config, model_config, plain, lazy, trust_remote_code, ranks
        )
        if is_masked or (is_split and adapter is not None):
            attach_adapter(model, adapter, mask=mask_folder)
    elif tokenizer_config:
        raise AFMError(
            f"tokenizer_config is {shown(dict(tokenizer_config))}: an AFM folder's tokenizer has no options."
        )
    else:
        model = load_model(folder, values, lazy=lazy, ranks=ranks)
        if adapter is not None or mask_folder is not None:
            attach_adapter(
                model, adapter, mask=mask_folder, base_folder=folder, force=force_adapter
            )
        tokenizer = load_tokenizer(folder)
        if tokenizer.vision_config != model.args.vision_config:  # by `model_config`
            tokenizer.vision_config = model.args.vision_config
    set_activation_bits(model, activation_bits)
    warn_if_slow(model)
    return (model, tokenizer, values) if return_config else (model, tokenizer)


def _config_values(source: Path, changes: Mapping[str, object] | None) -> dict[str, Any]:
    """Return a config.json's content with changes; raise `ConfigError` if it names no architecture."""
    changes = {} if changes is None else changes
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        raise ConfigError(
            f"model_config is {shown(changes)}; a mapping of config.json's keys to values is needed."
        )
    values = read_config_json(source) | dict(changes)
    if not isinstance(values.get("model_type"), str):
        raise ConfigError(
            f"{source}: model_type is {shown(values.get('model_type'))}; it names the architecture, "
            f"{MODEL_TYPE!r} for an AFM model."
        )
    return values


def import_packages(folder: str | Path) -> None:
    """Import the packages that `load` needs, so that it occupies MLX's thread for less time.

    They take seconds and run no MLX, so any thread can import them. `load` reports what fails.
    """
    with suppress(AFMError, ImportError):
        if not is_afm_config(read_config_json(Path(folder) / "config.json")):
            importlib.import_module("transformers").AutoTokenizer  # noqa: B018  # imported when it is named


def load_model(
    folder: Path,
    values: Mapping[str, Any] | None = None,
    lazy: bool = False,
    ranks: Ranks | None = None,
) -> Model:
    """Load the model of an AFM folder, without its tokenizer.

    Float weights are cast to the activation dtype, except the scales of int8 keys and values (float32).

    Args:
        folder: holds config.json and safetensors.
        values: content of config.json, if it was read already.
        lazy, ranks: see `load`.

    Raises:
        ConfigError, CheckpointError: name the file, and the key or the tensor.
    """
    ensure_checked()
    source = folder / "config.json"
    values = read_config_json(source) if values is None else values
    config = ModelConfig.from_dict(values, source=str(source))
    quantization = quantization_of(values, source)
    tensors = stored_tensors(folder)
    rules = check_folder_tensors(config, quantization, tensors, source)
    model = Model(config)
    weights, dtype = load_stored(tensors), activation_dtype()
    place_stored_layers(model, quantization, weights, source, dtype, rules)
    packed = {f"{path}.{p}" for path, rule in rules.items() if rule is not None for p in PARTS}
    rest = [(name, array) for name, array in weights.items() if name not in packed]
    for i, (name, array) in enumerate(rest):
        if (is_scale := name.endswith(KV_SCALES)) or mx.issubdtype(array.dtype, mx.floating):
            rest[i] = name, array.astype(mx.float32 if is_scale else dtype)
    model.load_weights(rest, strict=False)
    settle_scales(model)
    model.eval()
    if ranks is not None and ranks.size > 1:
        weights.clear()  # or whole tensors would stay in memory once their parts are read
        rest.clear()
        from afm_mlx.model.split_model import split_model

        split_model(model, ranks, tensors)
    if not lazy:
        prefer_huge_pages(read_parameters(model, folder).values())
    return model


# -- draft models


def load_drafts(
    path: str | Path | None,
    model: nn.Module,
    tokenizer: Tokenizer,
    folder: str | Path,
    adapters: Mapping[str, Path] | None = None,
) -> tuple[nn.Module | None, dict[str, nn.Module]]:
    """Load the draft model that a user names, and the draft models that come with adapters.

    Args:
        path: folder or hub id of the draft model; "auto" for the one that comes with the model. Pass None to
            load no draft model at all, not even an adapter's.
        model, tokenizer: the target and its tokenizer.
        folder: the target's folder.
        adapters: mapping from adapters' names to their paths.

    Returns:
        The draft model or None; and a mapping from adapters' names to their draft models.

    Raises:
        AFMError: see `load_draft`; and for "auto" if none comes with the model or an adapter.
    """
    if path is None:
        return None, {}
    given = {name: adapter_draft(path) for name, path in (adapters or {}).items()}
    own = {name: load_draft(path, model, tokenizer) for name, path in given.items() if path}
    found = model_draft(folder) if path == AUTO else path
    if found is None and not own:
        raise ConfigError(
            f"{folder} has no draft model of its own: there is no {DRAFT_FOLDER}/config.json. Give the draft "
            "model's folder or hub id."
        )
    return (None if found is None else load_draft(found, model, tokenizer)), own


@in_mlx_thread
def load_draft(path: str | Path, model: nn.Module, tokenizer: Tokenizer | None) -> nn.Module:
    """Load a draft model for a target.

    Args:
        path: folder or hub id of the draft model, such as `model_draft` returns.
        model: the target.
        tokenizer: the target's tokenizer; a tokenizer in the draft's folder must have the same pieces. Pass
            None to skip that comparison.

    Returns:
        The draft model in eval mode; an AFM `Model` if its folder holds one.

    Raises:
        ConfigError: if the draft's vocabulary is not the target's.
        AFMError: what is wrong with its folder, and where.
    """
    try:
        folder = resolve_model(path)
        values = read_config_json(folder / "config.json")
        if is_afm_config(values):
            draft: nn.Module = load_model(folder, values)
            own: Tokenizer | None = load_tokenizer(folder) if has_tokenizer(folder) else None
        else:
            from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder

            draft, own, _ = load_mlx_lm_folder(folder)
    except AFMError as error:
        raise type(error)(f"The draft model: {error}") from None
    if fault := _vocabulary_fault(draft, own, model, tokenizer):
        raise ConfigError(
            f"The draft model {folder} has another vocabulary than the model that it is to propose tokens to: "
            f"{fault}. Choose a draft with the model's tokenizer, or train one: afm-mlx lora --fine-tune-type "
            "draft --teacher MODEL."
        )
    return draft


def _vocabulary_fault(
    draft: nn.Module, own: Tokenizer | None, model: nn.Module, tokenizer: Tokenizer | None
) -> str:
    """Return how the vocabulary of a draft, with its `own` tokenizer, differs from the model's; "" if not."""
    rows = [getattr(each.args, "vocab_size", None) for each in (draft, model)]
    if rows[0] != rows[1]:
        counts = ["an unknown number of" if n is None else f"{n:,}" for n in rows]
        return f"its embedding has {counts[0]} rows, and the model's {counts[1]}"
    if own is None or tokenizer is None:
        return ""
    pieces, wanted = own.get_vocab(), tokenizer.get_vocab()
    if len(pieces) != len(wanted):
        return f"its tokenizer has {len(pieces):,} pieces, and the model's {len(wanted):,}"
    if other := sum(wanted.get(piece) != token for piece, token in pieces.items()):
        return f"{other:,} of its tokenizer's {len(pieces):,} pieces are others, or have other ids"
    return ""


# -- predictors of masks


def load_predictor(folder: str | Path, model: ModelConfig) -> MaskPredictor:
    """Load the predictor of a model's masks from the model's folder.

    Raises:
        ConfigError: if the folder has none, or it is for another model, or its config can't be used.
        CheckpointError: if its files are damaged.
    """
    check_predictor(folder)
    own = Path(folder) / PREDICTOR_FOLDER
    return read_head(own, load_model(own), model)


def check_predictor(folder: str | Path) -> None:
    """Raise `ConfigError` if a model folder has no predictor of masks."""
    if not has_predictor(folder):
        raise ConfigError(
            f"{folder} has no predictor of masks, a folder {PREDICTOR_FOLDER}. Train one with the model "
            " (afm-mlx lora --fine-tune-type ifp), or make a mask of a task (afm-mlx prune)."
        )
