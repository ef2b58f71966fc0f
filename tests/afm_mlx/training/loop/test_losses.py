"""Losses against float64 numpy, in chunks and whole, for models of both kinds."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import ConfigError
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.loop import losses
from afm_mlx.training.loop.losses import Acceptance, CrossEntropy, Distillation
from tests.tools.compare import assert_close, assert_same_tensors
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

VOCAB = 61


@pytest.fixture
def model(rng):
    return random_model(
        random_config(rng, vocab_size=VOCAB, num_layers=3, num_kv_reuse_layers=1), rng
    )


@pytest.fixture
def teacher(rng):
    return random_model(random_config(rng, vocab_size=VOCAB), rng)


def random_batch(rng, rows=2, length=7, targets=11) -> Batch:
    """Targets anywhere, some of weight 0, as padding has."""
    weights = rng.uniform(0, 2, targets) * (rng.random(targets) < 0.7)
    return Batch(
        mx.array(rng.integers(0, VOCAB, (rows, length)), dtype=mx.int32),
        None,
        mx.array(rng.integers(0, rows * length, targets), dtype=mx.int32),
        mx.array(rng.integers(0, VOCAB, targets), dtype=mx.int32),
        mx.array(weights.astype(np.float32)),
    )


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logits_of(model, batch):
    logits = np.array(model(batch.inputs).astype(mx.float32), np.float64)
    return logits.reshape(-1, VOCAB)[np.array(batch.positions)]


def expected(model, teacher, batch, weight, temperature, divergence="forward"):
    logits, labels = logits_of(model, batch), np.array(batch.labels)
    data = -log_softmax(logits)[np.arange(len(labels)), labels]
    first = log_softmax(logits_of(teacher, batch) / temperature)
    second = log_softmax(logits / temperature)
    if divergence == "reverse":
        first, second = second, first
    distance = (np.exp(first) * (first - second)).sum(-1)
    mixed = (1 - weight) * data + weight * temperature**2 * distance
    return (np.array(batch.weights, np.float64) * mixed).sum()


def test_cross_entropy_is_the_weighted_sum(model, rng):
    batch = random_batch(rng)
    assert CrossEntropy()(model, batch).item() == pytest.approx(
        expected(model, model, batch, 0, 1), rel=1e-4
    )


def test_distillation_is_the_weighted_sum(model, teacher, rng):
    for weight, temperature in [(1, 1), (0.3, 1), (1, 2.5), (0.6, 0.7)]:
        for divergence in ["forward", "reverse"]:
            batch = random_batch(rng)
            loss = Distillation(teacher, weight, temperature, divergence)(model, batch)
            assert loss.item() == pytest.approx(
                expected(model, teacher, batch, weight, temperature, divergence), rel=1e-4
            )


def test_acceptance_is_what_both_say(model, teacher, rng):
    batch = random_batch(rng)
    ours, theirs = (np.exp(log_softmax(logits_of(m, batch))) for m in (model, teacher))
    kept = (np.array(batch.weights, np.float64) * np.minimum(ours, theirs).sum(-1)).sum()
    assert Acceptance(teacher)(model, batch).item() == pytest.approx(kept, rel=1e-4)
    everything = Acceptance(model_like(model))(model, batch).item()
    assert everything == pytest.approx(batch.weights.sum().item(), rel=1e-4)


class Head(nn.Module):
    """An AFM model's embedding and head, and nothing between them."""

    def __init__(self, vocabulary, dims):
        super().__init__()
        self.model = nn.Module()
        self.model.embedding = nn.Embedding(vocabulary, dims)
        self.model.output_norm = nn.RMSNorm(dims)
        self.args = SimpleNamespace(vocab_size=vocabulary)

    def hidden_at(self, inputs, positions, segments):
        h = self.model.embedding(inputs)
        return h.reshape(-1, h.shape[-1])[positions]

    def head(self, h):
        return self.model.embedding.as_linear(self.model.output_norm(h))


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_gradients_of_both_divergences_equal_torch(rng, monkeypatch, divergence, chunk):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    monkeypatch.setattr(losses, "is_afm", lambda model: isinstance(model, Head))
    monkeypatch.setattr(losses, "CHUNK", chunk)
    monkeypatch.setattr(losses, "WHOLE", 0)
    vocabulary, dims, temperature = int(rng.integers(9, 80)), 6, float(rng.uniform(0.5, 3))
    student, teacher = Head(vocabulary, dims), Head(vocabulary, dims)
    weights = [rng.normal(0, 1, (vocabulary, dims)).astype(np.float32) for _ in range(2)]
    norm = rng.uniform(0.5, 1.5, dims).astype(np.float32)
    for head, weight in zip((student, teacher), weights, strict=True):
        head.model.embedding.weight = mx.array(weight)
    student.model.output_norm.weight = mx.array(norm)
    n, rows = 11, 14
    batch = Batch(
        mx.array(rng.integers(0, vocabulary, (2, 7)), dtype=mx.int32),
        None,
        mx.array(rng.integers(0, rows, n), dtype=mx.int32),
        mx.array(rng.integers(0, vocabulary, n), dtype=mx.int32),
        mx.array(rng.uniform(0, 2, n).astype(np.float32)),
    )
    loss = Distillation(teacher, 1.0, temperature, divergence)
    value, gradients = nn.value_and_grad(student, loss)(student, batch)

    ids = torch.tensor(np.array(batch.inputs)).reshape(-1)[np.array(batch.positions)]
    embedding = torch.tensor(weights[0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(norm, dtype=torch.float64, requires_grad=True)

    def log_probabilities(table, scale):
        h = functional.rms_norm(table[ids], (dims,), scale, eps=student.model.output_norm.eps)
        return functional.log_softmax(h @ table.T / temperature, dim=-1)

    mine = log_probabilities(embedding, scale)
    taught = log_probabilities(torch.tensor(weights[1], dtype=torch.float64), None)
    # Its `kl_div` is KL(target || input).
    order = (mine, taught) if divergence == "forward" else (taught, mine)
    distances = functional.kl_div(*order, reduction="none", log_target=True).sum(-1)
    total = temperature**2 * (torch.tensor(np.array(batch.weights)) * distances).sum()
    total.backward()
    assert value.item() == pytest.approx(total.item(), rel=1e-4)
    for ours, theirs in (
        (gradients["model"]["embedding"]["weight"], embedding.grad),
        (gradients["model"]["output_norm"]["weight"], scale.grad),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))


def test_samples_of_a_packed_row_cost_what_they_cost_alone(model, teacher, rng):
    tokens = rng.integers(0, VOCAB, 9)
    packed = Batch(
        mx.array(tokens)[None],
        mx.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]]),
        mx.array([1, 3, 4, 6]),
        mx.array(rng.integers(0, VOCAB, 4)),
        mx.ones(4),
    )
    first = packed._replace(inputs=packed.inputs[:, :4], segments=None)
    first = first._replace(weights=mx.array([1.0, 1.0, 0.0, 0.0]), positions=mx.array([1, 3, 0, 0]))
    second = packed._replace(inputs=packed.inputs[:, 4:7], segments=None)
    second = second._replace(
        weights=mx.array([0.0, 0.0, 1.0, 1.0]), positions=mx.array([0, 0, 0, 2])
    )
    for loss in (CrossEntropy(), Distillation(teacher, 0.5)):
        alone = loss(model, first) + loss(model, second)
        assert loss(model, packed).item() == pytest.approx(alone.item(), rel=1e-2)


