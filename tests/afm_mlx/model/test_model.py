"""The model against tamm, Apple's own PyTorch implementation, and against mlx-lm where that is right."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.config import ModelConfig
from afm_mlx.kernels import dispatch, fake_int8
from tests.tools.graph import matmul_flops
from tests.tools.models import (
    mlx_lm_twin,
    random_config,
    random_model,
    tamm_logits,
    tamm_model,
    tokens_without_ties,
    twin_of_tamm,
)

TOLERANCE = 1e-4  # of the logits' standard deviation, fp32


@pytest.fixture(params=["reference", "cpu"])
def assert_close(request):
    """Compares logits, while the operations run on one backend.

    Plain MLX computes in float32, and every logit has to agree. Native attention rounds queries and softmax
    weights to int16, which may move a key over a rounding boundary of int8. A code that differs moves the
    logits after it by some 1e-3; a wrong scale or position moves them by their own size.
    """

    def compare(got, wanted, kv_bits=8):
        got, wanted = np.asarray(got), np.asarray(wanted)
        assert got.shape == wanted.shape
        errors = np.abs(got - wanted) / wanted.std()
        if request.param == "reference":
            assert_close_but_for_ties(errors, kv_bits)
        else:
            assert np.median(errors) <= 100 * TOLERANCE
            assert errors.max() <= 0.1

    with dispatch.force(request.param):
        yield compare


def assert_close_but_for_ties(errors, kv_bits=8):
    """Of logits, in shares of their scale; without int8 there are no ties.

    Where a key or value lies on a rounding boundary, two right orders of summation may give neighbouring int8
    codes. That is rare, and moves the logits of what follows by a few percent at most.
    """
    assert np.median(errors) <= TOLERANCE, f"{np.median(errors):.2e} of the logits' scale"
    most = 0.05 if kv_bits else TOLERANCE
    assert errors.max() <= most, f"{errors.max():.2e} of the logits' scale"


@pytest.mark.parametrize("case", range(8))
def test_parity_with_tamm(rng, case, assert_close):
    """Whole prompt, token by token, and in chunks, with either cache, over random architectures."""
    fixed = {"kv_bits": 8 if case % 4 else None}
    if case % 5 == 0:
        fixed["num_kv_reuse_layers"] = 0
    config = random_config(rng, **fixed)
    reference = tamm_model(config, rng)
    model = twin_of_tamm(reference, config)
    rows, length = int(rng.integers(1, 3)), int(rng.integers(5, 16))
    tokens = tokens_without_ties(reference, config, rng, (rows, length))
    wanted = tamm_logits(reference, tokens)
    tokens = mx.array(tokens)

    assert_close(model(tokens), wanted, config.kv_bits)
    for kind in ("int8", "float"):
        cache = model.make_cache(kind)
        first = model.make_cache(kind)
        steps = [model(tokens[:1, i : i + 1], first) for i in range(length)]
        assert_close(mx.concatenate(steps, axis=1), wanted[:1], config.kv_bits)

        cut = int(rng.integers(1, length))
        cache = [layer.merge([layer] * rows) for layer in model.make_cache(kind)]
        chunks = [model(tokens[:, :cut], cache), model(tokens[:, cut:], cache)]
        assert_close(mx.concatenate(chunks, axis=1), wanted, config.kv_bits)


@pytest.mark.parametrize("case", range(3))
def test_ragged_rows_match_single_rows(rng, case, assert_close):
    """mlx-lm rotates reuse queries at S - L for every row (defect f); offsets are per row here."""
    config = random_config(rng, num_layers=4, num_kv_reuse_layers=2)
    reference = tamm_model(config, rng)
    model = twin_of_tamm(reference, config)
    lengths = [int(n) for n in rng.integers(2, 20, size=3)]
    prompts = [tokens_without_ties(reference, config, rng, (1, n)) for n in lengths]
    caches = []
    for prompt in prompts:
        cache = model.make_cache()
        cut = int(rng.integers(1, prompt.shape[1]))
        for part in (prompt[:, :cut], prompt[:, cut:-1]):
            if part.size:
                model.prefill(mx.array(part), cache)
        assert cache[0].lengths == [prompt.shape[1] - 1]
        caches.append(cache)
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    last = mx.array([[int(prompt[0, -1])] for prompt in prompts])
    logits = model(last, batch)
    for row, prompt in enumerate(prompts):
        assert_close(logits[row], tamm_logits(reference, prompt)[0, -1:])


@pytest.mark.parametrize("case", range(2))
def test_parity_with_mlx_lm_where_it_is_right(rng, case):
    sizes = {"num_layers": 4, "num_kv_reuse_layers": 1}
    # mlx-lm cuts the feed-forward width down where tamm rounds it; a whole factor agrees.
    config = random_config(rng, rope_theta=500000.0, hidden_dim_scale_factor=3.0, **sizes)
    model = random_model(config, rng)
    twin = mlx_lm_twin(model)
    errors = []
    for tokens in rng.integers(0, config.vocab_size, (7, 2, 13)):
        ours, theirs = model.make_cache(), twin.make_cache()
        for part in (tokens[:1, :9], tokens[:1, 9:], tokens):
            caches = (None, None) if len(part) == 2 else (ours, theirs)
            with dispatch.force("reference"):
                got = model(mx.array(part), caches[0])
            wanted = twin(mx.array(part), caches[1])
            errors.append(np.abs(np.array(got - wanted)).max() / np.array(wanted).std())
    # A number on a rounding boundary of int8 may fall to either side, so not every draw agrees to 1e-4.
    assert np.median(errors) <= TOLERANCE
    assert max(errors) < 0.1


def test_activations_on_the_cpu_are_float32(rng):
    model = random_model(random_config(rng), rng)
    assert model(mx.array([[1, 2, 3]])).dtype == mx.float32


def test_half_types_stay_half_and_close(rng):
    """What a GPU runs: nothing on the way may silently turn the activations into float32."""
    for dtype in [mx.bfloat16, mx.float16]:
        config = random_config(rng, num_layers=4, num_kv_reuse_layers=2)
        model = random_model(config, rng)
        tokens = mx.array(rng.integers(0, config.vocab_size, (1, 12)))
        wanted = np.array(model(tokens))
        model.apply(lambda x, dtype=dtype: x.astype(dtype) if x.ndim else x)
        got = model(tokens, model.make_cache())
        assert got.dtype == dtype
        eps = 2**-8 if dtype == mx.bfloat16 else 2**-11
        # Rounding to int8 turns the smallest difference into a step, so the bound is wide: what must not
        # happen is a wrong scale or position, which moves logits by their own size.
        error = np.sqrt(((np.array(got.astype(mx.float32)) - wanted) ** 2).mean()) / wanted.std()
        assert error < 24 * eps + 0.05


def test_prefill_work_at_the_3b_shape():
    """Prefill of 512 tokens does at most 0.66 of the full stack's matrix work, counted in the graph."""
    config = ModelConfig(
        vocab_size=512,  # the head is no part of the stack; a small one keeps the graph to the blocks
        hidden_dim=2048,
        num_layers=56,
        num_kv_reuse_layers=21,
        num_heads=16,
        num_kv_heads=2,
        rope_theta=500000.0,
    )

    def full_stack(model, tokens):
        return model(tokens)

    def prompt_pass(model, tokens):
        cache = model.make_cache()
        model.prefill(tokens[:, :-1], cache)
        return model(tokens[:, -1:], cache)

    full = matmul_flops(config, full_stack, length=512)
    prompt = matmul_flops(config, prompt_pass, length=512)
    assert full > 512 * 2 * 2.79e9  # the 3B's 2.797 G block weights, once per token
    assert prompt / full <= 0.66


