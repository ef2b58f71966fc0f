"""Packed layers: exact codes, the product and the lookup, and their place among MLX's modules."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import CheckpointError, RequestError
from afm_mlx.kernels import PackedWeight, dequantize, unpack_codes
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.packed_layers import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    set_activation_bits,
    stacked,
)
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import all_pairs, draw, each
from tests.tools.compare import assert_close

ROWS, INPUTS, GROUP = 24, 64, 32
SCALES = {"tensor": (), "row": (ROWS,), "group": (ROWS, INPUTS // GROUP)}
FORMATS = [(mode, per) for mode in ("balanced", "affine") for per in SCALES] + [("palette", "")]


def random_parts(rng, bits, mode, per):
    """Codes, the parts that give them a meaning, and the numbers that they stand for, in float64."""
    codes = rng.integers(0, 2**bits, (ROWS, INPUTS))
    if mode == "palette":
        table = rng.normal(0, 1, (3, 2**bits)).astype(np.float32)
        values = table.astype(np.float64)[np.arange(ROWS)[:, None] * 3 // ROWS, codes]
        parts = {"table": table}
    else:
        scales = rng.uniform(0.1, 1, SCALES[per]).astype(np.float32)
        biases = rng.normal(0, 1, SCALES[per]).astype(np.float32)
        wide = [np.broadcast_to(_per_input(a), (ROWS, INPUTS)) for a in (scales, biases)]
        if mode == "affine":
            values, parts = codes * wide[0] + wide[1], {"scales": scales, "biases": biases}
        else:
            values, parts = (codes - (2**bits - 1) / 2) * wide[0], {"scales": scales}
    return codes, {k: mx.array(v) for k, v in parts.items()}, values


def _per_input(array):
    array = array.astype(np.float64)
    return np.repeat(array, GROUP, axis=1) if array.ndim == 2 else array.reshape(-1, 1)


def test_layers_compute_what_their_codes_stand_for(rng):
    for bits, format_ in all_pairs((2, 4, 8), FORMATS):
        mode, per = format_
        codes, parts, values = random_parts(rng, bits, mode, per)
        bias = rng.normal(0, 1, ROWS).astype(np.float32)
        layer = PackedLinear.from_codes(mx.array(codes), bits, mode, bias=mx.array(bias), **parts)
        np.testing.assert_array_equal(np.array(unpack_codes(layer.weight, bits)), codes)
        x = rng.normal(0, 1, (2, 3, INPUTS)).astype(np.float32)
        wanted = x @ values.T + bias
        # Activations of 16 binary digits and more, float32 sums of INPUTS products; a kernel may take the codes
        # as they are and subtract what they lie too high by in the end.
        magnitudes = np.abs(values) + np.abs(values).max(axis=1, keepdims=True)
        bound = (2**-15 + INPUTS * 2**-23) * (np.abs(x) @ magnitudes.T + np.abs(bias))
        for training in (False, True):
            got = layer.train(training)(mx.array(x))
            assert (np.abs(np.array(got) - wanted) <= bound).all()
        np.testing.assert_allclose(
            np.array(layer.to_linear()(mx.array(x))), wanted, atol=bound.max()
        )

        embedding = PackedEmbedding.from_codes(mx.array(codes), bits, mode, **parts).eval()
        tokens = rng.integers(0, ROWS, (2, 5))
        np.testing.assert_allclose(
            np.array(embedding(mx.array(tokens))), values[tokens], rtol=1e-5, atol=1e-5
        )
        logits = np.array(embedding.as_linear(mx.array(x)))
        assert (np.abs(logits - x @ values.T) <= bound).all()
        whole = np.array(embedding.to_embedding().weight)
        np.testing.assert_array_equal(whole, np.array(dequantize(embedding.packed)))


@pytest.mark.parametrize("training", [False, True])
def test_experts_are_called_as_mlx_lms_are(rng, training):
    """Vectors of one token or several, for all of its experts or one each, sorted or not; gradients, too."""
    packed = stacked(pack(draw(rng, (4 * ROWS, INPUTS)), QuantizationRule(4)).packed, 4)
    layer = PackedExperts(packed, draw(rng, (4, ROWS))).train(training)
    twin = layer.to_switch_linear()
    assert (twin.input_dims, twin.output_dims, twin.num_experts) == (INPUTS, ROWS, layer.experts)
    for of_x, of_indices in (
        ((2, 3, 1, 1, INPUTS), (2, 3, 2)),  # gate and up of a mixture
        ((2, 3, 2, 1, INPUTS), (2, 3, 2)),  # down
        ((6, 1, INPUTS), (6,)),  # sorted
        ((1, 1, 1, 1, INPUTS), (2, 3, 2)),
        ((1, 3, 1, INPUTS), (2, 3)),  # vectors that are not next to each other
        ((3, 5, INPUTS), (1, 3)),  # DeepSeek's groups of heads
        ((0, 1, INPUTS), (0,)),
    ):
        x, indices = draw(rng, of_x), mx.array(rng.integers(0, 4, of_indices))
        ascending = len(of_indices) == 1
        indices = mx.sort(indices) if ascending else indices
        got, wanted = (each(x, indices, sorted_indices=ascending) for each in (layer, twin))
        assert_close(got, wanted, 1e-3, of_x)
        if training and x.size:
            weight = draw(rng, wanted.shape)
            of_layer, of_twin = (
                mx.grad(lambda x, each=each: (each(x, indices) * weight).sum())(x)  # noqa: B023
                for each in (layer, twin)
            )
            assert_close(of_layer, of_twin, 1e-4, of_x)
    assert layer.trainable_parameters() == {}
    assert "num_experts=4, bias=True, bits=4, mode=balanced, granularity=row" in repr(layer)


def test_the_lookup_has_the_activations_type(rng):
    codes, parts, _ = random_parts(rng, 4, "balanced", "row")
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        layer = PackedEmbedding.from_codes(mx.array(codes), 4, dtype=dtype, **parts)
        assert layer(mx.array([[1, 2]])).dtype == dtype
        assert layer.as_linear(mx.ones((1, INPUTS), dtype)).dtype == dtype


def test_gradients_reach_the_input_and_nothing_trains(rng):
    codes, parts, values = random_parts(rng, 2, "balanced", "row")
    layer = PackedLinear.from_codes(mx.array(codes), 2, **parts)
    model = nn.Sequential(nn.Linear(8, INPUTS), layer, nn.ReLU())
    model.train()
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    assert sorted(names) == ["layers.0.bias", "layers.0.weight"]
    x, weight = rng.normal(0, 1, INPUTS).astype(np.float32), rng.normal(0, 1, ROWS)
    gradient = mx.grad(lambda x: (layer(x) * mx.array(weight.astype(np.float32))).sum())(
        mx.array(x)
    )
    np.testing.assert_allclose(np.array(gradient), weight @ values, rtol=1e-3, atol=1e-4)


def test_parameters_are_a_folders_and_load_strictly(rng):
    layer, twin = (
        PackedLinear.from_codes(mx.array(codes), 2, "affine", **parts)
        for codes, parts, _ in (random_parts(rng, 2, "affine", "group") for _ in range(2))
    )
    parameters = tree_flatten(layer.parameters())
    assert set(dict(parameters)) == {"weight", "scales", "biases"}
    twin.load_weights(parameters, strict=True)
    assert mx.array_equal(twin.dequantize(), layer.dequantize())
    assert not hasattr(layer, "to_quantized")  # nn.quantize leaves it alone


def test_what_a_layer_shows():
    codes = mx.zeros((24, 64), mx.int32)
    per_group = PackedLinear.from_codes(codes, 2, scales=mx.zeros((24, 2)))
    per_tensor = PackedLinear.from_codes(codes, 2, scales=mx.array(1.0))
    tables = PackedEmbedding.from_codes(codes, 2, "palette", table=mx.zeros((2, 4)))
    text = "input_dims=64, output_dims=24, bias=False, bits=2, mode=balanced, group_size=32"
    assert text in repr(per_group)
    assert "granularity=tensor" in repr(per_tensor)
    assert "24, 64, bits=2, mode=palette, tables=2" in repr(tables)


def test_mlx_lm_counts_its_bits(rng):
    from mlx_lm.utils import compute_bits_per_weight

    codes, parts, _ = random_parts(rng, 2, "balanced", "row")
    model = nn.Sequential(PackedLinear.from_codes(mx.array(codes), 2, scales=parts["scales"]))
    assert compute_bits_per_weight(model) == pytest.approx(2 + 32 / INPUTS)


@each(
    ("changes", "words"),
    [
        ({"bits": 3}, "bits is 3; it must be one of 2, 4, 8"),
        ({"mode": "mxfp4"}, "mode is 'mxfp4'"),
        ({"codes": mx.zeros((4, 2), mx.int32)}, "weight is int32 of shape"),
        ({"codes": mx.zeros((4,), mx.uint32)}, "weight is uint32 of shape"),
        ({"scales": None}, "scales is missing"),
        ({"scales": mx.ones(5)}, r"scales is float32 of shape \[5\]; .* of shape \[\], \[4\]"),
        ({"scales": mx.ones(4, mx.int32)}, "scales is int32"),
        ({"scales": mx.ones((4, 3)), "biases": mx.ones((4, 3))}, "G divides 16"),
        ({"scales": mx.ones((4, 0)), "biases": mx.ones((4, 0))}, "G divides 16"),
        ({"biases": None}, "biases is missing"),
        ({"biases": mx.ones(1)}, r"biases is float32 of shape \[1\]"),
        ({"mode": "balanced"}, "absent in a balanced matrix"),
        ({"table": mx.ones((1, 16))}, "absent outside a palette"),
        ({"mode": "palette", "table": mx.ones((1, 16))}, "absent in a palette"),
        ({"mode": "palette"}, "table is missing"),
        ({"mode": "palette", "table": mx.ones((3, 16))}, "T divides 4"),
        ({"mode": "palette", "table": mx.ones((1, 4))}, r"\[T, 16\]"),
    ],
)
def test_parts_that_do_not_fit_each_other(changes, words):
    parts = {"codes": mx.zeros((4, 2), mx.uint32), "bits": 4, "mode": "affine"}
    parts |= {"scales": mx.ones(4), "biases": mx.ones(4)}
    with pytest.raises(CheckpointError, match=words):
        PackedLinear(PackedWeight(**parts | changes))


@each(
    ("codes", "bits", "words"),
    [
        (mx.array([[4] + [0] * 15]), 2, "codes reach from 0 to 4; 2 bits hold 0 to 3"),
        (mx.array([[-1] + [0] * 15]), 2, "codes reach from -1 to 0"),
        (mx.zeros((1, 20), mx.int32), 2, "20 inputs, which can't be packed in 2 bits"),
        (mx.zeros((1, 32)), 2, "integers of shape"),
        (mx.zeros((1, 32), mx.int32), 3, "bits is 3"),
    ],
)
def test_codes_that_do_not_pack(codes, bits, words):
    with pytest.raises(CheckpointError, match=words):
        PackedLinear.from_codes(codes, bits, scales=mx.array(1.0))


@pytest.mark.parametrize(("bits", "words"), [(4, "allowed are 16 and 8"), (8, "model has none")])
def test_activation_bits_that_cannot_be_set(bits, words):
    with pytest.raises(RequestError, match=words):
        set_activation_bits(nn.Linear(2, 2), bits)
