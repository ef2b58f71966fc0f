"""A program of a Core ML package as text, the language of the `model.mil` of compiled packages.

    program(1.3)
    [buildInfo = dict<string, string>({{"coremltools-version", "9.0"}})]
    {
        func main<ios18>(tensor<fp16, [1, 4]> x) {
            fp16 half = const()[name = string("half"), val = fp16(0x1p-1)];
            tensor<fp16, [1, 4]> y = mul(x = x, y = half)[name = string("y")];
        } -> (y);
    }

Floats are hexadecimal, so that none is rounded. Arguments and attributes are sorted by name. What no program of
this package has is refused: nested blocks, unknown sizes, other opsets.

Apple has published no grammar. Source: `model.mil` files of published compiled models, and `MIL.proto` of
coremltools 9.0, whose messages the text stands for one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2

VERSION = "1.3"

_OPSETS = {"CoreML8": "ios18"}
_TYPES: dict[str, tuple[str, type | None]] = {
    "STRING": ("string", None),
    "BOOL": ("bool", None),
    "FLOAT16": ("fp16", np.float16),
    "FLOAT32": ("fp32", np.float32),
    "INT8": ("int8", np.int8),
    "UINT8": ("uint8", np.uint8),
    "INT16": ("int16", np.int16),
    "UINT16": ("uint16", np.uint16),
    "INT32": ("int32", np.int32),
    "UINT1": ("uint1", None),
    "UINT2": ("uint2", None),
    "UINT3": ("uint3", None),
    "UINT4": ("uint4", None),
    "UINT6": ("uint6", None),
    "INT4": ("int4", None),
}
"""The text's name of a type, and the numbers of an immediate value that is stored as bytes."""


def program_text(
    program: MIL_pb2.Program,
    build_info: Mapping[str, str],
    weights: Callable[[str], str] = lambda path: path,
) -> str:
    """A program as text.

    Args:
        program: of a package, with functions of the opset iOS 18.
        build_info: what made the program; names and versions.
        weights: gives the path of a file of weights in the text, from the one in the program.

    Raises:
        ValueError: for what this language is not known to have a form for.
    """
    pairs = ", ".join(
        f"{{{_string(key)}, {_string(value)}}}" for key, value in sorted(build_info.items())
    )
    writer = _Writer(weights)
    functions = [writer.function(name, program.functions[name]) for name in program.functions]
    return "\n".join(
        [
            f"program({VERSION})",
            f"[buildInfo = dict<string, string>({{{pairs}}})]",
            "{",
            *sorted(functions),
            "}",
            "",
        ]
    )


class _Writer:
    def __init__(self, weights: Callable[[str], str]) -> None:
        self._weights = weights

    def function(self, name: str, function: MIL_pb2.Function) -> str:
        if function.opset not in _OPSETS:
            raise ValueError(f"{name} is of the opset {function.opset}, known is {[*_OPSETS]}")
        if list(function.block_specializations) != [function.opset]:
            raise ValueError(f"{name} has blocks for {list(function.block_specializations)}")
        block = function.block_specializations[function.opset]
        inputs = ", ".join(f"{_type(i.type)} {_name(i.name)}" for i in function.inputs)
        outputs = ", ".join(map(_name, block.outputs))
        return "\n".join(
            [
                f"    func {_name(name)}<{_OPSETS[function.opset]}>({inputs}) {{",
                *(f"            {self._operation(operation)};" for operation in block.operations),
                f"        }} -> ({outputs});",
            ]
        )

    def _operation(self, operation: MIL_pb2.Operation) -> str:
        if operation.blocks:
            raise ValueError(f"{operation.type} has blocks of its own")
        arguments = self._pairs(operation.inputs, self._argument)
        attributes = self._pairs(operation.attributes, self._value)
        call = f"{_name(operation.type)}({arguments})" + (f"[{attributes}]" if attributes else "")
        results = ", ".join(f"{_type(o.type)} {_name(o.name)}" for o in operation.outputs)
        return f"{results} = {call}" if results else call

    @staticmethod
    def _pairs(values: Mapping[str, Any], text: Callable[[Any], str]) -> str:
        return ", ".join(f"{_name(key)} = {text(values[key])}" for key in sorted(values))

    def _argument(self, argument: MIL_pb2.Argument) -> str:
        bound = [
            _name(b.name) if b.WhichOneof("binding") == "name" else self._value(b.value)
            for b in argument.arguments
        ]
        return bound[0] if len(bound) == 1 else f"({', '.join(bound)})"

    def _value(self, value: MIL_pb2.Value) -> str:
        if value.type.WhichOneof("type") != "tensorType":
            raise ValueError(f"a constant of the kind {value.type.WhichOneof('type')}")
        if value.WhichOneof("value") == "blobFileValue":
            blob = value.blobFileValue
            path = _string(self._weights(blob.fileName))
            text = f"BLOBFILE(path = string({path}), offset = uint64({blob.offset}))"
        else:
            text = _literal(value.type.tensorType, value.immediateValue.tensor)
        return f"{_type(value.type)}({text})"


