"""Reads programs that are written as text, as compiled Core ML models have them in `model.mil`.

The grammar is what published files of such models show, in the forms of versions 1.0 to 1.3: there, `int32` and
`tensor<int32, []>` are the same type. A program becomes the message that a package would hold.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from coremltools.proto import MIL_pb2

from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.errors import MILError
from tests.tools.mil.features import Features
from tests.tools.mil.function import Function

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"[^"\\]*")
      | (?P<float>-?(?:0x[0-9a-f]+(?:\.[0-9a-f]+)?p[+-]\d+|inf\b|\d+\.\d*(?:e[+-]?\d+)?))
      | (?P<integer>-?\d+)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<mark>->|[][(){}<>,;=?])""",
    re.VERBOSE,
)
_OPSETS = {"ios16": "CoreML6", "ios17": "CoreML7", "ios18": "CoreML8"}
_TYPES = {
    "string": MIL_pb2.STRING,
    "bool": MIL_pb2.BOOL,
    "fp16": MIL_pb2.FLOAT16,
    "fp32": MIL_pb2.FLOAT32,
    **{name.lower(): code for name, code in MIL_pb2.DataType.items() if "INT" in name},
}
# Where a message holds elements of a type; what is not named here is stored as bytes.
_FIELDS = {"string": "strings", "bool": "bools", "fp32": "floats", "int32": "ints"}
_FIELDS |= {"uint64": "longInts", "int64": "longInts"}
_BYTES = {"fp16": np.float16} | {f"{u}int{b}": f"{u}int{b}" for u in ("", "u") for b in (8, 16)}

_T = TypeVar("_T")


class TextProgram:
    """A program in a file, whose functions can be run.

    Args:
        path: of the file. Its weights are in the paths that it names, from its folder on.
        compute, round_floats: see `Package`.

    Attributes:
        program: the message that stands for the text.
        build_info: what made it.
        functions: by name.

    Raises:
        MILError: when it can't be read, or has an operation that is not known here.
    """

    def __init__(self, path: Path, compute: type = np.float32, round_floats: bool = False):
        self.program, self.build_info = parse(path.read_text(encoding="utf-8"))
        storage = functools.cache(
            lambda name: BlobStorage(path.parent / name.removeprefix("@model_path/"))
        )
        self.functions = {
            name: Function(
                name,
                function,
                Features.of_function(function),
                storage,
                np.dtype(compute),
                round_floats,
            )
            for name, function in self.program.functions.items()
        }


def parse(text: str) -> tuple[MIL_pb2.Program, dict[str, str]]:
    """A program's message, and its `buildInfo`.

    Raises:
        MILError: at the first place that is not in the language.
    """
    return _Parser(text).program()


