"""A planned Core AI bundle into files: the asset, the tokenizer, and metadata as in Apple's model zoo.

    NAME/
      metadata.json       what `CoreAILanguageModel(resourcesAt:)` and `afm_mlx.coreai` read
      NAME.aimodel/       the functions and their weights
      tokenizer/          tokenizer.json, tokenizer_config.json, chat_template.jinja
      adapters/ADAPTER/   the same bundle for Apple's Swift code, with the functions of an adapter

Source: apple/coreai-models, `python/src/coreai_models/export/bundle.py` (schema 0.2).
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from coreai.authoring import AIProgram, Module, OSVersion
from coreai.runtime import AIModelAssetMetadata

from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files
from afm_mlx.checkpoint.weights import check_space
from afm_mlx.config import ModelConfig
from afm_mlx.converters.coreai.constants import Constants
from afm_mlx.converters.coreai.functions import FunctionBuilder
from afm_mlx.converters.coreai.plan import BundlePlan
from afm_mlx.converters.coreai.vision_functions import VisionFunctionBuilder
from afm_mlx.converters.coreai.zoo_functions import ZooFunctionBuilder
from afm_mlx.converters.coreai.zoo_source import ZooSource
from afm_mlx.converters.graph_source import AdapterSource
from afm_mlx.coreai.bundle import (
    ENCODERS,
    FACTS,
    IMAGE,
    INPUTS,
    METADATA_VERSION,
    PROGRAM,
    SUFFIX,
    program_facts,
)
from afm_mlx.errors import AFMError, reason_of, shown
from afm_mlx.progress import Progress


def write_bundle(plan: BundlePlan, folder: Path, progress: Progress | None = None) -> None:
    """Write a model as a Core AI bundle into an empty folder, whose name becomes the bundle's.

    `progress` is called with the bytes of the functions that are built, and the total number of bytes.

    Raises:
        CheckpointError: if the disk has no room.
        AFMError: if weights can't be read or written, or hold numbers that the bundle's type can't hold.
    """
    systems = {system.value.removeprefix("v"): system for system in OSVersion}
    if plan.minimum_os not in systems:
        raise AFMError(
            f"--minimum-os is {shown(plan.minimum_os)}; this coreai-core knows {', '.join(systems)}."
        )
    constants = Constants(plan.source, plan.dtype)
    module = Module.create()
    with module:
        _build(plan, constants)
    _reserve(folder, constants.nbytes + (constants.nbytes >> 5) + (1 << 20))
    if progress is not None:
        progress(constants.nbytes, 2 * constants.nbytes)
    asset = folder / f"{folder.name}{SUFFIX}"
    facts = _facts(plan)
    try:
        AIProgram(module).save_asset(asset, _asset_metadata(facts), systems[plan.minimum_os])
    except (RuntimeError, OSError) as error:
        reason = reason_of(error.__cause__ or error)
        raise AFMError(
            f"The asset {asset.name} can't be written ({reason}). Check that there is room and permission to "
            "write."
        ) from None
    if progress is not None:
        progress(2 * constants.nbytes, 2 * constants.nbytes)
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    copy_tokenizer_files(plan.folder, tokenizer)
    _write_metadata(folder, _bundle_metadata(plan, asset, facts))
    for adapter in plan.adapters:
        _write_view(folder, adapter.name, _bundle_metadata(plan, asset, facts))


def _write_view(folder: Path, adapter: str, metadata: dict[str, Any]) -> None:
    """Write `adapters/ADAPTER`: for Apple's Swift code the same bundle, whose `main` has the adapter."""
    view = folder / "adapters" / adapter
    view.mkdir(parents=True)
    (view / "tokenizer").symlink_to(Path("../../tokenizer"))
    metadata["name"] += f"-{adapter}"
    metadata["assets"]["main"] = f"../../{metadata['assets']['main']}"
    metadata["language"]["function_map"]["main"] = [f"main_{adapter}"]
    _write_metadata(view, metadata)


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")


def _reserve(folder: Path, nbytes: int) -> None:
    """Raise unless a file of `nbytes` can be written: if not, LLVM, which writes assets, ends the process."""
    check_space(folder, nbytes)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def _build(plan: BundlePlan, constants: Constants) -> None:
    """Build all functions in the module that is open."""
    adapters: dict[str, int | AdapterSource | None] = {"": None}
    if plan.adapter_rank:
        adapters[f"_{INPUTS}"] = plan.adapter_rank
    adapters |= {f"_{adapter.name}": adapter for adapter in plan.adapters}
    vision = plan.config.vision_config if isinstance(plan.config, ModelConfig) else None
    for suffix, adapter in adapters.items():
        for with_images in (False, True) if vision is not None else (False,):
            start = IMAGE if with_images else ""
            for length in plan.lengths:
                name = f"{start}prompt_{length}{suffix}"
                _builder(plan, constants, adapter).prompt(name, length, with_images)
            _builder(plan, constants, adapter).step(f"{start}step{suffix}", with_images)
        if not isinstance(adapter, int):
            _builder(plan, constants, adapter).main(f"main{suffix}")
    if vision is not None:
        for mode in ENCODERS:
            VisionFunctionBuilder(plan.source, vision, constants, plan.dtype).encode(mode)


def _builder(
    plan: BundlePlan, constants: Constants, adapter: int | AdapterSource | None
) -> FunctionBuilder:
    if isinstance(plan.source, ZooSource):
        return ZooFunctionBuilder(plan.source, plan.config, constants, plan.dtype)
    return FunctionBuilder(plan.source, plan.config, constants, plan.dtype, adapter)


def _facts(plan: BundlePlan) -> dict[str, Any]:
    return {
        "config": plan.config.to_dict(),
        "base_model_fingerprint": plan.fingerprint,
        "dtype": plan.dtype.name,
        "prompt_lengths": list(plan.lengths),
        "adapter_rank": plan.adapter_rank,
        "adapters": [adapter.name for adapter in plan.adapters],
    }


def _asset_metadata(facts: dict[str, Any]) -> AIModelAssetMetadata:
    metadata = AIModelAssetMetadata()
    metadata.model_description = "Text model by afm-mlx"
    metadata.set_custom(FACTS, json.dumps(facts))
    return metadata


def _bundle_metadata(plan: BundlePlan, asset: Path, facts: dict[str, Any]) -> dict[str, Any]:
    name = asset.stem
    return {
        "metadata_version": METADATA_VERSION,
        "kind": "llm",
        "name": name,
        "assets": {"main": asset.name},
        "language": {
            "tokenizer": name,
            "vocab_size": plan.config.vocab_size,
            "max_context_length": plan.config.context_length,
            "embedded_tokenizer": True,
            "function_map": {"main": ["main"]},
        },
        "compilation": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "targets": [],
        },
        "user_data": {FACTS: json.dumps(facts), PROGRAM: program_facts(asset)},
    }
