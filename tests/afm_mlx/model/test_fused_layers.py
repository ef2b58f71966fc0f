"""Layers with the norm before and the addition after them, fused or not, against the formula."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from afm_mlx.kernels import BLOCK, LowRank, Part
from afm_mlx.kernels.reference import low_rank_product
from afm_mlx.model.fused_layers import (
    Normed,
    head_argmax,
    head_logits,
    project,
    project_each,
    swiglu,
)
from afm_mlx.quantization.quantize_model import pack_layer
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import draw
from tests.tools.compare import assert_close


def linear(bits, bias=False, outputs=48):
    layer = nn.Linear(32, outputs, bias=bias)
    return (layer if bits is None else pack_layer(layer, QuantizationRule(bits), "layer")).eval()


@pytest.fixture
def norm(rng):
    norm = nn.RMSNorm(32, eps=0.1)
    norm.weight = draw(rng, 32)
    return norm


@pytest.mark.parametrize(
    ("bits", "bias", "training"),
    [(None, False, False), (2, False, False), (2, True, False), (2, False, True)],
)
def test_project_is_norm_layer_and_addition(rng, norm, bits, bias, training):
    layer = linear(bits, bias).train(training)
    x, residual = draw(rng, (2, 3, 32)), draw(rng, (2, 3, 48))
    assert_close(project(layer, x), layer(x))
    assert_close(project(layer, Normed(x, norm), residual), residual + layer(norm(x)))


@pytest.mark.parametrize(
    ("bits", "activation_bits"), [((2, 2), 16), ((2, 4), 16), ((None, 2), 16), ((2, 2), 8)]
)
def test_swiglu_of_layers_that_are_alike_and_not(rng, norm, bits, activation_bits):
    gate, up = map(linear, bits)
    up.activation_bits = activation_bits
    x = draw(rng, (2, 3, 32))
    wanted = nn.silu(gate(norm(x))) * up(norm(x))
    assert_close(swiglu(gate, up, Normed(x, norm)), wanted)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("bits", [(4, 4, 4), (2, 4, 4), (None, 2, 2)])
def test_several_layers_of_one_norm(rng, norm, bits, adapted):
    """Layers that are alike and not; the first packed one, and no other, has an adapter for a row of two."""
    layers = [linear(b, outputs=n) for b, n in zip(bits, (64, 16, 20), strict=True)]
    x = draw(rng, (2, 3, 32))
    wanted = [layer(norm(x)) for layer in layers]
    if adapted:
        first = bits.index(next(filter(None, bits)))
        outputs = layers[first].packed.out_dims
        numbers = draw(rng, (2 * 32 + 2 * -(-outputs // BLOCK) * BLOCK,))
        slots = mx.array([-1, 0], mx.int32)
        low_rank = LowRank((numbers,), (Part(0, 64, 2),), mx.ones(1), slots, (outputs,))
        layers[first].adapters = lambda batch: low_rank
        wanted[first] = wanted[first] + low_rank_product(norm(x), low_rank)
    for got, right in zip(project_each(layers, Normed(x, norm)), wanted, strict=True):
        assert_close(got, right)


@pytest.mark.parametrize(
    ("bits", "training"), [(None, False), (4, False), (4, True)], ids=["float", "packed", "trains"]
)
def test_the_head_and_its_largest_logit(rng, norm, bits, training):
    embedding = nn.Embedding(64, 32)
    if bits:
        embedding = pack_layer(embedding, QuantizationRule(bits), "embedding")
    embedding.train(training)
    x = draw(rng, (3, 32))
    logits = embedding.as_linear(norm(x))
    assert_close(head_logits(embedding, Normed(x, norm)), logits)
    tokens, max_logits = head_argmax(embedding, Normed(x, norm))
    assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()
    assert_close(max_logits, logits.max(axis=-1))
