"""The interpreter: operations compute what coremltools folds and PyTorch computes; programs are checked."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tools.cases import each

if importlib.util.find_spec("coremltools") is None:  # it has wheels for few platforms
    pytest.skip("pip install '.[coreml]'", allow_module_level=True)

import coremltools as ct
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.libmilstoragepython import _BlobStorageWriter

from tests.tools.mil import MILError, Package
from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.ops import OPS

IOS18 = {"opset_version": ct.target.iOS18}


@pytest.fixture
def write_package(tmp_path):
    """A function that writes functions as a package, without any of coremltools' passes over it."""

    def write(**functions):
        program = Program()
        for name, function in functions.items():
            program.add_function(name, function)
        program.default_function_name = next(iter(functions))
        program.export_as_multifunction = True
        path = tmp_path / "model.mlpackage"
        ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            compute_units=ct.ComputeUnit.CPU_ONLY,
            skip_model_load=True,
        ).save(str(path))
        return path

    return write


@pytest.fixture
def a(rng):
    """Arrays that the tables below name."""
    shapes = {"x": (3, 4), "y": (3, 4), "row": (4,), "square": (4, 4), "cube": (2, 3, 4)}
    shapes |= {"wide": (2, 3, 4, 5), "big": (3, 4), "b": (3, 4), "c": (3, 4)}
    a = SimpleNamespace(**{k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})
    a.positive, a.big, a.b, a.c = np.exp(a.y), 100 * a.big, a.b > 0, a.c > 0
    a.i, a.j = (rng.integers(low, 9, (3, 4)).astype(np.int32) for low in (0, 1))
    a.picks = rng.integers(0, 3, (2, 5)).astype(np.int32)
    a.codes = rng.integers(0, 256, (3, 4)).astype(np.uint8)
    return a


def ints(*numbers):
    return np.array(numbers, np.int32)


def codes_of(name, array):
    """An array of fewer bits, as coremltools takes it."""
    return array.astype(types.nptype_from_builtin(types.string_to_builtin(name)))


