"""`.fmadapter` packages, which Apple's framework loads: a folder of metadata and unnamed blobs.

| file | what |
| --- | --- |
| `metadata.json` | name, author, signature of the base model, rank |
| `adapter_weights.bin` | every pair of the model, a blob each (`mil_blob.py`), in order (`pair_order.py`) |
| `draft.mil`, `draft_weights.bin` | a draft model: both or neither, copied as they are |

A is stored as (rank, inputs) and B as (outputs, rank), in float16. The framework rotates halves of a head
where tamm and MLX rotate neighbours, so B's rows of queries and keys are sorted: within a head of 2 h rows,
the even ones first. alpha is not folded in: the framework multiplies by 16 / rank, with rank 32.

An adapter of another scale is written with B multiplied by its scale over 0.5, which float16 rounds unless that
is a power of two; one of a smaller rank is filled up with zeros, which changes nothing.

Source: `export_fmadapter.py` of the adapter training toolkit 26.0.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, is_a
from afm_mlx.adapters.formats.mil_blob import read_blobs, write_blobs
from afm_mlx.adapters.formats.pair_order import (
    PairTarget,
    Tensors,
    complete,
    config_for,
    keys_of,
    num_layers_of,
    pair_targets,
    without_empty,
)
from afm_mlx.config import PRESETS, ModelConfig, read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_folder
from afm_mlx.json_values import FLOAT16_MAX, MAX_RANK, is_number, is_rank, is_text

SUFFIX = ".fmadapter"
METADATA_NAME = "metadata.json"
WEIGHTS_NAME = "adapter_weights.bin"
DRAFT_NAMES = ("draft.mil", "draft_weights.bin")
RUNTIME_RANK, RUNTIME_ALPHA = 32, 16
# Signature of the base model that the toolkit 26.0 trains adapters for.
BASE_SIGNATURE = "9799725ff8e851184037110b422d891ad3b92ec1"
# Key of this package's own notes in the metadata's `creatorDefined`.
OUR_NOTES = "afm-mlx"


@dataclass(frozen=True)
class PackageMetadata:
    """The content of a package's `metadata.json`, except the rank."""

    name: str  # letters, digits and '_'; the framework accepts no others
    author: str = "3P developer"
    description: str = ""
    license: str = ""
    # 40 hex digits that identify the base model; None for the toolkit 26.0's signature if the base has the 3B's
    # shape, else for the start of the base's fingerprint.
    base_signature: str | None = None
    draft_token_count: int = 5  # tokens that a draft model proposes at a time
    creator_defined: Mapping[str, object] = field(default_factory=dict)  # the author's own notes
    draft: Path | None = None  # folder that holds `draft.mil` and `draft_weights.bin`


def read_metadata(folder: Path) -> tuple[PackageMetadata, int]:
    """Read a package's `metadata.json`; return its content and the rank.

    Raises `ConfigError`, which names what is missing or can't be used, and what `check_draft` raises.
    """
    path = folder / METADATA_NAME
    values = read_config_json(path)
    rank: Any = values.get("loraRank")
    identifier, signature = values.get("adapterIdentifier"), values.get("baseModelSignature")
    texts = [values.get(key, "") for key in ("author", "description", "license")]
    tokens = values.get("speculativeDecodingDraftTokenCount", 5)
    notes = values.get("creatorDefined", {})
    match = re.fullmatch(r"fmadapter-(\w+)-\w+", identifier if is_text(identifier) else "")
    are_tokens = type(tokens) is int and tokens >= 0
    for name, value, holds, allowed in (
        ("loraRank", rank, is_rank(rank), f"a whole number of 1 to {MAX_RANK}"),
        ("adapterIdentifier", identifier, match, "fmadapter-NAME-SIGNATURE"),
        ("baseModelSignature", signature, _is_signature(signature), "40 hex digits"),
        ("author, description or license", texts, all(map(is_text, texts)), "Unicode text"),
        ("creatorDefined", notes, isinstance(notes, dict), "an object"),
        ("speculativeDecodingDraftTokenCount", tokens, are_tokens, "a whole number"),
    ):
        if not holds:
            raise ConfigError(f"{path}: {name} is {shown(value)}, and must be {allowed}.")
    assert match is not None
    draft = folder if check_draft(folder) else None
    author, description, license = texts
    return PackageMetadata(
        match[1], author, description, license, signature, tokens, notes, draft
    ), rank


