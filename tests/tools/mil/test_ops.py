"""Operations are what coremltools folds constants to, or what PyTorch computes where coremltools doesn't."""

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from tests.tools.mil import Package
from tests.tools.mil.ops import OPS


@pytest.fixture
def a(rng):
    """Arrays that the tables below name."""
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    whole = lambda high, *shape: rng.integers(0, high, shape).astype(np.int32)  # noqa: E731

    class Arrays:
        x, y, row, positive = normal(3, 4), normal(3, 4), normal(4), np.exp(normal(3, 4))
        wide, cube, square = normal(2, 3, 4, 5), normal(2, 3, 4), normal(4, 4)
        big = 100 * normal(3, 4)
        i, j, picks = whole(9, 3, 4), whole(9, 3, 4) + 1, whole(3, 2, 5)
        along = whole(4, 3, 7)
        b, c = normal(3, 4) > 0, normal(3, 4) > 0
        codes = rng.integers(-128, 128, (3, 4)).astype(np.int8)
        scales, zeros = np.exp(normal(4)), rng.integers(-9, 9, 4).astype(np.int8)

    return Arrays


def ints(*numbers):
    return np.array(numbers, np.int32)


def sub_byte(name, array):
    """An array of fewer bits, as coremltools takes it."""
    return array.astype(types.nptype_from_builtin(types.string_to_builtin(name)))


