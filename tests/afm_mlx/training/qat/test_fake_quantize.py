"""Fake quantization against torch's autograd and the packed formats."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.kernels import PackedWeight, dequantize, pack_codes
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.qat.qat_layers import (
    fake_quantize,
    initial_clip,
    lsq_gradient_scale,
    quantize,
)
from tests.tools.cases import draw, each

INPUTS, GROUP = 64, 32


def random_case(rng, rule):
    """Weights off center, factors that cut some of them off, and weights of a loss."""
    weight = draw(rng, (6, INPUTS)) + 0.2
    clip = mx.array(rng.uniform(0.4, 0.7, rule.part_shapes(weight.shape)["scales"]))
    return weight, clip.astype(mx.float32), draw(rng, weight.shape)


def gradients(loss, rule, **options):
    """A function (weights, factors) -> gradients of both."""
    return mx.grad(lambda w, f: (fake_quantize(w, f, rule, **options) * loss).sum(), (0, 1))


def in_torch(weight, clip, rule):
    """The formula, with torch's autograd; rounding is the identity to it."""
    import torch

    middle = (2**rule.bits - 1) / 2
    length = {"tensor": weight.numel(), "row": INPUTS, "group": rule.group_size}[rule.granularity]
    units = weight.reshape(-1, length)
    low, high = units.detach().amin(1, keepdim=True), units.detach().amax(1, keepdim=True)
    center = (high + low) / 2 if rule.mode == "affine" else torch.zeros_like(low)
    largest = (units.detach() - center).abs().amax(1, keepdim=True)
    scale = clip.reshape(-1, 1) * largest / middle
    steps = (units - center) / scale + middle
    codes = (steps + (steps.round() - steps).detach()).clamp(0, 2**rule.bits - 1)
    return (center + scale * (codes - middle)).reshape(weight.shape)


def test_values_and_gradients_equal_torchs(rng, rule):
    import torch

    weight, clip, loss = random_case(rng, rule)
    theirs = [torch.tensor(np.array(array), requires_grad=True) for array in (weight, clip)]
    values = in_torch(*theirs, rule)
    (values * torch.tensor(np.array(loss))).sum().backward()
    of_weight, of_clip = gradients(loss, rule)(weight, clip)
    assert np.allclose(of_weight, theirs[0].grad.numpy(), atol=1e-5)
    assert of_clip.shape == clip.shape
    slack = 1e-5 * mx.abs(loss * weight).sum().item()
    assert np.abs(np.array(of_clip) - theirs[1].grad.numpy()).max() <= slack
    assert np.allclose(fake_quantize(weight, clip, rule), values.detach().numpy(), atol=1e-5)
    assert 0 < (np.array(of_weight) == 0).mean() < 0.9  # both sides of the clamp were seen


@pytest.mark.parametrize("mode", ["balanced", "affine"])
def test_compiled_and_recomputed_gradients_are_the_same(compiled, rng, mode):
    rule = QuantizationRule(2, mode, "row")
    weight, clip, loss = random_case(rng, rule)
    of = gradients(loss, rule)
    for wanted, got in zip(of(weight, clip), mx.compile(of)(weight, clip), strict=True):
        assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_codes_are_those_of_the_forward_pass(rng, rule):
    weight, clip, _ = random_case(rng, rule)
    found = quantize(weight, clip, rule)
    words = pack_codes(found.codes, rule.bits)
    packed = PackedWeight(words, rule.bits, rule.mode, found.scales, found.biases)
    # In an affine grid scale * code + bias rounds otherwise than center + scale * (code - middle).
    slack = 0 if rule.mode == "balanced" else 1e-5 * 2**rule.bits
    wanted = fake_quantize(weight, clip, rule)
    assert mx.abs(dequantize(packed) - wanted).max() <= slack
    for name, shape in rule.part_shapes(weight.shape).items():
        assert name == "weight" or getattr(packed, name).shape == shape