# -- training


def random_segments(rng, rows, length):
    """Rows of samples numbered from 1, with padding (0) at the end."""
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        start, number = 0, 1
        while start < length - 2:
            stop = min(start + int(rng.integers(1, 7)), length - int(rng.integers(0, 3)))
            row[start:stop] = number
            start, number = stop, number + 1
    return segments


def test_packed_rows_equal_their_samples_alone(rng):
    for kv_bits in [8, None]:
        for training in [True, False]:
            config = random_config(rng, kv_bits=kv_bits)
            model = random_model(config, rng).train(training)
            segments = random_segments(rng, 3, 20)
            tokens = rng.integers(0, config.vocab_size, segments.shape)
            everywhere = mx.arange(tokens.size)
            h = model.hidden_at(mx.array(tokens), everywhere, mx.array(segments))
            logits = np.array(model.head(h)).reshape(*tokens.shape, -1)
            assert np.isfinite(logits).all()
            errors = []
            for row, numbers in enumerate(segments):
                for number in np.unique(numbers[numbers > 0]):
                    own = numbers == number
                    with dispatch.force("reference"):
                        wanted = np.array(model(mx.array(tokens[row, own][None])))[0]
                    errors.append(np.abs(logits[row, own] - wanted).ravel() / logits.std())
            assert_close_but_for_ties(np.concatenate(errors), kv_bits)


def test_hidden_states_at_chosen_tokens_give_their_logits(rng):
    config = random_config(rng)
    model = random_model(config, rng).train()
    tokens = mx.array(rng.integers(0, config.vocab_size, (3, 9)))
    chosen = rng.integers(0, tokens.size, 8)
    got = np.array(model.head(model.hidden_at(tokens, mx.array(chosen))))
    wanted = np.array(model(tokens)).reshape(-1, config.vocab_size)[chosen]
    assert np.abs(got - wanted).max() <= TOLERANCE * wanted.std()


def training_loss(model, tokens, segments):
    """A loss of every token's hidden state, and of the head."""

    def loss(parameters):
        model.update(parameters)
        h = model.hidden_at(tokens, mx.arange(tokens.size), segments)
        return mx.logsumexp(model.head(h), axis=-1).mean()

    return loss