def check_draft(folder: Path) -> bool:
    """Return True if a folder has both files of a draft model; raise `CheckpointError` if it has one."""
    there = [name for name in DRAFT_NAMES if (folder / name).is_file()]
    if len(there) == 1:
        raise CheckpointError(
            f"{folder} holds {there[0]} alone; a draft model is {' and '.join(DRAFT_NAMES)}, or neither."
        )
    return bool(there)


def read(path: Path, model_config: ModelConfig | None) -> tuple[Tensors, AdapterConfig]:
    """Read a package; see `read_adapter`."""
    metadata, rank = read_metadata(path)
    config = model_config or PRESETS["afm-3b"]
    targets = pair_targets(config)
    weights = path / WEIGHTS_NAME
    blobs = read_blobs(weights)
    hint = "" if model_config else " For another model than Apple's 3B, name its folder (--model)."
    if len(blobs) != 2 * len(targets):
        raise CheckpointError(
            f"{weights} holds {len(blobs)} blobs, and this model has {2 * len(targets)}.{hint}"
        )
    tensors = {}
    for index, target in enumerate(targets):
        a, b = blobs[2 * index : 2 * index + 2]
        for side, (name, blob, width) in enumerate(
            ((target.a, a, target.inputs), (target.b, b, target.outputs))
        ):
            if blob.size != rank * width:
                raise CheckpointError(
                    f"{weights}: blob {2 * index + side}, {name}, has {blob.size:,} numbers, and this model "
                    f"needs {rank * width:,}.{hint}"
                )
        tensors[target.a] = mx.array(a.reshape(rank, target.inputs)).T
        rows = interleave_rows(b.reshape(target.outputs, rank), target.rotary_heads)
        tensors[target.b] = mx.array(rows).T
    tensors = without_empty(tensors)
    notes = metadata.creator_defined.get(OUR_NOTES)
    notes = notes if isinstance(notes, dict) else {}
    rank, scale = _restore(tensors, rank, notes)
    fingerprint = notes.get("baseModelFingerprint")
    return tensors, AdapterConfig(
        rank=rank,
        scale=scale,
        num_layers=num_layers_of(tensors, config),
        keys=keys_of(tensors),
        base_model_fingerprint=fingerprint if is_text(fingerprint) else None,
    )


def _restore(tensors: Tensors, rank: int, notes: Mapping[str, object]) -> tuple[int, float]:
    """Convert tensors of rank `rank`, in place, to the notes' rank and scale; return those that hold now.

    Notes are untrusted: a rank or scale with which the adapter would compute anything else is not taken, and
    `rank`, or the runtime's scale for it, stays.
    """
    own_rank, scale = notes.get("rank"), RUNTIME_ALPHA / rank
    own_scale: Any = notes.get("scale")
    if type(own_rank) is int and 1 <= own_rank < rank:
        rest = [t[:, own_rank:] if is_a(n) else t[own_rank:] for n, t in tensors.items()]
        if not mx.any(mx.stack([mx.any(part) for part in rest])).item():
            rank = own_rank
            for name, tensor in tensors.items():
                tensors[name] = tensor[:, :rank] if is_a(name) else tensor[:rank]
    factor = scale / own_scale if is_number(own_scale) and own_scale else 0.0
    if math.isfinite(factor) and math.frexp(abs(factor))[0] == 0.5:  # a power of two
        b = {n: t for n, t in tensors.items() if not is_a(n)}
        own = {n: (factor * t.astype(mx.float32)).astype(mx.float16) for n, t in b.items()}
        # A factor beyond float32 would make zeros and infinities that look exact one way.
        exact = [mx.array_equal(own[n].astype(mx.float32) / factor, t) for n, t in b.items()]
        if mx.all(mx.stack(exact)).item():
            tensors |= own
            scale = float(own_scale)
    return rank, scale


