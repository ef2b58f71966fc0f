"""The CPU primitives around attention against float64 NumPy, on every instruction set of this machine."""

import mlx.core as mx
import pytest

from afm_mlx.kernels import HeadOptions, KeyValues, NewToken
from afm_mlx.kernels.selftest.specs import DTYPES
from tests.tools.cases import all_pairs, draw
from tests.tools.compare import assert_same
from tests.tools.problems import assert_solved, draw_heads, with_args

# (heads, kv_heads, head_dim): aligned and not, one head to a group, more than a tile's rows to one.
SHAPES = [(16, 2, 128), (4, 2, 64), (6, 2, 80), (3, 3, 2), (40, 1, 36), (5, 1, 512)]


def test_attention(ops, rng, isas):
    """On each side of a block of keys, a piece of work, a tile of queries and the kernels' rows and vectors."""
    lengths, stored_types = [1, 3, 63, 64, 65, 511, 513, 1300], (mx.int8, *DTYPES)
    for _ in isas():
        for shape, dtype, stored, length, rope, tokens in all_pairs(
            SHAPES, DTYPES, stored_types, lengths, (False, True), (1, 2, 5)
        ):
            options = {"capacity": length + tokens - 1, "stored": stored, "rope": rope}
            options["tail"] = 64 * int(rng.integers(2))
            problem = draw_heads(rng, "decode_attention", dtype, 3, tokens, shape, **options)
            assert_solved(problem, ops.decode_attention)
        for tokens, shape, dtype, stored in all_pairs((1, 2, 7, 200), SHAPES, DTYPES, stored_types):
            options = {"capacity": tokens + int(rng.integers(0, 150)), "stored": stored}
            problem = draw_heads(rng, "causal_attention", dtype, 2, tokens, shape, **options)
            assert_solved(problem, ops.causal_attention)


def test_a_token_comes_out_the_same_whatever_is_beside_it(ops, rng, isas, set_threads):
    """Bit for bit: with other rows and tokens, on any number of threads, wherever the tail begins."""
    batch, tokens, tail = 5, 4, 64
    cases = all_pairs(SHAPES[:3], (mx.int8, *DTYPES), (60, 700, 1500))
    for _ in isas():
        for (heads, kv_heads, head_dim), stored, longest in cases:
            columns = mx.array(
                rng.integers(-128, 128, (batch, 2 * kv_heads, longest + tail, head_dim))
            ).astype(stored)
            scales = [mx.array(0.02), mx.array(0.03)] if stored == mx.int8 else [None, None]
            queries = draw(rng, (batch, heads, tokens, head_dim))
            lengths = rng.integers(longest - 40, longest + 1, batch)

            def attended(rows, of_row, kv=columns, scales=scales, q=queries, seen=lengths):
                starts = [max(0, int(seen[row] - rng.integers(1, tail - tokens))) for row in rows]
                tails = [kv[row, :, s : s + tail] for row, s in zip(rows, starts, strict=True)]
                which, ends = mx.array(rows), mx.array(starts)[:, None, None, None]
                in_buffer = mx.arange(kv.shape[2])[:, None] < ends
                buffer = mx.where(in_buffer, kv[which], 1).astype(kv.dtype)
                given = KeyValues(buffer, *scales, mx.stack(tails), mx.array(starts))
                first = mx.array([int(seen[row]) + of_row.start for row in rows])
                return ops.decode_attention(q[which][:, :, of_row], given, first)

            set_threads(1)
            together = attended(list(range(batch)), slice(0, tokens))
            mx.eval(together)
            set_threads(3)
            for row, token in ((0, 0), (2, 1), (4, 3)):
                alone = attended([row], slice(token, token + 1))
                assert_same(alone[0, :, 0], together[row, :, token], (head_dim, stored, longest))


def test_decode_attention_reads_buffers_where_they_are(ops, rng):
    """A slice of a cache, transposed queries and a step along the head: no copy that changes the result."""
    problem = draw_heads(rng, "decode_attention", mx.float32, 2, 1, (9, 3, 32), capacity=50)
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
    queries, kv, *_ = draw_heads(
        rng, "decode_attention", mx.float32, 2, 1, (2, 1, 8), capacity=5
    ).args
    got = ops.decode_attention(queries, kv, mx.array([2**30, 0]))
    assert_same(got[0], ops.decode_attention(queries, kv, mx.array([5, 5]))[0])
    assert not got[1].any()