def _type(kind: MIL_pb2.ValueType) -> str:
    which = kind.WhichOneof("type")
    if which == "stateType":
        return f"state<{_type(kind.stateType.wrappedType)}>"
    if which != "tensorType":
        raise ValueError(f"a value of the kind {which}")
    tensor = kind.tensorType
    name = _element(tensor)[0]
    if not tensor.dimensions:
        return name
    return f"tensor<{name}, [{', '.join(map(str, _sizes(tensor)))}]>"


def _element(tensor: MIL_pb2.TensorType) -> tuple[str, type | None]:
    name = MIL_pb2.DataType.Name(tensor.dataType)
    if name not in _TYPES:
        raise ValueError(f"numbers of the type {name}; known are {', '.join(_TYPES)}")
    return _TYPES[name]


def _sizes(tensor: MIL_pb2.TensorType) -> list[int]:
    if any(d.WhichOneof("dimension") != "constant" for d in tensor.dimensions):
        raise ValueError("a size that only inputs tell")
    return [d.constant.size for d in tensor.dimensions]


def _literal(tensor: MIL_pb2.TensorType, held: MIL_pb2.TensorValue) -> str:
    """A constant's elements, in brackets by axis."""
    field, (name, dtype) = held.WhichOneof("value"), _element(tensor)
    if field == "bytes":
        if dtype is None:
            raise ValueError(f"numbers of {name} that are in no file of weights")
        elements: Iterable[Any] = np.frombuffer(held.bytes.values, dtype).tolist()
    else:
        elements = getattr(held, field).values
    texts, sizes = [_scalar(e) for e in elements], _sizes(tensor)
    if len(texts) != math.prod(sizes):
        raise ValueError(f"{len(texts)} numbers for the shape {sizes}")
    for size in reversed(sizes):
        count = len(texts) // size if size else 1
        texts = [f"[{', '.join(texts[i * size : (i + 1) * size])}]" for i in range(count)]
    return texts[0]


def _scalar(element: Any) -> str:
    if isinstance(element, str):
        return _string(element)
    if isinstance(element, bool):
        return str(element).lower()
    if isinstance(element, int):
        return str(element)
    if math.isnan(element):
        raise ValueError("NaN, which has no known form")
    if math.isinf(element):
        return str(element)
    mantissa, exponent = float(element).hex().split("p")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}p{exponent}"


def _string(text: str) -> str:
    if not text.isprintable() or set(text) & {'"', "\\"}:
        raise ValueError(f"the string {text!r}: no form is known for quotes and control characters")
    return f'"{text}"'


def _name(name: str) -> str:
    if not name.isascii() or not name.isidentifier():
        raise ValueError(f"the name {name!r}; names have letters, digits and '_'")
    return name
