"""A program into a package, one constant after the other.

Source: coremltools 9.0, `converters/mil/backend/mil/load.py`, whose exporter writes constants in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.backend.mil.helper import create_file_value_tensor
from coremltools.converters.mil.backend.mil.load import (
    CoreMLProtoExporter,
    MILProtoExporter,
    types_to_proto_primitive,
)
from coremltools.converters.mil.mil import Block, Builder, Program, types
from coremltools.libmilstoragepython import _BlobStorageWriter

from afm_mlx.checkpoint.weights import check_space
from afm_mlx.converters.coreml.compression import Constants, MatrixConstants
from afm_mlx.converters.coreml.layouts import TARGET, ChannelLayout, LinearLayout, add_functions
from afm_mlx.converters.coreml.source import PackagePlan
from afm_mlx.errors import AFMError
from afm_mlx.progress import Progress

_WEIGHTS = "weights"
_FILE = "weight.bin"
_RECORD_BYTES = 64
"""Length of the record that stands before the data of each constant in the file of weights."""


class _Exporter(MILProtoExporter):
    """coremltools' exporter, with constants whose data is read on the way."""

    def __init__(
        self, program: Program, folder: Path, constants: Constants, progress: Progress | None
    ) -> None:
        super().__init__(program, str(folder), TARGET)
        self._constants, self._progress = constants, progress
        self._writer = _BlobStorageWriter(str(folder / _FILE))
        self._offsets: dict[str, int] = {}
        self._written: dict[tuple[str, bytes], int] = {}
        self._done = self._end = 0
        self._path = folder / _FILE

    def written(self) -> Any:
        """The program's description, once the file of weights is whole.

        Raises:
            RuntimeError: when it is not.
        """
        proto = self.export()
        self._writer = None  # writes what is left, and has no way to say that it failed
        if self._path.stat().st_size < self._end:
            raise RuntimeError("it is cut off")
        return proto

    def create_file_value(self, var: Any) -> Any:
        key = var.op.weight_id
        if key is None:  # a small array, of the program itself
            offset = self._write(var.val, var.dtype, var.val.nbytes)
        else:
            if key not in self._offsets:
                constant = self._constants.by_key[key]
                self._offsets[key] = self._write(constant.read(), var.dtype, constant.nbytes)
                self._done += constant.nbytes
                if self._progress is not None:
                    self._progress(self._done, self._constants.nbytes)
            offset = self._offsets[key]
        return create_file_value_tensor(
            file_name=f"@model_path/{_WEIGHTS}/{_FILE}",
            offset=offset,
            dim=var.shape,
            data_type=types_to_proto_primitive(var.sym_type.get_primitive()),
        )

    def _write(self, array: np.ndarray, dtype: Any, nbytes: int) -> int:
        """Return the offset of the record of an array, which is appended unless an equal one is there.

        Args:
            array: numbers, or codes of one byte each.
            dtype: their type in the program.
            nbytes: bytes that they take in the file.
        """
        array = np.ascontiguousarray(array.reshape(-1))
        content = (str(dtype), hashlib.blake2b(array.view(np.uint8).data).digest())
        if content not in self._written:
            offset = self._written[content] = _append(self._writer, array, dtype)
            self._end = offset + _RECORD_BYTES + nbytes
        return self._written[content]

    def get_blob_writer(self, weight_path: str) -> Any:
        return self._writer


def _append(writer: Any, array: np.ndarray, dtype: Any) -> int:
    """Append (N,) numbers or codes to the file of weights; returns the offset of their record."""
    if dtype == types.uint2:
        return writer.write_uint2_data(array)
    if dtype == types.uint4:
        return writer.write_uint4_data(array)
    if dtype == types.uint8:
        return writer.write_uint8_data(array)
    if dtype == types.fp16:
        return writer.write_fp16_data(array.view(np.uint16))
    if dtype == types.int32:
        return writer.write_int32_data(array)
    assert dtype == types.fp32, dtype
    return writer.write_float_data(array)


