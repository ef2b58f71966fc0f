"""What a function's inputs, outputs and states are, as the package describes them to its callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.proto import FeatureTypes_pb2, MIL_pb2, Model_pb2

from tests.tools.mil.data_types import of_program
from tests.tools.mil.errors import MILError
from tests.tools.mil.values import constant_shape

_ARRAY_TYPES = {
    "FLOAT16": np.dtype(np.float16),
    "FLOAT32": np.dtype(np.float32),
    "DOUBLE": np.dtype(np.float64),
    "INT32": np.dtype(np.int32),
    "INT8": np.dtype(np.int8),
}


@dataclass(frozen=True)
class Feature:
    """An array that goes in or out.

    Args:
        name: for callers.
        dtype: of its numbers.
        shapes: that it may have; none are listed where any is allowed.
        ranges: lowest and highest size by axis, the highest -1 where there is none; empty without ranges.
    """

    name: str
    dtype: np.dtype
    shapes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, description: Model_pb2.FeatureDescription) -> Feature:
        """What a description says."""
        kind = description.type.WhichOneof("Type")
        if kind not in ("multiArrayType", "stateType"):
            raise MILError(
                f"{description.name} is a {kind}, expected a multiArrayType or stateType"
            )
        array = (
            description.type.stateType.arrayType
            if kind == "stateType"
            else description.type.multiArrayType
        )
        code = FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name(array.dataType)
        if code not in _ARRAY_TYPES:
            raise MILError(f"{description.name} is of the type {code}, known are {[*_ARRAY_TYPES]}")
        enumerated = [tuple(s.shape) for s in array.enumeratedShapes.shapes]
        ranges = tuple((r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges)
        shapes = enumerated or ([tuple(array.shape)] if array.shape and not ranges else [])
        return cls(description.name, _ARRAY_TYPES[code], tuple(shapes), ranges)

    @classmethod
    def of_type(cls, name: str, kind: MIL_pb2.ValueType) -> Feature:
        """What the program says of a value, whose shape must be known."""
        tensor = kind.tensorType
        if kind.WhichOneof("type") == "stateType":
            tensor = kind.stateType.wrappedType.tensorType
        return cls(name, of_program(tensor.dataType).dtype, (constant_shape(tensor),))

    def check(self, value: Any) -> np.ndarray:
        """The array, if the feature takes it.

        Raises:
            MILError: when its shape or the kind of its numbers is another one.
        """
        array = np.asarray(value)
        if array.dtype != self.dtype:
            raise MILError(f"{self.name} is {self.dtype}, got {array.dtype}")
        if self.shapes and array.shape not in self.shapes:
            raise MILError(f"{self.name} may be of {self.shapes}, got {array.shape}")
        if self.ranges and not self._in_ranges(array.shape):
            raise MILError(f"{self.name} may be of the ranges {self.ranges}, got {array.shape}")
        return array

    def _in_ranges(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.ranges) and all(
            low <= size and (high < 0 or size <= high)
            for size, (low, high) in zip(shape, self.ranges, strict=True)
        )


@dataclass(frozen=True)
class Features:
    """What a function takes and gives.

    Args:
        inputs: by name.
        outputs: by name.
        states: by name.
    """

    inputs: dict[str, Feature]
    outputs: dict[str, Feature]
    states: dict[str, Feature]

    @classmethod
    def described(cls, description: Any) -> Features:
        """Those of a package's description of a model or a function."""
        kinds = (description.input, description.output, description.state)
        return cls(*({f.name: Feature.of(f) for f in features} for features in kinds))

    @classmethod
    def of_function(cls, function: MIL_pb2.Function) -> Features:
        """Those that the program itself says."""
        block = function.block_specializations[function.opset]
        types = {o.name: o.type for operation in block.operations for o in operation.outputs}
        inputs: dict[str, Feature] = {}
        states: dict[str, Feature] = {}
        for i in function.inputs:
            held = states if i.type.WhichOneof("type") == "stateType" else inputs
            held[i.name] = Feature.of_type(i.name, i.type)
        return cls(inputs, {n: Feature.of_type(n, types[n]) for n in block.outputs}, states)