def test_two_bits_have_the_four_balanced_levels(rng):
    weight, clip = draw(rng, (1, 64)), mx.array(0.6)
    values = fake_quantize(weight, clip, QuantizationRule(2, "balanced", "tensor"))
    scale = (clip * mx.abs(weight).max() / 1.5).item()
    assert np.allclose(np.unique(values), np.array([-1.5, -0.5, 0.5, 1.5]) * scale)


def test_the_first_factors_are_near_the_best(rng, rule):
    """No factor of a fine search has an error much below that of the first one."""
    weight, _, _ = random_case(rng, rule)
    first = initial_clip(weight, rule)

    def errors(clip):
        error = (fake_quantize(weight, clip, rule) - weight).square()
        return np.array(error.reshape(max(first.size, 1), -1).sum(axis=-1))

    assert ((np.array(first) > 0.1) & (np.array(first) < 1.2)).all()
    best = np.min([errors(mx.full(first.shape, f)) for f in np.linspace(0.2, 1.1, 181)], axis=0)
    # Of 181 tries at 8 bits, where errors are noise, the luckiest is far below the others.
    assert errors(first).sum() <= (2.0 if rule.bits == 8 else 1.1) * best.sum()


@pytest.mark.parametrize("per", ["tensor", "row", "group"])
@pytest.mark.parametrize(("dtype", "slack"), [(mx.float32, 1e-6), (mx.bfloat16, 1e-2)])
def test_weights_on_a_grid_keep_their_codes(rng, per, dtype, slack):
    rule = QuantizationRule(2, "balanced", per, GROUP if per == "group" else None)
    packed = pack(draw(rng, (6, INPUTS)), rule).packed
    on_grid = dequantize(packed).astype(dtype)
    found = quantize(on_grid, initial_clip(on_grid, rule), rule)
    assert mx.array_equal(pack_codes(found.codes, 2), packed.codes)
    assert mx.allclose(found.scales, packed.scales, rtol=slack)


def test_zeros_have_values_gradients_and_codes():
    weight, clip, rule = mx.zeros((2, 32)), mx.ones(2), QuantizationRule(2)
    assert mx.array_equal(initial_clip(weight, rule), clip)
    assert all(mx.isfinite(g).all() for g in gradients(1.0, rule)(weight, clip))
    assert mx.abs(fake_quantize(weight, clip, rule)).max() < 1e-30


def test_gradient_scaling_scales_the_factors_gradient_only(rng, rule):
    weight, clip, loss = random_case(rng, rule)
    share = lsq_gradient_scale(weight.shape, rule)
    assert share == pytest.approx((weight.size / clip.size * (2**rule.bits - 1) / 2) ** -0.5)
    plain, scaled = (
        gradients(loss, rule, gradient_scale=factor)(weight, clip) for factor in (1.0, share)
    )
    assert mx.array_equal(plain[0], scaled[0])
    assert mx.allclose(plain[1] * share, scaled[1], rtol=1e-4)


def test_half_types_stay_half(rng):
    weight, clip, rule = draw(rng, (4, 32), mx.bfloat16), mx.ones(4), QuantizationRule(4)
    found = [fake_quantize(weight, clip, rule), *gradients(1.0, rule)(weight, clip)]
    assert [array.dtype for array in found] == [mx.bfloat16, mx.bfloat16, mx.float32]


@each(
    ("rule", "factor", "message"),
    [
        (QuantizationRule(4, "palette"), 1, r"up_proj: mode is 'palette'.*balanced and affine"),
        (QuantizationRule(2), 1, r"up_proj has 40 inputs"),
        (QuantizationRule(8, group_size=32), 1, "groups of 32 do not divide"),
        (QuantizationRule(8), np.nan, "NaN"),
    ],
)
def test_a_rule_that_cannot_train(rng, rule, factor, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        initial_clip(factor * draw(rng, (8, 40)), rule, "mlp.up_proj")
