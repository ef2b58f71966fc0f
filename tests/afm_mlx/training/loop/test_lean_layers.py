"""Layers of mlx-lm that a training step computes in another way: the same results, less memory or time."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import activations, qwen2
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from afm_mlx.adapters.lora import add_lora
from afm_mlx.model.fused_layers import silu_product
from afm_mlx.quantization.packed_layers import is_experts
from afm_mlx.track_config import TrackConfig
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.lean_layers import ExpertBlocks, lean_layers
from tests.tools.compare import assert_close
from tests.tools.tracks import SMALL, random_tracks
from tests.tools.zoo import zoo_model

EXPERTS = 6


def gradients(model, loss):
    value, tree = nn.value_and_grad(model, loss)()
    mx.eval(value, tree)
    return value, dict(tree_flatten(tree))


def test_a_swiglu_that_keeps_less(rng):
    model = zoo_model("qwen2", 20, 1).train()
    tokens = mx.array(rng.integers(0, 20, (2, 5)))
    with lean_layers(model):
        assert qwen2.swiglu is silu_product
        value, got = gradients(model, lambda: mx.square(model(tokens)).mean())
    assert qwen2.swiglu is activations.swiglu
    wanted_value, wanted = gradients(model, lambda: mx.square(model(tokens)).mean())
    assert value.item() == wanted_value.item()
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, 1e-4, name)


def mixture(kind, width=16, experts=EXPERTS):
    layer = kind(width, 24, experts, bias=True)
    layer.update(tree_map(lambda a: mx.random.normal(a.shape), layer.parameters()))
    return layer


@pytest.mark.parametrize("kind", [SwitchGLU, SwitchMLP])
@pytest.mark.parametrize(("tokens", "k"), [(48, 2), (400, 1), (301, 3)])
@pytest.mark.parametrize("drawn", ["evenly", "unevenly"])
def test_experts_compute_blocks_of_tokens(rng, kind, tokens, k, drawn):
    """Also where experts have no tokens, or more than a block."""
    mx.random.seed(int(rng.integers(1 << 30)))
    layer = mixture(kind)
    chosen = rng.integers(0, EXPERTS, (2, tokens, k))
    if drawn == "unevenly":
        chosen = chosen // 4 * 4  # 0 and 4, of 6
    chosen, weights = mx.array(chosen), mx.random.normal((2, tokens, k, 16))
    x = mx.random.normal((2, tokens, 16))

    def loss(x):
        return (layer(x, chosen) * weights).sum()

    def found():
        value, of_layer = gradients(layer, lambda: loss(x))
        return value, of_layer | {"x": mx.grad(loss)(x)}

    wanted_value, wanted = found()
    with lean_layers(layer):
        assert layer(x, chosen).shape == (2, tokens, k, 16)
        value, got = found()
    assert_close(value, wanted_value, 1e-4)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, 1e-4, name)
    assert type(layer) is kind


def test_a_whole_model_whose_experts_have_pairs(rng):
    model = random_tracks(TrackConfig(**SMALL), 3).train()
    add_lora(model, 4, 2.0)
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = tree_map(lambda a: mx.random.normal(a.shape), module.lora_b)
    tokens = mx.array(rng.integers(1, SMALL["vocab_size"], (6, 40)))
    _, wanted = gradients(model, lambda: mx.square(model(tokens)).mean())
    with lean_layers(model):
        assert all(type(m).__call__ is not SwitchGLU.__call__ for m in mixtures(model))
        _, got = gradients(model, lambda: mx.square(model(tokens)).mean())
    assert any("experts.up_proj.lora_a" in name for name in wanted)
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, 1e-3, name)


def test_few_tokens_and_other_stacks_are_left_to_mlx_lm(rng, monkeypatch):
    layer, x = mixture(SwitchGLU), mx.random.normal((40, 16))
    chosen = mx.array(rng.integers(0, EXPERTS, (40, 2)))
    assert ExpertBlocks.of(chosen, EXPERTS) is None
    assert ExpertBlocks.of(mx.repeat(chosen, 2, axis=0), EXPERTS).rows == 13
    wanted = layer(x, chosen)
    with lean_layers(layer):
        assert type(layer) is not SwitchGLU
        assert_close(layer(x, chosen), wanted, 1e-6)
    assert type(layer) is SwitchGLU

    layer.up_proj = mixture(SwitchGLU, 32).up_proj.to_quantized(group_size=32, bits=4)
    assert not is_experts(layer.up_proj)
    with lean_layers(layer):
        assert type(layer) is SwitchGLU
    layer = mixture(SwitchGLU)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    with lean_layers(layer):
        assert type(layer) is SwitchGLU


def test_other_models_compute_as_before(rng):
    """Such as a teacher with more experts; and mixtures of one model may have different numbers."""
    student, teacher = mixture(SwitchGLU), mixture(SwitchGLU, experts=9)
    both = Pair(student, teacher)
    x, chosen = mx.random.normal((400, 16)), mx.array(rng.integers(0, 9, (400, 2)))
    own = chosen % EXPERTS
    wanted = student(x, own), teacher(x, chosen)
    for changed in (student, both):
        with lean_layers(changed):
            assert (type(teacher) is SwitchGLU) == (changed is student)
            assert_close(student(x, own), wanted[0], 1e-4)
            assert_close(teacher(x, chosen), wanted[1], 1e-4)


class Pair(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other


def test_recomputed_blocks_compute_blocks_of_tokens(rng):
    model = zoo_model("qwen3_moe", 50, 1).train()
    tokens = mx.array(rng.integers(0, 50, (8, 40)))
    _, wanted = gradients(model, lambda: mx.square(model(tokens)).mean())
    with recomputed_blocks(model), lean_layers(model):
        assert any(type(m).__call__ is not SwitchGLU.__call__ for m in mixtures(model))
        _, got = gradients(model, lambda: mx.square(model(tokens)).mean())
    assert all(type(m) is SwitchGLU for m in mixtures(model))
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, 1e-3, name)


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, SwitchGLU)]


def test_a_second_derivative_of_moved_tokens(rng):
    blocks = ExpertBlocks.of(mx.array(rng.integers(0, EXPERTS, (100, 2))), EXPERTS)
    x, y = mx.random.normal((100, 4)), mx.random.normal((100, 4))

    def cubes(x):
        return (blocks.gather(x) ** 3).sum()

    gradient = mx.grad(lambda x: (mx.grad(cubes)(x) * y).sum())(x)
    assert_close(gradient, 2 * 6 * x * y, 1e-3)  # each token is in two blocks
