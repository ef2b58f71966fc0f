"""Weight files of a model folder: finding, reading, checking and writing them.

The layout is mlx-lm's: `model.safetensors`, or shards of at most 5 GiB that are named
`model-0000i-of-0000N.safetensors`, and `model.safetensors.index.json`.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.checkpoint.safetensors_file import (
    StoredTensor,
    TensorLike,
    TensorSpec,
    array_bytes,
    array_specs,
    load_stored,
    read_header,
    write_file,
)
from afm_mlx.config import read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, named, shown
from afm_mlx.files import output_of
from afm_mlx.progress import Progress

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30

_LINE = 300
_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder by name, from validated headers; no data is read.

    Raises:
        CheckpointError: for missing or damaged files, and if the index and the files disagree.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    weight_map = _read_index(index) if index.is_file() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else _find_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(folder / name).values():
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder}: both {tensors[tensor.name].path.name} and {name} hold the tensor "
                    f"{named(tensor.name)}. Remove the file that does not belong to the model."
                )
            tensors[tensor.name] = tensor
    if weight_map is not None:
        placed = {name: tensor.path.name for name, tensor in tensors.items()}
        wrong = sorted(n for n, f in weight_map.items() if placed.get(n) != f)
        wrong += sorted(set(placed) - set(weight_map))
        if wrong:
            raise CheckpointError(
                f"{index} does not fit the files that it names: {_first(wrong)}. The folder is a mix of "
                "two versions, or a download was cut off: copy or download it again."
            )
    return tensors


def load_weights(folder: str | Path) -> dict[str, mx.array]:
    """Load a model folder's tensors lazily, as `stored_tensors` finds them: data is read at its first use."""
    return load_stored(stored_tensors(folder))


def check_weights(
    expected: Mapping[str, Sequence[int]], weights: Mapping[str, TensorLike], source: str | Path
) -> None:
    """Compare the names and shapes of weights with the expected ones.

    Raises:
        CheckpointError: lists tensors that are missing, unexpected or of the wrong shape.
    """
    found = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of the wrong shape": [
            f"{named(name)} is {shown(list(weights[name].shape))} and must be {list(shape)}"
            for name, shape in expected.items()
            if name in weights and tuple(weights[name].shape) != tuple(shape)
        ],
    }
    problems = [f"{len(n)} tensors {what}: {_first(n)}" for what, n in found.items() if n]
    if problems:
        raise CheckpointError(
            f"{source} does not fit its config: {'; '.join(problems)}. "
            "Check that the config and the weights are of the same model."
        )


def write_weights(
    folder: str | Path,
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Iterable[Any]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    total_parameters: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model folder's safetensors files and their index; memory holds one chunk of `read`.

    Args:
        specs: the tensors, in the order in which shards are filled.
        read: called once for each tensor; yields its data, row-major and little-endian, in chunks with the
            buffer protocol.
        max_shard_bytes: maximum size of a shard; a larger tensor gets a shard of its own.
        total_parameters: number of parameters for the index; by default the number of elements.
        progress: called after each chunk with the bytes written and the total number of bytes.

    Raises:
        CheckpointError: if the disk has no room.
    """
    folder = Path(folder)
    total = sum(spec.nbytes for spec in specs)
    check_space(folder, total)
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    done, paths = 0, []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        paths.append(folder / (name if len(shards) > 1 else "model.safetensors"))
        weight_map |= {spec.name: paths[-1].name for spec in shard}

        def report(written: int, start: int = done) -> None:
            if progress is not None:
                progress(start + written, total)

        write_file(paths[-1], shard, read, report)
        done += sum(spec.nbytes for spec in shard)
    parameters = sum(spec.size for spec in specs) if total_parameters is None else total_parameters
    metadata = {"total_size": total, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=4), encoding="utf-8")
    return paths


def save_weights(folder: str | Path, weights: Mapping[str, mx.array], **options: Any) -> list[Path]:
    specs = array_specs(weights)
    return write_weights(folder, specs, lambda spec: [array_bytes(weights[spec.name])], **options)


def check_space(folder: Path, needed: int) -> None:
    """Raise `CheckpointError` if the disk of an output's temporary folder has fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{output_of(folder).parent} has no room: {needed / 1e6:,.1f} MB are needed and "
            f"{free / 1e6:,.1f} MB are free. Make room, choose another output path, or a dtype of 16 bits."
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_config_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map. Copy or download the model folder again.")
    for name in weight_map.values():
        # The index may be malicious: a name must not lead out of the folder.
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(
                f"{path} names the file {shown(name)}; only names of *.safetensors files in the same folder "
                "are allowed. Do not use this folder unless you know who made it."
            )
    return weight_map


def _find_files(folder: Path) -> list[str]:
    files = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. A model folder comes from `afm-mlx convert`."
        )
    numbered = [m for m in map(_SHARD_NAME.fullmatch, files) if m]
    for match in numbered[:1]:
        whole = {f"model-{i + 1:05d}-of-{match[2]}.safetensors" for i in range(int(match[2]))}
        missing = sorted(whole - set(files))
        if missing:
            raise CheckpointError(
                f"{folder} lacks {_first(missing)}. Copy or download the model folder again."
            )
    return files


def _first(names: Sequence[str]) -> str:
    """Return up to five names, as many as fit into a line, and the number of the others, as text."""
    chosen = list(itertools.accumulate(map(named, names[:5]), "{}, {}".format))
    fitting = [text for text in chosen if len(text) <= _LINE] or chosen[:1]
    more = len(names) - len(fitting)
    return fitting[-1] + (f" and {more} more" if more else "")
