"""Losses against float64 numpy, in chunks and whole, for models of both kinds."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.errors import ConfigError
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.track_config import TrackConfig
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.loop import losses
from afm_mlx.training.loop.losses import AcceptanceRate, CrossEntropy, Distillation
from tests.tools.cases import each
from tests.tools.compare import assert_close, assert_same_tensors
from tests.tools.models import random_config, random_model
from tests.tools.tracks import SMALL, random_tracks
from tests.tools.zoo import zoo_model

VOCAB = 61
both_divergences = pytest.mark.parametrize("divergence", ["forward", "reverse"])


@pytest.fixture
def model(rng):
    config = random_config(rng, vocab_size=VOCAB, num_layers=3, num_kv_reuse_layers=1)
    return random_model(config, rng)


@pytest.fixture
def teacher(rng):
    return random_model(random_config(rng, vocab_size=VOCAB), rng)


@pytest.fixture
def in_chunks(monkeypatch):
    """A function that has losses compute the logits of a few targets at a time."""

    def switch(size=4, vocabulary=VOCAB):
        monkeypatch.setattr(losses, "chunk_of", lambda *given: size)
        monkeypatch.setattr(losses, "WHOLE", 0)

    return switch


def random_batch(rng, vocabulary=VOCAB, targets=11) -> Batch:
    """Two rows of 7 tokens; targets anywhere, some of weight 0, as padding has."""
    weights = rng.uniform(0, 2, targets) * (rng.random(targets) < 0.7)
    inputs, positions, labels = (
        mx.array(rng.integers(0, most, shape), dtype=mx.int32)
        for most, shape in ((vocabulary, (2, 7)), (14, targets), (vocabulary, targets))
    )
    return Batch(inputs, None, positions, labels, mx.array(weights.astype(np.float32)))


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
    return pytest.approx((np.array(batch.weights, np.float64) * mixed).sum(), rel=1e-4)


@both_divergences
def test_losses_are_weighted_sums(model, teacher, rng, divergence):
    batch = random_batch(rng)
    assert CrossEntropy()(model, batch).item() == expected(model, model, batch, 0, 1)
    for weight, temperature in [(1, 1), (0.3, 1), (1, 2.5), (0.6, 0.7)]:
        loss = Distillation(teacher, weight, temperature, divergence)(model, batch)
        wanted = expected(model, teacher, batch, weight, temperature, divergence)
        assert loss.item() == wanted


def test_acceptance_is_what_both_say(model, teacher, rng):
    batch = random_batch(rng)
    ours, theirs = (np.exp(log_softmax(logits_of(m, batch))) for m in (model, teacher))
    kept = (np.array(batch.weights, np.float64) * np.minimum(ours, theirs).sum(-1)).sum()
    assert AcceptanceRate(teacher)(model, batch).item() == pytest.approx(kept, rel=1e-4)


class Head(nn.Module):
    def __init__(self, vocabulary, dims):
        super().__init__()
        self.model = nn.Module()
        self.model.embedding = nn.Embedding(vocabulary, dims)
        self.model.output_norm = nn.RMSNorm(dims)
        self.args = SimpleNamespace(vocab_size=vocabulary)

    def hidden_at(self, inputs, positions, segments, shared=None):
        h = self.model.embedding(inputs)
        return h.reshape(-1, h.shape[-1])[positions]

    def head(self, h):
        return self.model.embedding.as_linear(self.model.output_norm(h))


@pytest.fixture
def heads(rng, monkeypatch):
    """A function (vocabulary, width) -> a student and a teacher that are heads alone."""
    monkeypatch.setattr(losses, "is_afm", lambda model: isinstance(model, Head))
    return lambda *sizes: (Head(*sizes), Head(*sizes))


@both_divergences
def test_gradients_are_what_differences_give(heads, in_chunks, rng, divergence):
    in_chunks()
    vocabulary = int(rng.integers(9, 80))
    student, teacher = heads(vocabulary, 6)
    loss = Distillation(teacher, 1.0, float(rng.uniform(0.5, 3)), divergence)
    batch, start = random_batch(rng, vocabulary), student.trainable_parameters()
    _, gradients = nn.value_and_grad(student, loss)(student, batch)
    for name, gradient in tree_flatten(gradients):
        direction = mx.array(rng.normal(size=gradient.shape).astype(np.float32))
        values = []
        for step in (1e-2, -1e-2):
            student.update(start)
            moved = dict(tree_flatten(start))[name] + step * direction
            student.load_weights([(name, moved)], strict=False)
            values.append(loss(student, batch).item())
        student.update(start)
        slope = (values[0] - values[1]) / 2e-2
        scale = (mx.abs(gradient) * mx.abs(direction)).sum().item()
        assert slope == pytest.approx((gradient * direction).sum().item(), abs=3e-3 * scale)


def test_samples_of_a_packed_row_cost_what_they_cost_alone(model, teacher, rng):
    segments = mx.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
    labels = mx.array(rng.integers(0, VOCAB, 4))
    tokens = mx.array(rng.integers(0, VOCAB, (1, 9)))
    packed = Batch(tokens, segments, mx.array([1, 3, 4, 6]), labels, mx.ones(4))
    first = Batch(tokens[:, :4], None, mx.array([1, 3]), labels[:2], mx.ones(2))
    second = Batch(tokens[:, 4:7], None, mx.array([0, 2]), labels[2:], mx.ones(2))
    for loss in (CrossEntropy(), Distillation(teacher, 0.5)):
        alone = loss(model, first) + loss(model, second)
        assert loss(model, packed).item() == pytest.approx(alone.item(), rel=1e-2)


@pytest.mark.parametrize("head", ["trained", "frozen", "packed"])
@pytest.mark.parametrize(
    ("targets", "divergence"), [(1, "forward"), (8, "reverse"), (11, "forward"), (11, "reverse")]
)
def test_chunks_change_neither_the_loss_nor_a_gradient(
    model, teacher, in_chunks, rng, targets, divergence, head
):
    if head == "packed":
        widths = {"hidden_dim": 32, "hidden_dim_scale_factor": 2, "num_heads": 4, "num_kv_heads": 2}
        config = random_config(rng, vocab_size=VOCAB, **widths)
        model = random_model(config, rng)
        quantize_model(model, {}, QuantizationRule(4))
        add_lora(model, 2, 1.0)
    elif head == "frozen":
        model.model.embedding.freeze()
        model.model.output_norm.freeze()
    batch = random_batch(rng, targets=targets)
    step = nn.value_and_grad(model.train(), Distillation(teacher, 0.5, 2.0, divergence))
    loss, gradients = step(model, batch)
    mx.eval(loss, gradients)
    in_chunks(4)
    before = dict(tree_flatten(model.parameters()))
    chunked, again = step(model, batch)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(gradients), tree_flatten(again), strict=True):
        assert_close(other, one, 1e-3, name, least=1e-3)
    assert_same_tensors(dict(tree_flatten(model.parameters())), before)


@pytest.mark.parametrize(
    ("targets", "vocabulary", "is_frozen", "chunk"),
    [
        (1024, 2**14, True, 1024),  # few enough to be kept
        (1025, 2**14, True, 342),
        (256, 150_000, True, 52),
        (256, 150_000, False, 256),
        (1500, 150_000, False, 750),
        (3, 2**26, True, 1),
    ],
)
def test_chunks_have_few_logits(targets, vocabulary, is_frozen, chunk):
    assert losses.chunk_of(targets, vocabulary, is_frozen) == chunk


def test_a_teacher_is_frozen_and_evaluates(teacher):
    Distillation(teacher.train())
    assert not teacher.training
    assert not tree_flatten(teacher.trainable_parameters())


@pytest.mark.parametrize("taught", [True, False])
def test_a_model_of_the_zoo(model, rng, taught):
    student, batch = zoo_model("llama", VOCAB, seed=1), random_batch(rng)
    loss = Distillation(model, 0.5) if taught else CrossEntropy()
    assert loss(student, batch).item() == expected(student, model, batch, 0.5 * taught, 1)
    with pytest.raises(ConfigError, match="--no-packing"):
        loss(student, batch._replace(segments=mx.ones((2, 7), mx.int32)))


UNTIED = [kind for kind in losses.PLAIN_HEADS if kind != "parallel_tracks"]


@pytest.mark.parametrize(
    ("kind", "is_tied"),
    [
        *((kind, True) for kind in (*losses.PLAIN_HEADS, "gemma3_text")),
        *((kind, False) for kind in UNTIED),
    ],
)
def test_log_probabilities_of_the_zoo(in_chunks, rng, kind, is_tied):
    """Of states and a head where the head is known, else of the model's logits; whole, and in chunks."""
    if kind == "parallel_tracks":
        model = random_tracks(TrackConfig(**SMALL | {"vocab_size": VOCAB}), seed=1)
    else:
        model = zoo_model(kind, VOCAB, seed=1)
    batch = random_batch(rng)
    if not is_tied:
        model.args.tie_word_embeddings = False
        model.lm_head = nn.Linear(model.args.hidden_size, VOCAB, bias=False)
    model.unfreeze()

    def wanted(model):
        rows = model(batch.inputs).reshape(14, VOCAB)[batch.positions]
        shifted = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        return mx.take_along_axis(shifted, batch.labels[:, None], axis=1)[:, 0]

    def gradients(function):
        found = nn.value_and_grad(model, lambda model: (batch.weights * function(model)).sum())
        return tree_flatten(found(model)[1])

    def check():
        found = losses.log_probabilities(model, batch)
        np.testing.assert_allclose(found, wanted(model), rtol=1e-4, atol=1e-5)
        again = gradients(lambda model: losses.log_probabilities(model, batch))
        for (name, one), (_, other) in zip(again, gradients(wanted), strict=True):
            assert_close(one, other, 1e-3, name, least=1e-3)

    check()
    in_chunks(4)
    check()