# Folded by coremltools.
FOLDED = {
    "add": lambda a: mb.add(x=a.x, y=a.row),
    "add of integers": lambda a: mb.add(x=a.i, y=a.j),
    "sub": lambda a: mb.sub(x=a.x, y=a.y),
    "mul": lambda a: mb.mul(x=a.x, y=np.float32(2.5)),
    "real_div": lambda a: mb.real_div(x=a.x, y=a.y),
    "floor_div": lambda a: mb.floor_div(x=a.i - np.int32(4), y=a.j),
    "maximum": lambda a: mb.maximum(x=a.x, y=a.y),
    "minimum": lambda a: mb.minimum(x=a.x, y=a.y),
    "sqrt": lambda a: mb.sqrt(x=a.positive),
    "rsqrt": lambda a: mb.rsqrt(x=a.positive, epsilon=np.float32(0.5)),
    "exp": lambda a: mb.exp(x=a.x),
    "cos": lambda a: mb.cos(x=a.x),
    "sin": lambda a: mb.sin(x=a.x),
    "tanh": lambda a: mb.tanh(x=a.x),
    "sigmoid": lambda a: mb.sigmoid(x=a.x),
    "abs": lambda a: mb.abs(x=a.x),
    "round": lambda a: mb.round(x=np.array([-1.5, -0.5, 0.5, 0.7, 1.5, 2.5], np.float32)),
    "clip": lambda a: mb.clip(x=a.x, alpha=np.float32(-0.5), beta=np.float32(0.7)),
    "identity": lambda a: mb.identity(x=a.x),
    "greater": lambda a: mb.greater(x=a.i, y=a.j),
    "greater_equal": lambda a: mb.greater_equal(x=a.i, y=a.j),
    "less": lambda a: mb.less(x=a.i, y=a.j),
    "less_equal": lambda a: mb.less_equal(x=a.i, y=a.j),
    "equal": lambda a: mb.equal(x=a.i, y=a.j),
    "logical_and": lambda a: mb.logical_and(x=a.b, y=a.c),
    "logical_or": lambda a: mb.logical_or(x=a.b, y=a.c),
    "logical_not": lambda a: mb.logical_not(x=a.b),
    "select": lambda a: mb.select(cond=a.b, a=a.x, b=a.y),
    "softmax": lambda a: mb.softmax(x=a.big, axis=0),
    "linear": lambda a: mb.linear(x=a.x, weight=a.square, bias=a.row),
    "matmul": lambda a: mb.matmul(x=a.x, y=a.y, transpose_y=True),
    "matmul of the first transposed": lambda a: mb.matmul(x=a.wide, y=a.wide, transpose_x=True),
    "matmul of a row": lambda a: mb.matmul(x=a.row, y=a.square),
    "scaled_dot_product_attention": lambda a: mb.scaled_dot_product_attention(
        query=a.cube[:, :2], key=a.cube, value=-a.cube, attn_mask=a.x[:2, :3]
    ),
    "reduce_sum": lambda a: mb.reduce_sum(x=a.wide, axes=ints(1, -1), keep_dims=True),
    "reduce_sum of integers": lambda a: mb.reduce_sum(x=a.i, axes=ints(0)),
    "reduce_mean": lambda a: mb.reduce_mean(x=a.wide, axes=ints(0, 2)),
    "reduce_max": lambda a: mb.reduce_max(x=a.wide, axes=ints(-1)),
    "reduce_sum over all": lambda a: mb.reduce_sum(x=a.cube),
    "reduce_argmax": lambda a: mb.reduce_argmax(x=a.x, axis=0, keep_dims=True),
    "reduce_argmax of uint16": lambda a: mb.reduce_argmax(x=a.x, output_dtype="uint16"),
    "gather": lambda a: mb.gather(x=a.wide, indices=a.picks, axis=1),
    "gather of one": lambda a: mb.gather(x=a.x, indices=np.int32(2)),
    "slice_by_index": lambda a: mb.slice_by_index(
        x=a.wide, begin=ints(0, -2, 3, 1), end=ints(1, 3, 0, 5), stride=ints(1, 1, -2, 3)
    ),
    "slice_by_index with masks": lambda a: mb.slice_by_index(
        x=a.wide,
        begin=ints(1, 7, 2, 1),
        end=ints(7, 2, 7, 4),
        begin_mask=[False, True, False, False],
        end_mask=[False, False, True, False],
        squeeze_mask=[True, False, False, False],
    ),
    "slice_update": lambda a: mb.slice_update(
        x=a.cube, update=a.x[:1, None, 1:], begin=ints(1, 2, 0), end=ints(2, 3, 3)
    ),
    "slice_update with a stride": lambda a: mb.slice_update(
        x=a.x, update=a.y[:2, :2], begin=ints(0, 1), end=ints(3, 4), stride=ints(2, 2)
    ),
    "split into sizes": lambda a: mb.split(x=a.x, axis=1, split_sizes=ints(1, 3)),
    "split": lambda a: mb.split(x=a.x, axis=1, num_splits=2),
    "reshape": lambda a: mb.reshape(x=a.wide, shape=ints(2, -1, 10)),
    "reshape with zeros": lambda a: mb.reshape(x=a.x, shape=ints(1, 0, -1, 0)),
    "transpose": lambda a: mb.transpose(x=a.wide, perm=ints(3, 0, 2, 1)),
    "expand_dims": lambda a: mb.expand_dims(x=a.x, axes=ints(0, 3, -1)),
    "squeeze": lambda a: mb.squeeze(x=a.x[None, :, None], axes=ints(2)),
    "squeeze of all": lambda a: mb.squeeze(x=a.x[None, :, None]),
    "concat": lambda a: mb.concat(values=[a.x, a.y, a.x], axis=-1),
    "concat of one": lambda a: mb.concat(values=[a.x], axis=0),
    "tile": lambda a: mb.tile(x=a.x, reps=ints(2, 3)),
    "shape": lambda a: mb.shape(x=a.wide),
    "cumsum": lambda a: mb.cumsum(x=a.x, axis=1),
    "cumsum in reverse": lambda a: mb.cumsum(x=a.i, axis=0, reverse=True),
    "cast to integers": lambda a: mb.cast(x=a.big, dtype="int32"),
    "cast to floats": lambda a: mb.cast(x=a.i, dtype="fp32"),
    "cast to booleans": lambda a: mb.cast(x=a.i, dtype="bool"),
    "cast of booleans": lambda a: mb.cast(x=a.b, dtype="int32"),
}
# Not folded when a program is built, so that weights stay compressed; coremltools computes them when asked.
MATERIALIZED = {
    "constexpr_blockwise_shift_scale": lambda a: mb.constexpr_blockwise_shift_scale(
        data=sub_byte("int4", a.codes % 16 - 8), scale=a.positive[:, :2]
    ),
    "constexpr_blockwise_shift_scale with an offset": lambda a: mb.constexpr_blockwise_shift_scale(
        data=sub_byte("uint4", a.codes % 16),
        scale=a.positive[:1],
        offset=sub_byte("uint4", a.codes[:1] % 16),
    ),
    "constexpr_lut_to_dense": lambda a: mb.constexpr_lut_to_dense(
        indices=sub_byte("uint2", a.codes % 4), lut=a.wide[:1, :, :, :1].transpose(1, 0, 2, 3)
    ),
    "constexpr_blockwise_shift_scale with an offset of floats": (
        lambda a: mb.constexpr_blockwise_shift_scale(
            data=a.codes.view(np.uint8), scale=a.positive[:, :1], offset=a.x[:, :1]
        )
    ),
    "constexpr_lut_to_dense of 4 bits for a convolution": lambda a: mb.constexpr_lut_to_dense(
        indices=sub_byte("uint4", a.codes[..., None, None] % 16),
        lut=a.wide.reshape(-1)[:48].reshape(3, 1, 1, 1, 16, 1),
    ),
    "constexpr_lut_to_dense of 8 bits": lambda a: mb.constexpr_lut_to_dense(
        indices=a.codes.view(np.uint8), lut=np.resize(a.wide, (1, 1, 256, 1))
    ),
    "constexpr_lut_to_dense of 3 bits": lambda a: mb.constexpr_lut_to_dense(
        indices=sub_byte("uint3", a.codes % 8), lut=a.wide.reshape(-1)[:16].reshape(1, 2, 8, 1)
    ),
    "constexpr_lut_to_dense of pairs": lambda a: mb.constexpr_lut_to_dense(
        indices=sub_byte("uint1", a.codes % 2),
        lut=a.wide.reshape(-1)[:24].reshape(3, 2, 2, 2),
        vector_axis=0,
    ),
    "constexpr_lut_to_dense of pairs by rows": lambda a: mb.constexpr_lut_to_dense(
        indices=sub_byte("uint1", a.codes % 2),
        lut=a.wide.reshape(-1)[:4].reshape(1, 1, 2, 2),
        vector_axis=-1,
    ),
}
# Not folded by coremltools, or wanted from elsewhere, too.
PYTORCH = {
    "silu": (lambda a: mb.silu(x=a.x), lambda t: F.silu(t.x)),
    "softmax of large numbers": (lambda a: mb.softmax(x=a.big), lambda t: t.big.softmax(-1)),
    "linear of three axes": (
        lambda a: mb.linear(x=a.cube, weight=a.x),
        lambda t: F.linear(t.cube, t.x),
    ),
    "einsum": (
        lambda a: mb.einsum(
            values=(a.wide, a.wide.transpose(0, 3, 2, 1)), equation="nchw,nwhu->nchu"
        ),
        lambda t: torch.einsum("nchw,nwhu->nchu", t.wide, t.wide.permute(0, 3, 2, 1)),
    ),
    "einsum with broadcasting": (
        lambda a: mb.einsum(
            values=(a.cube[:, :1], a.cube.transpose(2, 1, 0)), equation="chw,whr->chr"
        ),
        lambda t: torch.einsum(
            "chw,whr->chr", t.cube[:, :1].expand(-1, 3, -1), t.cube.permute(2, 1, 0)
        ),
    ),
    "conv 1 x 1": (
        lambda a: mb.conv(
            x=a.wide, weight=a.x[:, :3, None, None], bias=a.x[:, 3], pad_type="valid"
        ),
        lambda t: F.conv2d(t.wide, t.x[:, :3, None, None], t.x[:, 3]),
    ),
    "scaled_dot_product_attention of some": (
        lambda a: mb.scaled_dot_product_attention(
            query=a.wide, key=a.wide[..., ::-1, :], value=a.wide + 1, attn_mask=a.square > -9
        ),
        lambda t: F.scaled_dot_product_attention(t.wide, t.wide.flip(2), t.wide + 1),
    ),
    "scaled_dot_product_attention with booleans": (
        lambda a: mb.scaled_dot_product_attention(
            query=a.cube, key=a.cube, value=-a.cube, attn_mask=np.tri(3, dtype=bool)
        ),
        lambda t: F.scaled_dot_product_attention(t.cube, t.cube, -t.cube, is_causal=True),
    ),
    "cumsum without the element": (
        # Of what is no constant: coremltools fails to fold it.
        lambda a: mb.cumsum(x=mb.add(x=a.x, y=a.zero), axis=1, exclusive=True),
        lambda t: t.x.cumsum(1) - t.x,
    ),
    "gather by batch": (
        lambda a: mb.gather(x=a.wide, indices=a.picks, axis=2, batch_dims=1),
        lambda t: torch.stack([x[:, i] for x, i in zip(t.wide, t.picks.long(), strict=True)]),
    ),
    "concat interleaved": (
        lambda a: mb.concat(values=[a.x, a.y], axis=0, interleave=True),
        lambda t: torch.stack([t.x, t.y], 1).reshape(6, 4),
    ),
}


