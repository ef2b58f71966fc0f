"""Tables of k-means against the best ones; affine weights written as floats and packed again."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import PackedWeight, dequantize, pack_codes, unpack_codes
from afm_mlx.quantization import float_to_codes
from afm_mlx.quantization.float_to_codes import pack, round_to
from afm_mlx.quantization.grids import any_grids, k_means, mlx_grids, nearest_entries
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.qat.qat_layers import initial_clip, quantize
from tests.tools.cases import all_pairs, each


def least_error(weights, entries):
    """Squared error of the best table: dynamic programming over where clusters of sorted weights end."""
    ordered = np.sort(weights.astype(np.float64))
    sums, squares = (np.concatenate([[0], np.cumsum(ordered**p)]) for p in (1, 2))
    place = np.arange(len(ordered) + 1)
    count = place - place[:, None]
    spread = np.subtract.outer(sums, sums).T ** 2 / np.maximum(count, 1)
    cost = np.where(count > 0, np.subtract.outer(squares, squares).T - spread, np.inf)
    least = cost[0]
    for _ in range(entries - 1):
        least = (least[:, None] + cost).min(axis=0)
    return least[-1]


def test_a_table_is_near_the_best_there_is(rng):
    for kind, entries in all_pairs(["normal", "heavy tails", "two heaps", "an outlier"], [4, 16]):
        weights = {
            "normal": rng.normal(0, 0.02, (4, 300)),
            "heavy tails": rng.standard_t(3, (4, 300)),
            "two heaps": rng.normal(0, 0.1, (4, 300)) + rng.choice([-1, 1], (4, 300)),
            "an outlier": np.where(np.arange(300) == 7, 1e3, rng.normal(0, 1, (4, 300))),
        }[kind].astype(np.float32)
        tables, exact = k_means(weights, entries)
        assert not exact.any()
        assert (np.diff(tables, axis=1) >= 0).all()
        codes = nearest_entries(weights, tables)
        errors = np.square(np.take_along_axis(tables, codes.astype(int), 1) - weights).sum(axis=1)
        # A far outlier leaves most of the bins empty.
        factor = 2.0 if kind == "an outlier" else 1.06
        for got, line in zip(errors, weights, strict=True):
            assert got <= factor * least_error(line, entries)


# -- affine

ROWS, INPUTS = 64, 256
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def codes_of(packed):
    return np.array(unpack_codes(packed.codes, packed.bits))


def normal(rng, dtype=mx.float32):
    return mx.array(rng.normal(0, 0.02, (ROWS, INPUTS))).astype(dtype)


def numbers(array):
    return np.array(array.astype(mx.float32))


def rms(difference, weight):
    return np.sqrt(np.square(difference).mean() / np.square(weight).mean())


@each(("bits", "group", "dtype"), all_pairs([2, 4, 8], [32, 64, 128], FLOATS))
def test_codes_of_mx_quantize_come_back(rng, bits, group, dtype):
    """For floats made by `mx.dequantize`, in their own dtype, and for floats rounded from float32."""
    words, scales, biases = mx.quantize(normal(rng, dtype), group, bits)
    rule = QuantizationRule(bits, "affine", group_size=group)
    here = dequantize(PackedWeight(words, bits, "affine", scales, biases), dtype)
    for weight in (mx.dequantize(words, scales, biases, group, bits), here):
        packed, exact = pack(weight, rule)
        if (bits, dtype) == (8, mx.bfloat16) and weight is not here:
            # Products of 8 digits lie further apart than 255 levels: several codes give one number.
            difference = numbers(dequantize(packed)) - numbers(weight)
            assert rms(difference, numbers(weight)) <= 2**-7
            continue
        assert exact
        assert mx.array_equal(dequantize(packed, dtype), here)
        if (bits, dtype) != (8, mx.bfloat16):
            assert mx.array_equal(packed.scales, scales)
            assert mx.array_equal(packed.biases, biases)
            assert mx.array_equal(packed.codes, words)


@pytest.mark.parametrize(
    ("bits", "unit", "dtype"),
    all_pairs([2, 4, 8], [("tensor", None), ("row", None), ("group", 16), ("group", 256)], FLOATS),
)
def test_codes_of_any_bias_come_back(rng, monkeypatch, bits, unit, dtype):
    if (bits, dtype) == (8, mx.bfloat16):
        dtype = mx.float16  # 255 levels do not all fit bfloat16's 8 digits
    per, group = unit
    monkeypatch.setattr(float_to_codes, "_BLOCK_ELEMENTS", 5 * INPUTS)
    rule = QuantizationRule(bits, "affine", per, group)
    first, exact = pack(normal(rng, dtype), rule)
    assert not exact
    weight = dequantize(first, dtype)
    packed, exact = pack(weight, rule)
    assert exact
    np.testing.assert_array_equal(codes_of(packed), codes_of(first))
    got, wanted = numbers(dequantize(packed, dtype)), numbers(weight)
    if dtype == mx.float32:  # computed in float32 from other scales and biases
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2**-21 * np.abs(wanted).max())
    else:
        # A level may lie so near to the middle of two numbers that float32 has no scale for it.
        assert (got != wanted).mean() <= 0.02
        place = 2.0 ** (-10 if dtype == mx.float16 else -7)
        np.testing.assert_allclose(got, wanted, rtol=place, atol=2**-23)


def test_numbers_of_affine_training_come_back(rng):
    """Grids of quantization-aware training, in MLX's own format: any bias, ends in and out of the range."""
    for bits in [2, 4]:
        for dtype in FLOATS:
            rule = QuantizationRule(bits, "affine")
            weight = normal(rng, dtype)
            clip = initial_clip(weight, rule)
            clip = clip * mx.array(rng.uniform(0.8, 1.2, clip.shape).astype(np.float32))
            codes, scales, biases = quantize(weight, clip, rule)
            parts = [part.astype(dtype) for part in (scales, biases)]
            trained = PackedWeight(pack_codes(codes, bits), bits, "affine", *parts)
            packed, exact = pack(dequantize(trained, dtype), rule)
            assert exact
            difference = numbers(dequantize(packed)) - numbers(dequantize(trained))
            assert rms(difference, numbers(weight)) <= 2.0 ** -{mx.float32: 20}.get(dtype, 10)
            assert (codes_of(packed) == np.array(codes)).mean() > 0.98


