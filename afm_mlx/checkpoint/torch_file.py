"""PyTorch checkpoint files, read without running what they hold and without loading them whole.

A `.pt` file is an uncompressed zip archive of a pickle, which describes the tensors, and of one record of
raw data per storage. The pickle is read by PyTorch's restricted unpickler, which builds tensors and
plain containers only; the data is mapped, so that a page of it takes memory only while it is used.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from afm_mlx.errors import AFMError, CheckpointError, shown
from afm_mlx.installation import package_problem

if TYPE_CHECKING:
    import torch

# A state dict of 1,326 tensors takes 0.2 MB; the unpickler holds all of it in memory.
_MAX_PICKLE_BYTES = 64 << 20
_CHUNK_ELEMENTS = 8 << 20


def import_torch() -> Any:
    """PyTorch, which only the reading of `.pt` files needs.

    Raises:
        AFMError: says how to install it.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        raise AFMError(
            f"Reading a .pt checkpoint needs PyTorch. {package_problem(error) or error}"
        ) from error
    return torch


def open_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a checkpoint that `torch.save` wrote of a state dict.

    Raises:
        CheckpointError: when the file is missing, cut off, damaged, no such checkpoint, or holds
            anything that could run code.
        AFMError: without PyTorch.
    """
    path = Path(path)
    check_archive(path)
    torch = import_torch()
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "WeightsUnpickler" in line), "")
        raise CheckpointError(
            f"{path} holds more than tensors, and loading that could run code of whoever made the file; "
            f"refused. {reason.strip()} Save the state dict alone: torch.save(model.state_dict(), path)."
        ) from None
    except Exception as error:
        # Whatever a damaged archive makes PyTorch raise: RuntimeError, EOFError, KeyError, ValueError, ...
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} can't be read as a PyTorch checkpoint: {reason}. "
            "It is damaged: copy or download it again."
        ) from None
    _check_state(state, path, torch)
    _check_records(state, path)
    return state


def mlx_dtype(tensor: torch.Tensor) -> mx.Dtype | None:
    """The MLX type of a floating-point tensor; None for all others and 8 bits. float64 counts as float32."""
    types = {
        "float16": mx.float16,
        "bfloat16": mx.bfloat16,
        "float32": mx.float32,
        "float64": mx.float32,
    }
    return types.get(str(tensor.dtype).removeprefix("torch."))


def tensor_chunks(tensor: torch.Tensor, dtype: mx.Dtype, name: str) -> Iterator[Any]:
    """Yield a floating-point tensor's elements, row-major, as little-endian bytes of `dtype`.

    Raises:
        CheckpointError: on NaN and infinity, and on numbers that float16 can't hold.
    """
    torch = import_torch()
    target = getattr(torch, str(dtype).removeprefix("mlx.core."))
    limit = torch.finfo(target).max
    for part in _parts(tensor):
        low, high = (value.item() for value in torch.aminmax(part))
        if not math.isfinite(low) or not math.isfinite(high):
            raise CheckpointError(
                f"{name} holds NaN or infinity: the checkpoint is damaged, or its training diverged."
            )
        if max(-low, high) > limit:
            raise CheckpointError(
                f"{name} holds {max(-low, high):.4g}, and {target} ends at {limit:.4g}. "
                "Choose bfloat16 or float32."
            )
        yield part.to(target).contiguous().reshape(-1).view(torch.uint8).numpy()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of the same shape hold the same numbers, without copying either."""
    torch = import_torch()
    if (one.data_ptr(), one.stride(), one.dtype) == (other.data_ptr(), other.stride(), other.dtype):
        return True
    return all(torch.equal(a, b) for a, b in zip(_parts(one), _parts(other), strict=True))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Groups of rows of a few megabytes."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    yield from rows.split(max(1, _CHUNK_ELEMENTS * len(rows) // rows.numel()))


def check_archive(path: Path) -> None:
    """Raise `CheckpointError` when a file is no whole archive as `torch.save` writes it."""
    again = "Give the .pt file that torch.save wrote."
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or no file.")
    with path.open("rb") as file:
        magic = file.read(4)
    size = path.stat().st_size
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path} is a bare pickle, or a checkpoint of a PyTorch before 1.6; only the zip format is "
            "read. Load it where you trust it and save it again with torch.save."
        )
    if magic != b"PK\x03\x04":
        raise CheckpointError(
            f"{path} ({size:,} bytes) is no PyTorch checkpoint: it starts with {magic!r}, a checkpoint with "
            f"b'PK\\x03\\x04'. {again}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} ({size:,} bytes) is cut off or damaged: {error}. Copy or download it again."
        ) from None
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path} is a zip archive, but no PyTorch checkpoint: it has no data.pkl in a folder. {again}"
        )
    if len({entry.filename for entry in entries}) < len(entries):
        raise CheckpointError(
            f"{path} has two entries of one name, and readers differ in which they take. {again}"
        )
    # The data is mapped where the archive says it lies, which compression or a lying size would break.
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or any(entry.file_size != entry.compress_size for entry in entries):
        raise CheckpointError(f"{path} was packed again with compression. {again}")
    if any(entry.header_offset + entry.file_size > size for entry in entries):
        raise CheckpointError(f"{path} is damaged: it announces more data than its {size:,} bytes.")
    if pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path} describes its tensors in {pickles[0].file_size:,} bytes; {_MAX_PICKLE_BYTES:,} are "
            "allowed. It is no checkpoint of a model that this package knows."
        )


def _check_state(state: Any, path: Path, torch: Any) -> None:
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}; a state dict (names to tensors) is needed."
        )
    others = [str(k) for k, v in state.items() if not isinstance(v, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{path} holds other things than tensors at its top level: {', '.join(others[:5])}. "
            "Save the state dict alone: torch.save(model.state_dict(), path)."
        )
    for key, tensor in state.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{path}: the name {shown(key)} is no text. A state dict is needed."
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(f"{path}: {key} is no dense tensor, and only those are read.")


def _check_records(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise `CheckpointError` for data of another size than described: what follows would be read too."""
    with zipfile.ZipFile(path) as archive:
        records = Counter(e.file_size for e in archive.infolist() if "/data/" in e.filename)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in state.values())}
    if missing := Counter(size for size in storages.values() if size) - records:
        raise CheckpointError(
            f"{path} describes tensors of {min(missing):,} bytes that no record in it has. It is damaged: "
            "copy or download it again."
        )
