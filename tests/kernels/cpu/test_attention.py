"""The CPU primitives around attention against float64 NumPy, on every instruction set of this machine."""

import mlx.core as mx

from afm_mlx.kernels import HeadOptions
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs
from tests.tools.compare import assert_same
from tests.tools.problems import assert_solved, with_args

# (heads, kv_heads, head_dim): aligned and not, one head to a group, more than a tile's rows to one.
SHAPES = [(16, 2, 128), (4, 2, 64), (6, 2, 80), (3, 3, 2), (40, 1, 36), (5, 1, 512)]


def drawn(rng, op, dtype, batch, tokens, shape, **options):
    heads, kv_heads, head_dim = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return make(Spec(op, dtype, batch, tokens, **sizes, **options), rng)


def test_decode_attention(ops, rng, isa):
    for shape, dtype, capacity, rope in all_pairs(SHAPES, DTYPES, (90, 1300), (False, True)):
        options = {"capacity": capacity, "rope": rope}
        problem = drawn(rng, "decode_attention", dtype, 3, 1, shape, **options)
        queries, kv, lengths, query_rope = problem.args
        lengths = mx.array([1, lengths[1].item(), capacity])
        assert_solved(with_args(problem, queries, kv, lengths, query_rope), ops.decode_attention)


def test_decode_attention_reads_buffers_where_they_are(ops, rng):
    """A slice of a cache, transposed queries and a step along the head: no copy that changes the result."""
    problem = drawn(rng, "decode_attention", mx.float32, 2, 1, (9, 3, 32), capacity=50)
    queries, kv, lengths, _ = problem.args
    strided = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
    whole = mx.zeros((2, 8, 90, 64), mx.int8)
    whole[:, 1:7, 10:60, ::2] = kv.buffer[:, :, ::-1]
    part = kv._replace(buffer=whole[:, 1:7, 10:60, ::2][:, :, ::-1])
    assert_same(part.buffer, kv.buffer)
    got, wanted = (
        ops.decode_attention(q, given, lengths) for q, given in ((strided, part), (queries, kv))
    )
    assert_same(got, wanted)


def test_decode_attention_never_looks_beyond_the_buffer(ops, rng):
    """Lengths that no cache has: more than the capacity is the capacity, and nothing seen is zero."""
    queries, kv, *_ = drawn(rng, "decode_attention", mx.float32, 2, 1, (2, 1, 8), capacity=5).args
    got = ops.decode_attention(queries, kv, mx.array([2**30, 0]))
    assert_same(got[0], ops.decode_attention(queries, kv, mx.array([5, 5]))[0])
    assert not got[1].any()


def test_causal_attention(ops, rng, isa):
    for tokens, shape, dtype in all_pairs((1, 7, 200), SHAPES[:4], DTYPES):
        capacity = tokens + int(rng.integers(0, 150))
        problem = drawn(rng, "causal_attention", dtype, 2, tokens, shape, capacity=capacity)
        assert_solved(problem, ops.causal_attention)


def test_rope_norm_quantize(ops, rng):
    for shape, dtype, tokens in all_pairs(SHAPES[:4], DTYPES, (1, 3)):
        problem = drawn(rng, "rope_norm_quantize", dtype, 2, tokens, shape)
        assert_solved(problem, ops.rope_norm_quantize)
        qkv, _, options = problem.args
        assert_solved(with_args(problem, qkv, 4000, options), ops.rope_norm_quantize)


def test_quantization_rounds_half_to_even_and_clamps(ops):
    values = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    qkv = mx.array([0.0] * 16 + values).reshape(1, 1, 24)
    ones, scale = mx.ones(8), mx.array(0.25)
    _, codes = ops.rope_norm_quantize(qkv, 0, HeadOptions(ones, ones, scale, scale, 1, 1e4, 1e-5))
    assert codes[:, 1].reshape(-1).tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
