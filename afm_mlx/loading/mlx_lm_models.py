"""Models of other architectures, which mlx-lm defines and loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.adapter_folder import TENSORS_NAME, check_floating, embedding_use
from afm_mlx.checkpoint.finite import check_finite, read_parameters
from afm_mlx.checkpoint.safetensors_file import load_stored, read_header
from afm_mlx.checkpoint.stored_layers import (
    place_stored_layers,
    quantization_of,
    repack_mlx_layers,
    settle_floats,
    settle_scales,
)
from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.config import read_config_json
from afm_mlx.errors import AFMError, CheckpointError, named, shown
from afm_mlx.installation import package_problem
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.kernels.selftest.checks import ensure_checked
from afm_mlx.quantization.packed_layers import PackedExperts, PackedLinear
from afm_mlx.ranks import Ranks
from afm_mlx.threads import give_way
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import tokenizer_files
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL


def register_models() -> None:
    """Let mlx-lm find the architectures that this package defines in mlx-lm's protocol."""
    from afm_mlx.model import parallel_tracks

    sys.modules.setdefault(f"mlx_lm.models.{TRACK_MODEL}", parallel_tracks)


def load_mlx_lm_folder(
    folder: Path,
    tokenizer_config: Mapping[str, object] | None = None,
    model_config: Mapping[str, object] | None = None,
    adapter: Path | None = None,
    lazy: bool = False,
    trust_remote_code: bool = False,
    ranks: Ranks | None = None,
) -> tuple[nn.Module, Tokenizer, dict[str, Any]]:
    """Load model, tokenizer and config as `mlx_lm.load` does, with our packed layers where they can be used.

    With several `ranks`, each loads a part of the model. Adapters of mlx-lm expect MLX's own layers, so with an
    adapter these are not replaced. Adapters of other formats, and adapters of a model that is stored in this
    package's formats, are run by this package.

    Raises:
        CheckpointError: if mlx-lm can't load it, or its packed layers or numbers are damaged.
    """
    model, config = open_mlx_lm_model(folder, model_config, adapter, trust_remote_code)
    tokenizer = load_mlx_lm_tokenizer(folder, config, tokenizer_config)
    give_way()  # other models may be running in this thread
    if ranks is not None and ranks.size > 1:
        from afm_mlx.model.split_model import split_model

        # Other architectures may rename or change what their files hold.
        own = stored_tensors(folder) if config["model_type"] == TRACK_MODEL else None
        split_model(model, ranks, own)
    if not lazy:
        read_model(model, folder)
    return model, tokenizer, config


def load_mlx_lm_tokenizer(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, object] | None = None
) -> Tokenizer:
    """Load a folder's tokenizer as `mlx_lm.load` does; raise `CheckpointError` if mlx-lm can't load it.

    `config` is the content of the folder's config.json, `tokenizer_config` has options of the tokenizer.
    """
    if config.get("model_type") == TRACK_MODEL and (folder / "tokenizer.model").is_file():
        if tokenizer_config:
            raise AFMError(
                f"tokenizer_config is {shown(dict(tokenizer_config))}: AFM's tokenizer has no options."
            )
        return load_tokenizer(folder)
    from mlx_lm import utils

    from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer

    with _errors_of_mlx_lm(folder):
        tokenizer_files(folder)  # bounds what is about to be read
        wrapper = utils.load_tokenizer(
            folder, dict(tokenizer_config or {}), eos_token_ids=config.get("eos_token_id")
        )
        made: Any = ZooTokenizer.of(wrapper)
        return made


def open_mlx_lm_model(
    folder: Path,
    model_config: Mapping[str, object] | None = None,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of `load_mlx_lm_folder` with its arrays unread, and the content of config.json."""
    from mlx_lm import utils

    from afm_mlx.model.zoo_blocks import replace_blocks

    ensure_checked()
    with _errors_of_mlx_lm(folder):
        is_theirs = False
        if adapter is not None and (path := adapter / TENSORS_NAME).is_file():
            is_theirs = True
            # mlx-lm would accept tensors of integers, NaN and infinity.
            stored = read_header(path)
            check_floating(stored, path)
            check_finite(load_stored(stored), path)
        model, config = load_mlx_lm_model(folder, model_config, trust_remote_code)
        kinds = PackedLinear | PackedExperts
        is_theirs = is_theirs and not any(isinstance(module, kinds) for module in model.modules())
        is_theirs = is_theirs and config["model_type"] != TRACK_MODEL
        if is_theirs:
            model = utils.load_adapters(model, str(adapter))
            model.embedding_use = None if adapter is None else embedding_use(adapter)
        else:
            repack_mlx_layers(model)
    settle_scales(model)
    settle_floats(model)
    replace_blocks(model)
    model.eval()
    if adapter is not None and not is_theirs:
        attach_adapter(model, adapter)
    return model, config


def read_model(model: nn.Module, folder: Path) -> None:
    """Read the arrays of a model of `open_mlx_lm_model`; `CheckpointError` names a damaged tensor or file."""
    prefer_huge_pages(read_parameters(model, folder).values())
    # Arrays that are no parameters, such as Falcon-H1's multipliers: other threads can't compute them later.
    mx.eval([a for module in model.modules() for a in module.values() if isinstance(a, mx.array)])


@contextmanager
def _errors_of_mlx_lm(folder: Path) -> Iterator[None]:
    try:
        yield
    except AFMError:
        raise
    except Exception as error:
        if (problem := package_problem(error)) or isinstance(error, ImportError):
            raise AFMError(problem or str(error)) from error
        reason = named(" ".join(str(error).split()).rstrip(".") or type(error).__name__)
        raise CheckpointError(
            f"mlx-lm can't load {folder}: {reason}. Check that the folder is whole, "
            "and that mlx-lm knows its model_type."
        ) from error


def load_mlx_lm_model(
    folder: Path, model_config: Mapping[str, object] | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model, its arrays unread, and the content of config.json; packed layers stay as stored."""
    from mlx_lm import utils

    register_models()
    options = {"lazy": True, "trust_remote_code": trust_remote_code}
    changes, source = dict(model_config or {}), folder / "config.json"
    values = read_config_json(source) | changes
    quantization = quantization_of(values, source)
    if not has_packed_layers(quantization):
        return utils.load_model(folder, model_config=changes, **options)

    def classes(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], type]:
        architecture, arguments = utils._get_classes(config)
        weights = load_weights(folder)

        def build(args: Any) -> nn.Module:
            model = architecture(args)
            # Norms have the type of the model's activations; scales have another.
            norms = [a.dtype for name, a in weights.items() if name.endswith("norm.weight")]
            dtype = norms[0] if norms else mx.float32
            place_stored_layers(model, quantization, weights, source, dtype)
            return model

        return build, arguments

    # mlx-lm would build its own layers for these formats, which it does not know.
    changes |= {"quantization": None, "quantization_config": None}
    model, _ = utils.load_model(folder, model_config=changes, get_model_classes=classes, **options)
    return model, values


def has_packed_layers(quantization: Mapping[str, object]) -> bool:
    """True if a folder holds formats that mlx-lm does not load."""
    entries = [quantization, *(e for e in quantization.values() if isinstance(e, Mapping))]
    return any(e.get("mode") in ("balanced", "palette") or "granularity" in e for e in entries)