def test_floats_lie_anywhere_and_may_be_anything(ops, rng, isas):
    """A step along the head, a transposed cache, large and subnormal numbers; a NaN in sight shows."""
    for dtype in (dtype for _ in isas() for dtype in DTYPES):
        sizes = {"capacity": 90, "stored": dtype}
        queries, kv, *_ = draw_heads(rng, "decode_attention", dtype, 2, 1, (6, 3, 32), **sizes).args

        def attended(buffer, lengths=(80, 70), queries=queries):
            return ops.decode_attention(queries, KeyValues(buffer), mx.array(lengths))

        for buffer in (
            mx.repeat(kv.buffer, 2, axis=3)[..., ::2],
            mx.contiguous(kv.buffer.swapaxes(1, 2)).swapaxes(1, 2),
        ):
            assert_same(attended(buffer), attended(kv.buffer))

        # Equal keys make means of the values, which are all the same.
        values = mx.array([2.0**-24, -(2.0**-15), 60000.0, 0.0] * 8, dtype=dtype)
        columns = mx.broadcast_to(values, (1, 1, 5, 32))
        mean = attended(
            mx.concatenate([mx.zeros_like(columns), columns], axis=1), [4], queries[:1, :2]
        )
        assert mx.allclose(mean, mx.broadcast_to(values, mean.shape), rtol=1e-2, atol=0)

        # Head 0 has keys, head 3 their values; the second row sees 70 columns.
        for head, column, number in all_pairs((0, 3), (0, 63, 69, 75), (mx.nan, mx.inf)):
            buffer = kv.buffer[...]
            buffer[:, head, column] = number
            finite = mx.isfinite(attended(buffer)).all(axis=(2, 3))
            assert not finite[0, :2].any()
            assert finite[1, :2].tolist() == [column >= 70] * 2
            assert finite[:, 2:].all()


def test_rope_norm_quantize(ops, rng):
    for shape, dtype, tokens, floats in all_pairs(SHAPES[:4], DTYPES, (1, 3), (False, True)):
        options = {"stored": dtype if floats else mx.int8}
        problem = draw_heads(rng, "rope_norm_quantize", dtype, 2, tokens, shape, **options)
        assert_solved(problem, ops.rope_norm_quantize)
        qkv, _, options = problem.args
        assert_solved(with_args(problem, qkv, 4000, options), ops.rope_norm_quantize)


def test_norm_rope(ops, rng):
    for shape, dtype, tokens, norm in all_pairs(SHAPES, DTYPES, (1, 3, 70), (False, True)):
        options = {"stored": dtype, "norm": norm}
        problem = draw_heads(rng, "norm_rope", dtype, 2, tokens, shape, **options)
        assert_solved(problem, ops.norm_rope)
        heads, periods, _, *rest = problem.args
        # A view, as a projection's result is, and one position for all rows, beyond those that are kept.
        strided = mx.contiguous(heads.swapaxes(1, 2)).swapaxes(1, 2)
        for offset in (0, 4000):
            assert_solved(with_args(problem, strided, periods, offset, *rest), ops.norm_rope)


def test_norm_rope_attend(ops, rng, isas):
    """With and without norms, for rows whose tails begin and end anywhere; the given tail stays as it is."""
    for _ in isas():
        for shape, dtype, norm, capacity in all_pairs(SHAPES, DTYPES, (False, True), (1, 700)):
            options = {"stored": dtype, "norm": norm, "capacity": capacity, "tail": 64}
            problem = draw_heads(rng, "norm_rope_attend", dtype, 3, 1, shape, **options)
            before = problem.args[1].tail[...]
            assert_solved(problem, ops.norm_rope_attend)
            assert_same(problem.args[1].tail, before)


