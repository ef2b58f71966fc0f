"""Layers with what stands before and after them, fused or not, against the formula."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from afm_mlx.model import fused_layers
from afm_mlx.model.fused_layers import head_argmax, project, project_head, swiglu
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


@pytest.fixture
def fused(monkeypatch):
    """Names of the fused kernels that are called."""
    called = []
    for name in ("packed_matmul", "packed_swiglu", "packed_argmax"):
        kernel = getattr(fused_layers, name)

        def spy(*args, name=name, kernel=kernel):
            called.append(name)
            return kernel(*args)

        monkeypatch.setattr(fused_layers, name, spy)
    return called


@pytest.mark.parametrize(
    ("bits", "bias", "training"),
    [(None, False, False), (2, False, False), (2, True, False), (2, False, True)],
)
def test_project_is_norm_layer_and_addition(rng, norm, fused, bits, bias, training):
    layer, x, residual = linear(bits, bias).train(training), draw(rng, (2, 3, 32)), draw(rng, 48)
    residual = mx.broadcast_to(residual, (2, 3, 48))
    assert_close(project(layer, x), layer(x))
    assert_close(project(layer, x, norm, residual), residual + layer(norm(x)))
    assert fused == ["packed_matmul"] * 2 * (bits is not None and not bias and not training)


@pytest.mark.parametrize(
    ("bits", "activation_bits", "alike"),
    [((2, 2), 16, True), ((2, 4), 16, False), ((None, 2), 16, False), ((2, 2), 8, False)],
)
def test_swiglu_of_layers_that_are_alike_and_not(rng, norm, fused, bits, activation_bits, alike):
    gate, up = map(linear, bits)
    up.activation_bits = activation_bits
    x = draw(rng, (2, 3, 32))
    wanted = nn.silu(gate(norm(x))) * up(norm(x))
    assert_close(swiglu(gate, up, x, norm), wanted)
    assert fused == ["packed_swiglu"] * alike


@pytest.mark.parametrize(
    ("bits", "training"), [(None, False), (4, False), (4, True)], ids=["float", "packed", "trains"]
)
def test_the_head_and_its_largest_logit(rng, norm, fused, bits, training):
    embedding = nn.Embedding(64, 32)
    if bits:
        embedding = pack_layer(embedding, QuantizationRule(bits), "embedding")
    embedding.train(training)
    x = draw(rng, (3, 32))
    logits = embedding.as_linear(norm(x))
    assert_close(project_head(embedding, x, norm), logits)
    tokens, peaks = head_argmax(embedding, x, norm)
    assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()
    assert_close(peaks, logits.max(axis=-1))
    assert fused == ["packed_matmul", "packed_argmax"] * (bits is not None and not training)
