"""An adapter of any format as a file of a Core AI bundle; `afm_mlx.coreai.adapter_file` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from afm_mlx.converters.adapter_conversion import BaseFolder, read_for
from afm_mlx.converters.graph_source import AdapterMatrices, AdapterSource, matrices_of
from afm_mlx.coreai.adapter_file import FINGERPRINT, RANK
from afm_mlx.coreai.bundle import CoreAIBundle, adapter_inputs
from afm_mlx.errors import AFMError
from afm_mlx.files import atomic_write, refuse_existing


def write_adapter_file(
    adapter: str | Path, bundle: CoreAIBundle, output: Path, **options: Any
) -> None:
    """Write an adapter as the arrays that a bundle's functions take, padded with zeros to their rank.

    Args:
        adapter: an adapter of any format.
        bundle: the bundle that will run it.
        output: the file to write, which must not exist.
        options: `alpha` and `force` of `read_for`.

    Raises:
        AFMError: if the adapter can't be read, was made for another model, or has a greater rank.
    """
    architecture, rank = bundle.check_takes_adapters()
    refuse_existing(output)
    base = BaseFolder(architecture, bundle.fingerprint)
    tensors, config = read_for(adapter, base, **options)
    if config.rank > rank:
        raise AFMError(
            f"{adapter} has rank {config.rank}, and {bundle.path} takes up to {rank}. Make the bundle again "
            f"with --adapter-rank {config.rank}."
        )
    name, dtype = Path(adapter).name, np.dtype(bundle.dtype)
    source = AdapterSource(name, adapter, tensors, config, architecture, dtype)
    arrays = {name: np.zeros(shape, dtype) for name, shape in adapter_inputs(architecture, rank)}
    for path in matrices_of(architecture):
        if (found := source.matrices(path)) is not None:
            _fill(arrays, path, found, config.rank, rank)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as temporary:
        save_file(arrays, temporary, {FINGERPRINT: bundle.fingerprint, RANK: str(rank)})


def _fill(
    arrays: dict[str, np.ndarray], path: str, found: AdapterMatrices, own: int, rank: int
) -> None:
    """Put an adapter's matrices of rank `own` into arrays of the rank `rank`."""
    for i, b in enumerate(found.b):
        arrays[f"{path}.lora_a"][:, i * rank : i * rank + own] = found.a[i * own : (i + 1) * own].T
        arrays[f"{path}.lora_b.{i}"][:own] = b.T
