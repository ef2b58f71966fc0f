"""A caller's KV cache: in a file, and kept from one prompt to the next.

A file is one safetensors file, which only the model that made it accepts.

`PromptCaches` compares a prompt with the tokens that a cache holds, token by token. The common beginning stays
in the cache; the rest is removed and computed again. So a run that reuses a cache is fed the same tokens as a
run without one, even if an answer is not tokenized as it was generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import safe_open

from afm_mlx.adapters.active import adapter_fingerprint
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.safetensors_file import (
    StoredTensor,
    load_stored,
    read_header,
    reading,
    save_file,
)
from afm_mlx.errors import CacheFileError, CheckpointError, named, shown
from afm_mlx.files import atomic_write
from afm_mlx.model.kv_cache import KEEP, MOST_TOKENS, Cache, KVCache, NoKVCache
from afm_mlx.model.model import Model
from afm_mlx.threads import in_mlx_thread

FORMAT = "afm-mlx prompt cache"
VERSION = "1"
_PARTS = ("keys", "values", "rows")  # names of a block's tensors, in the order of `KVCache.state`


@in_mlx_thread
def save_prompt_cache(
    path: str | Path,
    cache: Cache,
    model: Model,
    *,
    adapter: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a cache that `model` has filled to a file `*.safetensors`; an interrupt changes no older file.

    Args:
        adapter: fingerprint of the adapter that the cache was filled under, "" for none; pass None for the
            adapter that the cache records, or else the model's attached one, if any.
        metadata: the caller's own strings.

    Raises:
        CacheFileError: for an empty cache, another adapter, or another name of the file.
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
            f"{adapter or 'none'}. Keys and values don't carry over; compute the cache again."
        )
    tensors: dict[str, mx.array] = {}
    for index, layer in enumerate(layers):
        parts = zip(_PARTS, layer.state, strict=True)
        tensors |= {f"{index}.{part}": array for part, array in parts}
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
) -> tuple[Cache, dict[str, str]]:
    """Read a cache that `model` will continue from, and the metadata that `save_prompt_cache` was given.

    `adapter` is the fingerprint of the adapter that will be in use (`pool.load(name).fingerprint`); "" for
    none, and None for the model's attached one, if any.

    Raises:
        CacheFileError: when the file is missing or damaged, of another version, or of another model or
            adapter; both fingerprints are shown.
    """
    path = Path(path)
    if not path.is_file():
        raise CacheFileError(f"There is no prompt cache file {path}.")
    try:
        stored = read_header(path)
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        if adapter is None:
            adapter = adapter_fingerprint(model) or ""
        kind, metadata = _check_header(header, path, model, adapter)
        cache = model.make_cache(*kind)
        layers = [layer for layer in cache if isinstance(layer, KVCache)]
        _check_tensors(stored, len(layers), model, path)
        tensors = load_stored(stored)
        with reading(path):
            mx.eval(tensors)
        check_finite(tensors, path)
    except CheckpointError as error:
        raise CacheFileError(str(error)) from None
    for index, layer in enumerate(layers):
        state = [tensors[f"{index}.{part}"] for part in _PARTS]
        if not mx.array_equal(state[2], tensors["0.rows"]).item():
            raise CacheFileError(
                f"{path}: blocks 0 and {index} hold different rows; it is damaged."
            )
        try:
            layer.state = state
        except CacheFileError as error:
            raise CacheFileError(f"{path}: block {index}: {error} It is damaged.") from None
    layers[0].adapter = adapter
    mx.eval([layer.state for layer in cache])
    return cache, metadata


def _check_header(
    header: Mapping[str, str], path: Path, model: Model, adapter: str
) -> tuple[tuple[str, int | None, bool], dict[str, str]]:
    """Return a file's `KVCache.kind` and the caller's metadata; `CacheFileError` if the model can't use it."""
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CacheFileError(
            f"{path} is {shown(header.get('format', 'of an unknown format'))} in version "
            f"{shown(header.get('version'))}; version {VERSION} of {FORMAT!r} is read. Compute the cache again."
        )
    for part, wanted in (("model", base_model_fingerprint(model)), ("adapter", adapter)):
        if header.get(part) != wanted:
            raise CacheFileError(
                f"{path} was made with another {part}: its fingerprint is "
                f"{named(header.get(part) or 'none')}, and the one in use has {wanted or 'none'}. Keys and "
                "values don't carry over; compute the cache again."
            )

    parsed: list[Any] = []
    for key in ("metadata", "kind"):
        try:
            parsed.append(json.loads(header[key]))
        except KeyError:
            raise CacheFileError(f"{path} has no {key}; it is damaged.") from None
        except (ValueError, RecursionError):
            raise CacheFileError(
                f"{path}: {key} is {shown(header[key])}, which is no JSON; it is damaged."
            ) from None
    metadata, kind = parsed
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CacheFileError(
            f"{path}: metadata is {shown(metadata)}; an object of strings is needed. It is damaged."
        )
    match kind:
        case ["int8" | "float", None, False]:
            pass
        case ["int8" | "float", int(size), bool(slides)] if (
            type(size) is int and (KEEP if slides else 0) < size <= MOST_TOKENS
        ):
            pass
        case _:
            raise CacheFileError(
                f"{path}: kind is {shown(kind)}; 'int8' or 'float', the bound on tokens or null, and whether a "
                f"window of more than {KEEP} tokens slides are needed. It is damaged."
            )
    return (kind[0], kind[1], kind[2]), metadata


