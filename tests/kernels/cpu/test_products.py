"""The products as primitives of MLX: what lies between `native.py` and the kernels that they call."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import PackedWeight, Part, ProductOptions, pack_codes
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.cpu import native as ops
from afm_mlx.kernels.selftest import oracle
from tests.tools.cases import all_pairs, draw
from tests.tools.compare import assert_close, assert_same, assert_within
from tests.tools.low_rank import draw_low_rank

pytestmark = pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())

N, K = 48, 96


def draw_weight(rng, granularity="row", bits=4, mode="affine"):
    codes = pack_codes(mx.array(rng.integers(0, 2**bits, (N, K)).astype(np.uint32)), bits)
    shape = {"tensor": (), "row": (N,), "group": (N, 3)}[granularity]
    scales, biases = (mx.array(rng.uniform(0.01, 0.03, shape).astype(np.float32)) for _ in range(2))
    return PackedWeight(codes, bits, mode, scales, biases if mode == "affine" else None)


def draw_adapters(rng, batch):
    slots = rng.integers(-1, 2, batch).tolist()
    return draw_low_rank(rng, slots, K, (20, N), [4, 6], [mx.float16, mx.float32]).low_rank


def assert_right(x, *weights, what="outputs", **options):
    """As the oracle says; int16 activations are off by 2**-16 of the largest one, and sums have 96 terms."""
    op = "packed_swiglu" if len(weights) > 1 else "packed_matmul"
    given = ProductOptions(**options)
    got, wanted = (getattr(module, op)(x, *weights, given) for module in (ops, oracle))
    assert_close(got, wanted, what=what)


def test_every_argument_arrives(rng):
    for case in all_pairs(("tensor", "row", "group"), ((K,), (1, 1, K), (3, 2, K), (2, 9, K))):
        granularity, shape = case
        weight, up = draw_weight(rng, granularity), draw_weight(rng, mode="balanced", bits=2)
        x, options = draw(rng, shape), {"norm": draw(rng, (K,)), "eps": 1e-3}
        pair = tuple(draw_adapters(rng, shape[0]) for _ in range(2 * (len(shape) > 1)))
        residual = draw(rng, (*shape[:-1], N))
        assert_right(x, weight, **options, residual=residual, adapters=pair[:1], what=case)
        assert_right(x, weight, up, **options, adapters=pair, what=case)


def test_arrays_that_are_not_contiguous(rng):
    """Every input as a view with strides: the same as a copy."""
    weight = draw_weight(rng, "group")
    x = draw(rng, (K, 5, 2)).transpose(2, 1, 0)
    residual = draw(rng, (N, 2, 5)).transpose(1, 2, 0)
    strided = PackedWeight(
        mx.repeat(weight.codes, 2, axis=1)[:, ::2],
        weight.bits,
        weight.mode,
        mx.contiguous(weight.scales.T).T,
        mx.repeat(weight.biases, 2, axis=0)[::2],
    )
    norm = draw(rng, (2 * K,))[::2]
    options = ProductOptions(norm=norm, residual=residual)
    got = ops.packed_matmul(x, strided, options)
    copies = ProductOptions(norm=mx.contiguous(norm), residual=mx.contiguous(residual))
    assert_same(got, ops.packed_matmul(mx.contiguous(x), weight, copies))
    assert_close(got, oracle.packed_matmul(x, weight, options))


def test_argmax(rng):
    for shape in ((K,), (2, 3, K)):
        weight, x = draw_weight(rng), draw(rng, shape)
        products = oracle.packed_matmul(x, weight)
        index, value = ops.packed_argmax(x, weight)
        assert index.dtype == mx.uint32
        assert index.shape == value.shape == shape[:-1]
        chosen = np.take_along_axis(products, np.array(index)[..., None].astype(int), -1)[..., 0]
        assert_within(chosen, value, 1e-3, shape)
        assert_within(products.max(-1), value, 1e-3, shape)


def test_embedding_takes_all_kinds_of_tokens(rng):
    weight = draw_weight(rng, "group")
    rows = oracle.packed_embedding(mx.arange(N), weight, mx.float32)
    tokens = rng.integers(0, N, (2, 7))
    for dtype in (mx.int32, mx.uint32, mx.int64, mx.uint16):
        got = ops.packed_embedding(mx.array(tokens).astype(dtype), weight, mx.float32)
        assert_within(got, rows[tokens], 1e-6, dtype)
    negative = ops.packed_embedding(mx.array([-1, -N]), weight, mx.float32)
    assert_within(negative, rows[[-1, 0]], 1e-6)
    assert ops.packed_embedding(mx.zeros((0,), mx.int32), weight, mx.float16).shape == (0, K)


def bad_adapters(rng):
    """Adapters that would be read where there is nothing, or that make no sense."""
    good = draw_adapters(rng, 2)
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


def test_an_adapter_given_twice_is_one_array(rng):
    """Gate and up lie in the same arrays; and two rows may use one adapter under two scales."""
    weight, up, x = draw_weight(rng), draw_weight(rng), draw(rng, (2, 3, K))
    one = draw_low_rank(rng, [0, 1], K, (N,), [4], [mx.float16]).low_rank
    twice = one._replace(numbers=one.numbers * 2, parts=one.parts * 2, scales=mx.array([0.5, -2.0]))
    assert_right(x, weight, adapters=(twice,))
    pair = (twice, twice._replace(scales=mx.array([1.0, 3.0])))
    assert_right(x, weight, up, adapters=pair)


def test_a_trace_keeps_adapters_apart_that_differ_in_place_only(rng):
    """`mx.compile` merges equal operations: those of other parts of one array are not equal."""
    weight, x = draw_weight(rng), draw(rng, (1, K))
    first = draw_low_rank(rng, [0], K, (N,), [4], [mx.float16]).low_rank
    second = draw_low_rank(rng, [0], K, (N,), [4], [mx.float16]).low_rank
    numbers = mx.concatenate([first.numbers[0], second.numbers[0]])
    a, b, rank = second.parts[0]
    offset = first.numbers[0].size
    moved = Part(a + offset, b + offset, rank)

    @mx.compile
    def both(x, numbers, scales, slots):
        def of(part):
            low_rank = first._replace(numbers=(numbers,), parts=(part,), scales=scales, slots=slots)
            return ops.packed_matmul(x, weight, ProductOptions(adapters=(low_rank,)))

        return of(first.parts[0]), of(moved)

    found = both(x, numbers, first.scales, first.slots)
    for got, each in zip(found, (first, second._replace(scales=first.scales)), strict=True):
        assert_close(got, oracle.packed_matmul(x, weight, ProductOptions(adapters=(each,))))


def test_what_does_not_fit_is_refused(rng):
    weight, x = draw_weight(rng, "group"), draw(rng, (2, K))
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
        *(
            ((x, weight, {"adapters": (adapters,)}), message)
            for adapters, message in bad_adapters(rng)
        ),
    ]
    for (given, matrix, options), message in cases:
        with pytest.raises(ValueError, match=message):
            ops.packed_matmul(given, matrix, ProductOptions(**options))
    with pytest.raises(ValueError, match="adapters of 1 matrices, not of 2"):
        ops.packed_swiglu(x, weight, weight, ProductOptions(adapters=(draw_adapters(rng, 2),)))
