"""The largest product on Metal, run by the emulator: the next token of greedy decoding."""

import mlx.core as mx
import numpy as np

from afm_mlx import kernels
from afm_mlx.kernels import BITS, PackedWeight, dispatch
from afm_mlx.kernels.metal import matmul, products
from afm_mlx.kernels.ops import case_of
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, FORMATS, Spec
from tests.tools.cases import all_pairs, each
from tests.tools.problems import assert_solved


# A simdgroup has one tile up to 32,768 rows, or 16,384 for 3 or 4 vectors; for more, chunks are of 4,096.
@each(
    "rows, out_dims",
    [(1, 1), (1, 5), (4, 70), (2, 32768), (2, 40001), (3, 16384), (6, 4096 + 37), (33, 70)],
)
def test_ties_go_to_the_lowest_row(metal, rng, rows, out_dims):
    """Integers whose products are exact in float32, with rows of the matrix that occur again and again."""
    x = mx.array(rng.integers(-3, 4, (rows, 16)).astype(np.float32))
    distinct = rng.integers(0, 16, (max(1, out_dims // 9), 16))
    codes = distinct[rng.integers(0, len(distinct), out_dims)]
    weight = PackedWeight(kernels.pack_codes(mx.array(codes), 4), 4, "balanced", mx.array(2.0))
    logits = np.array(x).astype(np.float64) @ (2 * codes - 15).T
    chosen = dispatch.select("packed_argmax", case_of("packed_argmax", x, weight)).name
    assert chosen == ("metal/argmax" if rows <= 4 else "metal/argmax_of_products")
    index, value = kernels.packed_argmax(x, weight)
    assert index.dtype == mx.uint32
    assert index.tolist() == logits.argmax(-1).tolist()
    assert value.tolist() == logits.max(-1).tolist()


def test_the_largest_in_any_tile_is_found(metal, rng):
    """A simdgroup of the 3B's head has 5 or 10 tiles. Here, the last simdgroup's last one has a single row."""
    out_dims = 40_001
    for rows in (1, 2, 3):
        code_rows = products.most_code_rows(rows)
        tiles = -(-out_dims // (code_rows * matmul.CHUNK))
        assert tiles >= 2
        assert out_dims % (tiles * code_rows) % code_rows == 1
        # One place in each tile of a simdgroup, one of which is the last row of all.
        first = int(rng.integers(out_dims // (tiles * code_rows))) * tiles * code_rows
        places = [first + tile * code_rows + int(rng.integers(code_rows)) for tile in range(tiles)]
        places[out_dims % (tiles * code_rows) // code_rows] = out_dims - 1
        for some in (places[i : i + rows] for i in range(0, tiles, rows)):
            signs = np.where(np.arange(16) >> np.arange(rows)[:, None] & 1, 1, -1)
            codes = rng.integers(6, 10, (out_dims, 16))
            codes[some] = np.where(signs[: len(some)] > 0, 15, 0)
            weight = PackedWeight(
                kernels.pack_codes(mx.array(codes), 4), 4, "balanced", mx.array(2.0)
            )
            index, value = kernels.packed_argmax(mx.array(signs.astype(np.float32)), weight)
            assert index.tolist()[: len(some)] == some
            assert value.tolist()[: len(some)] == [16 * 15] * len(some)


def test_every_format(metal, rng):
    for (mode, per), bits, dtype, rows, shape in all_pairs(
        FORMATS, BITS, DTYPES, (1, 3), ((704, 21), (64, 8))
    ):
        group = 32 if per == "group" else 0
        spec = Spec("packed_argmax", dtype, rows, 1, *shape, bits, mode, per, group, norm=rows > 1)
        assert_solved(make(spec._replace(activation_bits=32), rng), kernels.packed_argmax)


def test_what_is_no_number_is_the_largest_so_that_it_is_seen(metal):
    scales = mx.array([-1.0] * 4 + [float("nan")] + [-2.0] * 4)
    weight = PackedWeight(mx.zeros((9, 2), mx.uint32), 4, "balanced", scales)
    index, value = kernels.packed_argmax(mx.ones((1, 16)), weight)
    assert index.tolist() == [4]
    assert not np.isfinite(value.tolist()[0])
