"""An adapter of a Core AI bundle: a safetensors file with the arrays that functions take.

Its metadata have the fingerprint of the base model and the rank. `afm-mlx adapter convert --to coreai` writes
it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from afm_mlx.coreai.bundle import CoreAIBundle, adapter_inputs
from afm_mlx.errors import AFMError, CheckpointError, named, shown

FINGERPRINT, RANK = "base_model_fingerprint", "rank"


def read_adapter_arrays(file: str | Path, bundle: CoreAIBundle) -> dict[str, np.ndarray]:
    """Read an adapter's arrays by the names of a bundle's inputs, in the bundle's type.

    Raises:
        AFMError: if the file can't be read, is damaged, or was made for another model or another rank; or if
            the bundle takes no adapters.
    """
    config, rank = bundle.check_takes_adapters()
    remedy = "Write it again with afm-mlx adapter convert --to coreai."
    if not Path(file).is_file():  # a pipe has no end
        own = ", ".join(bundle.adapters) or "none"
        raise AFMError(
            f"{file} can't be read as an adapter: it is missing, or no regular file, and the adapters with "
            f"functions in {bundle.path} are {own}. {remedy}"
        )
    try:
        with safe_open(str(file), framework="np") as stored:
            metadata = stored.metadata() or {}
            if metadata.get(FINGERPRINT) != bundle.fingerprint:
                raise CheckpointError(
                    f"{file} was made for a model with the fingerprint {shown(metadata.get(FINGERPRINT))}, and "
                    f"{bundle.path} has {bundle.fingerprint}. {remedy}"
                )
            if metadata.get(RANK) != str(rank):
                raise CheckpointError(
                    f"{file} has the rank {shown(metadata.get(RANK))}, and {bundle.path} takes "
                    f"{rank}. {remedy}"
                )
            shapes = dict(adapter_inputs(config, rank))
            if set(stored.keys()) != set(shapes):
                wrong = min(set(stored.keys()) ^ set(shapes))
                raise CheckpointError(
                    f"{file} has other arrays than {bundle.path} takes, such as {named(wrong)}. {remedy}"
                )
            arrays = {name: stored.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise AFMError(f"{file} can't be read as an adapter: {error}. {remedy}") from None
    for name, array in arrays.items():
        if array.shape != shapes[name] or not np.issubdtype(array.dtype, np.floating):
            raise CheckpointError(
                f"{file}: {named(name)} is {array.dtype} {list(array.shape)}, and {bundle.path} takes floats "
                f"{list(shapes[name])}. {remedy}"
            )
        if not np.isfinite(array).all():
            raise CheckpointError(f"{file}: {named(name)} holds NaN or infinity. {remedy}")
    return {name: array.astype(bundle.dtype, copy=False) for name, array in arrays.items()}
