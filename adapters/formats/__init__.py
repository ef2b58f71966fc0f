"""Formats of adapters: reading and writing.

| format | what it is | file |
| --- | --- | --- |
| `mlx-lm` | a folder with `adapters.safetensors`; this package's own | `afm_mlx.adapters.adapter_folder` |
| `peft` | a folder with `adapter_model.safetensors`, of Hugging Face's PEFT | `peft.py` |
| `toolkit` | a `.pt` file of Apple's adapter training toolkit | `toolkit_adapter.py` |
| `fmadapter` | a package that Apple's framework loads | `fmadapter.py`, `mil_blob.py` |

Each is converted from and to one form in memory: tensors by mlx-lm's names, and an `AdapterConfig`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from afm_mlx.adapters.adapter_folder import (
    CONFIG_NAME,
    TENSORS_NAME,
    AdapterConfig,
    check_pairs,
    load_adapter,
    save_adapter,
)
from afm_mlx.adapters.formats import fmadapter, peft, toolkit_adapter
from afm_mlx.adapters.formats.fmadapter import PackageMetadata, read_metadata
from afm_mlx.adapters.formats.pair_order import (
    Architecture,
    Tensors,
    check_fits,
    complete_fused,
    misfits,
)
from afm_mlx.adapters.reward_head import RewardHead, save_reward_head
from afm_mlx.adapters.target_modules import ZooBase
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.config import read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_folder, refuse_existing
from afm_mlx.quantization.quantize_model import is_vision

__all__ = [
    "FORMATS",
    "PackageMetadata",
    "detect_format",
    "misfits",
    "read_adapter",
    "read_metadata",
    "write_adapter",
]

FORMATS = ("mlx-lm", "peft", "toolkit", "fmadapter")


def detect_format(path: str | Path) -> str:
    """Return the format of an adapter, one of `FORMATS`, judged by its file names.

    Raises:
        CheckpointError: when it is no adapter; says what was found.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix in (".aar", fmadapter.SUFFIX, ".zip"):
            raise CheckpointError(
                f"{path} is an archive or a file; an .fmadapter package is a folder. Unpack it first "
                "(unzip, or aa extract)."
            )
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{path} is one file of an adapter; give its folder, {path.parent}."
            )
        with suppress(zipfile.BadZipFile):  # one over several disks, which its reader refuses
            if path.suffix != ".pt" and not zipfile.is_zipfile(path):
                raise CheckpointError(
                    f"{path} is no adapter: files are the toolkit's .pt, and the other formats are folders."
                )
        return "toolkit"
    if not path.is_dir():
        raise CheckpointError(
            f"There is no {path}. An adapter is a folder of mlx-lm or PEFT, a .pt file, or an .fmadapter "
            "package."
        )
    if (path / fmadapter.WEIGHTS_NAME).exists() or path.suffix == fmadapter.SUFFIX:
        return "fmadapter"
    names = {file.name for file in path.iterdir()}
    if TENSORS_NAME in names and peft.TENSORS_NAME in names:
        raise CheckpointError(
            f"{path} holds {TENSORS_NAME} and {peft.TENSORS_NAME}, which are two adapters. Give each a folder."
        )
    if TENSORS_NAME in names:
        return "mlx-lm"
    if names & {peft.TENSORS_NAME, "adapter_model.bin"}:
        return "peft"
    # The tensors are missing: the format's reader raises.
    if CONFIG_NAME in names:
        return "peft" if "peft_type" in read_config_json(path / CONFIG_NAME) else "mlx-lm"
    found = ", ".join(sorted(names)[:8]) or "nothing"
    raise CheckpointError(
        f"{path} is no adapter: it holds {named(found)}. An adapter is a folder with {TENSORS_NAME} "
        f"(mlx-lm) or {peft.TENSORS_NAME} (PEFT), a .pt file, or an .fmadapter package."
    )


