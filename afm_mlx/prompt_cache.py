"""Prompt caches in files: one safetensors file that only the model it was made with will take back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.adapters.attach import adapter_fingerprint
from afm_mlx.cache import KVCache, NoKVCache
from afm_mlx.errors import CacheFileError, CheckpointError
from afm_mlx.files import atomic_write
from afm_mlx.fingerprint import base_model_fingerprint
from afm_mlx.model import Model
from afm_mlx.threads import in_mlx_thread
from afm_mlx.weights import read_header, save_file

FORMAT = "afm-mlx prompt cache"
VERSION = "1"


@in_mlx_thread
def save_prompt_cache(
    path: str | Path,
    cache: Sequence[Any],
    model: Model,
    *,
    adapter: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a cache to one file; an interrupt leaves an older file as it was.

    Args:
        path: of the file, ending in `.safetensors`.
        cache: of `Model.make_cache`, with at least one token in it.
        model: that filled it.
        adapter: fingerprint of the adapter that it was filled under, "" for none; None for what the cache says
            itself, or else for the one that the model has, if any.
        metadata: the caller's own strings.

    Raises:
        CacheFileError: when the cache is empty or was filled under another adapter, or the file's name ends in
            anything else.
        CheckpointError: when the disk has no room.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CacheFileError(f"A prompt cache file is named *.safetensors; got {path}.")
    layers = [layer for layer in cache if isinstance(layer, KVCache)]
    if not layers or any(layer.empty() for layer in layers):
        raise CacheFileError("The cache holds no tokens; run a prompt through the model first.")
    known = layers[0].adapter
    if adapter is None:
        adapter = known if known is not None else adapter_fingerprint(model) or ""
    elif known not in (None, adapter):
        raise CacheFileError(
            f"The cache was filled under the adapter {known or 'none'}, and is to be saved as one of "
            f"{adapter or 'none'}. Keys and values don't carry over; make the cache anew."
        )
    tensors: dict[str, mx.array] = {}
    for index, layer in enumerate(layers):
        keys, values, rows = layer.state
        tensors |= {f"{index}.keys": keys, f"{index}.values": values, f"{index}.rows": rows}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": base_model_fingerprint(model),
        "adapter": adapter,
        "kind": json.dumps(layers[0].kind),
        "metadata": json.dumps(dict(metadata or {})),
    }
    with atomic_write(path) as temporary:
        save_file(temporary, tensors, header)


@in_mlx_thread
def load_prompt_cache(
    path: str | Path, model: Model, *, adapter: str | None = None
) -> tuple[list[Any], dict[str, str]]:
    """Read a cache back.

    Args:
        path: of the file.
        model: that will go on with it.
        adapter: fingerprint of the adapter that will be in use, such as `pool.load(name).fingerprint`; "" for
            none, and None for the one that the model has, if any.

    Returns:
        The cache, and the metadata that `save_prompt_cache` was given.

    Raises:
        CacheFileError: when the file is missing or damaged, of another version, or of another model or
            adapter; both fingerprints are shown.
    """
    path = Path(path)
    if not path.is_file():
        raise CacheFileError(f"There is no prompt cache file {path}.")
    try:
        read_header(path)
    except CheckpointError as error:
        raise CacheFileError(str(error)) from None
    tensors, header = mx.load(str(path), format="safetensors", return_metadata=True)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CacheFileError(
            f"{path} is {header.get('format', 'of an unknown format')!r} in version "
            f"{header.get('version')}; version {VERSION} of {FORMAT!r} is read here. Make it anew."
        )
    if adapter is None:
        adapter = adapter_fingerprint(model) or ""
    for part, wanted in (("model", base_model_fingerprint(model)), ("adapter", adapter)):
        if header.get(part) != wanted:
            raise CacheFileError(
                f"{path} was made with another {part}: its fingerprint is {header.get(part) or 'none'}, "
                f"and the one in use has {wanted or 'none'}. Keys and values don't carry over; make the "
                "cache anew."
            )
    kind, max_size, sliding_window = json.loads(header["kind"])
    cache = model.make_cache(kind, max_size, sliding_window)
    for index, layer in enumerate(layer for layer in cache if not isinstance(layer, NoKVCache)):
        try:
            layer.state = [tensors[f"{index}.{name}"] for name in ("keys", "values", "rows")]
        except KeyError as error:
            raise CacheFileError(f"{path} lacks the tensor {error}; it is damaged.") from None
    cache[0].adapter = adapter
    mx.eval([layer.state for layer in cache])
    return cache, json.loads(header["metadata"])
