"""Metal kernels around the matrix products, run by the emulator, against float64 NumPy."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import BITS, AttentionPartials, HeadOptions, KeyValues, dispatch
from afm_mlx.kernels.metal import attention, products, runtime
from afm_mlx.kernels.reference import merge_partials
from afm_mlx.kernels.selftest import problems
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, FORMATS, Spec
from tests.metal import machine
from tests.tools.cases import all_pairs, draw, each
from tests.tools.compare import UNIT_ROUNDOFF, assert_close, assert_same, assert_within
from tests.tools.problems import assert_solved, draw_heads, with_args

LONG = attention.SINGLE_PASS + 1  # columns that take two passes


def drawn(rng, op, dtype, batch, tokens, *shape, **options):
    # These kernels compute with floats: no error of activations as integers is allowed.
    return draw_heads(rng, op, dtype, batch, tokens, shape, **options, activation_bits=32)


# -- RoPE, QK-norm, int8 keys and values


@each(
    ("dtype", "batch", "tokens", "shape"),
    [
        *((dtype, 1, 1, (16, 2, 128)) for dtype in DTYPES),  # the 3B
        (mx.float32, 2, 3, (4, 2, 64)),
        (mx.bfloat16, 3, 2, (3, 1, 12)),
        (mx.float16, 1, 1, (1, 1, 2)),  # fewer than 8 numbers in every weight
        (mx.float32, 9, 1, (2, 2, 6)),  # 8 rows or more are in another address space
        (mx.bfloat16, 1, 2, (2, 1, 256)),
    ],
)
def test_rope_norm_quantize(metal, rng, dtype, batch, tokens, shape):
    problem = drawn(rng, "rope_norm_quantize", dtype, batch, tokens, *shape)
    qkv, offsets, options = problem.args
    for offset in (offsets, offsets[0].item()):
        assert_solved(with_args(problem, qkv, offset, options), kernels.rope_norm_quantize)
    # An angle is as inexact as it is large: near the beginning, sine and cosine have to be right.
    for offset in (1, 4096, 40_000):
        args = qkv, mx.full(offsets.shape, offset, mx.int32), options
        bound = problems._bound(problem.spec, args)
        assert_solved(with_args(problem, *args), kernels.rope_norm_quantize, bound)


def test_angles_are_as_exact_as_float32_has_them(metal):
    """Frequencies and angles are rounded once each; what sine and cosine are off by does not grow with them."""
    heads, head_dim, theta, positions = 8, 128, 500000.0, np.array([4096, 40_000])
    pairs = mx.tile(mx.array([1.0, 0.0]), (2, 1, (heads + 2) * head_dim // 2))
    ones, scale = mx.ones((head_dim,)), mx.array(1.0)
    options = HeadOptions(ones, ones, scale, scale, 1, theta, 0.0)
    queries, _ = kernels.rope_norm_quantize(pairs, mx.array(positions), options)
    turned = np.array(queries).astype(np.float64).reshape(2, heads, -1, 2)
    angles = positions[:, None, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    off = np.angle((turned[..., 0] + 1j * turned[..., 1]) * np.exp(-1j * angles))
    assert (np.abs(off) <= 2.0**-23 * angles + 2.0**-21).all()


def test_the_norm_of_a_head_is_as_exact_as_float32_has_it(metal, rng):
    """Heads of one number, whose norm is the root of the head's size, whatever the number is.

    Half a rounding comes from the square, one from 1 / rms, and one from the product. The fast function for
    1 / rms is off by up to four.
    """
    heads, head_dim = 64, 16
    x = np.zeros((1, 1, heads + 2, head_dim), np.float32)
    x[..., 0] = rng.uniform(3.6, 4, heads + 2)
    ones, scale = mx.ones((head_dim,)), mx.array(1.0)
    options = HeadOptions(ones, ones, scale, scale, 1, 1e4, 0.0)
    queries, _ = kernels.rope_norm_quantize(mx.array(x.reshape(1, 1, -1)), 0, options)
    wanted = np.zeros((1, heads, 1, head_dim))
    wanted[..., 0] = head_dim**0.5
    assert_close(queries, wanted, 2.5 * UNIT_ROUNDOFF[mx.float32])


def test_codes_are_rounded_half_to_even_and_clamped(metal):
    values = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    qkv = mx.array([0.0] * 16 + values).astype(mx.bfloat16).reshape(1, 1, 24)
    ones, scale = mx.ones((8,), mx.bfloat16), mx.array(0.25)
    options = HeadOptions(ones, ones, scale, scale, 1, 1e4, 1e-5)
    _, codes = kernels.rope_norm_quantize(qkv, 3, options)
    assert codes.flatten().tolist() == [0] * 8 + [0, 2, 0, -2, 127, 127, -128, -128]


def test_queries_whose_squares_overflow_give_nan(metal):
    ones, scale = mx.ones((8,)), mx.array(1.0)
    options = HeadOptions(ones, ones, scale, scale, 1, 1e4, 1e-5)
    qkv = mx.array([3e19] * 8 + [0.0] * 16).reshape(1, 1, 24)
    queries, _ = kernels.rope_norm_quantize(qkv, 0, options)
    assert mx.isnan(queries).all().item()


# -- attention of one new token per row


@each(
    ("dtype", "batch", "shape", "capacity"),
    [
        *((dtype, 1, (16, 2, 128), 96) for dtype in DTYPES),  # the 3B
        (mx.bfloat16, 3, (4, 2, 64), 40),  # the embedded model
        (mx.float32, 3, (3, 1, 12), 33),
        (mx.float16, 1, (5, 5, 4), 7),
        (mx.float32, 1, (6, 1, 256), 25),
        (mx.bfloat16, 9, (2, 1, 36), 9),  # 8 rows or more are in another address space
        (mx.float32, 1, (1, 1, 4), 1),  # the smallest
        *((dtype, 1, (8, 1, 128), LONG) for dtype in DTYPES),
        (mx.float32, 2, (3, 1, 12), LONG + 500),
        (mx.bfloat16, 1, (2, 1, 256), LONG + 7),
        (mx.float16, 1, (4, 1, 252), LONG),  # a key takes all lanes
    ],
)
def test_decode_attention(metal, rng, dtype, batch, shape, capacity):
    for rope, tail, tokens in ((False, 0, 1), (True, 5, 1), (True, 5, 2)):
        options = {"capacity": capacity, "rope": rope, "tail": tail}
        problem = drawn(rng, "decode_attention", dtype, batch, tokens, *shape, **options)
        assert_solved(problem, kernels.decode_attention)
    problem = drawn(rng, "write_and_attend", dtype, batch, 1, *shape, capacity=capacity, tail=7)
    assert_solved(problem, kernels.write_and_attend)


def test_scores_are_as_exact_as_float32_has_them(metal, rng):
    """A key whose weight is 2^-64 or so, which shows if a score's factor is off by more than a rounding.

    The exponential may be off by 2 ulps for each unit of its argument, and by 3 wherever it is 1.
    """
    heads, head_dim, code = 64, 64, 64
    queries = np.zeros((heads, head_dim), np.float32)
    queries[:, -2] = rng.uniform(5.5, 5.6, heads)
    new, old = np.zeros((2, 2, 1, head_dim), np.int8)
    old[0, 0, -2], old[1] = -code, code
    buffer, one = mx.array(np.concatenate([old, new], axis=1)[None]), mx.array(1.0)
    columns = KeyValues(buffer, one, one)
    got = kernels.decode_attention(mx.array(queries[None, :, None]), columns, mx.array([2]))
    assert_weights(got, code * queries[:, -2], code, head_dim, roundings=2)
    # The same from a projection. A norm makes a head of one number as long as the root of its size; the
    # last pair's frequency is next to 0, so that nothing turns.
    weight = mx.full((head_dim,), 0.69)
    options = HeadOptions(weight, mx.ones((head_dim,)), one, one, 1, 1e30, 0.0)
    qkv = np.zeros((1, heads + 2, head_dim), np.float32)
    qkv[0, :heads, -2] = rng.uniform(1, 2, heads)
    qkv[0, heads, 0] = 1.0  # a key whose score is 0
    tail = mx.zeros((1, 2, 4, head_dim), mx.int8)
    columns = KeyValues(buffer[:, :, :1], one, one, tail, mx.array([1]))
    got, _ = kernels.write_and_attend(
        mx.array(qkv.reshape(1, 1, -1)), columns, mx.array([2]), options
    )
    length = np.full(heads, np.float32(0.69) * head_dim**0.5)
    assert_weights(got, code * length, code, head_dim, roundings=6)


def assert_weights(got, products, code, head_dim, roundings):
    """Raise unless `got` is `code` times the weight of a key whose products with queries are `-products`.

    The other key's products are 0, and so are its values.
    """
    powers = np.float64(products) * np.log2(np.e) * head_dim**-0.5
    wanted = code / (1 + 2**powers)
    ulps = 3 + np.floor(2 * powers) + 4 * 3
    relative = np.log(2) * powers * roundings * UNIT_ROUNDOFF[mx.float32]
    allowed = ulps * np.spacing(wanted.astype(np.float32)) + wanted * relative
    shape = len(wanted), head_dim
    assert_within(got.reshape(shape), np.broadcast_to(wanted[:, None], shape), allowed[:, None])


@each("capacity", [40, LONG])
def test_both_sums_of_a_softmax_get_the_same_weights(metal, rng, capacity):
    """Columns with one value everywhere have it as attention's result, however inexact the exponentials are.

    Both sums are rounded alike, as the value is a power of 2; the last division may be off by 3 ulps. Of the
    first lane's dimensions only: it has the sum of the weights, and the emulator draws each lane's errors.
    """
    heads, head_dim, code = 4, 64, 64
    queries = mx.array(rng.standard_normal((1, heads, 1, head_dim)), mx.float32)
    keys = rng.integers(-128, 128, (1, 1, capacity, head_dim))
    one, values = mx.array(1.0), np.full(keys.shape, code)
    buffer = mx.array(np.concatenate([keys, values], axis=1), mx.int8)
    columns = KeyValues(buffer, mx.array(0.02), one)
    got = kernels.decode_attention(queries, columns, mx.array([capacity]))
    assert_close(got[..., :4] / code, np.ones((1, heads, 1, 4)), 3 * 2.0**-23)


# A threadgroup has registers for 2 tokens in 2 heads, or 4 in one; 8 tokens are written by one dispatch.
@pytest.mark.parametrize(
    ("dtype", "tokens", "batch", "shape", "capacity"),
    [
        (mx.bfloat16, 2, 2, (4, 2, 64), 40),
        (mx.float16, 3, 1, (16, 2, 128), 70),
        (mx.float32, 3, 1, (3, 1, 12), LONG + 300),
        (mx.bfloat16, 4, 1, (16, 2, 128), 70),
        (mx.float32, 5, 2, (3, 1, 12), 40),
        (mx.float32, 5, 1, (2, 1, 256), 33),
        (mx.bfloat16, 8, 1, (2, 1, 128), LONG),
        (mx.float32, 9, 2, (4, 2, 64), 40),
    ],
)
def test_several_tokens_of_a_row(metal, rng, dtype, tokens, batch, shape, capacity):
    options = {"capacity": capacity, "tail": 24}
    for op, more in (("decode_attention", {"rope": True}), ("write_and_attend", {})):
        problem = drawn(rng, op, dtype, batch, tokens, *shape, **options, **more)
        assert_solved(problem, getattr(kernels, op))


def returning(*results):
    """A function of any arguments that gives these results."""
    return lambda *_: results


def halves(y, dtype):
    """Attention's output (B, n_heads, 1, head_dim) as two partials, each with its own score."""
    y = y.astype(mx.float32)
    ones = mx.ones((*y.shape[:3], 1))
    numbers = [mx.concatenate([2 * y, 0 * ones, 2 * ones], axis=-1)]
    numbers.append(mx.concatenate([4 * y, -ones, 4 * ones], axis=-1))
    return AttentionPartials(mx.concatenate(numbers, axis=2), mx.array(1.0), dtype)