def read_adapter(
    path: str | Path,
    model_config: Architecture | None = None,
    *,
    alpha: float | None = None,
    finite: bool = True,
) -> tuple[Tensors, AdapterConfig]:
    """Read an adapter of any format.

    Sizes are checked before memory is taken. Tensors of safetensors files are lazy when `finite` is False.

    Args:
        path: folder or file.
        model_config: architecture that the adapter must fit; needed for PEFT folders of mlx-lm's models, and
            for `.fmadapter` packages unless they are for Apple's 3B.
        alpha: alpha of a toolkit's `.pt`; pass None to take it from the config next to the file.
        finite: read all numbers, and refuse NaN and infinity.

    Returns:
        tensors by mlx-lm's names, `lora_a` (inputs, rank) and `lora_b` (rank, outputs), and their config.

    Raises:
        CheckpointError, ConfigError: what is wrong, and where.
    """
    path = Path(path)
    kind = detect_format(path)
    if alpha is not None and kind != "toolkit":
        raise ConfigError(
            f"An alpha was given, and {path} has its own. Only a .pt file can lack it: leave it out."
        )
    if kind == "mlx-lm":
        tensors, config = load_adapter(path)
    elif kind == "peft":
        tensors, config = peft.read(path, model_config)
    elif isinstance(model_config, ZooBase):
        raise _for_afm_only(path, kind, model_config)
    elif kind == "toolkit":
        tensors, config = toolkit_adapter.read(path, model_config, alpha)
    else:
        tensors, config = fmadapter.read(path, model_config)
    if model_config is not None:
        check_fits(tensors, model_config, path)
    if finite:
        check_finite(tensors, path)
    return tensors, config


def _for_afm_only(path: Path, kind: str, base: ZooBase) -> CheckpointError:
    return CheckpointError(
        f"{path}: {kind} is a format of adapters of AFM models, and the base is of the type "
        f"{shown(base.model_type)}. For every architecture there are mlx-lm and peft."
    )


def write_adapter(
    path: str | Path,
    tensors: Mapping[str, mx.array],
    config: AdapterConfig,
    to: str,
    *,
    model_config: Architecture | None = None,
    head: RewardHead | None = None,
    dtype: mx.Dtype | None = None,
    package: PackageMetadata | None = None,
    any_rank: bool = False,
    qkv: str = "fused",
) -> None:
    """Write an adapter in one of the formats, whole or not at all.

    Args:
        path: the output, which must not exist; `NAME.pt` for the toolkit, which also gets
            `NAME-config.json`, and `NAME.fmadapter` for a package.
        tensors: see `read_adapter`.
        config: the adapter's rank, scale and layers.
        to: one of `FORMATS`.
        model_config: architecture of the base. The toolkit's and Apple's formats hold pairs of every layer, and
            need it for other models than Apple's 3B. The adapter must fit it.
        head: the reward head of a folder of mlx-lm.
        dtype: type of the numbers; pass None to keep it. `.pt` files are float32, and packages float16, in any
            case.
        package: metadata of an `.fmadapter`; pass None for a name only, taken from the path.
        any_rank: write packages of ranks above 32, which Apple's runtime does not take.
        qkv: "fused" or "split": a PEFT folder has one layer for queries, keys and values, or three.

    Raises:
        CheckpointError: when the adapter does not fit the format, or holds NaN or infinity.
        AFMError: when the output exists, or can't be written.
    """
    path = Path(path)
    if to not in FORMATS:
        raise AFMError(f"The format is {shown(to)}; allowed are {', '.join(FORMATS)}.")
    refuse_existing(path)
    check_pairs(tensors, config, path)
    if to != "mlx-lm" and any(map(is_vision, tensors)):
        raise CheckpointError(
            f"{path}: the adapter changes the image encoder or its adaptor, and {to} has no place for these "
            "layers. Convert it to mlx-lm."
        )
    if model_config is not None:
        check_fits(tensors, model_config, path)
    check_finite(tensors, path)
    if dtype is not None:
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        check_finite(tensors, f"{path}, in {str(dtype).removeprefix('mlx.core.')}")
    try:
        if to == "mlx-lm":
            if model_config is not None:
                tensors = complete_fused(tensors, model_config, config.rank)
            with atomic_folder(path) as folder:
                save_adapter(folder, tensors, config)
                if head is not None:
                    save_reward_head(folder, head)
        elif to == "peft":
            peft.write(path, tensors, config, model_config, qkv)
        elif isinstance(model_config, ZooBase):
            raise _for_afm_only(path, to, model_config)
        elif to == "toolkit":
            toolkit_adapter.write(path, tensors, config, model_config)
        else:
            fmadapter.write(path, tensors, config, model_config, package, any_rank)
    except OSError as error:
        raise AFMError(
            f"The adapter {path} can't be written: {error}. Check room and permissions."
        ) from None
