"""`convert` detects the format of a source, and writes a model folder, a Core ML package or a Core AI bundle.

| source | written by |
| --- | --- |
| a toolkit checkpoint: a folder with `base-model.pt`, or a `.pt` file with its config | `toolkit.py` |
| the same of a parallel-track model | `tracks.py`, which writes such checkpoints, too |
| a folder of an AFM model, ours or mlx-lm's | `mlx_lm.py`; for Core ML `coreml/`, for Core AI `coreai/` |
| any other model that mlx-lm knows, as a folder or a hub id | `other_models.py`, through mlx-lm |

The first two locate a model's parameters, and `folder_writer.py` writes them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.checkpoint.toolkit_checkpoint import check_archive, is_toolkit_config
from afm_mlx.config import MODEL_TYPE, read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.coreai.plan import plan_bundle
from afm_mlx.converters.coreai.zoo_source import plan_zoo_bundle
from afm_mlx.converters.coreml.plan import plan_package
from afm_mlx.converters.mixed_bits import Mix, calibration_file, check_mlx_format, mix_of_folder
from afm_mlx.converters.mlx_lm import write_mlx_lm
from afm_mlx.converters.other_models import write_other_model
from afm_mlx.converters.svd_adapter import split_weights, write_error_adapter, write_svd_adapter
from afm_mlx.converters.toolkit import write_toolkit
from afm_mlx.converters.tracks import write_tamm_checkpoint
from afm_mlx.coreai.availability import import_coreai
from afm_mlx.coreai.bundle import SUFFIX
from afm_mlx.coreml.availability import REINSTALL, import_coremltools
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_folder, place_beside, refuse_existing
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.progress import Progress
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL

__all__ = ["ConversionOptions", "convert", "detect"]


def convert(
    model: str | Path,
    mlx_path: str | Path,
    *,
    progress: Progress | None = None,
    measuring: Progress | None = None,
    **options: Any,
) -> Path:
    """Convert a checkpoint to a model folder, or a model folder to a Core ML package or a Core AI bundle.

    The folder is built next to its path and renamed once it is complete: a failure or an interrupt leaves
    nothing behind. The source is never written to.

    Args:
        model: a toolkit checkpoint, a model folder, or a hub id.
        mlx_path: path of the folder, which must not exist. A package's name ends with `.mlpackage`.
        progress: called with the bytes written and the total number of bytes.
        measuring: called with the passes over the calibration text that are done, and their total number.
        options: type, target and packing, see `ConversionOptions`; by default all as in the source.

    Returns:
        `mlx_path`.

    Raises:
        AFMError: if the source can't be read or can't be converted with these options.
        TypeError: for an unknown option.
    """
    unknown = options.keys() - {field.name for field in fields(ConversionOptions)}
    if unknown:
        raise TypeError(
            f"convert() has no option {min(unknown)!r}; `ConversionOptions` explains those it has"
        )
    chosen = ConversionOptions(**options)
    chosen.check()
    refuse_existing(mlx_path)
    mlx_path = Path(mlx_path)
    source = Path(model) if os.path.exists(model) else resolve_model(model)
    kind = detect(source)
    if chosen.to == "tamm" and kind != TRACK_MODEL:
        raise AFMError(
            f"--to tamm is for models of type {TRACK_MODEL!r}, and {source} is of type {shown(kind)}."
        )
    try:
        if chosen.svd_adapter is not None:
            _convert_with_adapter(source, kind, mlx_path, options, progress, measuring)
        elif chosen.is_export:
            _check_exported(source, kind, chosen)
            if chosen.for_core_ml:
                _convert_to_core_ml(source, mlx_path, chosen, progress)
            else:
                _convert_to_core_ai(source, kind, mlx_path, chosen, progress)
        elif kind in ("toolkit", MODEL_TYPE):
            mix = None
            if chosen.target_bpw is not None:
                mix = _mix_of_afm(source, kind, mlx_path, chosen, measuring)
                chosen = mix.options
            write = write_toolkit if kind == "toolkit" else write_mlx_lm
            with atomic_folder(mlx_path) as folder:
                write(source, folder, mlx_path.name, chosen, progress)
                if mix is not None:
                    mix.write(folder)
        else:
            with atomic_folder(mlx_path) as folder:
                if chosen.to == "tamm":
                    write_tamm_checkpoint(source, folder, chosen)
                else:
                    write_other_model(source, folder, kind, chosen, measuring)
    except OSError as error:
        raise AFMError(
            f"Converting {model} to {mlx_path} failed: {error}. Check that the source can be read and that "
            "there is room and permission to write."
        ) from None
    return mlx_path


def _convert_with_adapter(
    source: Path,
    kind: str,
    mlx_path: Path,
    options: dict[str, Any],
    progress: Progress | None,
    measuring: Progress | None,
) -> None:
    """Pack a model, and write an adapter of singular vectors into its folder."""
    own = ("svd_adapter", "svd_of")
    packing = {name: value for name, value in options.items() if name not in own}
    rank, of_weights = options["svd_adapter"], options.get("svd_of") == "weights"
    if kind != "toolkit":
        config = source / "config.json"
        stored = quantization_of(read_config_json(config), config)
        ConversionOptions(**packing).check_source(source, bool(stored))
    mlx_path.parent.mkdir(parents=True, exist_ok=True)
    # Float weights, or what is left of them, are written to the output's disk for a while.
    with place_beside(mlx_path) as place:
        name = source.resolve().name
        if of_weights or kind == "toolkit":
            source = convert(source, place / "float" / name, dtype=options.get("dtype"))
        if of_weights:
            folder = place / "rest" / name
            tensors = split_weights(source, folder, rank)
            shutil.rmtree(source)
            source = folder
        packed = place / "packed" / mlx_path.name
        convert(source, packed, progress=progress, measuring=measuring, **packing)
        if of_weights:
            write_svd_adapter(packed, tensors, rank)
        else:
            write_error_adapter(source, packed, rank)
        packed.rename(mlx_path)


def _check_exported(source: Path, kind: str, options: ConversionOptions) -> None:
    if kind == MODEL_TYPE or (options.for_core_ai and kind != "toolkit"):
        return
    what = "a toolkit checkpoint" if kind == "toolkit" else f"a model of type {shown(kind)}"
    made = "Core ML package" if options.for_core_ml else "Core AI bundle"
    raise AFMError(
        f"{source} is {what}; a {made} is made of an AFM model's folder. `afm-mlx convert` makes "
        "one of a toolkit checkpoint."
    )


def _convert_to_core_ml(
    source: Path, mlx_path: Path, options: ConversionOptions, progress: Progress | None
) -> None:
    if mlx_path.suffix != ".mlpackage":
        raise AFMError(
            f"A Core ML package is a folder whose name ends with .mlpackage, and {mlx_path} does not. "
            "Choose such a path (--mlx-path)."
        )
    plan = plan_package(
        source,
        dtype=options.dtype or "float16",
        neural_engine=options.ane,
        lengths=options.prompt_lengths,
    )
    import_coremltools()
    try:
        from afm_mlx.converters.coreml.package_writer import write_package
    except ImportError as error:
        raise AFMError(
            f"coremltools lacks a part that writes Core ML programs ({error}). Install it again, for a Python "
            f"that it has a wheel for: {REINSTALL}"
        ) from error
    with atomic_folder(mlx_path) as folder:
        write_package(plan, folder, progress)


def _convert_to_core_ai(
    source: Path, kind: str, mlx_path: Path, options: ConversionOptions, progress: Progress | None
) -> None:
    if mlx_path.suffix == SUFFIX:
        raise AFMError(
            f"A Core AI bundle is a folder with an asset and a tokenizer, and {mlx_path} has the name of an "
            f"asset. Leave {SUFFIX} out (--mlx-path)."
        )
    shared: dict[str, Any] = {
        "dtype": options.dtype or "float16",
        "context": options.context,
        "lengths": options.prompt_lengths,
        "minimum_os": options.minimum_os or "27",
    }
    if kind == MODEL_TYPE:
        adapters = options.adapter_functions or ()
        plan = plan_bundle(source, adapter_rank=options.adapter_rank, adapters=adapters, **shared)
    elif options.adapter_rank or options.adapter_functions:
        raise AFMError(
            f"{source} is a model of type {shown(kind)}; bundles of mlx-lm's models have no functions with "
            "adapters. Leave --adapter-rank and --adapter-functions out, and merge an adapter into the model."
        )
    else:
        plan = plan_zoo_bundle(source, **shared)
    import_coreai("coreai.authoring")
    from afm_mlx.converters.coreai.bundle_writer import write_bundle

    with atomic_folder(mlx_path) as folder:
        write_bundle(plan, folder, progress)


def _mix_of_afm(
    source: Path, kind: str, mlx_path: Path, options: ConversionOptions, progress: Progress | None
) -> Mix:
    data = calibration_file(options, source)
    if options.for_mlx_lm:
        check_mlx_format(options, "balanced")
    if kind != "toolkit":
        return mix_of_folder(source, options, data, progress)
    mlx_path.parent.mkdir(parents=True, exist_ok=True)
    # Only a folder can be read into a model: float weights are written to the output's disk for a while.
    with place_beside(mlx_path) as place:
        folder = convert(source, place / "float")
        return mix_of_folder(folder, options, data, progress)


def detect(source: Path) -> str:
    """Return "toolkit" for a toolkit checkpoint, or the `model_type` of a model folder.

    Raises:
        CheckpointError: if it is neither; says what was found.
        ConfigError: if its config.json can't be read, or names no model type.
    """
    if not source.is_dir():
        check_archive(source)
        return "toolkit"
    if any(source.glob("*.pt")):
        return "toolkit"
    config = source / "config.json"
    if not config.is_file():
        names = sorted(path.name for path in source.iterdir())
        found = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
        raise CheckpointError(
            f"{source} is no checkpoint: it holds {named(found)}. Give a folder with base-model.pt and "
            "base-model-config.json, or a model folder with config.json and *.safetensors."
        )
    values = read_config_json(config)
    if is_toolkit_config(values):
        raise CheckpointError(
            f"{config} is a config of a toolkit checkpoint, without its .pt file in the same folder."
        )
    kind = values.get("model_type")
    if not kind or not isinstance(kind, str):
        raise ConfigError(
            f"{config}: model_type is {shown(kind)}; it names the architecture, "
            f"{MODEL_TYPE!r} for an AFM model."
        )
    return kind
