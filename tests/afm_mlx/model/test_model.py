"""The model against tamm, Apple's own PyTorch implementation, and against mlx-lm where that is right."""

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx.config import PRESETS
from afm_mlx.kernels import dispatch, fake_int8
from afm_mlx.model.model import Model
from tests.tools import compare
from tests.tools.adapters import ragged_cache
from tests.tools.compare import UNIT_ROUNDOFF, assert_parity, exact
from tests.tools.models import (
    mlx_lm_twin,
    random_config,
    random_model,
    tamm_logits,
    tamm_model,
    twin_of_tamm,
)

TOLERANCE = 1e-4  # of the largest logit, fp32


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", range(6))
def test_parity_with_tamm(rng, case, backend):
    fixed = {"kv_bits": 8 if case % 4 else None}
    if case % 5 == 0:
        fixed["num_kv_reuse_layers"] = 0
    config = random_config(rng, **fixed)
    reference = tamm_model(config, rng)
    model = twin_of_tamm(reference, config)
    length, kind = int(rng.integers(5, 16)), ["int8", "float"][int(rng.integers(2))]
    prompts = rng.integers(0, config.vocab_size, (5, 2, length))
    cut, seen = int(rng.integers(1, length)), rng.integers(1, length, 2)

    def in_parts(tokens, *cuts):
        cache = [layer.merge([layer] * 2) for layer in model.make_cache(kind)]
        parts = np.split(tokens, cuts, axis=1)
        return mx.concatenate([model(mx.array(part), cache) for part in parts], axis=1)

    def ragged(tokens):
        """The logits of one token per row; the rows have seen beginnings of different lengths."""
        cache = ragged_cache(model, [row[:n] for row, n in zip(tokens, seen, strict=True)], kind)
        return model(mx.array(tokens[[0, 1], seen][:, None]), cache)[:, 0]

    # Native attention rounds queries and softmax weights to int16.
    bound, ties = (TOLERANCE, 0.05) if backend == "reference" else (100 * TOLERANCE, 0.1)
    ties = ties if config.kv_bits else None
    with dispatch.force(backend):
        for ours, scored in (
            (lambda tokens: model(mx.array(tokens)), ...),
            (lambda tokens: in_parts(tokens, cut), ...),
            (lambda tokens: in_parts(tokens, *range(1, length)), ...),
            # mlx-lm rotates reuse queries at the longest row's position (defect f).
            (ragged, ([0, 1], seen)),
        ):

            def theirs(tokens, scored=scored):
                return tamm_logits(reference, tokens)[scored]

            assert_parity(ours, theirs, prompts, bound, ties)


def test_parity_with_mlx_lm_where_it_is_right(rng):
    sizes = {"num_layers": 4, "num_kv_reuse_layers": 1}
    # mlx-lm cuts the feed-forward width down where tamm rounds it; a whole factor agrees.
    config = random_config(rng, rope_theta=500000.0, hidden_dim_scale_factor=3.0, **sizes)
    model = random_model(config, rng)
    twin = mlx_lm_twin(model)
    prompts = rng.integers(0, config.vocab_size, (7, 2, 13))
    with dispatch.force("reference"):
        assert_parity(lambda t: model(mx.array(t)), lambda t: twin(mx.array(t)), prompts, ties=0.05)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_activations_have_the_type_of_the_weights(rng, dtype):
    """What a GPU runs in half types: nothing on the way may silently turn them into float32."""
    config = random_config(rng, num_layers=4, num_kv_reuse_layers=2)
    model = random_model(config, rng)
    tokens = mx.array(rng.integers(0, config.vocab_size, (1, 12)))
    wanted = np.array(model(tokens))
    model.apply(lambda x: x.astype(dtype) if x.ndim else x)
    got = model(tokens, model.make_cache())
    assert got.dtype == dtype
    # Rounding to int8 turns the smallest difference into a step, so the bound is wide: what must not
    # happen is a wrong scale or position, which moves logits by their own size.
    difference = np.sqrt(((exact(got) - wanted) ** 2).mean()) / wanted.std()
    assert difference < 24 * UNIT_ROUNDOFF[dtype] + 0.05


def matrix_work(model, run):
    """Multiplications of the matrix products in the graph of `run`; nothing is computed."""
    found = []

    def count(event):
        match event:
            case {"name": "Matmul" | "AddMM", "inputs": [(_, x, _), *_], "outputs": [(_, y, _)]}:
                found.append(math.prod(y) * x[-1])
            case {"name": "ScaledDotProductAttention", "inputs": [(_, q, _), (_, k, _), *_]}:
                found.append(2 * math.prod(q) * k[2])

    def traced(tokens, **weights):
        model.update(tree_unflatten(weights))
        return run(tokens)

    weights = dict(tree_flatten(model.parameters()))
    with dispatch.force("reference"):
        mx.export_function(count, traced, mx.zeros((1, 512), mx.int32), **weights)
    return sum(found)


def test_a_prompt_takes_three_fifths_of_the_matrix_work_of_the_3b():
    """As docs/architecture.md says: all its tokens but the last run through the writing blocks only."""
    config = dataclasses.replace(PRESETS["afm-3b"], vocab_size=32)  # the head is in no block
    model = Model(config).eval()

    def prompt_pass(tokens):
        cache = model.make_cache()
        model.prefill(tokens[:, :-1], cache)
        written = [entry.buffer for entry in cache if not entry.empty()]
        return [model(tokens[:, -1:], cache), *written]

    whole = matrix_work(model, model)
    assert whole > 512 * 2.79e9  # the blocks' weights, once per token
    assert matrix_work(model, prompt_pass) / whole == pytest.approx(0.61, abs=0.005)


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


