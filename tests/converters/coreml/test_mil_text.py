"""A program's text, read by another program, is the message that it was."""

import numpy as np
import pytest
from coremltools.proto import MIL_pb2

from afm_mlx.converters.coreml.mil_text import program_text
from tests.tools.cases import each
from tests.tools.mil.text import parse

FLOATS = [0.0, -0.0, 1.0, -0.5, 6e-8, 1e-5, -65504.0, 0.1, np.inf, -np.inf]
FIELDS = {"FLOAT32": "floats", "INT32": "ints", "BOOL": "bools", "STRING": "strings"}


def type_of(name, sizes):
    kind = MIL_pb2.ValueType()
    tensor = kind.tensorType
    tensor.dataType, tensor.rank = MIL_pb2.DataType.Value(name), len(sizes)
    for size in sizes:
        tensor.dimensions.add().constant.size = size
    return kind


def immediate(name, array):
    value = MIL_pb2.Value(type=type_of(name, array.shape))
    held = value.immediateValue.tensor
    if name in FIELDS:
        field = getattr(held, FIELDS[name])
        field.SetInParent()
        field.values.extend(array.reshape(-1).tolist())
    else:
        held.bytes.values = array.tobytes()
    return value


def blob(name, sizes, offset):
    value = MIL_pb2.Value(type=type_of(name, sizes))
    value.blobFileValue.fileName, value.blobFileValue.offset = "@model_path/weight.bin", offset
    return value


@pytest.fixture
def program(rng):
    """Two functions with constants of every type, in random shapes, and every way to name an argument."""
    program = MIL_pb2.Program(version=1)
    for name in ("main", "other"):
        function = program.functions[name]
        function.opset = "CoreML8"
        x = function.inputs.add(name="x", type=type_of("FLOAT16", (2, 3)))
        state = function.inputs.add(name="kept")
        state.type.stateType.wrappedType.CopyFrom(x.type)
        block = function.block_specializations["CoreML8"]
        block.outputs.extend(["a", "b"])
        operations = block.operations
        for kind, array in constants(rng):
            value = immediate(kind, array)
            const = operations.add(type="const")
            const.outputs.add(name=f"c{len(operations)}", type=value.type)
            const.attributes["name"].CopyFrom(immediate("STRING", np.array(f"c{len(operations)}")))
            const.attributes["val"].CopyFrom(value)
        table = operations.add(type="constexpr_lut_to_dense")
        for offset, (key, kind) in enumerate([("indices", "UINT2"), ("lut", "FLOAT16")]):
            argument = table.inputs[key].arguments.add()
            argument.value.CopyFrom(blob(kind, (4, 4), 64 + 64 * offset))
        table.outputs.add(name="table", type=type_of("FLOAT16", (4, 4)))
        write = operations.add(type="write_state")
        for key in ("input", "data"):
            write.inputs[key].arguments.add(name={"input": "kept", "data": "x"}[key])
        split = operations.add(type="split")
        for source in ("x", "kept"):
            split.inputs["values"].arguments.add(name=source)
        for output in ("a", "b"):
            split.outputs.add(name=output, type=x.type)
    return program


def constants(rng):
    shapes = [(), (1,), (3,), (2, 3), (2, 1, 3), (0,)]
    for shape in shapes:
        yield "FLOAT16", rng.choice(FLOATS, shape).astype(np.float16)
        yield "FLOAT32", rng.standard_normal(shape).astype(np.float32)
        yield "BOOL", rng.random(shape) > 0.5
        yield "STRING", rng.choice(["valid", "a, b", "é"], shape)
        for name in ("INT8", "UINT8", "INT16", "UINT16", "INT32"):
            limits = np.iinfo(name.lower())
            drawn = rng.integers(limits.min, limits.max, shape, endpoint=True)
            yield name, np.asarray(drawn, name.lower())


def test_the_text_is_the_program(program):
    text = program_text(program, {"coremltools-version": "9.0"})
    found, info = parse(text)
    assert info == {"coremltools-version": "9.0"}
    assert found == program
    # Sorted, whatever order a map of protobuf has.
    assert text == program_text(found, info)
    assert '{{"coremltools-version", "9.0"}}' in text.splitlines()[1]


@each(
    ("change", "words"),
    [
        (lambda f, op: setattr(f, "opset", "CoreML5"), "main is of the opset CoreML5"),
        (lambda f, op: op.blocks.add(), "const has blocks"),
        (lambda f, op: setattr(op.outputs[0], "name", "a.b"), r"the name 'a\.b'"),
        (lambda f, op: op.outputs[0].type.dictionaryType.SetInParent(), "the kind dictionaryType"),
        (lambda f, op: op.attributes["val"].type.listType.SetInParent(), "the kind listType"),
        (
            lambda f, op: op.attributes["val"].CopyFrom(immediate("STRING", np.array('"'))),
            "no form is known for quotes",
        ),
        (
            lambda f, op: op.attributes["val"].CopyFrom(immediate("FLOAT32", np.array(np.nan))),
            "NaN",
        ),
        (
            lambda f, op: op.attributes["val"].CopyFrom(immediate("UINT4", np.zeros(1, np.uint8))),
            "uint4 that are in no file",
        ),
        (
            lambda f, op: op.outputs[0].type.CopyFrom(type_of("INT64", ())),
            "numbers of the type INT64",
        ),
        (
            lambda f, op: f.inputs[0].type.tensorType.dimensions.add().unknown.SetInParent(),
            "a size that only inputs tell",
        ),
    ],
)
def test_programs_without_a_known_form(program, change, words):
    changed = MIL_pb2.Program()
    changed.CopyFrom(program)
    main = changed.functions["main"]
    change(main, main.block_specializations["CoreML8"].operations[0])
    with pytest.raises(ValueError, match=words):
        program_text(changed, {})