# Folded by coremltools.
FOLDED = {
    "abs": lambda a: mb.abs(x=a.x),
    "add": lambda a: mb.add(x=a.x, y=a.row),
    "sub": lambda a: mb.sub(x=a.i, y=a.j),
    "mul": lambda a: mb.mul(x=a.x, y=np.float32(2.5)),
    "real_div": lambda a: mb.real_div(x=a.x, y=a.y),
    "floor_div": lambda a: mb.floor_div(x=a.i - np.int32(4), y=a.j),
    "maximum": lambda a: mb.maximum(x=a.x, y=a.y),
    "minimum": lambda a: mb.minimum(x=a.x, y=a.y),
    "rsqrt": lambda a: mb.rsqrt(x=a.positive, epsilon=np.float32(0.5)),
    "round": lambda a: mb.round(x=np.array([-1.5, -0.5, 0.5, 0.7, 1.5, 2.5], np.float32)),
    "greater_equal": lambda a: mb.greater_equal(x=a.i, y=a.j),
    "less": lambda a: mb.less(x=a.i, y=a.j),
    "less_equal": lambda a: mb.less_equal(x=a.i, y=a.j),
    "logical_and": lambda a: mb.logical_and(x=a.b, y=a.c),
    "softmax": lambda a: mb.softmax(x=a.big, axis=0),
    "linear": lambda a: mb.linear(x=a.x, weight=a.square, bias=a.row),
    "scaled_dot_product_attention": lambda a: mb.scaled_dot_product_attention(
        query=a.cube[:, :2], key=a.cube, value=-a.cube, attn_mask=a.x[:2, :3]
    ),
    "reduce_mean": lambda a: mb.reduce_mean(x=a.wide, axes=ints(0, 2), keep_dims=True),
    "reduce_max": lambda a: mb.reduce_max(x=a.wide, axes=ints(-1), keep_dims=False),
    "gather": lambda a: mb.gather(x=a.wide, indices=a.picks, axis=1),
    "slice_by_index": lambda a: mb.slice_by_index(
        x=a.wide, begin=ints(0, 1, 2, 1), end=ints(1, 3, 4, 5)
    ),
    "slice_update": lambda a: mb.slice_update(
        x=a.cube, update=a.x[:1, None, 1:], begin=ints(1, 2, 0), end=ints(2, 3, 3)
    ),
    "split into sizes": lambda a: mb.split(x=a.x, axis=1, split_sizes=ints(1, 3)),
    "split": lambda a: mb.split(x=a.x, axis=1, num_splits=2),
    "reshape": lambda a: mb.reshape(x=a.wide, shape=ints(2, -1, 10)),
    "transpose": lambda a: mb.transpose(x=a.wide, perm=ints(3, 0, 2, 1)),
    "expand_dims": lambda a: mb.expand_dims(x=a.x, axes=ints(0, 3)),
    "concat": lambda a: mb.concat(values=[a.x, a.y, a.x], axis=-1),
    "concat of one": lambda a: mb.concat(values=[a.x], axis=0),
    "tile": lambda a: mb.tile(x=a.x, reps=ints(2, 3)),
    "cumsum": lambda a: mb.cumsum(x=a.x, axis=1),
    "cast to integers": lambda a: mb.cast(x=a.big, dtype="int32"),
    "cast to floats": lambda a: mb.cast(x=a.i, dtype="fp32"),
    "cast of booleans": lambda a: mb.cast(x=a.b, dtype="int32"),
}
# Not folded when a program is built, so that weights stay compressed; coremltools computes them when asked.
MATERIALIZED = {
    "constexpr_blockwise_shift_scale": lambda a: mb.constexpr_blockwise_shift_scale(
        data=codes_of("uint4", a.codes % 16), scale=a.positive[:, :2]
    ),
    "constexpr_blockwise_shift_scale with an offset": lambda a: mb.constexpr_blockwise_shift_scale(
        data=a.codes, scale=a.positive[:, :1], offset=a.x[:, :1]
    ),
    "constexpr_lut_to_dense": lambda a: mb.constexpr_lut_to_dense(
        indices=codes_of("uint2", a.codes % 4), lut=a.wide[:1, :, :, :1].transpose(1, 0, 2, 3)
    ),
    "constexpr_lut_to_dense for a convolution": lambda a: mb.constexpr_lut_to_dense(
        indices=codes_of("uint4", a.codes[..., None, None] % 16),
        lut=a.wide.reshape(-1)[:48].reshape(3, 1, 1, 1, 16, 1),
    ),
    "constexpr_lut_to_dense of 8 bits": lambda a: mb.constexpr_lut_to_dense(
        indices=a.codes, lut=np.resize(a.wide, (1, 1, 256, 1))
    ),
}
# Not folded by coremltools.
PYTORCH = {
    "silu": (lambda a: mb.silu(x=a.x), lambda t: F.silu(t.x)),
    "softmax of large numbers": (lambda a: mb.softmax(x=a.big), lambda t: t.big.softmax(-1)),
    "einsum": (
        lambda a: mb.einsum(
            values=(a.wide, a.wide.transpose(0, 3, 2, 1)), equation="nchw,nwhu->nchu"
        ),
        lambda t: torch.einsum("nchw,nwhu->nchu", t.wide, t.wide.permute(0, 3, 2, 1)),
    ),
    "conv": (
        lambda a: mb.conv(x=a.wide, weight=a.x[:, :3, None, None]),
        lambda t: F.conv2d(t.wide, t.x[:, :3, None, None]),
    ),
}


def test_operations_compute_what_coremltools_and_pytorch_do(write_package, a):
    variables, builders = {}, {**FOLDED, **MATERIALIZED, **{k: v[0] for k, v in PYTORCH.items()}}
    assert {name.split()[0] for name in builders} == {*OPS}

    @mb.function(input_specs=[mb.TensorSpec((1,))], **IOS18)
    def main(zero):
        for name, build in builders.items():
            built = build(a)
            variables[name] = built if isinstance(built, (list, tuple)) else [built]
        return mb.add(x=zero, y=zero, name="result")

    function = Package(write_package(main=main)).function("main")
    names = [v.name for results in variables.values() for v in results]
    found = function.predict({"zero": np.zeros(1, np.float32)}, {}, keep=names)

    tensors = SimpleNamespace(**{name: torch.tensor(array) for name, array in vars(a).items()})
    for name, results in variables.items():
        for variable in results:
            if name in PYTORCH:
                wanted = PYTORCH[name][1](tensors).numpy()
            elif name in MATERIALIZED:
                wanted = variable.op.materialized_val_inference()
            else:
                wanted = variable.val
            got, wanted = found[variable.name], np.asarray(wanted)
            assert got.shape == wanted.shape, name
            np.testing.assert_allclose(got, wanted, 2e-5, 2e-6, err_msg=name)


