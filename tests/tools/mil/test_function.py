"""Functions with state, shapes to choose from, rounding, and what is refused."""

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, get_new_symbol, types

from tests.tools.cases import each
from tests.tools.mil import MILError, Package
from tests.tools.mil.blobs import BlobStorage

IOS18 = {"opset_version": ct.target.iOS18}
CAPACITY, WIDTH = 8, 4


@pytest.fixture
def weight(rng):
    return rng.standard_normal((WIDTH, WIDTH)).astype(np.float16)


@pytest.fixture
def two_functions(write_package, weight):
    """A package of two functions that write rows to a state and return the sum of all: of 3 rows, and of 1."""
    program = Program()
    for name, rows in (("prefill", 3), ("decode", 1)):
        program.add_function(name, writing(rows, weight))
    program.default_function_name = "prefill"
    program.export_as_multifunction = True
    return write_package(program)


def writing(rows, weight):
    """Takes x (rows, width) and its first row's place; returns (1, width)."""
    inputs = [
        mb.TensorSpec((rows, WIDTH), dtype=types.fp16),
        mb.TensorSpec((1,), dtype=types.int32),
        mb.StateTensorSpec((CAPACITY, WIDTH), dtype=types.fp16),
    ]

    @mb.function(input_specs=inputs, **IOS18)
    def function(x, at, cache):
        shared = mb.const(val=weight)
        shared.op.weight_id = "weight"
        begin = mb.concat(values=[at, np.zeros(1, np.int32)], axis=0)
        size = np.array([rows, WIDTH], np.int32)
        written = mb.slice_update(
            x=mb.read_state(input=cache),
            update=mb.linear(x=x, weight=shared),
            begin=begin,
            end=mb.add(x=begin, y=size),
        )
        total = mb.coreml_update_state(state=cache, value=written)
        return mb.reduce_sum(x=total, axes=[0], keep_dims=True, name="total")

    return function


def test_calls_accumulate_in_the_state(two_functions, weight, rng):
    package = Package(two_functions, np.float64)
    assert package.function_names == ["prefill", "decode"]
    prefill, decode = package.function(), package.function("decode")
    assert prefill.name == "prefill"
    state = prefill.make_state()
    x = rng.standard_normal((5, WIDTH)).astype(np.float16)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    for function, first, last in ((prefill, 0, 3), (decode, 3, 4), (decode, 4, 5)):
        inputs = {"x": x[first:last], "at": np.array([first], np.int32)}
        total = function.predict(inputs, state)["total"]
        np.testing.assert_allclose(total, wanted[:last].sum(0, keepdims=True), 1e-12)
    np.testing.assert_allclose(state["cache"][:5], wanted, 1e-12)
    assert not state["cache"][5:].any()
    # The same weights, once.
    path = two_functions / "Data/com.apple.CoreML/weights/weight.bin"
    assert BlobStorage(path).count == 1


def test_results_are_rounded_to_the_types_of_the_program(two_functions, weight, rng):
    decode = Package(two_functions, np.float64, round_floats=True).function("decode")
    state = decode.make_state()
    x = rng.standard_normal((2, 1, WIDTH)).astype(np.float16)
    rows = (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float16)
    for i in range(2):
        total = decode.predict({"x": x[i], "at": np.array([i], np.int32)}, state)["total"]
    np.testing.assert_array_equal(state["cache"][:2], rows[:, 0])
    np.testing.assert_array_equal(total, rows.astype(np.float64).sum(0).astype(np.float16))


def test_an_input_of_each_enumerated_shape(write_package, rng):
    length = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, length, 4))], **IOS18)
    def program(x):
        last = mb.sub(x=mb.gather(x=mb.shape(x=x), indices=1), y=1)
        return mb.gather(x=x, indices=last, axis=1, name="last")

    shapes = [(1, n, 4) for n in (2, 5, 8)]
    inputs = [ct.TensorType(name="x", shape=ct.EnumeratedShapes(shapes, default=shapes[0]))]
    function = Package(write_package(program, inputs=inputs)).function()
    assert set(function.inputs["x"].shapes) == set(shapes)
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(function.predict({"x": x})["last"], x[:, -1])
    with pytest.raises(MILError, match=r"x may be of .*, got \(1, 3, 4\)"):
        function.predict({"x": np.zeros((1, 3, 4), np.float32)})


def test_inputs_and_states_that_are_refused(two_functions):
    decode = Package(two_functions).function("decode")
    x, at, state = np.zeros((1, WIDTH), np.float16), np.zeros(1, np.int32), decode.make_state()
    for inputs, held, words in [
        ({"x": x}, state, r"takes \['at', 'x'\] and the states \['cache'\], got \['x'\]"),
        ({"x": x, "at": at}, None, r"got \['at', 'x'\] and \[\]"),
        ({"x": x.astype(np.float32), "at": at}, state, "x is float16, got float32"),
        ({"x": x[0], "at": at}, state, r"x may be of \(\(1, 4\),\), got \(4,\)"),
        ({"x": x, "at": at}, {"cache": x}, r"state cache is \(8, 4\), got \(1, 4\)"),
        ({"x": x, "at": at + CAPACITY}, state, r"slice_update .*axis 0 from 8 to 9 has only 8"),
    ]:
        with pytest.raises(MILError, match=words):
            decode.predict(inputs, held)


@each(
    ("change", "words"),
    [
        (
            lambda op: setattr(op, "type", "erf"),
            r"erf \(linear_\d+\) is an operation that is not known",
        ),
        (
            lambda op: op.inputs["alpha"].CopyFrom(op.inputs["x"]),
            "unexpected keyword argument 'alpha'",
        ),
        (lambda op: op.inputs.pop("weight"), "missing a required argument: 'weight'"),
        (
            lambda op: narrow(op.outputs[0]),
            r"linear .*computed \(1, 4\), the program says \[1, 3\]",
        ),
        (lambda op: setattr(op.outputs[0].type.tensorType, "dataType", 23), "says int32"),
    ],
)
def test_programs_that_are_refused(two_functions, change, words):
    package = Package(two_functions)
    block = package.spec.mlProgram.functions["decode"].block_specializations["CoreML8"]
    change(next(op for op in block.operations if op.type == "linear"))
    with pytest.raises(MILError, match=words):
        decode = package.function("decode")
        inputs = {"x": np.zeros((1, WIDTH), np.float16), "at": np.zeros(1, np.int32)}
        decode.predict(inputs, decode.make_state())


def narrow(output):
    output.type.tensorType.dimensions[1].constant.size -= 1


def test_packages_that_are_refused(two_functions):
    with pytest.raises(MILError, match=r"has no function main; it has \['prefill', 'decode'\]"):
        Package(two_functions).function("main")
    (two_functions / "Data/com.apple.CoreML/weights/weight.bin").unlink()
    with pytest.raises(MILError, match=r"weight.bin is missing"):
        Package(two_functions).function()
    (two_functions / "Manifest.json").write_text("{}")
    with pytest.raises(MILError, match="has no manifest that names its model"):
        Package(two_functions)