def write_program(
    program: Program,
    constants: Constants,
    folder: Path,
    metadata: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """Write a program as a package.

    Args:
        program: functions, whose constants' data is read now.
        constants: those constants.
        folder: an empty folder whose name ends with `.mlpackage`; it becomes the package.
        metadata: what the package's description says of the model, as Core ML's user-defined keys.
        progress: called with bytes written and bytes in all.

    Raises:
        CheckpointError: when the disk has no room.
        AFMError: when the file of weights can't be written.
    """
    beside = folder.with_name(_WEIGHTS)
    beside.mkdir()
    check_space(folder, constants.nbytes)
    try:
        proto = _Exporter(program, beside, constants, progress).written()
    except RuntimeError as error:  # what the library raises that writes the file
        raise AFMError(
            f"The file of weights of {folder.name} can't be written ({error}). Check that there is room and "
            "permission to write."
        ) from None
    if progress is not None:  # a few small arrays stand in the program itself
        progress(constants.nbytes, constants.nbytes)
    spec = CoreMLProtoExporter(
        program, proto, None, None, None, "mlprogram", "milinternal", TARGET
    ).export(TARGET)
    spec.description.metadata.shortDescription = metadata["description"]
    spec.description.metadata.userDefined.update(
        {key: value for key, value in metadata.items() if key != "description"}
    )
    # A package copies its weights. It gets an empty folder of them, and the file is moved.
    empty = folder.with_name("empty")
    empty.mkdir()
    ct.utils.save_spec(spec, str(folder), weights_dir=str(empty))
    inside = next(folder.glob(f"Data/*/{_WEIGHTS}"))
    os.replace(beside / _FILE, inside / _FILE)
    _make_repeatable(folder, spec)
    for path in folder.rglob("*"):
        if (
            path.is_file()
        ):  # coremltools makes the description in a temporary file, which only its owner may read
            shutil.copymode(inside / _FILE, path)


def _make_repeatable(folder: Path, spec: Any) -> None:
    """Write the program and the manifest again, so that they depend on nothing but the package's contents.

    protobuf writes the entries of a map in the order in which they lie in memory, and coremltools draws ids.
    """
    manifest_path = folder / "Manifest.json"
    manifest = json.loads(manifest_path.read_text())
    entries = sorted(manifest["itemInfoEntries"].items(), key=lambda item: item[1]["path"])
    root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]
    program = spec.SerializeToString(deterministic=True)
    (folder / "Data" / root["path"]).write_bytes(program)
    of_program = uuid.uuid5(uuid.NAMESPACE_OID, hashlib.sha256(program).hexdigest())
    ids = {old: str(uuid.uuid5(of_program, entry["path"])) for old, entry in entries}
    manifest["itemInfoEntries"] = {ids[old]: entry for old, entry in entries}
    manifest["rootModelIdentifier"] = ids[manifest["rootModelIdentifier"]]
    manifest_path.write_text(json.dumps(manifest, indent=4, sort_keys=True))


def package_size(package: Path) -> tuple[int, int]:
    """Bytes of a package's weights, and of all else in it."""
    sizes = {path: path.stat().st_size for path in package.rglob("*") if path.is_file()}
    weights = sum(size for path, size in sizes.items() if path.name == _FILE)
    return weights, sum(sizes.values()) - weights


# -- write


def write_package(plan: PackagePlan, folder: Path, progress: Progress | None = None) -> None:
    """Write a model and its adapters as a Core ML package.

    Args:
        plan: what the package is made of.
        folder: an empty folder whose name ends with `.mlpackage`; it becomes the package.
        progress: called with bytes written and bytes in all.

    Raises:
        AFMError: when weights can't be read, or hold numbers that the package's type can't hold.
    """
    with _own_names():
        _write(plan, folder, progress)


@contextmanager
def _own_names() -> Iterator[None]:
    """Count names from 0: coremltools goes on from the last program of the process."""
    before = Builder.name_count, Block.counter
    Builder.name_count, Block.counter = defaultdict(int), 0
    try:
        yield
    finally:
        Builder.name_count, Block.counter = before


def _write(plan: PackagePlan, folder: Path, progress: Progress | None) -> None:
    constants = Constants()
    matrices = MatrixConstants(constants, plan.dtype)
    kind = ChannelLayout if plan.neural_engine else LinearLayout
    program = Program()
    for adapter in (None, *plan.adapters):
        prefill, decode = (
            kind(plan.source, constants, matrices, plan.dtype, adapter) for _ in range(2)
        )
        suffix = "" if adapter is None else f"_{adapter.name}"
        add_functions(program, prefill, decode, plan.lengths, suffix)
    program.default_function_name = "decode"
    program.export_as_multifunction = True
    metadata = {
        "description": "AFM text model by afm-mlx: prefill and decode with a shared cache of keys and values",
        "afm_config": json.dumps(plan.source.config.to_dict()),
        "arrangement": "neural_engine" if plan.neural_engine else "linear",
        "prompt_lengths": json.dumps(plan.lengths),
        "adapters": json.dumps([adapter.name for adapter in plan.adapters]),
    }
    write_program(program, constants, folder, metadata, progress)
