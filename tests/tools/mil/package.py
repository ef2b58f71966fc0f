"""An `.mlpackage`: its manifest, its model, and its functions, which run in NumPy."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2, Model_pb2

from tests.tools.mil.blobs import BlobStorage, MILError, of_program
from tests.tools.mil.ops import OPS

_OPSET = "CoreML8"  # iOS 18
# Kinds of NumPy's types that may replace each other: NumPy makes wider integers than the program has.
_KINDS = {"f": "float", "i": "integer", "u": "integer", "b": "boolean"}
# Arguments that are tuples of values, even of one.
_TUPLES = {("concat", "values"), ("einsum", "values")}


class Package:
    """A package whose functions can be run.

        decode = Package("model.mlpackage").function("decode")
        state = decode.make_state()
        logits = decode.predict({"tokens": tokens, "position": position}, state)["logits"]

    Args:
        path: the `.mlpackage` folder.
        compute: type in which floating-point operations run: `np.float32` or `np.float64`.
        round_floats: round results to the program's types, as on a device that computes each operation exactly.
            Otherwise numbers of type float16 keep the precision of `compute`, in states too.
    """

    def __init__(self, path: str | Path, compute: type = np.float32, round_floats: bool = False):
        self._compute, self._round_floats = np.dtype(compute), round_floats
        manifest = json.loads((Path(path) / "Manifest.json").read_text())
        root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
        folder = (Path(path) / "Data" / root).parent
        self.spec = Model_pb2.Model()
        self.spec.ParseFromString((Path(path) / "Data" / root).read_bytes())
        self._storage = functools.cache(
            lambda name: BlobStorage(folder / name.removeprefix("@model_path/"))
        )

    def function(self, name: str) -> Function:
        (description,) = (f for f in self.spec.description.functions if f.name == name)
        program = self.spec.mlProgram.functions[name]
        return Function(description, program, self._storage, self._compute, self._round_floats)


@dataclass(frozen=True)
class _Name:
    """A reference to an earlier value."""

    name: str


@dataclass(frozen=True)
class _Step:
    """An operation; arguments are constants, references, and lists of them."""

    kind: str
    arguments: dict[str, Any]
    outputs: tuple[tuple[str, MIL_pb2.ValueType], ...]

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(name for name, _ in self.outputs)})"


class Function:
    """A function of a package; raises `MILError` for operations that are not known here."""

    def __init__(
        self,
        description: Any,
        function: MIL_pb2.Function,
        storage: Callable[[str], BlobStorage],
        compute: np.dtype,
        round_floats: bool,
    ):
        self.name = description.name
        self._compute, self._round_floats = compute, round_floats
        self._inputs = {i.name: i.type.multiArrayType for i in description.input}
        self._states = {s.name: s.type.stateType.arrayType for s in description.state}
        self._outputs = [o.name for o in description.output]
        block = function.block_specializations[_OPSET]
        self._input_types = {i.name: i.type for i in function.inputs}
        if {*self._inputs, *self._states} != {*self._input_types} or {*self._outputs} != {
            *block.outputs
        }:
            raise MILError(f"{self.name}: the description and the program differ")
        self._constants: dict[str, Any] = {}
        self._steps: list[_Step] = []
        for operation in block.operations:
            step = _step(operation, storage)
            if step.kind == "const":
                ((name, kind),) = step.outputs
                self._constants[name] = self._settled(step.arguments["val"], kind, str(step))
            elif step.kind.startswith("constexpr_"):
                self._run(step, self._constants, {})
            else:
                self._steps.append(step)

    def make_state(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(a.shape, self._compute) for name, a in self._states.items()}

    def predict(
        self, inputs: Mapping[str, Any], state: dict[str, np.ndarray], keep: Iterable[str] = ()
    ) -> dict[str, np.ndarray]:
        """Run the function once; return its outputs by name, and other values of the program that `keep` names.

        Inputs are int32 of one of the described shapes. `state` is from `make_state` of a function with the
        same states, and is written to. Floats have the dtype `compute`.
        """
        values = dict(self._constants)
        for name, described in self._inputs.items():
            array = np.asarray(inputs[name])
            shapes = [tuple(s.shape) for s in described.enumeratedShapes.shapes]
            if array.shape not in (shapes or [tuple(described.shape)]):
                raise MILError(f"{name} may be of {shapes or described.shape}, got {array.shape}")
            values[name] = self._settled(array, self._input_types[name], name)
        for step in self._steps:
            self._run(step, values, state)
        return {name: values[name] for name in (*self._outputs, *keep)}

    def _run(self, step: _Step, values: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        if step.kind == "write_state":
            name, data = step.arguments["input"].name, values[step.arguments["data"].name]
            held = self._input_types[name].stateType.wrappedType
            state[name][...] = self._settled(data, held, str(step))
            return
        if step.kind == "read_state":
            results: Any = (state[step.arguments["input"].name].copy(),)
        else:
            arguments = {k: self._argument(v, values) for k, v in step.arguments.items()}
            try:
                results = OPS[step.kind](**arguments)
            except (ValueError, IndexError, TypeError) as error:
                raise MILError(f"{step}: {error}") from error
            results = results if isinstance(results, tuple) else (results,)
        for result, (name, kind) in zip(results, step.outputs, strict=True):
            values[name] = self._settled(result, kind, str(step))

    def _argument(self, argument: Any, values: dict[str, Any]) -> Any:
        if isinstance(argument, list):
            return [self._argument(item, values) for item in argument]
        if isinstance(argument, _Name):
            return values[argument.name]
        if isinstance(argument, np.ndarray) and argument.dtype.kind == "f":
            return argument.astype(self._compute)
        return argument

    def _settled(self, value: Any, kind: MIL_pb2.ValueType, place: str) -> Any:
        """Return a value in its type in the program; raise if shape or kind of numbers differ."""
        tensor = kind.tensorType
        if kind.WhichOneof("type") != "tensorType" or tensor.dataType == MIL_pb2.STRING:
            return value
        array, dtype, sizes = np.asarray(value), of_program(tensor.dataType).dtype, _sizes(tensor)
        if len(sizes) != array.ndim or any(
            size not in (None, found) for size, found in zip(sizes, array.shape, strict=True)
        ):
            raise MILError(f"{place}: computed {array.shape}, the program says {sizes}")
        if _KINDS[array.dtype.kind] != _KINDS[dtype.kind]:
            raise MILError(f"{place}: computed {array.dtype}, the program says {dtype}")
        if self._round_floats:
            array = array.astype(dtype, copy=False)
        return array.astype(self._compute if dtype.kind == "f" else dtype, copy=False)


def _step(operation: MIL_pb2.Operation, storage: Callable[[str], BlobStorage]) -> _Step:
    kind = operation.type
    arguments: dict[str, Any] = {
        name: _constant(value, storage)
        for name, value in operation.attributes.items()
        if name != "name"
    }
    for name, argument in operation.inputs.items():
        bound = [
            _Name(b.name) if b.WhichOneof("binding") == "name" else _constant(b.value, storage)
            for b in argument.arguments
        ]
        arguments[name] = bound if (kind, name) in _TUPLES else bound[0]
    step = _Step(kind, arguments, tuple((o.name, o.type) for o in operation.outputs))
    if kind in ("const", "read_state", "write_state"):
        return step
    if kind not in OPS:
        raise MILError(f"{step} is not known here; add it to tests/tools/mil/ops.py")
    try:
        inspect.signature(OPS[kind]).bind(**arguments)
    except TypeError as error:
        raise MILError(f"{step}: {error}") from error
    return step


def _constant(value: MIL_pb2.Value, storage: Callable[[str], BlobStorage]) -> Any:
    tensor = value.type.tensorType
    if tensor.dataType == MIL_pb2.STRING:
        return value.immediateValue.tensor.strings.values[0]
    shape, data_type = tuple(_sizes(tensor)), of_program(tensor.dataType)
    count = math.prod(shape)
    if value.WhichOneof("value") == "blobFileValue":
        blob = value.blobFileValue
        stored, array = storage(blob.fileName).read(blob.offset)
        if stored != data_type or array.size != count:
            raise MILError(
                f"the blob at {blob.offset} holds {array.size} {stored.name}, "
                f"and the program says {count} {data_type.name}"
            )
        return array.reshape(shape)
    held = value.immediateValue.tensor
    field = held.WhichOneof("value")
    if field == "bytes":
        data = np.frombuffer(held.bytes.values, np.uint8)
        return data_type.unpack(data, count).reshape(shape)
    return np.array(getattr(held, field).values, data_type.dtype).reshape(shape)


def _sizes(tensor: MIL_pb2.TensorType) -> list[Any]:
    """Sizes by axis, None for sizes that only inputs decide."""
    return [
        d.constant.size if d.WhichOneof("dimension") == "constant" else None
        for d in tensor.dimensions
    ]
