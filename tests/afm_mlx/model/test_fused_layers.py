"""Layers with the norm before and the addition after them, fused or not, against the formula."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from afm_mlx.model.fused_layers import Normed, head_argmax, head_logits, project, swiglu
from afm_mlx.quantization.quantize_model import pack_layer
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import draw
from tests.tools.compare import assert_close


def linear(bits, bias=False):
    layer = nn.Linear(32, 48, bias=bias)
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