def test_a_teacher_of_another_vocabulary(model, rng):
    teacher = random_model(random_config(rng, vocab_size=VOCAB + 3), rng)
    with pytest.raises(ConfigError, match=f"{VOCAB + 3} tokens and the model {VOCAB}"):
        Distillation(teacher)(model, random_batch(rng))


@each(
    ("option", "value", "message"),
    [
        ("weight", 1.5, "0 to 1"),
        ("weight", float("nan"), "0 to 1"),
        ("temperature", 0.0, "positive"),
        ("temperature", float("inf"), "positive"),
        ("divergence", "backward", "allowed are 'forward' and 'reverse'"),
    ],
)
def test_an_option_out_of_range(option, value, message):
    with pytest.raises(ConfigError, match=message):
        Distillation(nn.Linear(1, 1), **{option: value})


@pytest.mark.usefixtures("exact_memory")
def test_a_frozen_head_keeps_no_logits(heads, in_chunks, rng):
    vocabulary, targets, chunk = 4096, 256, 8
    in_chunks(chunk, vocabulary)
    tokens = mx.array(rng.integers(0, vocabulary, targets), dtype=mx.int32)
    batch = Batch(tokens[None], None, mx.arange(targets), tokens[::-1], mx.ones(targets))
    model = heads(vocabulary, 8)[0].train()
    model.freeze()
    mx.eval(batch, model.parameters())
    shift = mx.zeros(8)

    def of(shift):
        states = Head.hidden_at
        model.hidden_at = lambda *given: states(model, *given) + shift
        return CrossEntropy()(model, batch)

    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(of)(shift))
    # MLX allocates ahead: seven arrays of a chunk's logits, of 32.
    assert mx.get_peak_memory() - held < 10 * 4 * chunk * vocabulary


@pytest.mark.usefixtures("compiled", "exact_memory")
@both_divergences
def test_a_compiled_step_keeps_no_logits(heads, in_chunks, rng, divergence):
    vocabulary, targets = 4096, 1024
    in_chunks(64)
    tokens = mx.array(rng.integers(0, vocabulary, targets), dtype=mx.int32)
    positions = mx.arange(targets, dtype=mx.int32)
    batch = Batch(tokens[None], None, positions, tokens[::-1], mx.ones(targets))
    model, teacher = heads(vocabulary, 8)
    loss = Distillation(teacher, divergence=divergence)
    parameters = model.trainable_parameters()
    mx.eval(batch, parameters, teacher.parameters())

    def of(traced):
        model.update(traced)
        return loss(model, batch)

    step = mx.value_and_grad(of)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    compiled = mx.compile(step)(parameters)
    mx.eval(compiled)
    # Kept logits alone are that much, and their gradients as much again.
    assert mx.get_peak_memory() - held < 1.2 * targets * vocabulary * 4
    for (name, got), (_, wanted) in zip(
        tree_flatten(compiled), tree_flatten(step(parameters)), strict=True
    ):
        assert_close(got, wanted, 1e-3, name)