@pytest.mark.parametrize("kv_bits", [8, None])
@pytest.mark.parametrize("training", [True, False])
def test_packed_rows_equal_their_samples_alone(rng, kv_bits, training):
    config = random_config(rng, kv_bits=kv_bits)
    model = random_model(config, rng).train(training)
    segments = random_segments(rng, 3, 20)
    tokens = rng.integers(0, config.vocab_size, segments.shape)
    h = model.hidden_at(mx.array(tokens), mx.arange(tokens.size), mx.array(segments))
    logits = np.array(model.head(h)).reshape(*tokens.shape, -1)
    assert np.isfinite(logits).all()
    samples = [
        (row, numbers == number)
        for row, numbers in enumerate(segments)
        for number in np.unique(numbers[numbers > 0])
    ]

    def alone(sample):
        return model(mx.array(tokens[sample][None]))[0]

    with dispatch.force("reference"):
        ties = 0.05 if kv_bits else None
        assert_parity(lambda sample: logits[sample], alone, samples, TOLERANCE, ties)


@pytest.mark.parametrize("training", [True, False])
def test_samples_of_a_row_that_share_their_beginning(rng, training):
    config = random_config(rng, kv_bits=None)
    model = random_model(config, rng).train(training)
    starts, parts, width = [5, 3], [[4, 1, 6], [2, 3]], 18
    tokens = rng.integers(0, config.vocab_size, (2, width))
    segments = np.zeros((2, width), np.int32)
    samples = []  # columns of a sample, its beginning included
    for row, (start, lengths) in enumerate(zip(starts, parts, strict=True)):
        segments[row, :start] = 1
        samples.append((row, list(range(start))))
        end = start
        for number, length in enumerate(lengths, start=2):
            segments[row, end : end + length] = number
            samples.append((row, [*range(start), *range(end, end + length)]))
            end += length
    arrays = map(mx.array, (tokens, np.arange(tokens.size), segments, np.array(starts, np.int32)))
    logits = np.array(model.head(model.hidden_at(*arrays))).reshape(2, width, -1)
    assert np.isfinite(logits).all()
    with dispatch.force("reference"):
        for row, columns in samples:
            alone = np.array(model(mx.array(tokens[row, columns][None])))[0]
            assert np.abs(logits[row, columns] - alone).max() <= TOLERANCE * alone.std()


def test_hidden_states_at_chosen_tokens_give_their_logits(rng):
    config = random_config(rng)
    model = random_model(config, rng).train()
    tokens = mx.array(rng.integers(0, config.vocab_size, (3, 9)))
    chosen = rng.integers(0, tokens.size, 8)
    got = np.array(model.head(model.hidden_at(tokens, mx.array(chosen))))
    wanted = np.array(model(tokens)).reshape(-1, config.vocab_size)[chosen]
    assert np.abs(got - wanted).max() <= TOLERANCE * wanted.std()


@pytest.mark.parametrize("packed", [True, False])
def test_every_parameter_gets_a_gradient_recomputed_and_compiled_too(compiled, rng, packed):
    # Fixed sizes: compiled operations hold them as constants, and are kept on disk from run to run.
    sizes = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 10000.0}
    config = random_config(rng, num_layers=2, num_kv_reuse_layers=1, **sizes)
    model = random_model(config, rng).train()
    segments = mx.array(random_segments(rng, 2, 12)) if packed else None
    tokens = mx.array(rng.integers(0, config.vocab_size, (2, 12)))

    def loss(parameters):
        model.update(parameters)
        h = model.hidden_at(tokens, mx.arange(tokens.size), segments)
        return mx.logsumexp(model.head(h), axis=-1).mean()

    parameters = model.parameters()
    wanted = dict(tree_flatten(mx.grad(loss)(parameters)))
    assert len(wanted) == len(tree_flatten(parameters))
    for name, gradient in wanted.items():
        assert 0 < mx.abs(gradient).max() < mx.inf, name
    # Through the values' codes: their rows of the projection have no other way to a gradient.
    of_values = wanted["model.layers.0.self_attn.qkv_proj.weight"][-config.kv_dim :]
    assert mx.abs(of_values).max() > 0
    others = [mx.grad(mx.checkpoint(loss))] + [mx.compile(mx.grad(loss))] * packed
    for other in others:
        for name, gradient in tree_flatten(other(parameters)):
            error = mx.abs(gradient - wanted[name]).max()
            assert error <= 1e-3 * mx.abs(wanted[name]).max(), name


@pytest.mark.parametrize("spread", [10, 100, 300])
def test_fake_int8_is_torchs_with_its_gradients(rng, spread):
    import torch

    numbers = rng.normal(0, spread * 0.05, (5, 7)).astype(np.float32)
    weights = rng.normal(0, 1, numbers.shape).astype(np.float32)
    x, scale = (
        torch.tensor(each, requires_grad=True) for each in (numbers, np.array([0.05], np.float32))
    )
    share = float(rng.uniform(0.1, 0.9))
    values = torch._fake_quantize_learnable_per_tensor_affine(
        x, scale, torch.zeros(1), -128, 127, share
    )
    (values * torch.tensor(weights)).sum().backward()

    def loss(x, scale):
        return (fake_int8(x, scale, share) * mx.array(weights)).sum()

    inputs = mx.array(numbers), mx.array(0.05)
    of_x, of_scale = mx.grad(loss, argnums=(0, 1))(*inputs)
    compare.assert_close(fake_int8(*inputs, share), values, 1e-6)
    compare.assert_close(of_x, x.grad, 1e-6)
    slack = 1e-5 * np.abs(weights * numbers / 0.05).sum()
    assert abs(of_scale.item() - scale.grad.item()) <= slack
