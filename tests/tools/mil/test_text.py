"""Programs as text, in the forms that published compiled models have, are read and run."""

import struct

import numpy as np
import pytest

from tests.tools.cases import each
from tests.tools.mil import MILError
from tests.tools.mil.text import TextProgram, parse

TEXT = """program(1.3)
[buildInfo = dict<string, string>({{"coremlc-version", "1.0"}, {"made-by", "hand"}})]
{
    func main<ios18>(tensor<fp16, [1, 4]> x, state<tensor<fp16, [2, 4]>> kept) {
            tensor<fp16, [2, 4]> rows = const()[name = string("rows"), val = tensor<fp16, [2, 4]>(
                BLOBFILE(path = string("@model_path/weight.bin"), offset = uint64(64)))];
            fp16 half = const()[name = string("half"), val = fp16(0x1p-1)];
            tensor<fp16, [1, 4]> scaled = mul(x = x, y = half)[name = string("scaled")];
            tensor<int32, [2]> reps = const()[name = string("reps"), val = tensor<int32, [2]>([2, 1])];
            tensor<fp16, [2, 4]> twice = tile(reps = reps, x = scaled)[name = string("twice")];
            write_state(data = twice, input = kept)[name = string("write")];
            tensor<fp16, [2, 4]> read = read_state(input = kept)[name = string("read")];
            int32 axis = const()[name = string("axis"), val = int32(-1)];
            tensor<fp16, [2, 8]> joined =
                concat(axis = axis, interleave = bool(false), values = (read, rows))[name = string("joined")];
            int32 count = const()[name = string("count"), val = int32(2)];
            tensor<fp16, [2, 4]> left, tensor<fp16, [2, 4]> right =
                split(axis = axis, num_splits = count, x = joined)[name = string("parts")];
            tensor<fp16, [1, 4]> step = const()[name = string("step"),
                val = tensor<fp16, [1, 4]>([[-0x1.8p+1, 0x0p+0, 0x1.fep-3, inf]])];
            tensor<fp16, [2, 4]> y = minimum(x = right, y = step)[name = string("y")];
        } -> (left, y);
}
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a text as a file, beside a file of the weights that `TEXT` names."""

    def write(text, rows):
        record = struct.pack("<IIQQ40x", 0xDEADBEEF, 1, rows.nbytes, 128)
        path = tmp_path / "weight.bin"
        path.write_bytes(struct.pack("<II56x", 1, 2) + record + rows.tobytes())
        (tmp_path / "model.mil").write_text(text)
        return tmp_path / "model.mil"

    return write


def test_a_program_is_read_and_run(write, rng):
    rows = rng.standard_normal((2, 4)).astype(np.float16)
    x = rng.standard_normal((1, 4)).astype(np.float16)
    program = TextProgram(write(TEXT, rows))
    assert program.build_info == {"coremlc-version": "1.0", "made-by": "hand"}
    main = program.functions["main"]
    state = main.make_state()
    found = main.predict({"x": x}, state)
    half = np.tile(x.astype(np.float32) / 2, (2, 1))
    np.testing.assert_array_equal(state["kept"], half)
    np.testing.assert_array_equal(found["left"], half)
    wanted = np.minimum(rows.astype(np.float32), [[-3, 0, 0.2490234375, np.inf]])
    np.testing.assert_array_equal(found["y"], wanted)


def test_older_forms_are_the_same_program():
    """Version 1.0 writes single values as tensors without axes; others put several results into brackets."""
    old = TEXT.replace("program(1.3)", "program(1.0)")
    for name in ("string", "int32", "bool", "fp16", "uint64"):
        old = old.replace(f" {name}(", f" tensor<{name}, []>(")
        old = old.replace(f"            {name} ", f"            tensor<{name}, []> ")
    old = old.replace("dict<string, string>", "dict<tensor<string, []>, tensor<string, []>>")
    results = "tensor<fp16, [2, 4]> left, tensor<fp16, [2, 4]> right"
    old = old.replace(results, f"({results})")
    assert old.count("tensor<int32, []>") == 4
    assert parse(old) == parse(TEXT)


@each(
    ("change", "words"),
    [
        (lambda t: t.replace("ios18", "ios99"), "line 4: ios99 where one of ios16"),
        (lambda t: t.replace("int32(-1)", "int32(0x1p+0)", 1), "line 13: 0x1p.0 where a integer"),
        (lambda t: t.replace("[2, 1]", "[2, 1, 1]"), "line 9: .* where 2 parts instead of 3"),
        (lambda t: t.replace("fp16(0x1p-1)", "fp16(half)"), "line 7: half where a integer"),
        (lambda t: t.replace("bool(false)", "bfloat(false)"), r"line 15: \( where , is"),
        (lambda t: t.replace('"hand"', '"ha\\nd"'), "line 2: .* where a token"),
        (lambda t: t[: t.index("} ->")], "the end where a type"),
        (lambda t: t + "}", "where the end is expected"),
        (lambda t: t.replace("tile(reps", "erf(reps"), "erf .* not known"),
        (lambda t: t.replace("[2, 8]> joined", "[2, 9]> joined"), r"computed \(2, 8\)"),
        (lambda t: t.replace("uint64(64)", "uint64(128)"), "no record"),
    ],
)
def test_texts_that_are_refused(write, change, words):
    path = write(change(TEXT), np.zeros((2, 4), np.float16))
    with pytest.raises(MILError, match=words):
        main = TextProgram(path).functions["main"]
        main.predict({"x": np.zeros((1, 4), np.float16)}, main.make_state())
