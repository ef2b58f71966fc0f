"""The operations as primitives of MLX: how arguments arrive, and which are refused."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import HeadOptions, PackedWeight, Part, ProductOptions, cpu, dispatch
from afm_mlx.kernels.operands import PLAIN
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import make, packed_weight
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import draw
from tests.tools.compare import assert_close, assert_same
from tests.tools.problems import draw_low_rank

N, K = 48, 96
SPEC = Spec("packed_matmul", mx.float32, 1, 1, K, N, 4, "affine", "group", 32)


def draw_adapters(rng, slots):
    return draw_low_rank(rng, slots, K, (20, N), [4, 6], [mx.float16, mx.float32])


def assert_right(ops, x, *weights, **options):
    op = "packed_swiglu" if len(weights) > 1 else "packed_matmul"
    got, wanted = (getattr(m, op)(x, *weights, ProductOptions(**options)) for m in (ops, oracle))
    assert_close(got, wanted, what=f"{op} of {x.shape}")


def test_any_number_of_leading_axes(ops, rng):
    weight, up = packed_weight(SPEC, rng), packed_weight(SPEC._replace(bits=2), rng)
    for shape in ((K,), (1, 1, K), (3, 2, K)):
        x, norm, residual = draw(rng, shape), draw(rng, (K,)), draw(rng, (*shape[:-1], N))
        assert_right(ops, x, weight, norm=norm, eps=0.5, residual=residual)
        assert_right(ops, x, weight, up, norm=norm, eps=0.5)
        index, value = ops.packed_argmax(x, weight, PLAIN)
        assert index.shape == value.shape == shape[:-1]


def test_arrays_that_are_not_contiguous(ops, rng):
    """Every input as a view with strides: the same as a copy."""
    weight = packed_weight(SPEC, rng)
    x, residual = draw(rng, (2, 5, K)), draw(rng, (2, 5, N))
    norm = draw(rng, (K,))
    plain = ops.packed_matmul(x, weight, ProductOptions(norm=norm, residual=residual))
    strided = PackedWeight(
        mx.repeat(weight.codes, 2, axis=1)[:, ::2],
        weight.bits,
        weight.mode,
        mx.contiguous(weight.scales.T).T,
        mx.repeat(weight.biases, 2, axis=0)[::2],
    )
    options = ProductOptions(
        norm=mx.repeat(norm, 2)[::2],
        residual=mx.contiguous(residual.transpose(2, 0, 1)).transpose(1, 2, 0),
    )
    x = mx.contiguous(x.transpose(2, 1, 0)).transpose(2, 1, 0)
    assert_same(ops.packed_matmul(x, strided, options), plain)


def test_embedding_takes_all_kinds_of_tokens(ops, rng):
    weight = packed_weight(SPEC, rng)
    rows = ops.packed_embedding(mx.arange(N), weight, mx.float32)
    tokens = mx.array(rng.integers(0, N, (2, 7)))
    for dtype in (mx.uint32, mx.int64, mx.uint16):
        got = ops.packed_embedding(tokens.astype(dtype), weight, mx.float32)
        assert_same(got, rows[tokens], dtype)
    negative = ops.packed_embedding(mx.array([-1, -N]), weight, mx.float32)
    assert_same(negative, rows[mx.array([N - 1, 0])])
    assert ops.packed_embedding(mx.zeros((0,), mx.int32), weight, mx.float16).shape == (0, K)


def test_experts_take_all_kinds_of_indices(ops, rng):
    """No index leads out of the matrix: those beyond it count as the nearest."""
    weight, x = packed_weight(SPEC, rng), draw(rng, (3, K))

    def gather(indices, x=x):
        return ops.packed_gather(x, weight, indices, 4)

    indices = rng.integers(0, 4, 6)
    wanted = oracle.packed_gather(x, weight, mx.array(indices), 4)
    for dtype in (mx.int32, mx.uint32, mx.int64, mx.uint8):
        assert_close(gather(mx.array(indices).astype(dtype)), wanted, what=dtype)
    strided = mx.repeat(mx.array(indices.astype(np.int32)), 2)[::2]
    assert_close(gather(strided, mx.contiguous(x.T).T), wanted)
    assert_same(gather(mx.array([-1, -4, -9])), gather(mx.array([3, 0, 0])))
    assert_same(gather(mx.array([4, 99, 2**31 - 1])), gather(mx.array([3, 3, 3])))
    assert gather(mx.zeros((0,), mx.int32)).shape == (0, N // 4)
    assert gather(mx.zeros((0,), mx.int32), x[:0]).shape == (0, N // 4)


def test_experts_that_do_not_fit(ops, rng):
    weight, x, indices = packed_weight(SPEC, rng), draw(rng, (2, K)), mx.array([0, 1])
    for args, words in (
        ((x, weight, indices, 5), "5 experts can't share 48 rows"),
        ((x, weight, indices, 0), "0 experts can't share 48 rows"),
        ((x, weight, mx.array([0, 1, 2]), 4), "3 pairs aren't a multiple of 2 vectors"),
        ((x[:0], weight, indices, 4), "2 pairs aren't a multiple of 0 vectors"),
        ((x[None], weight, indices, 4), r"x must be \(M, K\)"),
        ((x, weight, indices[None], 4), r"indices \(P,\)"),
        ((x[:, 1:], weight, indices, 4), "x has 95 inputs, the matrix 96"),
        ((x, weight, indices, 4, False, 4), "activation_bits are 4; 16 or 8 can run"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.packed_gather(*args)


def test_numbers_go_to_each_dtype_rounded_once(ops, rng):
    """The conversions that the primitives do themselves, on all kinds of float32, against MLX's."""
    numbers = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    small = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 6, 4096)).astype(np.float32)
    edges = np.array([65519.0, 65520.0, 65504.0, 2.0**-24, 2.0**-25, 0.0, -0.0], np.float32)
    values = np.concatenate([numbers[np.isfinite(numbers)], small, edges])
    table = mx.array(values[: len(values) // 4 * 4].reshape(-1, 4))
    # Row i's codes 0, 1, 2, 3 and so on are a palette's entries: the embedding copies them.
    codes = mx.full((table.shape[0], 1), 0xE4E4E4E4, dtype=mx.uint32)
    weight = PackedWeight(codes, 2, "palette", table=table)
    for dtype in DTYPES:
        got = ops.packed_embedding(mx.arange(table.shape[0]), weight, dtype)
        assert_same(got, mx.concatenate([table] * 4, axis=1).astype(dtype))


# -- adapters


def test_an_adapter_given_twice_is_one_array(ops, rng):
    """Gate's and up's adapters share arrays; two rows can use one adapter with two scales."""
    weight, up = packed_weight(SPEC, rng), packed_weight(SPEC, rng)
    x = draw(rng, (2, 3, K))
    one = draw_low_rank(rng, [0, 1], K, (N,), [4])
    twice = one._replace(numbers=one.numbers * 2, parts=one.parts * 2, scales=mx.array([0.5, -2.0]))
    assert_right(ops, x, weight, adapters=(twice,))
    assert_right(ops, x, weight, up, adapters=(twice, twice._replace(scales=mx.array([1.0, 3.0]))))


def test_a_trace_keeps_adapters_apart_that_differ_in_place_only(compiled, ops, rng):
    """`mx.compile` merges equal operations; operations on other parts of one array are not equal."""
    weight, x = packed_weight(SPEC, rng), draw(rng, (1, K))
    first, second = (draw_low_rank(rng, [0], K, (N,), [4]) for _ in range(2))
    numbers, offset = mx.concatenate([first.numbers[0], second.numbers[0]]), first.numbers[0].size
    a, b, rank = second.parts[0]
    adapters = [
        first._replace(numbers=(numbers,), parts=(part,))
        for part in (first.parts[0], Part(a + offset, b + offset, rank))
    ]

    @mx.compile
    def both(x, numbers):
        given = (ProductOptions(adapters=(each._replace(numbers=(numbers,)),)) for each in adapters)
        return [ops.packed_matmul(x, weight, options) for options in given]

    for got, each in zip(both(x, numbers), adapters, strict=True):
        assert_close(got, oracle.packed_matmul(x, weight, ProductOptions(adapters=(each,))))


# -- what is refused


@pytest.mark.parametrize(
    ("op", "fields", "says"),
    [
        ("packed_matmul", {"dtype": mx.int8}, "takes float32, float16 or bfloat16, not int8"),
        ("decode_attention", {"head_dim": 1024}, "head_dim is at most 512"),
        ("decode_attention", {"head_dim": 512}, "None"),
        ("rope_norm_quantize", {"head_dim": 13}, "head_dim must be even"),
        ("rope_norm_quantize", {"head_dim": 12}, "None"),
        ("write_tokens", {"dtype": mx.int8}, "None"),
    ],
)
def test_obstacles(ops, op, fields, says):
    case = dispatch.Case("cpu", mx.float32, 1)._replace(**fields)
    (variant,) = (v for v in cpu.VARIANTS if v.op == op)
    assert str(variant.obstacle(case)) == says


def bad_adapters(rng):
    """Adapters that would be read where there is nothing, or that make no sense."""
    good = draw_adapters(rng, [0, 1])
    first, second = good.numbers
    a, b, rank = good.parts[0]
    end = first.size // 16 * 16

    def with_part(part):
        return good._replace(parts=(part, good.parts[1]))

    return [
        (good._replace(sections=(20, 40)), "end at row 40"),
        (good._replace(sections=(20, 20, N)), "ascend"),
        (good._replace(slots=mx.array([0])), "slots"),
        (good._replace(slots=mx.array([0.0, 1.0])), "slots"),
        (good._replace(scales=mx.ones(3)), "scales"),
        (good._replace(scales=mx.ones(2, mx.float16)), "scales"),
        (good._replace(numbers=(), parts=()), "0 adapters"),
        (good._replace(numbers=(first,) * 9, parts=good.parts[:1] * 9), "9 adapters"),
        (good._replace(parts=good.parts[:1]), "as many parts, not 1"),
        (good._replace(numbers=(first[None], second)), "adapter 0 must be a flat array"),
        (good._replace(numbers=(first.astype(mx.int32), second)), "numbers must be float32"),
        (with_part(Part(a, b, -1)), "adapter 0 has rank -1"),
        (with_part(Part(-16, b, rank)), "A of adapter 0"),
        (with_part(Part(a + 8, b, rank)), "A of adapter 0.*multiple of 16"),
        (with_part(Part(end, b, rank)), "A of adapter 0"),
        (with_part(Part(2**62, b, rank)), "A of adapter 0"),
        (with_part(Part(a, end, rank)), "B of adapter 0"),
        (with_part(Part(a, b, 2**20)), "A of adapter 0"),
        (with_part(Part(a, b, 2**40)), "rank 1099511627776"),
    ]


def test_products_that_do_not_fit_are_refused(ops, rng):
    weight, x = packed_weight(SPEC, rng), draw(rng, (2, K))
    cases = [
        ((x[:, :-1], weight, {}), "x has 95 inputs, the matrix 96"),
        ((x, weight, {"norm": mx.ones(K - 1)}), "norm's weight"),
        ((x, weight, {"residual": mx.ones((2, N - 1))}), "residual"),
        ((x, weight, {"activation_bits": 4}), "activation_bits are 4"),
        ((x, weight._replace(bits=3), {}), "bits are 3"),
        ((x, weight._replace(mode="ternary"), {}), "mode is ternary"),
        ((x, weight._replace(biases=None), {}), "biases"),
        ((x, weight._replace(scales=mx.ones((N, 5)), biases=mx.ones((N, 5))), {}), "5 groups"),
        ((x, weight._replace(codes=weight.codes.astype(mx.int32)), {}), "uint32"),
        ((x.astype(mx.int32), weight, {}), "x must be float32"),
        *(((x, weight, {"adapters": (bad,)}), message) for bad, message in bad_adapters(rng)),
    ]
    for (given, matrix, options), message in cases:
        with pytest.raises(ValueError, match=message):
            ops.packed_matmul(given, matrix, ProductOptions(**options))
    with pytest.raises(ValueError, match="adapters of 1 matrices, not of 2"):
        options = ProductOptions(adapters=(draw_adapters(rng, [0, 1]),))
        ops.packed_swiglu(x, weight, weight, options)


def test_attention_that_does_not_fit_is_refused(ops, rng):
    spec = Spec("decode_attention", heads=4, kv_heads=2, head_dim=8, capacity=4)
    q, kv, lengths, _ = make(spec, rng).args
    cases = [
        (q[:, :3], kv, lengths, "3 query heads are no multiple of 2"),
        (q[..., :6], kv, lengths, "head_dim 6"),
        (q, kv._replace(buffer=kv.buffer.astype(mx.float32)), lengths, "int8"),
        (q, kv._replace(buffer=kv.buffer[:, :3]), lengths, r"keys and values \(B, 2 \* n_kv_heads"),
        (q, kv._replace(buffer=kv.buffer[0]), lengths, r"keys and values \(B, 2 \* n_kv_heads"),
        (q, kv, mx.array([4, 4]), "lengths"),
        (q.astype(mx.int32), kv, lengths, "float32, bfloat16 or float16"),
    ]
    for queries, given, seen, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.decode_attention(queries, given, seen)
    with pytest.raises(ValueError, match="doesn't hold"):
        options = HeadOptions(mx.ones(8), mx.ones(8), *(lengths * 1.0,) * 2, 2, 1e4, 1e-5)
        ops.rope_norm_quantize(mx.zeros((1, 1, 32)), 0, options)
