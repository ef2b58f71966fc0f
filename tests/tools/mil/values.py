"""Constants of a program as arrays, strings and lists of strings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2

from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.data_types import of_program
from tests.tools.mil.errors import MILError


def read_value(value: MIL_pb2.Value, storage: Callable[[str], BlobStorage]) -> Any:
    """A constant.

    Args:
        value: of the program.
        storage: the blob storage of a file name, such as `@model_path/weights/weight.bin`.

    Returns:
        An array of the type's dtype and shape, a string, or a list of strings.
    """
    kind = value.type.WhichOneof("type")
    if kind == "listType":
        return [read_value(item, storage) for item in value.immediateValue.list.values]
    if kind != "tensorType":
        raise MILError(f"a constant of the kind {kind}; known are tensors and lists of strings")
    tensor = value.type.tensorType
    if tensor.dataType == MIL_pb2.STRING:
        return value.immediateValue.tensor.strings.values[0]
    shape = constant_shape(tensor)
    data_type, count = of_program(tensor.dataType), math.prod(shape)
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


def constant_shape(tensor: MIL_pb2.TensorType) -> tuple[int, ...]:
    """The shape of a tensor type, whose sizes must be known."""
    sizes = known_sizes(tensor)
    if None in sizes:
        raise MILError(f"a constant with the sizes {sizes}, of which some are unknown")
    return tuple(sizes)


def known_sizes(tensor: MIL_pb2.TensorType) -> list[int | None]:
    """Sizes by axis, None where only inputs tell."""
    return [
        d.constant.size if d.WhichOneof("dimension") == "constant" else None
        for d in tensor.dimensions
    ]
