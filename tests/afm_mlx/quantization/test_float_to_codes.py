"""Float matrices to codes: grids come back bit for bit, everything else to a stated error."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.kernels import dequantize, pack_codes, unpack_codes
from afm_mlx.quantization import float_to_codes
from afm_mlx.quantization.float_to_codes import Rows, pack
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import all_pairs, each
from tests.tools.compare import assert_close, assert_same

ROWS, INPUTS = 48, 256
BITS, PER = (2, 4, 8), ("tensor", "row", "group")


def codes_of(packed):
    return np.array(unpack_codes(packed.codes, packed.bits))


def on_grid(rng, rule, dtype):
    """Random codes, with the top or bottom one in every unit, and the matrix that they stand for."""
    size = rule.group_size or INPUTS
    codes = rng.integers(0, 2**rule.bits, (ROWS, INPUTS))
    codes[:, ::size] = rng.choice([0, 2**rule.bits - 1], codes[:, ::size].shape)
    codes[:, 1::size] = 1 << (rule.bits - 1)
    scales = rng.uniform(1e-3, 0.1, rule.part_shapes((ROWS, INPUTS))["scales"])
    scales = np.asarray(scales, np.float32)
    wide = np.repeat(scales, size, axis=1) if scales.ndim == 2 else scales.reshape(-1, 1)
    values = (codes - (2**rule.bits - 1) / 2).astype(np.float32) * wide
    return codes, mx.array(values).astype(dtype)


@pytest.mark.parametrize(
    ("bits", "per", "dtype", "blocks"),
    all_pairs(BITS, PER, [mx.float32, mx.float16, mx.bfloat16], ["one", "many"]),
)
def test_codes_on_a_grid_come_back(rng, monkeypatch, bits, per, dtype, blocks):
    if bits == 8 and dtype == mx.bfloat16:
        dtype = mx.float32  # 255 levels a half apart do not all fit bfloat16's 8 digits
    rule = QuantizationRule(bits, "balanced", per)
    if blocks == "many":
        monkeypatch.setattr(float_to_codes, "_BLOCK_ELEMENTS", 5 * INPUTS)
        monkeypatch.setattr(float_to_codes, "_SAMPLE_ELEMENTS", 7 * INPUTS)
    codes, weight = on_grid(rng, rule, dtype)
    packed, exact = pack(weight, rule)
    assert exact
    np.testing.assert_array_equal(codes_of(packed), codes)
    assert mx.array_equal(dequantize(packed).astype(dtype), weight)
    assert mx.array_equal(packed.codes, pack_codes(mx.array(codes), rule.bits))
    assert packed.scales.dtype == mx.float32


def test_a_grid_of_a_single_scale():
    """Codes under which float16 leaves one float32 of all scales, next to the middle of the exact bounds."""
    codes = np.array(
        """0 128 181 203 12 152 86 23 7 239 9 17 30 168 248 192 211 36 44 223 239 146 135 112 18 186 135
        140 109 248 219 58 232 132 166 50 3 236 204 6 79 221 133 228 207 199 224 188 102 96 81 52 232 32
        23 84 206 14 248 25 169 255 34 38""".split(),
        np.int32,
    )[None]
    scale = np.float32(0.059126418)
    weight = mx.array((codes - 127.5).astype(np.float32) * scale).astype(mx.float16)
    packed, exact = pack(weight, QuantizationRule(8))
    assert exact
    assert packed.scales.item() == scale
    np.testing.assert_array_equal(codes_of(packed), codes)


def test_grids_without_their_outer_levels_and_rows_of_zeros(rng):
    rule = QuantizationRule(4)
    codes, _ = on_grid(rng, rule, mx.float32)
    inner = np.clip(codes, 3, 12)
    scales = rng.uniform(0.01, 0.1, (ROWS, 1)).astype(np.float32)
    values = (inner - 7.5).astype(np.float32) * scales
    values[5] = 0
    packed, exact = pack(mx.array(values), rule)
    assert exact
    np.testing.assert_array_equal(np.array(dequantize(packed)), values)
    assert packed.scales[5].item() == 0


def test_a_balanced_grid_gives_affine_groups_their_codes(rng):
    """`mx.quantize` stretches its grid over the ends of each group: levels end up between codes."""
    codes = rng.choice(4, (64, 512), p=[0.07, 0.43, 0.43, 0.07])
    codes[:, ::64] = 3  # the middle levels alone would be on a grid three times as coarse
    weight = (codes - 1.5).astype(np.float32) * rng.uniform(0.01, 0.1, (64, 1)).astype(np.float32)
    packed, exact = pack(mx.array(weight), QuantizationRule(2, "affine"))
    assert exact
    np.testing.assert_array_equal(codes_of(packed), codes)
    assert_close(mx.dequantize(packed.codes, packed.scales, packed.biases, 64, 2), weight, 1e-6)


def test_normal_weights_keep_a_stated_error(rng):
    for mode, bits, per in all_pairs(["balanced", "affine", "palette"], BITS, PER):
        best = {2: 0.3449, 4: 0.1074, 8: 0.0089}[bits]
        weight = rng.normal(0, 0.02, (ROWS, INPUTS)).astype(np.float32)
        packed, exact = pack(mx.array(weight), QuantizationRule(bits, mode, per))
        assert not exact or (mode, bits, per) == ("palette", 8, "row")
        error = np.array(dequantize(packed)) - weight
        # Few weights for each of 256 entries; extremes and not least squares in MLX's own format.
        factors = {("palette", 8, per): 3, ("affine", bits, "group"): 1.5}
        factor = factors.get((mode, bits, per), 1.25)
        assert error.std() / 0.02 <= factor * best
        assert packed.granularity == ("table" if mode == "palette" else per)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_affine_groups_are_mlxs_own(rng, monkeypatch, dtype):
    monkeypatch.setattr(float_to_codes, "_BLOCK_ELEMENTS", 5 * INPUTS)
    weight = mx.array(rng.normal(0, 0.1, (ROWS, INPUTS))).astype(dtype)
    for bits, group in ((2, 32), (4, 64), (8, 128)):
        packed, _ = pack(weight, QuantizationRule(bits, "affine", group_size=group))
        wanted = mx.quantize(weight, group, bits)
        for got, array in zip((packed.codes, packed.scales, packed.biases), wanted, strict=True):
            assert got.dtype == array.dtype
            assert mx.array_equal(got, array)


def test_a_palette_of_few_values_is_exact(rng):
    for per in ["tensor", "row", "group"]:
        rule = QuantizationRule(4, "palette", per)
        count, _ = rule.part_shapes((ROWS, INPUTS))["table"]
        table = rng.normal(0, 1, (count, 13)).astype(np.float32)
        codes = rng.integers(0, 13, (ROWS, INPUTS))
        values = table[np.arange(ROWS)[:, None] * len(table) // ROWS, codes]
        packed, exact = pack(mx.array(values), rule)
        assert exact
        np.testing.assert_array_equal(np.array(dequantize(packed)), values)


def test_one_stray_weight_is_no_grid(rng, monkeypatch):
    """A sample may be on a grid, or in a table, that the matrix does not."""
    monkeypatch.setattr(float_to_codes, "_SAMPLE_ELEMENTS", INPUTS)
    monkeypatch.setattr(float_to_codes, "_BLOCK_ELEMENTS", 5 * INPUTS)
    for mode in ("balanced", "palette"):
        rule = QuantizationRule(2, mode, "tensor")
        _, weight = on_grid(rng, QuantizationRule(2, "balanced", "tensor"), mx.float32)
        assert pack(weight, rule).exact
        weight[ROWS - 2, 3] = 0.777
        assert not pack(weight, rule).exact


@each(
    ("rule", "words"),
    [
        (QuantizationRule(2), "40 inputs, which can't be packed in 2 bits"),
        (QuantizationRule(4, "affine"), "40 inputs, which groups of 64 do not divide"),
        (QuantizationRule(4, "palette"), "6 rows, which groups of 16 do not divide"),
    ],
)
def test_shapes_that_cannot_be_packed(rule, words):
    with pytest.raises((CheckpointError, ConfigError), match=f"lm_head has {words}"):
        pack(mx.zeros((6, 40)), rule, name="lm_head")


def test_numbers_that_cannot_be_packed(rng):
    for bad, mode in itertools.product((np.nan, np.inf), ("balanced", "affine", "palette")):
        weight = rng.normal(0, 1, (6, 40)).astype(np.float32)
        weight[3, 3] = bad
        with pytest.raises(CheckpointError, match="lm_head holds NaN or infinity"):
            pack(mx.array(weight), QuantizationRule(8, mode, "row"), name="lm_head")
    with pytest.raises(CheckpointError, match=r"lm_head: the weight is .*int32"):
        pack(mx.zeros((4, 32), mx.int32), QuantizationRule(4), name="lm_head")


def test_rows_are_read_in_blocks(rng, monkeypatch):
    monkeypatch.setattr(float_to_codes, "_SAMPLE_ELEMENTS", 4 * INPUTS)
    weight = rng.normal(0, 1, (ROWS, INPUTS)).astype(np.float32)
    heights = []

    def read(start, stop):
        heights.append(stop - start)
        return weight[start:stop]

    for rule in (
        QuantizationRule(2, "balanced", "tensor"),
        QuantizationRule(2, "balanced", "row"),
        QuantizationRule(2, "affine"),
        QuantizationRule(2, "palette", group_size=2),
    ):
        whole, _ = pack(mx.array(weight), rule)
        with monkeypatch.context() as patch:
            patch.setattr(float_to_codes, "_BLOCK_ELEMENTS", 4 * INPUTS)
            parts, _ = pack(Rows((ROWS, INPUTS), mx.float32, read), rule)
        assert_same(dequantize(parts), dequantize(whole))
    assert max(heights) <= 4


def test_small_groups_of_8_bits_need_not_reach_their_outer_levels(rng):
    """Of 16 random codes the largest often lies far below the top of 128 levels."""
    rule = QuantizationRule(8, "balanced", group_size=16)
    codes = rng.integers(0, 256, (ROWS, INPUTS))
    codes[:, 1::16] = 128 + rng.integers(0, 2, codes[:, 1::16].shape)  # no coarser grid fits
    codes[0] = np.clip(codes[0], 100, 150)  # on finer grids, too
    scales = rng.uniform(0.01, 0.1, (ROWS, INPUTS // 16)).astype(np.float32)
    values = (codes - 127.5).astype(np.float32) * np.repeat(scales, 16, axis=1)
    packed, exact = pack(mx.array(values), rule)
    assert exact
    np.testing.assert_array_equal(np.array(dequantize(packed)), values)
    np.testing.assert_array_equal(codes_of(packed)[1:], codes[1:])
