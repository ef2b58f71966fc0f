"""Rules: their defaults, what is refused, and the bytes that they come to."""

import itertools

import mlx.core as mx
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.rule import GRANULARITIES, QuantizationRule, rule_of
from tests.tools.cases import each

MODES = ("balanced", "affine", "palette")


def test_defaults_by_mode():
    assert QuantizationRule() == QuantizationRule(2, "balanced", "row", None)
    assert QuantizationRule(4, "affine") == QuantizationRule(4, "affine", "group", 64)
    assert QuantizationRule(4, "palette") == QuantizationRule(4, "palette", "group", 16)
    assert QuantizationRule(2, "balanced", group_size=32).granularity == "group"


@each(
    ("values", "words"),
    [
        ({"bits": 3}, "bits is 3; allowed are 2, 4, 8"),
        ({"bits": True}, "bits is True"),
        ({"mode": "mxfp4"}, "mode is 'mxfp4'; allowed are balanced, affine, palette"),
        ({"granularity": "column"}, "granularity is 'column'; allowed are tensor, row, group"),
        ({"granularity": "group", "group_size": 0}, "group_size is 0; allowed is a positive"),
        ({"granularity": "group", "group_size": 64.0}, "group_size is 64.0"),
        ({"granularity": "row", "group_size": 64}, "group_size is 64 with granularity 'row'"),
        ({"group": 64}, "unknown keys group; known are bits, mode, granularity, group_size"),
    ],
)
def test_rules_that_cannot_be(values, words):
    with pytest.raises(ConfigError, match=words):
        QuantizationRule.from_dict(values)


def test_entries_of_config_json():
    for mode, per in itertools.product(MODES, GRANULARITIES):
        rule = QuantizationRule(4, mode, per)
        assert QuantizationRule.from_dict(rule.to_dict()) == rule
    # MLX's own format is written as mlx-lm writes it.
    entry = {"bits": 4, "group_size": 64, "mode": "affine"}
    assert QuantizationRule(4, "affine").to_dict() == entry


def test_experts_have_the_parts_of_their_matrices_together():
    """And only formats for whose products MLX has a form."""
    for mode, per in itertools.product(MODES[:2], GRANULARITIES):
        rule = QuantizationRule(2, mode, per)
        rule.check((4, 24, 128), "experts")
        parts, flat = rule.part_shapes((4, 24, 128)), rule.part_shapes((96, 128))
        for part, shape in parts.items():
            assert shape == (
                (4, 24, *flat[part][1:]) if per != "tensor" or part == "weight" else ()
            )
        assert rule.nbytes((4, 24, 128)) == rule.nbytes((96, 128))
    for rule, inputs in ((QuantizationRule(4), 96), (QuantizationRule(4, group_size=96), 192)):
        rule.check((4, 24, inputs), "experts")
    for rule, inputs in (
        (QuantizationRule(4, "palette"), 128),
        (QuantizationRule(4), 80),
        (QuantizationRule(4, group_size=16), 128),
    ):
        rule.check((96, inputs), "a matrix")
        with pytest.raises(ConfigError, match=r"experts holds experts, .*(palettes|share)"):
            rule.check((4, 24, inputs), "experts")


def test_bytes_are_those_of_the_parts(rng):
    for mode, per, dtype, bits in itertools.product(
        MODES, GRANULARITIES, (mx.float32, mx.bfloat16), (2, 4)
    ):
        # One table for a whole palette is one per tensor: two groups of 16 rows at least.
        shape = (16 * int(rng.integers(2, 4)), 64 * int(rng.integers(1, 4)))
        weight = mx.array(rng.normal(0, 1, shape)).astype(dtype)
        rule = QuantizationRule(bits, mode, per)
        packed = pack(weight, rule).packed
        assert rule_of(packed) == rule
        parts = [packed.codes, packed.scales, packed.biases, packed.table]
        assert rule.nbytes(shape, dtype) == sum(part.nbytes for part in parts if part is not None)
