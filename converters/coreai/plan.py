"""Check that a Core AI bundle can hold a model folder, without importing coreai-core."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.converters.adapter_conversion import BaseFolder, read_for
from afm_mlx.converters.conversion_options import prompt_lengths
from afm_mlx.converters.graph_source import AdapterSource, Float, Source
from afm_mlx.coreai.bundle import INPUTS, ZooConfig, is_function_suffix
from afm_mlx.errors import AFMError
from afm_mlx.loading.resolve import resolve_adapter


@dataclass(frozen=True)
class BundlePlan:
    """A model folder that can become a Core AI bundle, and how; see `plan_bundle`.

    `config` has the bundle's context, which can be shorter than the model's.
    """

    folder: Path
    source: Source
    config: ModelConfig | ZooConfig
    fingerprint: str
    dtype: Float
    lengths: tuple[int, ...]
    adapter_rank: int | None
    adapters: tuple[AdapterSource, ...]
    minimum_os: str


def plan_bundle(
    folder: Path,
    *,
    dtype: str = "float16",
    context: int | None = None,
    lengths: Sequence[int] | None = None,
    adapter_rank: int | None = None,
    adapters: Sequence[str | Path] = (),
    minimum_os: str = "27",
) -> BundlePlan:
    """Check that a Core AI bundle can hold a model folder, float or packed.

    Args:
        folder: an AFM model's folder.
        dtype: "float16" or "float32", the type that functions compute in.
        context: number of tokens that the states hold; the model's context by default.
        lengths: numbers of tokens that `prompt_N` takes; pass None for the default of `prompt_lengths`.
        adapter_rank: rank of the adapters that functions take as inputs; pass None for no such functions.
        adapters: adapters, by path or by name in the folder, that get functions of their own.
        minimum_os: the oldest macOS and iOS.

    Raises:
        AFMError: if the folder is damaged, holds a format that Core AI has no operation for, or has a shorter
            context than `context` or one of the lengths; or if an adapter can't be read, was made for another
            model, or has a name that functions can't have.
    """
    source = Source.read(folder, with_images=True)
    most = source.config.context_length
    check_context(context, most)
    config = dataclasses.replace(source.config, context_length=context or most)
    fingerprint = folder_fingerprint(source.config, folder)
    found = [resolve_adapter(adapter, folder) for adapter in adapters]
    # Each gets a folder, and a Mac's file system takes names that differ in case alone as one.
    if len({path.stem.casefold() for path in found}) < len(found):
        raise AFMError(
            "--adapter-functions has two adapters of the same name, if A and a are one letter. Rename one "
            "of them."
        )
    return BundlePlan(
        folder,
        source,
        config,
        fingerprint,
        np.dtype(dtype),
        prompt_lengths(lengths, config.context_length, False),
        adapter_rank,
        tuple(_adapter(path, source, fingerprint, np.dtype(dtype)) for path in found),
        minimum_os,
    )


def check_context(context: int | None, most: int) -> None:
    """Raise `AFMError` if a bundle's context is longer than its model's."""
    if context is not None and context > most:
        raise AFMError(
            f"--context is {context}; the model's context is {most} tokens, which is the most."
        )


def _adapter(path: Path, source: Source, fingerprint: str, dtype: Float) -> AdapterSource:
    """Read an adapter of any format that was made for the model."""
    if not is_function_suffix(path.stem):
        raise AFMError(
            f"{path.name} can't be the name of functions: English letters, digits, _ and - are allowed, and "
            f"{INPUTS!r} is taken. Rename the adapter."
        )
    text = dataclasses.replace(source.config, vision_config=None)  # no encoder with an adapter
    tensors, config = read_for(path, BaseFolder(text, fingerprint))
    return AdapterSource(path.stem, path, tensors, config, source.config, dtype)