def write(
    path: Path,
    tensors: Mapping[str, mx.array],
    config: AdapterConfig,
    model_config: ModelConfig | None,
    metadata: PackageMetadata | None = None,
    any_rank: bool = False,
) -> None:
    """Write a package; see `write_adapter`."""
    if path.suffix != SUFFIX:
        raise CheckpointError(f"A package's name ends in {SUFFIX}; {path.name} does not.")
    metadata = metadata or PackageMetadata(path.stem)
    model_config = config_for(tensors, model_config, path)
    signature = _signature(metadata, config, model_config)
    if re.fullmatch(r"[A-Za-z0-9_]+", metadata.name) is None:
        proposal = re.sub(r"[^A-Za-z0-9_]+", "_", metadata.name).strip("_") or "my_adapter"
        raise CheckpointError(
            f"The adapter's name is {shown(metadata.name)}. Apple's framework loads names of letters, digits "
            f"and '_' only: take --name {named(proposal)}."
        )
    if metadata.draft is not None and not check_draft(metadata.draft):
        raise CheckpointError(
            f"{metadata.draft} holds no draft model of a package, which is {' and '.join(DRAFT_NAMES)}. Name "
            "the folder that holds both, or leave the draft model out (--draft none)."
        )
    rank = max(config.rank, RUNTIME_RANK)
    if config.rank > RUNTIME_RANK and not any_rank:
        raise CheckpointError(
            f"The adapter has rank {config.rank}, and Apple's runtime takes {RUNTIME_RANK} at most. Train "
            f"one of rank {RUNTIME_RANK}, or write a package for other runtimes (--any-rank)."
        )
    notes = {key: value for key, value in metadata.creator_defined.items() if key != OUR_NOTES}
    ours: dict[str, object] = {}
    if config.base_model_fingerprint is not None:
        ours["baseModelFingerprint"] = config.base_model_fingerprint
    if (config.rank, config.scale) != (rank, RUNTIME_ALPHA / rank):
        ours |= {"rank": config.rank, "scale": float(config.scale)}
    values = {
        "adapterIdentifier": f"fmadapter-{metadata.name}-{signature[:7]}",
        "author": metadata.author,
        "baseModelSignature": signature,
        "creatorDefined": notes | ({OUR_NOTES: ours} if ours else {}),
        "description": metadata.description,
        "license": metadata.license,
        "loraRank": rank,
        "speculativeDecodingDraftTokenCount": metadata.draft_token_count,
    }
    targets = pair_targets(model_config)
    whole = complete(tensors, targets, config.rank)
    with atomic_folder(path) as folder:
        text = json.dumps(values, indent=4, sort_keys=True)
        (folder / METADATA_NAME).write_text(text, encoding="utf-8")
        blobs = _blobs(whole, targets, rank, config.scale / (RUNTIME_ALPHA / rank), path)
        write_blobs(folder / WEIGHTS_NAME, blobs, 2 * len(targets))
        if metadata.draft is not None:
            for name in DRAFT_NAMES:
                shutil.copyfile(metadata.draft / name, folder / name)


def _signature(metadata: PackageMetadata, config: AdapterConfig, model: ModelConfig) -> str:
    signature = metadata.base_signature
    if signature is None:
        if pair_targets(model) == pair_targets(PRESETS["afm-3b"]):
            return BASE_SIGNATURE
        signature = (config.base_model_fingerprint or "")[:40]
        if not _is_signature(signature):
            raise CheckpointError(
                f"The base model's signature is unknown: the adapter's fingerprint of it is "
                f"{shown(config.base_model_fingerprint)}. Give the signature (--base-signature), 40 hex "
                "digits, or the model folder (--model)."
            )
    if not _is_signature(signature):
        raise CheckpointError(
            f"The base model's signature is {shown(signature)}; it has 40 hex digits."
        )
    return signature


def _is_signature(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}", value) is not None


def _blobs(
    tensors: Mapping[str, mx.array],
    targets: Sequence[PairTarget],
    rank: int,
    factor: float,
    path: Path,
) -> Iterator[np.ndarray]:
    for target in targets:
        a = np.array(tensors[target.a].astype(mx.float32)).T
        b = factor * np.array(tensors[target.b].astype(mx.float32)).T
        for name, matrix in ((target.a, a), (target.b, b)):
            # NaN fails this too.
            if not np.abs(matrix).max() <= FLOAT16_MAX:
                raise CheckpointError(
                    f"{path}: {name} holds NaN, or numbers beyond float16's {FLOAT16_MAX:g} at the scale "
                    "of Apple's runtime. Its training diverged, or its scale is extreme."
                )
        more = rank - a.shape[0]
        yield np.pad(a.astype(np.float16), ((0, more), (0, 0)))
        rows = split_rows(b.astype(np.float16), target.rotary_heads)
        yield np.pad(rows, ((0, 0), (0, more)))


def split_rows(b: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows (heads * 2 h, rank) for RoPE on halves, from RoPE on neighbours: even rows first."""
    return b.reshape(heads, -1, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape) if heads else b


def interleave_rows(b: np.ndarray, heads: int) -> np.ndarray:
    """Undo `split_rows`: reorder rows from halves to neighbours."""
    return b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape) if heads else b