@pytest.mark.parametrize("packed", [True, False])
def test_every_parameter_gets_a_gradient_recomputed_and_compiled_too(rng, packed):
    # Fixed sizes: compiled operations hold them as constants, and are kept on disk from run to run.
    sizes = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 10000.0}
    config = random_config(rng, num_layers=2, num_kv_reuse_layers=1, **sizes)
    model = random_model(config, rng).train()
    segments = mx.array(random_segments(rng, 2, 12)) if packed else None
    tokens = mx.array(rng.integers(0, config.vocab_size, (2, 12)))
    loss = training_loss(model, tokens, segments)
    parameters = model.parameters()
    wanted = dict(tree_flatten(mx.grad(loss)(parameters)))
    assert len(wanted) == len(tree_flatten(parameters))
    for name, gradient in wanted.items():
        assert 0 < mx.abs(gradient).max() < mx.inf, name
    others = [mx.grad(mx.checkpoint(loss))] + [mx.compile(mx.grad(loss))] * packed
    for other in others:
        for name, gradient in tree_flatten(other(parameters)):
            error = mx.abs(gradient - wanted[name]).max()
            assert error <= 1e-3 * mx.abs(wanted[name]).max(), name
    model.update(parameters)


def test_gradients_reach_weights_through_int8_keys_and_values(rng):
    """They are near those of the same model with keys and values in float.

    As a rule: 4 of 150 draws were further off.
    """
    name = "model.layers.0.self_attn.qkv_proj.weight"
    differences = []
    for _ in range(9):
        config = random_config(rng, num_layers=2, num_kv_reuse_layers=1)
        model = random_model(config, rng).train()
        # In steps this fine, the straight-through gradient is nearly the true one.
        for layer in model.model.layers:
            layer.self_attn.quant_key_scale = mx.array(0.06)
            layer.self_attn.quant_value_scale = mx.array(0.06)
        tokens = mx.array(rng.integers(0, config.vocab_size, (2, 12)))
        loss = training_loss(model, tokens, None)
        parameters = model.parameters()
        got = dict(tree_flatten(mx.grad(loss)(parameters)))[name]
        model.update(parameters)
        twin = random_model(dataclasses.replace(config, kv_bits=None), rng).train()
        twin.load_weights([(n, a) for n, a in tree_flatten(parameters) if "quant_" not in n])
        loss = training_loss(twin, tokens, None)
        wanted = dict(tree_flatten(mx.grad(loss)(twin.parameters())))[name]
        differences.append((mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item())
    assert np.median(differences) <= 0.35


@pytest.mark.parametrize("spread", [10, 100, 300])
def test_fake_int8_equals_tamms_and_its_gradients_those_of_torch(rng, spread):
    import torch
    from tamm.ao.layers import functional

    scale = np.float32(rng.uniform(0.01, 0.1))
    x = rng.normal(0, spread * scale, (5, 7)).astype(np.float32)
    weights = rng.normal(0, 1, x.shape).astype(np.float32)
    inputs = torch.tensor(x, requires_grad=True), torch.tensor(scale, requires_grad=True)
    steps = inputs[0] / inputs[1]
    straight = steps + (steps.round() - steps).detach()
    (straight.clamp(-128, 127) * inputs[1] * torch.tensor(weights)).sum().backward()
    limits = {"zero_point": torch.tensor(0.0), "quant_min": -128, "quant_max": 127}
    values = functional.fake_quantize(torch.tensor(x), scale=torch.tensor(scale), **limits)
    assert np.array_equal(np.array(fake_int8(mx.array(x), mx.array(scale))), values.numpy())
    gradients = mx.grad(lambda x, s: (fake_int8(x, s) * mx.array(weights)).sum(), argnums=(0, 1))
    of_x, of_scale = gradients(mx.array(x), mx.array(scale))
    assert np.allclose(np.array(of_x), inputs[0].grad.numpy())
    slack = 1e-5 * np.abs(weights * x / scale).sum()
    assert abs(of_scale.item() - inputs[1].grad.item()) <= slack


def test_the_gradient_scale_of_fake_int8_scales_that_of_the_scale_only(rng):
    x, scale = mx.array(rng.normal(0, 1, (4, 6)).astype(np.float32)), mx.array(0.02)
    share = float(rng.uniform(0.1, 0.9))
    plain = mx.grad(lambda x, s: fake_int8(x, s).square().sum(), argnums=(0, 1))(x, scale)
    scaled = mx.grad(lambda x, s: fake_int8(x, s, share).square().sum(), argnums=(0, 1))(x, scale)
    assert mx.array_equal(plain[0], scaled[0])
    assert abs(scaled[1].item() - share * plain[1].item()) <= 1e-4 * abs(plain[1].item())
    assert mx.array_equal(fake_int8(x, scale), fake_int8(x, scale, share))