def test_a_product_merges_the_partials_of_attention(metal, rng):
    """Of adapters, the kernel that multiplies with A does so, too."""
    split = attention.SPLIT
    # A threadgroup of 256 threads merges fewer heads and numbers than it has threads, or more.
    sizes = ((split + 1, 4, 16), (4 * split, 4, 128), (9 * split, 4, 16), (split + 1, 136, 4))
    for rows, dtype, of, rank in all_pairs((1, 2), DTYPES, sizes, (0, 4)):
        capacity, heads, head_dim = of
        shape = (heads, 2, head_dim)
        problem = drawn(rng, "write_and_attend", dtype, rows, 1, *shape, capacity=capacity, tail=5)
        parts, tail = kernels.write_and_attend(*problem.args, False)
        if heads > 4:  # they keep the GPU busy by themselves
            parts = halves(parts, dtype)
        else:
            assert parts.numbers.shape[2] == min(-(-capacity // split), attention.MAX_PARTIALS)
        merged = merge_partials(parts)
        assert_solved(problem, returning(merged.reshape(rows, heads, 1, head_dim), tail))
        width = heads * head_dim
        spec = Spec("packed_matmul", dtype, rows, 1, width, 40, 2, "balanced", "row", residual=True)
        product = make(spec._replace(rank=rank), rng)
        product = with_args(product, merged, *product.args[1:])
        got = kernels.packed_matmul(parts, *product.args[1:])
        assert_solved(product, returning(got), 2 * product.bound)


@pytest.mark.parametrize("scores", [(0, 300, -300), (300, 0, -1e4), (-1e4, 0, 300)])
def test_partials_are_weighed_by_their_distance_from_the_largest_score(metal, rng, scores):
    """Of scores that are far apart only the largest counts, whichever partial has it: nothing overflows."""
    heads, head_dim = 4, 16
    sums = draw(rng, (1, heads, 3, head_dim))
    tops = mx.broadcast_to(mx.array(scores, mx.float32)[:, None], (1, heads, 3, 1))
    numbers = mx.concatenate([sums, tops, mx.full(tops.shape, 2.0)], axis=-1)
    parts = AttentionPartials(numbers, mx.array(1.0), mx.float32)
    best = (sums[:, :, int(np.argmax(scores))] / 2).reshape(parts.shape)
    assert_close(products.merge_partials(parts), best, 1e-6)
    product = make(
        Spec("packed_matmul", mx.float32, 1, 1, heads * head_dim, 40, 2, "balanced", "row"), rng
    )
    product = with_args(product, best, *product.args[1:])
    got = kernels.packed_matmul(parts, *product.args[1:])
    assert_solved(product, returning(got), 2 * product.bound)


def test_partials_are_merged_before_products_that_can_not_merge_them(metal, rng):
    """Too many rows, too much memory of a threadgroup, or a kernel that takes vectors only."""
    capacity = 2 * attention.SPLIT
    for rows, dtype, head_dim, in_parts in (
        (2, mx.float32, 128, True),
        (3, mx.float16, 128, False),
        (2, mx.float32, 256, False),
    ):
        shape = (16, 2, head_dim)
        problem = drawn(rng, "decode_attention", dtype, rows, 1, *shape, capacity=capacity)
        got = kernels.decode_attention(*problem.args, merge=False)
        assert isinstance(got, AttentionPartials) == in_parts, (rows, head_dim)
    problem = drawn(rng, "decode_attention", mx.float32, 1, 1, 4, 2, 16, capacity=capacity)
    parts = kernels.decode_attention(*problem.args, merge=False)
    _, *rest = make(Spec("packed_matmul", mx.float32, 1, 1, 64, 8, 4, "balanced", "row"), rng).args
    merged = kernels.packed_matmul(parts, *rest)
    with dispatch.force("reference"):
        assert_close(kernels.packed_matmul(parts, *rest), merged, 1e-5)


def test_splits_follow_the_gpu(monkeypatch):
    """More of them on more cores, and none for a short context that another dispatch would have to merge."""
    of_3b = (1, 16, 2, 512, 128)
    for letter, cores in runtime.CORES.items():
        runtime.gpu_cores.cache_clear()
        monkeypatch.setattr(
            mx, "device_info", lambda name=letter: {"architecture": f"applegpu_g16{name}"}
        )
        assert runtime.gpu_cores() == cores
    runtime.gpu_cores.cache_clear()
    splits = [attention.plan(*of_3b, False, cores).splits for cores in runtime.CORES.values()]
    assert splits == [1, 4, 4, 4]
    assert attention.plan(*of_3b).splits == 1
    long = [attention.plan(1, 16, 2, 4096, 128, False, n).splits for n in runtime.CORES.values()]
    assert long == [1, 5, 8, 8]
    assert attention.plan(1, 16, 2, 4096, 128, True, 80).splits == 10


@pytest.mark.parametrize("capacity", [24, LONG])
def test_every_size_of_a_group(metal, rng, capacity):
    for group in range(1, 9):
        shape = (2 * group, 2, 12)
        problem = drawn(rng, "decode_attention", mx.float32, 1, 1, *shape, capacity=capacity)
        assert_solved(problem, kernels.decode_attention)


@pytest.mark.parametrize("capacity", [64, LONG])
def test_columns_past_the_length_and_large_scores(metal, rng, monkeypatch, capacity):
    """What lies past a row's length is never looked at, and scores of some 10,000 overflow nothing."""
    problem = drawn(rng, "decode_attention", mx.float32, 3, 1, 3, 1, 12, capacity=capacity)
    queries, kv, _, _ = problem.args
    lengths = mx.array([1, 17, 50])
    monkeypatch.setattr(machine, "_seed", lambda: 1)  # the same errors of functions in both calls
    got = kernels.decode_attention(queries, kv, lengths)
    outside = mx.arange(capacity)[:, None] >= lengths[:, None, None, None]
    others = kv._replace(buffer=mx.where(outside, mx.array(127, mx.int8), kv.buffer))
    assert_same(kernels.decode_attention(queries, others, lengths), got)
    large = with_args(problem, queries * 1000, kv, lengths, None)
    assert_solved(large, kernels.decode_attention, 1000 * problem.bound)


def test_the_best_key_in_the_last_of_many_ranges(metal, rng):
    capacity = 40 * attention.SPLIT  # more ranges than a simdgroup has lanes
    assert attention.plan(1, 1, 1, capacity, 4).splits == 40
    problem = drawn(rng, "decode_attention", mx.float32, 1, 1, 1, 1, 4, capacity=capacity)
    queries, kv, *_ = problem.args
    codes = np.array(kv.buffer)
    codes[:, :1] //= 2
    codes[0, 0, -1] = np.where(np.array(queries[0, 0, 0]) > 0, 127, -128)
    kv, lengths = kv._replace(buffer=mx.array(codes)), mx.array([capacity])
    for size in (0.1, 1000):  # all keys share the weight, or one has it
        best = with_args(problem, queries * size, kv, lengths, None)
        assert_solved(best, kernels.decode_attention, max(1, size) * problem.bound)


def test_the_plan_covers_every_head_size():
    batches, groups, capacities = (1, 8, 64), (1, 3, 8), (256, 1280, 65536)
    cases = itertools.product(range(4, 257, 4), batches, groups, capacities)
    for head_dim, batch, group, capacity in cases:
        work = attention.plan(batch, 2 * group, 2, capacity, head_dim)
        assert group % work.heads == 0
        assert work.heads <= 4
        assert 32 % work.lanes == 0
        assert work.lanes * work.units * 4 >= head_dim
        assert work.heads * work.units * 4 <= 32  # registers for queries, and as many for sums
        assert 1 <= work.splits <= attention.MAX_SPLITS


# -- embedding


@pytest.mark.parametrize(
    ("shape", "group", "rows"),
    [
        ((96, 12), 24, (1, 3)),
        ((2208, 40), 32, (2, 5)),  # 8 tokens or more are in another address space
        ((16, 1), 16, (1, 2)),  # scales of one number
    ],
)
def test_packed_embedding(metal, rng, shape, group, rows):
    indices = (mx.int32, mx.uint32, mx.int64)
    for (mode, per), bits, dtype, index in all_pairs(FORMATS, BITS, DTYPES, indices):
        matrix = (*shape, bits, mode, per, group if per == "group" else 0)
        problem = make(Spec("packed_embedding", dtype, *rows, *matrix), rng)
        tokens, *rest = problem.args
        assert_solved(with_args(problem, tokens.astype(index), *rest), kernels.packed_embedding)


def test_an_embedding_past_16_bits(metal, rng):
    matrix = {"in_dims": 16, "out_dims": (1 << 16) + 37, "bits": 4, "mode": "balanced"}
    problem = make(Spec("packed_embedding", tokens=3, **matrix, granularity="row"), rng)
    assert_solved(problem, kernels.packed_embedding)  # of the last row, too


# -- what they can't run


@each(
    ("op", "fields", "says"),
    [
        ("rope_norm_quantize", {"head_dim": 13}, "even head sizes up to 256, not 13"),
        ("rope_norm_quantize", {"head_dim": 258}, "not 258"),
        ("decode_attention", {"head_dim": 30}, "4 divides up to 256, not 30"),
        ("decode_attention", {"head_dim": 260}, "not 260"),
        ("decode_attention", {"head_dim": 64, "dtype": mx.int8}, "int8"),
        ("packed_embedding", {"dtype": mx.int32}, "int32"),
        ("packed_embedding", {"rows": 0}, "one row at least"),
    ],
)
def test_obstacles(op, fields, says):
    case = dispatch.Case("gpu", mx.float32, 1)._replace(**fields)
    (variant,) = (v for v in attention.VARIANTS if v.op == op)
    assert says in (variant.obstacle(case) or "")