def test_a_model_is_at_no_distance_from_itself(model, rng):
    loss, gradients = nn.value_and_grad(model.train(), Distillation(model_like(model)))(
        model, random_batch(rng)
    )
    assert loss.item() == pytest.approx(0, abs=1e-4)
    largest = max(mx.abs(g).max().item() for _, g in tree_flatten(gradients))
    assert largest == pytest.approx(0, abs=1e-4)


def model_like(model):
    """The same model again, in arrays of its own module."""
    twin = type(model)(model.args)
    twin.load_weights(tree_flatten(model.parameters()))
    return twin


@pytest.mark.parametrize(
    ("targets", "divergence"), [(1, "forward"), (8, "reverse"), (11, "forward"), (11, "reverse")]
)
def test_chunks_change_neither_the_loss_nor_a_gradient(
    model, teacher, rng, monkeypatch, targets, divergence
):
    batch = random_batch(rng, targets=targets)
    step = nn.value_and_grad(model.train(), Distillation(teacher, 0.5, 2.0, divergence))
    loss, gradients = step(model, batch)
    mx.eval(loss, gradients)
    monkeypatch.setattr(losses, "CHUNK", 4)
    monkeypatch.setattr(losses, "WHOLE", 0)
    before = tree_flatten(model.parameters())
    chunked, again = step(model, batch)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(gradients), tree_flatten(again), strict=True):
        assert_close(other, one, 1e-4, name, least=1e-3)
    assert_same_tensors(dict(tree_flatten(model.parameters())), dict(before))