CAPACITY, WIDTH = 8, 4


@pytest.fixture
def two_functions(write_package, rng):
    """A package of two functions that write rows to a state and return the sum of all: of 3 rows, and of 1."""
    weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float16)

    def writing(rows):
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
            written = mb.slice_update(
                x=mb.read_state(input=cache),
                update=mb.linear(x=x, weight=shared, bias=np.zeros(WIDTH, np.float16)),
                begin=begin,
                end=mb.add(x=begin, y=np.array([rows, WIDTH], np.int32)),
            )
            total = mb.coreml_update_state(state=cache, value=written)
            return mb.reduce_mean(x=total, axes=[0], keep_dims=True, name="mean")

        return function

    return write_package(prefill=writing(3), decode=writing(1)), weight


@pytest.mark.parametrize("rounded", [False, True])
def test_calls_accumulate_in_the_state(two_functions, rng, rounded):
    path, weight = two_functions
    package = Package(path, np.float64, round_floats=rounded)
    functions = {name: package.function(name) for name in ("prefill", "decode")}
    state = functions["prefill"].make_state()
    x = rng.standard_normal((5, WIDTH)).astype(np.float16)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    if rounded:
        wanted = wanted.astype(np.float16).astype(np.float64)
    for name, first, last in (("prefill", 0, 3), ("decode", 3, 4), ("decode", 4, 5)):
        inputs = {"x": x[first:last], "at": np.array([first], np.int32)}
        mean = functions[name].predict(inputs, state)["mean"]
        error = 1e-3 if rounded else 1e-12
        np.testing.assert_allclose(mean, wanted[:last].sum(0, keepdims=True) / CAPACITY, error)
    np.testing.assert_allclose(state["cache"][:5], wanted, 1e-12)
    assert not state["cache"][5:].any()


@each(
    ("change", "words"),
    [
        (lambda op: setattr(op, "type", "erf"), r"erf \(linear_\d+\) is not known"),
        (lambda op: op.inputs.pop("weight"), "missing a required argument: 'weight'"),
        (lambda op: narrow(op.outputs[0]), r"computed \(1, 4\), the program says \[1, 3\]"),
        (lambda op: setattr(op.outputs[0].type.tensorType, "dataType", 23), "says int32"),
    ],
)
def test_programs_that_are_refused(two_functions, change, words):
    package = Package(two_functions[0])
    block = package.spec.mlProgram.functions["decode"].block_specializations["CoreML8"]
    change(next(op for op in block.operations if op.type == "linear"))
    with pytest.raises(MILError, match=words):
        decode = package.function("decode")
        inputs = {"x": np.zeros((1, WIDTH), np.float16), "at": np.zeros(1, np.int32)}
        decode.predict(inputs, decode.make_state())


def narrow(output):
    output.type.tensorType.dimensions[1].constant.size -= 1


def test_inputs_that_are_refused(two_functions):
    decode = Package(two_functions[0]).function("decode")
    x, at = np.zeros((1, WIDTH), np.float16), np.zeros(1, np.int32)
    with pytest.raises(MILError, match=r"x may be of .*1, 4.*, got \(4,\)"):
        decode.predict({"x": x[0], "at": at}, decode.make_state())
    with pytest.raises(MILError, match=r"slice_update .*8 to 9 has only 8"):
        decode.predict({"x": x, "at": at + CAPACITY}, decode.make_state())


def test_blobs_are_read_as_coremltools_writes_them(rng, tmp_path):
    path, arrays = tmp_path / "weight.bin", {}
    writer = _BlobStorageWriter(str(path))
    for bits in (2, 4, 8):
        for count in (1, *rng.integers(2, 200, 3)):
            array = rng.integers(0, 2**bits, count).astype(np.uint8)
            arrays[f"UINT{bits}", getattr(writer, f"write_uint{bits}_data")(array)] = array
    floats = rng.standard_normal(9).astype(np.float16)
    arrays["FLOAT16", writer.write_fp16_data(floats.view(np.uint16))] = floats
    del writer
    storage = BlobStorage(path)
    assert storage.count == len(arrays)
    for (name, offset), array in arrays.items():
        data_type, found = storage.read(offset)
        assert data_type.name == name
        np.testing.assert_array_equal(found, array)
    damaged = path.read_bytes()
    path.write_bytes(damaged[:64] + b"\0" + damaged[65:])
    with pytest.raises(MILError, match="no record of a known type: 0xdeadbe00"):
        BlobStorage(path).read(64)