def run(write_package, arrays, builders):
    """Lists of results by operation: coremltools' variables, and the arrays that are computed here."""
    variables = {}

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS18)
    def program(zero):
        arrays.zero = zero
        for name, build in builders.items():
            built = build(arrays)
            variables[name] = built if isinstance(built, (list, tuple)) else [built]
        return mb.identity(x=zero, name="result")

    function = Package(write_package(program)).function()
    names = [v.name for results in variables.values() for v in results]
    found = function.predict({"zero": np.zeros(1, np.float32)}, keep=names)
    return variables, {k: [found[v.name] for v in results] for k, results in variables.items()}


def assert_close(found, wanted, name):
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape, name
    assert found.dtype.kind == wanted.dtype.kind or {found.dtype.kind, wanted.dtype.kind} <= set(
        "iu"
    ), name
    np.testing.assert_allclose(found, wanted, 2e-5, 2e-6, err_msg=name)


def test_operations_are_what_coremltools_folds_them_to(write_package, a):
    variables, found = run(write_package, a, {**FOLDED, **MATERIALIZED})
    for name, results in variables.items():
        for variable, value in zip(results, found[name], strict=True):
            op = variable.op
            wanted = op.materialized_val_inference() if name in MATERIALIZED else variable.val
            assert wanted is not None, f"coremltools doesn't fold {name}"
            assert_close(value, wanted, name)


def test_operations_are_what_pytorch_computes(write_package, a):
    class Tensors:
        pass

    for name, array in vars(a).items():
        if isinstance(array, np.ndarray):
            setattr(Tensors, name, torch.tensor(array))
    _, found = run(write_package, a, {name: build for name, (build, _) in PYTORCH.items()})
    for name, (_, compute) in PYTORCH.items():
        assert_close(found[name][0], compute(Tensors).numpy(), name)


def test_every_operation_is_in_one_of_the_tables():
    tested = {name.split()[0] for name in (*FOLDED, *MATERIALIZED, *PYTORCH)}
    assert tested == set(OPS)