def test_chunks_with_a_frozen_head(model, rng, monkeypatch):
    model.model.embedding.freeze()
    model.model.output_norm.freeze()
    batch = random_batch(rng)
    step = nn.value_and_grad(model.train(), CrossEntropy())
    _, gradients = step(model, batch)
    monkeypatch.setattr(losses, "CHUNK", 4)
    monkeypatch.setattr(losses, "WHOLE", 0)
    _, again = step(model, batch)
    for (name, one), (_, other) in zip(tree_flatten(gradients), tree_flatten(again), strict=True):
        assert "embedding" not in name
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-3)


def test_no_gradient_reaches_the_teacher(model, teacher, rng):
    before = dict(tree_flatten(teacher.parameters()))
    loss = Distillation(teacher.train())
    assert not teacher.training
    assert not tree_flatten(teacher.trainable_parameters())
    _, gradients = nn.value_and_grad(model.train(), loss)(model, random_batch(rng))
    mx.eval(gradients)
    assert_same_tensors(dict(tree_flatten(teacher.parameters())), before)


def test_a_model_of_the_zoo(model, rng):
    for taught in [True, False]:
        student = zoo_model("llama", VOCAB, seed=int(rng.integers(1 << 30)))
        batch = random_batch(rng)
        loss = Distillation(model, 0.5) if taught else CrossEntropy()
        assert loss(student, batch).item() == pytest.approx(
            expected(student, model, batch, 0.5 * taught, 1), rel=1e-4
        )
        with pytest.raises(ConfigError, match="--no-packing"):
            loss(student, batch._replace(segments=mx.ones((2, 7), mx.int32)))


def test_a_teacher_of_another_vocabulary(model, rng):
    teacher = random_model(random_config(rng, vocab_size=VOCAB + 3), rng)
    with pytest.raises(ConfigError, match=f"{VOCAB + 3} tokens and the model {VOCAB}"):
        Distillation(teacher)(model, random_batch(rng))


def test_options_out_of_range(teacher):
    for options, message in [
        ({"weight": 1.5}, "0 to 1"),
        ({"weight": float("nan")}, "0 to 1"),
        ({"temperature": 0.0}, "positive"),
        ({"temperature": float("inf")}, "positive"),
        ({"divergence": "backward"}, "allowed are 'forward' and 'reverse'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Distillation(teacher, **options)


@pytest.mark.slow  # MLX compiles some fifty expressions
@pytest.mark.usefixtures("compiled")
def test_chunks_in_a_compiled_step(rng, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 4)
    monkeypatch.setattr(losses, "WHOLE", 0)
    config = random_config(rng, vocab_size=VOCAB, num_layers=2, num_kv_reuse_layers=1)
    model, teacher = random_model(config, rng).train(), random_model(config, rng)
    batches = [random_batch(rng) for _ in range(2)]
    loss = Distillation(teacher, 0.5)

    def step(arrays):
        parameters = model.trainable_parameters()
        batch = Batch(segments=None, **arrays)
        result = nn.value_and_grad(model, loss)(model, batch)
        model.update(parameters)
        return result

    inputs = [{k: v for k, v in b._asdict().items() if v is not None} for b in batches]
    plain = [step(arrays) for arrays in inputs]
    compiled = mx.compile(step, inputs=model.state)
    for arrays, (value, gradients) in zip(inputs, plain, strict=True):
        again, others = compiled(arrays)
        assert again.item() == pytest.approx(value.item(), rel=1e-4)
        for (name, one), (_, two) in zip(
            tree_flatten(gradients), tree_flatten(others), strict=True
        ):
            assert_close(two, one, 1e-3, name, least=1e-2)


@pytest.mark.usefixtures("compiled", "exact_memory")
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_compiled_step_keeps_no_logits(rng, monkeypatch, divergence):
    """Neither the model's nor the teacher's: chunks are computed again in the backward pass."""
    vocabulary, targets, dims = 4096, 1024, 8
    monkeypatch.setattr(losses, "is_afm", lambda model: isinstance(model, Head))
    monkeypatch.setattr(losses, "CHUNK", 64)
    monkeypatch.setattr(losses, "WHOLE", 0)
    tokens = mx.array(rng.integers(0, vocabulary, targets), dtype=mx.int32)
    batch = Batch(
        tokens[None], None, mx.arange(targets, dtype=mx.int32), tokens[::-1], mx.ones(targets)
    )
    model = Head(vocabulary, dims)
    loss = Distillation(Head(vocabulary, dims), divergence=divergence)
    parameters = model.trainable_parameters()
    mx.eval(batch, parameters, loss.teacher.parameters())

    def of(traced):
        model.update(traced)
        return loss(model, batch)

    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.compile(mx.value_and_grad(of))(parameters))
    # Kept logits alone are that much, and their gradients as much again.
    assert mx.get_peak_memory() - held < 1.2 * targets * vocabulary * 4
