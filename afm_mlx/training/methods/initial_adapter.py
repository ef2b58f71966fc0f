"""The adapter that training starts from: a folder, or one file of mlx-lm's."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, AdapterConfig, load_adapter
from afm_mlx.checkpoint.safetensors_file import read_header
from afm_mlx.config import read_config_json
from afm_mlx.errors import CheckpointError, ConfigError


def read_initial(
    path: str | Path, scale: float | None = None
) -> tuple[dict[str, mx.array], AdapterConfig]:
    """Read an adapter to start from; the tensors are lazy.

    Args:
        path: an adapter folder; or a `.safetensors` file of LoRA pairs, such as mlx-lm's
            `0000100_adapters.safetensors`. Its scale is that of the `adapter_config.json` beside it.
        scale: alpha / rank of a file that has no config beside it.

    Raises:
        CheckpointError: when the path is missing, damaged, or holds no LoRA pairs.
        ConfigError: when the config can't be used, or nothing says what the scale is.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        return load_adapter(path)
    ranks = {
        tensor.shape[1]
        for name, tensor in read_header(path).items()
        if ".lora_a" in name and len(tensor.shape) == 2
    }
    if not ranks:
        raise CheckpointError(
            f"{path} holds no LoRA pairs (tensors named lora_a and lora_b). Choose an adapter's file or folder."
        )
    if len(ranks) != 1:
        raise CheckpointError(
            f"{path} holds LoRA pairs of {len(ranks)} ranks {sorted(ranks)}; one rank for all is needed."
        )
    (rank,) = ranks
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    config_path = path.with_name(CONFIG_NAME)
    if config_path.is_file():
        config = AdapterConfig.from_dict(read_config_json(config_path), config_path)
        if config.rank != rank:
            raise CheckpointError(
                f"{path} has rank {rank}, and {config_path} says {config.rank}; they don't belong together."
            )
        return tensors, config
    if scale is None:
        raise ConfigError(
            f"There is no {CONFIG_NAME} beside {path} that says the adapter's scale (alpha / rank). Give it: "
            "--scale, or --rank and --alpha."
        )
    return tensors, AdapterConfig(rank, scale, num_layers=-1)
