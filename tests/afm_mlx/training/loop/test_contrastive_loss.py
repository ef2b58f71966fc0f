"""InfoNCE against float64 and differences, the same gradients in small memory, and recall by brute force."""

import dataclasses
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora, lora_tensors
from afm_mlx.errors import ConfigError
from afm_mlx.model.pooling import hidden_states
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.training.data.pairs import Pair, PairBatches
from afm_mlx.training.loop.contrastive_loss import ContrastiveLoss, info_nce
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.mean_loss import find_non_finite
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.step import TrainingStep
from tests.tools.cases import each
from tests.tools.compare import assert_close
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

VOCAB = 40
both = pytest.mark.parametrize("both_directions", [False, True])


def oracle(scores, excluded, both_directions):
    """The mean of the cross-entropies of rows and of columns, in PyTorch's float64."""
    scores = scores.masked_fill(torch.tensor(excluded), -torch.inf)
    wanted = torch.arange(len(scores))
    losses = torch.nn.functional.cross_entropy(scores, wanted, reduction="none")
    if both_directions:
        square = scores[:, : len(scores)].T
        losses = (losses + torch.nn.functional.cross_entropy(square, wanted, reduction="none")) / 2
    return losses


@both
def test_info_nce_and_its_gradient(rng, both_directions):
    count, candidates = int(rng.integers(2, 9)), int(rng.integers(9, 20))
    scores = rng.normal(0, 20, (count, candidates))
    excluded = rng.random((count, candidates)) < 0.3
    excluded[np.arange(count), np.arange(count)] = False
    weights = rng.random(count)
    wanted = torch.tensor(scores, requires_grad=True)
    losses = oracle(wanted, excluded, both_directions)
    (losses * torch.tensor(weights)).sum().backward()

    def loss(scores):
        found = info_nce(scores, mx.array(excluded), both_directions)
        return (found * mx.array(weights.astype(np.float32))).sum(), found

    (_, found), gradient = mx.value_and_grad(loss)(mx.array(scores.astype(np.float32)))
    assert_close(found, losses, 1e-5)
    assert_close(gradient, wanted.grad, 1e-5)


def random_batches(rng, count=9, vocabulary=VOCAB, **options):
    """Pairs of random texts of 1 to 30 tokens with up to two negatives; a query has two positives."""

    def text():
        return " ".join(map(str, rng.integers(1, vocabulary, int(rng.integers(1, 30)))))

    pairs = [
        Pair(text(), text(), tuple(text() for _ in range(rng.integers(3))), f"line {i}")
        for i in range(count)
    ]
    pairs[1] = dataclasses.replace(pairs[1], query=pairs[0].query)
    options = {"batch_size": count, "max_seq_length": 64, "group_rows": 4} | options
    return PairBatches(pairs, lambda text, _: list(map(int, text.split())), **options)


def adapted(kind, rng):
    """A model with random LoRA pairs, in training mode."""
    if kind == "qwen3":
        model = zoo_model("qwen3", VOCAB, int(rng.integers(2**31)))
    else:
        sizes = {
            "hidden_dim": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "hidden_dim_scale_factor": 3.0,
        }
        config = random_config(
            rng, vocab_size=VOCAB, num_layers=3, num_kv_reuse_layers=1, kv_bits=None, **sizes
        )
        model = random_model(config, rng)
        if kind == "packed":
            model = quantize_model(model, config.to_dict())[0]
    add_lora(model, 2, 1.0, seed=int(rng.integers(99)))
    drawn = [
        (name, mx.array(rng.normal(0, 0.3, array.shape).astype(np.float32)))
        for name, array in lora_tensors(model).items()
    ]
    model.load_weights(drawn, strict=False)
    return model.train()


def gradients(model, loss, batch):
    value, tree = nn.value_and_grad(model, loss)(model, batch)
    mx.eval(value, tree)
    return value, dict(tree_flatten(tree))


def expected_loss(model, batch, loss, lengths):
    """The formula over single texts, in float64."""
    rows = []
    for tokens, sizes in zip(batch.tokens, batch.lengths, strict=True):
        for row, size in zip(tokens, sizes.tolist(), strict=True):
            states = np.array(hidden_states(model, row[None, :size])[0]).astype(np.float64)
            rows.append(states[-1] if loss.pooling == "last" else states.mean(0))
    vectors = np.array([rows[row] for row in batch.rows.tolist()])
    count, total = batch.weights.size, 0.0
    for m in lengths:
        unit = vectors[:, :m] / np.linalg.norm(vectors[:, :m], axis=1, keepdims=True)
        scores = torch.tensor(unit[:count] @ unit[count:].T / loss.temperature)
        total += oracle(scores, np.array(batch.excluded), loss.both_directions).sum().item()
    return total


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("float", "last"), ("packed", "mean"), ("qwen3", "last"), ("qwen3", "mean")],
)
def test_in_small_memory_the_gradients_are_the_same(rng, kind, pooling):
    model, batch = adapted(kind, rng), random_batches(rng)(0)
    options = {
        "temperature": 0.2,
        "dimensions": (8, 3, 32),
        "both_directions": bool(rng.integers(2)),
    }
    loss = ContrastiveLoss(pooling, **options)
    value, wanted = gradients(model, loss, batch)
    assert value.item() == pytest.approx(expected_loss(model, batch, loss, (8, 3, 32)), rel=1e-4)
    cached = dataclasses.replace(loss, cached=True)
    for blocks in (nullcontext, recomputed_blocks):
        with blocks(model):
            same, found = gradients(model, cached, batch)
        assert same.item() == pytest.approx(value.item(), rel=1e-5)
        assert found.keys() == wanted.keys() == lora_tensors(model).keys()
        for name, gradient in wanted.items():
            assert_close(found[name], gradient, 1e-5, name)
    # Along the gradient, the slope is its norm; the losses are in float64.
    norm = sum(mx.square(gradient).sum().item() for gradient in wanted.values()) ** 0.5
    start, values = lora_tensors(model), []
    for size in (1e-3 / norm, -1e-3 / norm):
        model.load_weights([(n, a + size * wanted[n]) for n, a in start.items()], strict=False)
        values.append(expected_loss(model, batch, loss, (8, 3, 32)))
    assert norm == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.02)


