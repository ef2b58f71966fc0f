"""Fake quantization against torch's autograd and the packed formats."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.kernels import PackedWeight, dequantize, pack_codes
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.qat.fake_quantize import (
    fake_quantize,
    initial_clip,
    lsq_gradient_scale,
    quantize,
    scale_gradient,
)
from tests.tools.cases import all_pairs

ROWS, INPUTS, GROUP = 6, 64, 32
RULES = [
    QuantizationRule(bits, mode, per, GROUP if per == "group" else None)
    for bits, mode, per in all_pairs((2, 4, 8), ("balanced", "affine"), ("tensor", "row", "group"))
]


@pytest.fixture(params=RULES, ids=lambda r: f"{r.bits}-{r.mode}-{r.granularity}")
def rule(request):
    return request.param


def random_case(rng, rule):
    """Weights off center, factors that cut some of them off, and weights of a loss."""
    weight = (rng.normal(0, 1, (ROWS, INPUTS)) + 0.2).astype(np.float32)
    shape = rule.part_shapes(weight.shape)["scales"]
    clip = rng.uniform(0.4, 0.7, shape).astype(np.float32)
    return weight, clip, rng.normal(0, 1, weight.shape).astype(np.float32)


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
    theirs = torch.tensor(weight, requires_grad=True), torch.tensor(clip, requires_grad=True)
    values = in_torch(*theirs, rule)
    (values * torch.tensor(loss)).sum().backward()

    def ours(weight, clip):
        return (fake_quantize(weight, clip, rule) * mx.array(loss)).sum()

    gradients = mx.grad(ours, (0, 1))(mx.array(weight), mx.array(clip))
    of_weight, of_clip = (np.array(g) for g in gradients)
    assert np.allclose(of_weight, theirs[0].grad.numpy(), atol=1e-5)
    assert of_clip.shape == clip.shape
    slack = 1e-5 * np.abs(loss * weight).sum()
    assert np.abs(of_clip - theirs[1].grad.numpy()).max() <= slack
    got = np.array(fake_quantize(mx.array(weight), mx.array(clip), rule))
    assert np.allclose(got, values.detach().numpy(), atol=1e-5)
    cut = (np.array(of_weight) == 0).mean()
    assert 0 < cut < 0.9  # both sides of the clamp were seen


@pytest.mark.parametrize("mode", ["balanced", "affine"])
def test_compiled_and_recomputed_gradients_are_the_same(rng, mode):
    rule = QuantizationRule(2, mode, "row")
    weight, clip, loss = random_case(rng, rule)

    def ours(weight, clip):
        return (fake_quantize(weight, clip, rule) * mx.array(loss)).sum()

    wanted = mx.grad(ours, (0, 1))(mx.array(weight), mx.array(clip))
    for run in (mx.compile(mx.grad(ours, (0, 1))), mx.grad(mx.checkpoint(ours), (0, 1))):
        got = run(mx.array(weight), mx.array(clip))
        for a, b in zip(got, wanted, strict=True):
            assert mx.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_codes_are_those_of_the_forward_pass(rng, rule):
    weight, clip, _ = random_case(rng, rule)
    found = quantize(mx.array(weight), mx.array(clip), rule)
    middle = (2**rule.bits - 1) / 2
    words = pack_codes(found.codes, rule.bits)
    packed = PackedWeight(words, rule.bits, rule.mode, found.scales, found.biases)
    wanted = fake_quantize(mx.array(weight), mx.array(clip), rule)
    if rule.mode == "balanced":
        assert mx.array_equal(dequantize(packed), wanted)
    else:  # scale * code + bias rounds otherwise than center + scale * (code - middle)
        assert mx.allclose(dequantize(packed), wanted, atol=1e-5 * middle)
    for name, shape in rule.part_shapes(weight.shape).items():
        assert name == "weight" or getattr(packed, name).shape == shape


def test_two_bits_have_the_four_balanced_levels(rng):
    weight, clip = rng.normal(0, 1, (1, 64)).astype(np.float32), np.float32(0.6)
    rule = QuantizationRule(2, "balanced", "tensor")
    values = np.array(fake_quantize(mx.array(weight), mx.array(clip), rule))
    scale = clip * np.abs(weight).max() / 1.5
    assert np.allclose(np.unique(values), np.array([-1.5, -0.5, 0.5, 1.5]) * scale)


def test_the_first_factors_are_near_the_best(rng, rule):
    """No factor of a fine search has an error much below that of the first one."""
    weight, _, _ = random_case(rng, rule)
    first = initial_clip(mx.array(weight), rule)

    def errors(clip):
        error = (fake_quantize(mx.array(weight), clip, rule) - mx.array(weight)).square()
        return np.array(error.reshape(max(first.size, 1), -1).sum(axis=-1))

    found = errors(first)
    assert ((np.array(first) > 0.1) & (np.array(first) < 1.2)).all()
    best = np.min([errors(mx.full(first.shape, f)) for f in np.linspace(0.2, 1.1, 181)], axis=0)
    # Of 181 tries at 8 bits, where errors are noise, the luckiest is far below the others.
    assert found.sum() <= (2.0 if rule.bits == 8 else 1.1) * best.sum()


def test_weights_on_a_grid_keep_their_codes(rng):
    for per in ["tensor", "row", "group"]:
        for dtype in [mx.float32, mx.bfloat16]:
            rule = QuantizationRule(2, "balanced", per, GROUP if per == "group" else None)
            weight = mx.array(rng.normal(0, 1, (ROWS, INPUTS)).astype(np.float32))
            packed = pack(weight, rule).packed
            on_grid = dequantize(packed).astype(dtype)
            found = quantize(on_grid, initial_clip(on_grid, rule), rule)
            assert mx.array_equal(pack_codes(found.codes, 2), packed.codes)
            assert mx.allclose(
                found.scales, packed.scales, rtol=1e-6 if dtype == mx.float32 else 1e-2
            )


def test_zeros_have_values_gradients_and_codes():
    weight, clip = mx.zeros((2, 32)), mx.ones(2)
    rule = QuantizationRule(2)
    assert mx.array_equal(initial_clip(weight, rule), clip)
    gradients = mx.grad(lambda w, f: fake_quantize(w, f, rule).sum(), (0, 1))(weight, clip)
    assert all(mx.isfinite(g).all().item() for g in gradients)
    assert mx.abs(fake_quantize(weight, clip, rule)).max() < 1e-30


def test_gradient_scaling_scales_the_factors_gradient_only(rng, rule):
    weight, clip, loss = random_case(rng, rule)
    share = lsq_gradient_scale(weight.shape, rule)
    assert share == pytest.approx((weight.size / clip.size * (2**rule.bits - 1) / 2) ** -0.5)
    plain, scaled = (
        mx.grad(
            lambda w, f, factor=factor: (fake_quantize(w, f, rule, factor) * mx.array(loss)).sum(),
            (0, 1),
        )(mx.array(weight), mx.array(clip))
        for factor in (1.0, share)
    )
    assert mx.array_equal(plain[0], scaled[0])
    assert mx.allclose(plain[1] * share, scaled[1], rtol=1e-4)
    x = mx.array(weight)
    assert mx.array_equal(scale_gradient(x, share), x)


def test_half_types_stay_half(rng):
    weight = mx.array(rng.normal(0, 1, (4, 32)).astype(np.float32)).astype(mx.bfloat16)
    clip = mx.ones(4)
    value, gradients = mx.value_and_grad(
        lambda w, f: fake_quantize(w, f, QuantizationRule(4)).sum(), (0, 1)
    )(weight, clip)
    assert [value.dtype, *(g.dtype for g in gradients)] == [mx.bfloat16, mx.bfloat16, mx.float32]


def test_rules_that_cannot_train(rng):
    weight = mx.array(rng.normal(0, 1, (8, 40)).astype(np.float32))
    with pytest.raises(ConfigError, match=r"mlp\.up_proj: mode is 'palette'.*balanced and affine"):
        initial_clip(weight, QuantizationRule(4, "palette"), "mlp.up_proj")
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj has 40 inputs"):
        initial_clip(weight, QuantizationRule(2), "mlp.up_proj")
    with pytest.raises(ConfigError, match="groups of 32 do not divide"):
        initial_clip(weight, QuantizationRule(8, group_size=32), "mlp.up_proj")
    with pytest.raises(CheckpointError, match="NaN"):
        initial_clip(weight * mx.nan, QuantizationRule(8), "mlp.up_proj")