class _Parser:
    def __init__(self, text: str):
        self._text, self._at = text, 0
        self._kind, self._token = "", ""
        self._next()

    # -- tokens

    def _next(self) -> str:
        """Goes on to the next token; returns the one before."""
        before = self._token
        while True:
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self._kind, self._token = "end", self._text[self._at :].split("\n")[0]
                if self._token:
                    raise self._error("a token")
                return before
            self._at = match.end()
            if match.lastgroup != "space":
                self._kind, self._token = str(match.lastgroup), match.group()
                return before

    def _error(self, wanted: str) -> MILError:
        line = self._text.count("\n", 0, self._at) + 1
        return MILError(f"line {line}: {self._token or 'the end'} where {wanted} is expected")

    def _take(self, token: str) -> None:
        if self._token != token:
            raise self._error(token)
        self._next()

    def _is(self, token: str) -> bool:
        """Whether the next token is this one, which is then taken."""
        if self._token != token or self._kind == "end":
            return False
        self._next()
        return True

    def _of(self, kind: str) -> str:
        if self._kind != kind:
            raise self._error(f"a {kind}")
        return self._next()

    def _list(self, item: Callable[[], _T], first: str, last: str) -> list[_T]:
        self._take(first)
        found: list[_T] = []
        while not self._is(last):
            if found:
                self._take(",")
            found.append(item())
        return found

    # -- the program

    def program(self) -> tuple[MIL_pb2.Program, dict[str, str]]:
        self._take("program")
        self._take("(")
        self._of("float" if self._kind == "float" else "integer")
        self._take(")")
        info = dict(self._list(self._build_info, "[", "]")) if self._token == "[" else {}
        program = MIL_pb2.Program(version=1)
        self._take("{")
        while not self._is("}"):
            self._function(program)
        if self._kind != "end":
            raise self._error("the end")
        return program, info.get("buildInfo", {})

    def _build_info(self) -> tuple[str, dict[str, str]]:
        name = self._of("name")
        self._take("=")
        self._take("dict")
        self._take("<")
        self._type()
        self._take(",")
        self._type()
        self._take(">")
        self._take("(")
        pairs = self._list(lambda: self._list(self._string, "{", "}"), "{", "}")
        self._take(")")
        return name, dict(pairs)

    def _string(self) -> str:
        return self._of("string")[1:-1]

    def _function(self, program: MIL_pb2.Program) -> None:
        self._take("func")
        function = program.functions[self._of("name")]
        self._take("<")
        if self._token not in _OPSETS:
            raise self._error(f"one of {', '.join(_OPSETS)}")
        function.opset = _OPSETS[self._next()]
        self._take(">")
        function.inputs.extend(self._list(self._named_type, "(", ")"))
        block = function.block_specializations[function.opset]
        self._take("{")
        while not self._is("}"):
            block.operations.append(self._operation())
        self._take("->")
        block.outputs.extend(self._list(lambda: self._of("name"), "(", ")"))
        self._take(";")

    def _operation(self) -> MIL_pb2.Operation:
        operation = MIL_pb2.Operation()
        if self._token == "(":
            operation.outputs.extend(self._list(self._named_type, "(", ")"))
            self._take("=")
        elif not self._is_call():
            operation.outputs.append(self._named_type())
            while self._is(","):
                operation.outputs.append(self._named_type())
            self._take("=")
        operation.type = self._of("name")
        for name, argument in self._list(lambda: self._pair(self._argument), "(", ")"):
            operation.inputs[name].arguments.extend(argument)
        if self._token == "[":
            for name, value in self._list(lambda: self._pair(self._value), "[", "]"):
                operation.attributes[name].CopyFrom(value)
        self._take(";")
        return operation

    def _is_call(self) -> bool:
        """Whether a name and a bracket follow, as in operations without results."""
        return self._kind == "name" and self._text[self._at :].lstrip().startswith("(")

    def _pair(self, value: Callable[[], _T]) -> tuple[str, _T]:
        name = self._of("name")
        self._take("=")
        return name, value()

    def _argument(self) -> list[MIL_pb2.Argument.Binding]:
        if self._token == "(":
            return self._list(self._binding, "(", ")")
        return [self._binding()]

    def _binding(self) -> MIL_pb2.Argument.Binding:
        if self._token in _TYPES or self._token == "tensor":
            return MIL_pb2.Argument.Binding(value=self._value())
        return MIL_pb2.Argument.Binding(name=self._of("name"))

    # -- types and values

    def _named_type(self) -> MIL_pb2.NamedValueType:
        kind = self._type()
        return MIL_pb2.NamedValueType(name=self._of("name"), type=kind)

    def _type(self) -> MIL_pb2.ValueType:
        if self._is("state"):
            self._take("<")
            kind = MIL_pb2.ValueType()
            kind.stateType.wrappedType.CopyFrom(self._type())
            self._take(">")
            return kind
        sizes: list[int | None] = []
        if not self._is("tensor"):
            element = self._element()
        else:
            self._take("<")
            element = self._element()
            self._take(",")
            sizes = self._list(self._size, "[", "]")
            self._take(">")
        kind = MIL_pb2.ValueType()
        tensor = kind.tensorType
        tensor.dataType, tensor.rank = _TYPES[element], len(sizes)
        for size in sizes:
            dimension = tensor.dimensions.add()
            if size is None:
                dimension.unknown.SetInParent()
            else:
                dimension.constant.size = size
        return kind

    def _element(self) -> str:
        if self._token not in _TYPES:
            raise self._error("a type")
        return self._next()

    def _size(self) -> int | None:
        return None if self._is("?") else int(self._of("integer"))

    def _value(self) -> MIL_pb2.Value:
        element = self._token
        value = MIL_pb2.Value(type=self._type())
        self._take("(")
        if self._is("BLOBFILE"):
            self._blob(value)
        else:
            tensor = value.type.tensorType
            element = next(name for name, code in _TYPES.items() if code == tensor.dataType)
            sizes = [d.constant.size for d in tensor.dimensions]
            self._immediate(value.immediateValue.tensor, element, sizes)
        self._take(")")
        return value

    def _blob(self, value: MIL_pb2.Value) -> None:
        parts = dict(self._list(lambda: self._pair(self._value), "(", ")"))
        if set(parts) != {"path", "offset"}:
            raise self._error("a path and an offset")
        path, offset = (parts[n].immediateValue.tensor for n in ("path", "offset"))
        value.blobFileValue.fileName = path.strings.values[0]
        value.blobFileValue.offset = offset.longInts.values[0]

    def _immediate(self, held: MIL_pb2.TensorValue, element: str, sizes: list[int]) -> None:
        numbers = self._elements(element, sizes)
        if element in _FIELDS:
            field = getattr(held, _FIELDS[element])
            field.SetInParent()
            field.values.extend(numbers)
        elif element in _BYTES:
            held.bytes.values = np.array(numbers, _BYTES[element]).tobytes()
        else:
            raise self._error(f"another type than {element}")

    def _elements(self, element: str, sizes: list[int]) -> list[Any]:
        if not sizes:
            return [self._scalar(element)]
        parts = self._list(lambda: self._elements(element, sizes[1:]), "[", "]")
        if len(parts) != sizes[0]:
            raise self._error(f"{sizes[0]} parts instead of {len(parts)}")
        return [number for part in parts for number in part]

    def _scalar(self, element: str) -> Any:
        if element == "string":
            return self._string()
        if element == "bool":
            if self._token not in ("true", "false"):
                raise self._error("true or false")
            return self._next() == "true"
        if element in ("fp16", "fp32") and self._kind == "float":
            token = self._next()
            return float.fromhex(token) if "x" in token else float(token)
        return int(self._of("integer"))