def test_floats_of_another_type_keep_codes(rng):
    """`convert -d --dtype`: scales are rounded to the new type, codes stay."""
    rule = QuantizationRule(4, "affine")
    for before in FLOATS:
        first = pack(normal(rng, before), rule).packed
        for after in FLOATS:
            packed, exact = pack(dequantize(first, after), rule)
            assert exact
            same = codes_of(packed) == codes_of(first)
            # Where both ends are equally far from 0 after rounding, codes may count from the other one.
            assert same.mean() > 0.99
            difference = numbers(dequantize(packed)) - numbers(dequantize(first))
            digits = 8 if mx.bfloat16 in (before, after) else 11
            assert rms(difference, numbers(dequantize(first))) <= 2.0 ** (1 - digits)


def test_groups_of_few_levels_keep_their_numbers(rng):
    """Two or three levels are on many grids: their codes are unknown, and any of them has the same numbers."""
    for bits in [2, 4, 8]:
        for group in [16, 32]:
            levels = rng.integers(0, 2**bits, (ROWS * INPUTS // group, 3))
            codes = np.take_along_axis(levels, rng.integers(0, 3, (len(levels), group)), axis=1)
            scales = rng.uniform(1e-3, 0.1, (len(levels), 1)).astype(np.float32)
            zeros = rng.integers(0, 2**bits, (len(levels), 1)).astype(np.float32)
            values = (codes - zeros).astype(np.float32) * scales
            values[7] = values[7, 0]
            weight = values.reshape(ROWS, INPUTS)
            packed, exact = pack(
                mx.array(weight), QuantizationRule(bits, "affine", group_size=group)
            )
            assert exact
            got = np.array(dequantize(packed)).reshape(values.shape)
            largest = np.abs(values).max(axis=1, keepdims=True)
            assert (np.abs(got - values) <= 2**-21 * np.maximum(largest, scales)).all()


def test_weights_on_no_grid_are_found_on_none(rng):
    for bits in [2, 4, 8]:
        for dtype in FLOATS:
            units = round_to(rng.normal(0, 0.02, (2000, 32)).astype(np.float32), dtype)
            assert not mlx_grids(units, bits, dtype).found.any()
            assert not any_grids(units, units.mean(axis=1), bits, dtype).found.any()
            assert not any_grids(units[:, :16], units.mean(axis=1), bits, dtype).found.any()


def test_a_stray_weight_is_rounded_and_the_others_keep_their_codes(rng):
    rule = QuantizationRule(4, "affine")
    first = pack(normal(rng), rule).packed
    weight = dequantize(first)
    weight[3, 70] += 1e-4
    packed, exact = pack(weight, rule)
    assert not exact
    same = np.array(packed.codes == first.codes).reshape(ROWS, INPUTS // 64, -1).all(axis=2)
    assert same.sum() >= same.size - 1
    assert not same[3, 1] or numbers(dequantize(packed))[3, 70] != numbers(weight)[3, 70]
