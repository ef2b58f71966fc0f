"""A function of a package: its operations in order, on arrays and state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2

from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.data_types import of_program
from tests.tools.mil.errors import MILError
from tests.tools.mil.features import Features
from tests.tools.mil.ops import OPS
from tests.tools.mil.values import known_sizes, read_value

# Those of iOS 17, iOS 18 and iOS 26. Operations of earlier ones have the same names and may do other things.
OPSETS = ("CoreML7", "CoreML8", "CoreML9")
# Kinds of NumPy's types that may stand for each other: NumPy makes wider integers than the program has.
_KINDS = {"f": "float", "i": "integer", "u": "integer", "b": "boolean"}
# Take tuples of values, even of one.
_TUPLES = {("concat", "values"), ("einsum", "values")}


@dataclass(frozen=True)
class _Name:
    """A reference to an earlier value."""

    name: str


@dataclass(frozen=True)
class _Step:
    """An operation whose arguments are constants and references.

    Args:
        kind: name of the operation.
        arguments: by parameter; lists of them for parameters that take tuples.
        outputs: names and types.
    """

    kind: str
    arguments: dict[str, Any]
    outputs: tuple[tuple[str, MIL_pb2.ValueType], ...]

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(name for name, _ in self.outputs) or 'no result'})"


class Function:
    """A function that can be run.

    Args:
        name: in its package.
        function: its program.
        features: what it takes and gives.
        storage: the blob storage of a file name.
        compute: type in which floating-point operations run.
        round_floats: whether results are rounded to the program's types.

    Attributes:
        inputs: by name.
        outputs: by name.
        states: by name.

    Raises:
        MILError: when an operation is not known here, or has parameters that are not.
    """

    def __init__(
        self,
        name: str,
        function: MIL_pb2.Function,
        features: Features,
        storage: Callable[[str], BlobStorage],
        compute: np.dtype,
        round_floats: bool,
    ):
        self.name = name
        self._compute, self._round_floats = compute, round_floats
        self.inputs, self.outputs = features.inputs, features.outputs
        self.states = features.states
        if function.opset not in OPSETS:
            raise MILError(f"{name} is of the opset {function.opset}, known are {OPSETS}")
        block = function.block_specializations[function.opset]
        self._input_types = {i.name: i.type for i in function.inputs}
        named = {*self.inputs, *self.states}
        if named != set(self._input_types) or {*self.outputs} != {*block.outputs}:
            raise MILError(
                f"{name}: its description has {sorted(named)} -> {sorted(self.outputs)}, "
                f"its program {sorted(self._input_types)} -> {sorted(block.outputs)}"
            )
        self._constants: dict[str, Any] = {}
        self._steps: list[_Step] = []
        for operation in block.operations:
            self._add(operation, storage)

    def make_state(self) -> dict[str, np.ndarray]:
        """Zeros for each state, as Core ML makes them."""
        return {
            name: np.zeros(feature.shapes[0], self._held(feature.dtype))
            for name, feature in self.states.items()
        }

    def predict(
        self,
        inputs: Mapping[str, Any],
        state: dict[str, np.ndarray] | None = None,
        keep: Iterable[str] = (),
    ) -> dict[str, np.ndarray]:
        """Run the function once.

        Args:
            inputs: by name, of the described dtype and one of the described shapes.
            state: from `make_state` of this function or of one with the same states; it is written to.
            keep: names of other values of the program that are wanted, too.

        Returns:
            Outputs by name, and the values in `keep`. Floats have the dtype `compute`.

        Raises:
            MILError: when inputs or state are not what the function takes, or an operation can't be run.
        """
        state = {} if state is None else state
        if {*inputs} != {*self.inputs} or {*state} != {*self.states}:
            raise MILError(
                f"{self.name} takes {sorted(self.inputs)} and the states {sorted(self.states)}, "
                f"got {sorted(inputs)} and {sorted(state)}"
            )
        for name, feature in self.states.items():
            if state[name].shape not in feature.shapes:
                raise MILError(f"state {name} is {feature.shapes[0]}, got {state[name].shape}")
        values = dict(self._constants)
        for name, feature in self.inputs.items():
            values[name] = self._settled(feature.check(inputs[name]), self._input_types[name], name)
        for step in self._steps:
            self._run(step, values, state)
        return {name: values[name] for name in (*self.outputs, *keep)}

    def _add(self, operation: MIL_pb2.Operation, storage: Callable[[str], BlobStorage]) -> None:
        """Make an operation a step, or a constant where it depends on nothing else."""
        step = _step(operation, storage)
        if step.kind == "const":
            ((name, kind),) = step.outputs
            self._constants[name] = self._settled(step.arguments["val"], kind, str(step))
        elif step.kind.startswith("constexpr_"):
            self._run(step, self._constants, {})
        else:
            self._steps.append(step)

    def _run(self, step: _Step, values: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        """Carry out one operation: its results are added to `values`."""
        if step.kind == "write_state":
            name, data = step.arguments["input"].name, values[step.arguments["data"].name]
            held = self._input_types[name].stateType.wrappedType
            state[name][...] = self._settled(data, held, str(step))
            return
        if step.kind == "read_state":
            results = (state[step.arguments["input"].name].copy(),)
        else:
            try:
                results = OPS[step.kind](
                    **{k: self._argument(v, values) for k, v in step.arguments.items()}
                )
            except (ValueError, IndexError, TypeError) as error:
                raise MILError(f"{step}: {error}") from error
            results = results if isinstance(results, (tuple, list)) else (results,)
        if len(results) != len(step.outputs):
            raise MILError(f"{step}: {len(results)} results for {len(step.outputs)} names")
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
        """A value in the type that the program gives it.

        Raises:
            MILError: when its shape or the kind of its numbers is another one.
        """
        tensor = kind.tensorType
        if kind.WhichOneof("type") != "tensorType" or tensor.dataType == MIL_pb2.STRING:
            return value
        array, dtype = np.asarray(value), of_program(tensor.dataType).dtype
        sizes = known_sizes(tensor)
        if len(sizes) != array.ndim or any(
            size not in (None, found) for size, found in zip(sizes, array.shape, strict=True)
        ):
            raise MILError(f"{place}: computed {array.shape}, the program says {sizes}")
        if _KINDS[array.dtype.kind] != _KINDS[dtype.kind]:
            raise MILError(f"{place}: computed {array.dtype}, the program says {dtype}")
        if self._round_floats:
            array = array.astype(dtype, copy=False)
        return array.astype(self._held(dtype), copy=False)

    def _held(self, dtype: np.dtype) -> np.dtype:
        """The dtype of arrays here that the program says have this one."""
        return self._compute if dtype.kind == "f" else dtype


def _step(operation: MIL_pb2.Operation, storage: Callable[[str], BlobStorage]) -> _Step:
    """An operation of the program.

    Raises:
        MILError: when it is not known here, or has parameters that are not.
    """
    kind = operation.type
    outputs = tuple((o.name, o.type) for o in operation.outputs)
    arguments: dict[str, Any] = {
        name: read_value(value, storage)
        for name, value in operation.attributes.items()
        if name != "name"
    }
    for name, argument in operation.inputs.items():
        bound = [
            _Name(b.name) if b.WhichOneof("binding") == "name" else read_value(b.value, storage)
            for b in argument.arguments
        ]
        arguments[name] = bound if (kind, name) in _TUPLES else bound[0]
    step = _Step(kind, arguments, outputs)
    if kind in ("const", "read_state", "write_state"):
        return step
    if kind not in OPS:
        raise MILError(
            f"{step} is an operation that is not known here; add it to tests/tools/mil/ops"
        )
    try:
        inspect.signature(OPS[kind]).bind(**arguments)
    except TypeError as error:
        raise MILError(f"{step}: {error}") from error
    return step