def _check_tensors(
    stored: Mapping[str, StoredTensor], blocks: int, model: Model, path: Path
) -> None:
    """Raise `CacheFileError` unless a file has the tensors of `blocks` blocks; `KVCache` checks the rest."""
    wanted = {f"{index}.{part}" for index in range(blocks) for part in _PARTS}
    if differing := sorted(wanted ^ set(stored)):
        name = named(differing[0])
        fault = (
            f"no tensor {name}"
            if differing[0] in wanted
            else f"the tensor {name}, which no cache has"
        )
        raise CacheFileError(f"{path} has {fault} ({len(differing)} such). It is damaged.")
    heads, dim = model.kv_heads, model.args.head_dim
    for name, tensor in stored.items():
        shape = tensor.shape
        if not name.endswith(".rows") and (len(shape) != 4 or (shape[1], shape[3]) != (heads, dim)):
            raise CacheFileError(
                f"{path}: {name} is {shown(list(shape))}; the model needs [rows, {heads}, columns, {dim}]. "
                "It is damaged."
            )


# -- from one prompt to the next


@dataclass
class Continuation:
    """A prompt whose beginning is in a cache."""

    cache: Cache  # its keys and values
    rest: list[int]  # tokens of the prompt that are still to be fed, at least one
    answer: list[int] = field(default_factory=list)  # the generating code appends its tokens


class PromptCaches:
    """The cache of the last prompt of each adapter, for the next prompt to continue from.

    Each adapter has its own: the keys and values of one are wrong for another. `new_cache` makes an empty one.
    """

    def __init__(self, new_cache: Callable[[], Cache]):
        self._new_cache = new_cache
        self._kept: dict[Hashable, tuple[Cache, list[int]]] = {}  # caches, and tokens in them

    def keep(self, cache: Cache, tokens: Sequence[int], adapter: Hashable = None) -> None:
        """Keep a cache for the adapter's next prompt, if it holds these tokens and no others."""
        if tokens_in(cache) == len(tokens):
            self._kept[adapter] = cache, list(tokens)

    @contextmanager
    def continuing(self, prompt: Sequence[int], adapter: Hashable = None) -> Iterator[Continuation]:
        """Lend the cache that holds most of a prompt, and keep it with what was fed to it.

        An empty cache is lent if the adapter has none, or one that can't be trimmed, because its sliding window
        has forgotten tokens. A cache is lent to one caller at a time. After an error it is kept with the tokens
        that it holds by then. After Ctrl-C, which may have interrupted a write, it is kept only if it has the
        same tokens as before.
        """
        cache, held = self._kept.pop(adapter, ([], []))
        pairs = zip(held, prompt[:-1], strict=False)  # the last token always remains to be fed
        reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        surplus = len(held) - reused
        if not cache or (surplus and not all(entry.is_trimmable() for entry in cache)):
            cache, reused, surplus = self._new_cache(), 0, 0
        for entry in cache if surplus else ():
            entry.trim(surplus)
        run = Continuation(cache, list(prompt[reused:]))
        keeps = True
        try:
            yield run
        except BaseException as error:
            keeps = isinstance(error, Exception) or tokens_in(cache) == reused
            raise
        finally:
            if keeps:  # the last token of an answer was usually not fed
                self.keep(run.cache, [*prompt, *run.answer][: tokens_in(run.cache)], adapter)


def tokens_in(cache: Cache) -> int | None:
    """Return how many tokens a cache of one row has seen; None if its entries don't say, or differ.

    The states of mlx-lm's `ArraysCache` don't say, and are as far as the other entries.
    """
    counts: set[int] = set()
    entries = list(cache)
    while entries:
        entry = entries.pop()
        if isinstance(entry, KVCache):
            counts.add(entry.lengths[0])
        elif not isinstance(entry, NoKVCache):
            entries += getattr(entry, "caches", [])  # of a `CacheList`
            counts |= {entry.offset} if hasattr(entry, "offset") else set()
    return counts.pop() if len(counts) == 1 else None