def test_norm_rope_attend_equals_its_parts(ops, rng, isas):
    """Bit for bit, as a step before it and a step after it may take either way."""
    for _ in isas():
        for dtype, norm in all_pairs(DTYPES, (False, True)):
            options = {"stored": dtype, "norm": norm, "capacity": 90, "tail": 64}
            shape = (6, 2, 80)
            args = draw_heads(rng, "norm_rope_attend", dtype, 3, 1, shape, **options).args
            token, kv, lengths = args
            q, k, v = token.heads(80)
            q, k = (
                ops.norm_rope(x, token.periods, lengths - 1, of, token.eps)
                for x, of in zip((q, k), token.norms or (None, None), strict=True)
            )
            tail = ops.write_tokens(kv.tail, mx.concatenate([k, v], axis=1), lengths - kv.starts)
            y = ops.decode_attention(q, kv._replace(tail=tail), lengths)
            got = ops.norm_rope_attend(*args)
            assert_same(got[0], y.reshape(3, 1, -1))
            used = int((lengths - kv.starts).max())
            assert_same(got[1][:, :, :used], tail[:, :, :used])


def test_rows_that_end_earlier_have_numbers_where_others_have_tokens(ops, rng):
    """Columns in new memory that are copied together: none is what the memory held before."""
    token, kv, _ = draw_heads(
        rng,
        "norm_rope_attend",
        mx.float32,
        2,
        1,
        (4, 2, 64),
        capacity=9,
        tail=64,
        stored=mx.float32,
    ).args
    token, starts = token._replace(norms=None), mx.array([5, 5])
    for ends in ([9, 20], [7, 21], [8, 22]):
        mx.eval(mx.full((2, 4, 64, 64), mx.nan))  # memory that the next array may get
        lengths = starts + mx.array(ends)
        y, tail = ops.norm_rope_attend(token, kv._replace(starts=starts), lengths)
        assert mx.isfinite(y).all()
        assert mx.isfinite(tail[:, :, : max(ends)]).all()
        kv = kv._replace(tail=tail)


def test_norm_rope_attend_writes_nothing_outside_the_tail(ops):
    """Nor does it look there, whatever lengths it is given."""
    token = NewToken(*[mx.ones((3, 1, 8))] * 3, mx.ones(4))
    zeros = mx.zeros((3, 2, 4, 8))
    kv = KeyValues(zeros, tail=zeros, starts=mx.array([0, 4, 4]))
    y, tail = ops.norm_rope_attend(token, kv, mx.array([5, 9, 4]))
    assert not tail.any()
    assert not y.any()


def test_norm_rope_attend_refuses(ops):
    x, cache, starts = mx.zeros((2, 1, 8)), mx.zeros((2, 4, 5, 4)), mx.zeros(2, mx.int32)
    kv, ones = KeyValues(cache, tail=cache, starts=starts), mx.ones(4)
    token, half = NewToken(x, x, x, mx.ones(2)), x[..., :4]
    for changed, columns, lengths, message in (
        ({"values": half}, kv, starts, "keys and values must be"),
        ({"queries": half}, kv, starts, "queries must be"),
        ({"periods": mx.ones(3)}, kv, starts, "periods must be"),
        ({}, kv._replace(buffer=cache[:, :3]), starts, "buffer and tail"),
        ({}, kv._replace(tail=cache[:1]), starts, "buffer and tail"),
        ({}, kv._replace(tail=cache.astype(mx.float16)), starts, "one dtype"),
        ({}, kv, starts[:1], "lengths and starts"),
        ({"norms": (ones,)}, kv, starts, "norm of queries"),
        ({"norms": (ones, mx.ones(3))}, kv, starts, "norms must be"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.norm_rope_attend(token._replace(**changed), columns, lengths)


def test_norm_rope_refuses(ops):
    heads, periods = mx.zeros((2, 1, 3, 8)), mx.ones(4)
    for arguments, message in (
        ((mx.zeros((2, 1, 3, 7)), periods, 0), "head_dim even"),
        ((heads, mx.ones(3), 0), "periods must be"),
        ((heads, periods, mx.zeros(3, mx.int32)), "offsets must be"),
        ((heads, periods, 0, mx.ones(4), 1e-6), "weight must be"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.norm_rope(*arguments)


def test_quantization_rounds_half_to_even_and_clamps(ops):
    values = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    qkv = mx.array([0.0] * 16 + values).reshape(1, 1, 24)
    ones, scale = mx.ones(8), mx.array(0.25)
    _, codes = ops.rope_norm_quantize(qkv, 0, HeadOptions(ones, ones, scale, scale, 1, 1e4, 1e-5))
    assert codes[:, 1].reshape(-1).tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