def test_activations_of_one_group_are_in_memory_at_a_time(rng):
    """Of sixteen groups instead of four, the plain batch keeps all, and the cached one hardly more."""
    model, peaks = adapted("float", rng), {}
    for count in (16, 64):
        pairs = [Pair(f"{i + 1} " * 60, f"{i + 2} " * 60, (), "") for i in range(count)]
        batches = PairBatches(
            pairs,
            lambda text, _: [int(word) % VOCAB for word in text.split()],
            batch_size=count,
            max_seq_length=64,
            group_rows=8,
        )
        for cached in (False, True):
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            gradients(model, ContrastiveLoss(cached=cached), batches(0))
            peaks[count, cached] = mx.get_peak_memory() - before
    assert peaks[64, False] > 3 * peaks[16, False]
    assert peaks[64, True] < 1.3 * peaks[16, True]
    assert peaks[64, True] < 0.3 * peaks[64, False]


def test_a_compiled_step_descends_and_leaves_no_traces(rng):
    model, batches = adapted("packed", rng), random_batches(rng, batch_size=5)
    step = TrainingStep(model, ContrastiveLoss(cached=True), AdamW(1e-2), 1.0)
    values = []
    for _ in range(4):
        result = step([batches(0), batches(1)])
        step.evaluate(result)
        values.append(result.loss.item())
        assert result.targets.item() == result.weight.item() == 9
    assert values[-1] < values[0]
    mx.eval(model.parameters(), mx.random.state)


def test_whole_vectors_and_their_halves_by_default(rng):
    model, batch = adapted("float", rng), random_batches(rng)(0)
    narrow = ContrastiveLoss()(model, batch).item()
    assert narrow == pytest.approx(expected_loss(model, batch, ContrastiveLoss(), (32,)), rel=1e-4)
    loss = ContrastiveLoss()
    assert loss.lengths(64) == [64]
    assert loss.lengths(300) == [300, 150, 75]
    assert ContrastiveLoss(dimensions=(7, 9)).lengths(9) == (7, 9)
    with pytest.raises(ConfigError, match=r"dimensions are \[8, 33\], .* have 32 numbers"):
        ContrastiveLoss(dimensions=(8, 33))(model, batch)


@each(
    "arguments, fault",
    [
        ({"pooling": "max"}, "pooling is 'max'; allowed are 'last' and 'mean'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"dimensions": ()}, r"dimensions are \[\]"),
        ({"dimensions": (0, 3)}, r"dimensions are \[0, 3\]"),
        ({"dimensions": (3, 3)}, r"dimensions are \[3, 3\]"),
    ],
)
def test_arguments_out_of_range(arguments, fault):
    with pytest.raises(ConfigError, match=fault):
        ContrastiveLoss(**arguments)


def test_the_origin_of_nan_is_named(rng):
    model, batch = adapted("float", rng), random_batches(rng)(0)
    model.model.output_norm.weight = model.model.output_norm.weight * 0
    for cached in (False, True):
        loss = ContrastiveLoss(cached=cached)
        assert "the loss is not finite" in find_non_finite(model, loss, [batch])


@pytest.mark.parametrize("count", [-1, 2])
def test_recall_is_what_brute_force_finds(rng, count):
    model, batches = adapted("float", rng), random_batches(rng, 12, 6, batch_size=4, shuffle=False)
    model.eval()
    n, loss = (3 if count == -1 else count), ContrastiveLoss()
    vectors, queries, texts = {}, [], []
    for step in range(n):
        batch = batches(step)
        numbers, candidates = batches.texts(step)
        rows = [
            np.array(hidden_states(model, row[None, :size])[0, -1])
            for tokens, sizes in zip(batch.tokens, batch.lengths, strict=True)
            for row, size in zip(tokens, sizes.tolist(), strict=True)
        ]
        for number, row in zip(numbers + candidates, batch.rows.tolist(), strict=True):
            vectors[number] = rows[row] / np.linalg.norm(rows[row])
        queries, texts = queries + numbers, texts + candidates
    best = [max(texts, key=lambda text: vectors[text] @ vectors[query]) for query in queries]
    right = [text in batches.positives[query] for query, text in zip(queries, best, strict=True)]
    assert loss.recall_at_1(model, batches, count) == pytest.approx(np.mean(right))
    assert 0 <= np.mean(right) < 1
