"""A planned Core ML package into files, one constant after the other.

Source: coremltools 9.0, `converters/mil/backend/mil/load.py`, whose exporter writes constants in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil.backend.mil.helper import create_file_value_tensor
from coremltools.converters.mil.backend.mil.load import (
    CoreMLProtoExporter,
    MILProtoExporter,
    types_to_proto_primitive,
)
from coremltools.converters.mil.mil import Block, Builder, Program, Var, types
from coremltools.libmilstoragepython import _BlobStorageWriter
from coremltools.proto import MIL_pb2, Model_pb2

from afm_mlx.checkpoint.weights import check_space
from afm_mlx.converters.coreml.compression import Constants, MatrixConstants
from afm_mlx.converters.coreml.layouts import (
    TARGET,
    ChannelLayout,
    LinearLayout,
    decode_function,
    prefill_function,
)
from afm_mlx.converters.coreml.plan import PackagePlan
from afm_mlx.errors import AFMError
from afm_mlx.progress import Progress

_WEIGHTS = "weights"
_FILE = "weight.bin"
_RECORD_BYTES = 64
"""Length of the record in front of the data of each constant in the file of weights."""


def write_package(plan: PackagePlan, folder: Path, progress: Progress | None = None) -> None:
    """Write a model and its adapters as a Core ML package into an empty folder NAME.mlpackage.

    `progress` is called with the bytes written and the total number of bytes.

    Raises:
        CheckpointError: if the disk has no room.
        AFMError: if weights can't be read or written, or hold numbers that the package's type can't hold.
    """
    with _counting_names_from_0():
        constants, program = Constants(), Program()
        matrices = MatrixConstants(constants, plan.dtype)
        layout = ChannelLayout if plan.neural_engine else LinearLayout
        for adapter in (None, *plan.adapters):
            prefill, decode = (
                layout(plan.source, constants, matrices, plan.dtype, adapter) for _ in range(2)
            )
            suffix = "" if adapter is None else f"_{adapter.name}"
            program.add_function(f"prefill{suffix}", prefill_function(prefill, plan.lengths))
            program.add_function(f"decode{suffix}", decode_function(decode))
        program.default_function_name = "decode"
        program.export_as_multifunction = True
        metadata = {
            "afm_config": json.dumps(plan.source.config.to_dict()),
            "arrangement": "neural_engine" if plan.neural_engine else "linear",
            "prompt_lengths": json.dumps(plan.lengths),
            "adapters": json.dumps([adapter.name for adapter in plan.adapters]),
        }
        # Directories next to `folder`, in the temporary place that becomes the package.
        weights, empty = folder.with_name(_WEIGHTS), folder.with_name("empty")
        weights.mkdir()
        check_space(folder, constants.nbytes)
        try:
            proto = _Exporter(program, weights, constants, progress).written()
        except RuntimeError as error:  # raised by the library that writes the file
            raise AFMError(
                f"The file of weights of {folder.name} can't be written ({error}). Check that there is room "
                "and permission to write."
            ) from None
        if progress is not None:  # a few small arrays are in the program itself
            progress(constants.nbytes, constants.nbytes)
        spec = CoreMLProtoExporter(
            program, proto, None, None, None, "mlprogram", "milinternal", TARGET
        ).export(TARGET)
        spec.description.metadata.shortDescription = (
            "AFM text model by afm-mlx: prefill and decode with a shared cache of keys and values"
        )
        spec.description.metadata.userDefined.update(metadata)
        # `save_spec` would copy the weights: it gets an empty folder of them, and the file is moved.
        empty.mkdir()
        ct.utils.save_spec(spec, str(folder), weights_dir=str(empty))
        inside = next(folder.glob(f"Data/*/{_WEIGHTS}"))
        os.replace(weights / _FILE, inside / _FILE)
        _make_repeatable(folder, spec)
        for path in folder.rglob("*"):
            # coremltools makes the description in a temporary file, which only its owner may read.
            if path.is_file():
                shutil.copymode(inside / _FILE, path)


@contextmanager
def _counting_names_from_0() -> Iterator[None]:
    """Count names from 0 inside the context: coremltools goes on from the last program of the process."""
    before = Builder.name_count, Block.counter
    Builder.name_count, Block.counter = defaultdict(int), 0
    try:
        yield
    finally:
        Builder.name_count, Block.counter = before


class _Exporter(MILProtoExporter):
    """coremltools' exporter, except that the data of constants is read and written one by one."""

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

    def written(self) -> MIL_pb2.Program:
        """Write the file of weights, and return the program; raise `RuntimeError` if the file is incomplete."""
        proto = self.export()
        self._writer = None  # writes the rest, and can't report that it failed
        if self._path.stat().st_size < self._end:
            raise RuntimeError("it is cut off")
        return proto

    def create_file_value(self, var: Var) -> MIL_pb2.Value:
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

    def _write(self, array: np.ndarray, dtype: type, nbytes: int) -> int:
        """Append an array of `nbytes` unless an equal one was written; return its record's offset."""
        array = np.ascontiguousarray(array.reshape(-1))
        kind = _WRITERS[dtype]
        content = (kind, hashlib.blake2b(array.view(np.uint8).data).digest())
        if content not in self._written:
            write = getattr(self._writer, f"write_{kind}_data")
            offset = write(array.view(np.uint16) if dtype == types.fp16 else array)
            self._written[content] = offset
            self._end = offset + _RECORD_BYTES + nbytes
        return self._written[content]

    def get_blob_writer(self, weight_path: str) -> _BlobStorageWriter | None:
        return self._writer


_WRITERS = {
    types.uint2: "uint2",
    types.uint4: "uint4",
    types.uint8: "uint8",
    types.fp16: "fp16",
    types.int32: "int32",
    types.fp32: "float",
}
"""Names of types in the methods of coremltools' writer."""


def _make_repeatable(folder: Path, spec: Model_pb2.Model) -> None:
    """Write the program and the manifest again, so that they depend on nothing but the package's contents.

    protobuf writes the entries of a map in the order of memory, and coremltools draws random ids.
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
    sizes = {path: path.stat().st_size for path in package.rglob("*") if path.is_file()}
    weights = sum(size for path, size in sizes.items() if path.name == _FILE)
    return weights, sum(sizes.values()) - weights
