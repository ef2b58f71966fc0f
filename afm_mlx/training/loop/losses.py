"""Losses: cross-entropy of the data, and the divergence from a teacher's predictions.

    CrossEntropy = sum over targets of  w * -log softmax(logits)[label]
    Distillation = sum over targets of  w * ((1 - a) * cross-entropy + a * T^2 * KL(teacher_T || student_T))
    the same, reversed:                                              ... KL(student_T || teacher_T)

with `x_T = softmax(logits / T)`. The forward divergence makes the student cover all tokens that the teacher
finds likely; the reverse one keeps it from tokens that the teacher finds unlikely. The reverse divergence
suits a draft model, whose tokens are useless if the target rejects them. T^2 makes the size of gradients
independent of T (Hinton et al. 2015, arXiv 1503.02531, section 2). All losses are sums: the training loop
divides by the sum of weights, so that every target counts the same in any micro-batch.

Logits are computed for targets only, and with a large vocabulary for some targets at a time (`chunk_of`). They
are not kept: a frozen head computes the gradient of its input together with the losses, and a head that is
trained runs again in the backward pass. The 3B's logits of 8,192 targets would take 5 GB in float32, and their
gradient another 5 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.errors import ConfigError
from afm_mlx.model.model import is_afm
from afm_mlx.model.pooling import hidden_states
from afm_mlx.quantization.packed_layers import PackedEmbedding
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.data.embedded import embedded
from afm_mlx.training.loop.gradient_checkpointing import Tree, recomputed, with_gradient

CHUNK = 1024
"""Number of targets whose logits are in memory at a time, if the head is trained, too.

Each chunk then computes a gradient of the size of the head's matrix.
"""

WHOLE = 1 << 24
"""Number of logits up to which they are kept: 64 MB of float32."""

CHUNK_LOGITS = 1 << 23
"""Number of logits of a chunk, if the head is frozen: 32 MB of float32.

MLX allocates the results of some ten operations ahead of computing them: up to seven such arrays.
"""

DIVERGENCES = ("forward", "reverse")

TargetLoss: TypeAlias = Callable[[mx.array, mx.array | None, mx.array], mx.array]
"""Maps logits (n, V), the teacher's logits (n, V) or None, and labels (n,) to losses (n,) in float32."""


Metrics: TypeAlias = dict[str, mx.array]
"""Sums of figures over a batch, () float32, by their names; divided by the sum of weights, they are means."""

LOWER_IS_BETTER = (
    "loss",
    "grade_loss",
    "kl",
    "kl_mismatched",
    "rejected",
    "rejected_reward",
    "length",
    "cut_off",
    "balance",
    "router_z",
    "load_max",
)
"""Metrics of which the lowest value is the best; of others it is the highest."""


class Loss(Protocol):
    """A weighted sum over the targets of a batch, () float32; or a pair of this sum and the batch's metrics."""

    def __call__(self, model: nn.Module, batch: Any) -> mx.array | tuple[mx.array, Metrics]: ...


@runtime_checkable
class SplitMetrics(Protocol):
    """A loss with figures that need all batches of a split, rather than sums over each batch."""

    def split_metrics(self, model: nn.Module, batches: Any, count: int) -> dict[str, float]:
        """Return the figures of the first `count` batches, or of all for -1, by their names."""


def loss_and_metrics(loss: Loss, model: nn.Module, batch: Any) -> tuple[mx.array, Metrics]:
    """Return the loss of a batch and its metrics, which most losses don't have."""
    result = loss(model, batch)
    return result if isinstance(result, tuple) else (result, {})


class CrossEntropy:
    """The negative log-likelihood of the data, in nats."""

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        return mx.sum(batch.weights * _of_targets(model, None, batch, _cross_entropy))


class Distillation:
    """The divergence between a model's and a teacher's predictions, mixed with cross-entropy.

    Args:
        teacher: a model of the same vocabulary, which is frozen and put in eval mode.
        weight: a in [0, 1]; with 1 the loss has no cross-entropy.
        temperature: T > 0; above 1, the teacher's unlikely tokens count more.
        divergence: "forward", KL(teacher || student), or "reverse", KL(student || teacher).

    Raises:
        ConfigError: for an argument out of range; on a call, for a teacher of another vocabulary.
    """

    def __init__(
        self,
        teacher: nn.Module,
        weight: float = 1.0,
        temperature: float = 1.0,
        divergence: str = "forward",
    ):
        if not 0 <= weight <= 1:
            raise ConfigError(f"The distillation weight is {weight}; allowed are 0 to 1.")
        if not 0 < temperature < float("inf"):
            raise ConfigError(
                f"The distillation temperature is {temperature}; allowed are positive numbers."
            )
        check_divergence(divergence)
        teacher.freeze()
        self.teacher = teacher.eval()
        self.weight = weight
        self.temperature = temperature
        self.divergence = divergence

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        return mx.sum(batch.weights * _of_targets(model, self.teacher, batch, self._divergence))

    def _divergence(self, logits: mx.array, taught: mx.array, labels: mx.array) -> mx.array:
        first, second = (taught, logits) if self.divergence == "forward" else (logits, taught)
        loss = self.weight * _divergence(first, second, self.temperature)
        if self.weight < 1:
            loss = loss + (1 - self.weight) * _cross_entropy(logits, None, labels)
        return loss


class AcceptanceRate:
    """The share of a model's draft tokens that speculative sampling accepts: sum of min(model, teacher).

    A token that is drawn from `p` and accepted with probability min(1, q / p) is accepted with probability
    sum min(p, q) (Leviathan et al. 2023, arXiv 2211.17192, section 3.2). This is a metric, not a training loss.
    `teacher` is the target, which verifies the draft tokens; in eval mode, of the same vocabulary.
    """

    def __init__(self, teacher: nn.Module):
        self.teacher = teacher

    def __call__(self, model: nn.Module, batch: Batch) -> mx.array:
        return mx.sum(batch.weights * _of_targets(model, self.teacher, batch, _shared))


def check_divergence(divergence: str) -> None:
    """Raise `ConfigError` for an unknown divergence."""
    if divergence not in DIVERGENCES:
        allowed = " and ".join(map(repr, DIVERGENCES))
        raise ConfigError(f"The divergence is {divergence!r}; allowed are {allowed}.")


def _cross_entropy(logits: mx.array, taught: mx.array | None, labels: mx.array) -> mx.array:
    return _surprise(logits, labels)


@mx.custom_function
def _surprise(logits: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, labels, reduction="none")


@_surprise.vjp
def _surprise_gradients(
    primals: Sequence[mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    # MLX's own holds a third array of the logits' size: the gradient of the label's logit, among zeros.
    logits, labels = primals
    found, labels = mx.softmax(logits, axis=-1) * cotangent[:, None], labels[:, None]
    own = mx.take_along_axis(found, labels, axis=-1) - cotangent[:, None]
    return mx.put_along_axis(found, labels, own, axis=-1), mx.zeros_like(labels[:, 0])


def _divergence(first: mx.array, second: mx.array, temperature: float) -> mx.array:
    """Return T^2 * KL(softmax(first / T) || softmax(second / T)), (n,)."""
    log_p, log_q = (
        x - mx.logsumexp(x, axis=-1, keepdims=True)
        for x in (first / temperature, second / temperature)
    )
    return temperature**2 * mx.sum(mx.exp(log_p) * (log_p - log_q), axis=-1)


def _shared(logits: mx.array, taught: mx.array, labels: mx.array) -> mx.array:
    """Return the sum of min(model, teacher) of the probabilities over the vocabulary, (n,), from logits."""
    return mx.minimum(mx.softmax(logits, axis=-1), mx.softmax(taught, axis=-1)).sum(axis=-1)


# -- targets, a chunk at a time


def chunk_of(targets: int, vocabulary: int, is_frozen: bool) -> int:
    """Return the number of targets whose logits are in memory at a time, of all `targets`.

    `is_frozen` says that no part of the head is trained. Chunks are as large as each other, nearly.
    """
    if targets * vocabulary <= WHOLE:
        return targets
    most = max(1, CHUNK_LOGITS // vocabulary) if is_frozen else CHUNK
    return -(-targets // -(-targets // most))


class Targets(Protocol):
    """The arrays of a batch that say what is predicted, and from what; see `batches.Batch`."""

    @property
    def inputs(self) -> mx.array: ...
    @property
    def segments(self) -> mx.array | None: ...
    @property
    def positions(self) -> mx.array: ...
    @property
    def labels(self) -> mx.array: ...


def log_probabilities(model: nn.Module, batch: Targets, temperature: float = 1.0) -> mx.array:
    """Return the log-probability of each label of a batch, (T,) float32, in nats; differentiable.

    Logits are divided by the temperature, as where answers are sampled. Padding has numbers, too, of no
    meaning.
    """

    def surprise(logits: mx.array, taught: mx.array | None, labels: mx.array) -> mx.array:
        return _cross_entropy(logits / temperature, taught, labels)

    return -_of_targets(model, None, batch, surprise)


def _of_targets(
    model: nn.Module, teacher: nn.Module | None, batch: Targets, of_targets: TargetLoss
) -> mx.array:
    """Return the losses of the batch's targets, (T,) float32."""
    h = _states(model, batch)
    taught = None if teacher is None else mx.stop_gradient(_states(teacher, batch))

    def loss(rows: slice, h: mx.array) -> mx.array:
        logits, others = _logits(model, h), None
        if taught is not None:
            # Depends on `h`: if the forward pass and the recomputation were equal expressions,
            # `mx.compile` would keep the logits of the first.
            others = mx.stop_gradient(_logits(teacher, mx.depends([taught[rows]], [h])[0]))
            if others.shape != logits.shape:
                raise ConfigError(
                    f"The teacher has {others.shape[-1]} tokens and the model {logits.shape[-1]}; a teacher "
                    "must have the model's vocabulary. Choose the model that this one was made of."
                )
        return of_targets(logits, others, batch.labels[rows])

    targets = batch.labels.size
    own = _plain_head(model)
    has_head = own is not None or is_afm(model)  # `h` are states, not logits
    vocabulary = model.args.vocab_size if has_head else h.shape[-1]
    if targets * vocabulary <= WHOLE:
        return loss(slice(targets), h)
    head = [own] if own is not None else []
    if is_afm(model):
        head = [model.model.embedding, model.model.output_norm]
    is_frozen = not any(tree_flatten(module.trainable_parameters()) for module in head)

    def update(parameters: list[Tree]) -> None:
        for module, values in zip(head, parameters, strict=True):
            module.update(values)

    def part(
        rows: slice, parameters: list[Tree], h: mx.array, after: mx.array
    ) -> tuple[mx.array, mx.array]:
        before = [module.trainable_parameters() for module in head]
        update(parameters)
        try:
            found = loss(rows, mx.depends([h], [after])[0])
            return found, mx.depends([after], [found])[0]
        finally:
            # The model must not keep traced arrays.
            update(before)

    # MLX would run chunks in parallel. `after`, a 0, is an input and an output of each, so that forward passes
    # run one after the other, and so do backward passes, in the reverse order.
    parts, after = [], mx.array(0.0)
    chunk = chunk_of(targets, vocabulary, is_frozen)
    with _dequantized_head(model):
        for start in range(0, targets, chunk):
            rows = slice(start, min(start + chunk, targets))
            if is_frozen:
                inputs = mx.depends([h[rows]], [after])[0]
                of_rows = partial(loss, rows)
                found = with_gradient(of_rows)(inputs) if model.training else of_rows(inputs)
                after = mx.depends([after], [found])[0]
            else:
                # The logits are computed again in the backward pass, not kept. Gradients reach only the
                # arguments of such a function, so the parameters are among them.
                parameters = [module.trainable_parameters() for module in head]
                found, after = recomputed(partial(part, rows))(parameters, h[rows], after)
            parts.append(found)
    return mx.concatenate(parts) + after


@contextmanager
def _dequantized_head(model: nn.Module) -> Iterator[None]:
    """In training, dequantize a packed head once for all chunks; kernels have no gradient."""
    embedding = model.model.embedding if is_afm(model) else None
    if not isinstance(embedding, PackedEmbedding) or not embedding.training:
        yield
        return
    model.model.embedding = embedding.to_embedding()
    try:
        yield
    finally:
        model.model.embedding = embedding


# -- both kinds of model


def _states(model: nn.Module, batch: Targets) -> mx.array:
    """Return the head's inputs for all targets, (T, D); of models whose head is not known apart, the logits."""
    if is_afm(model):
        shared = getattr(batch, "shared", None)
        return model.hidden_at(embedded(model, batch), batch.positions, batch.segments, shared)
    if batch.segments is not None:
        raise ConfigError(
            "Rows that hold several samples need a mask that models of mlx-lm don't take. Give each sample a "
            "row of its own (packed=False, --no-packing)."
        )
    # Logits of prompts would be most of the memory.
    whole = (
        model(batch.inputs) if _plain_head(model) is None else hidden_states(model, batch.inputs)
    )
    return whole.reshape(-1, whole.shape[-1])[batch.positions]


def _logits(model: nn.Module, h: mx.array) -> mx.array:
    if is_afm(model):
        h = model.head(h)
    elif (head := _plain_head(model)) is not None:
        h = head.as_linear(h) if hasattr(head, "as_linear") else head(h)
    return h.astype(mx.float32)


PLAIN_HEADS = ("llama", "qwen2", "qwen3", "parallel_tracks")
"""Modules of models whose logits are one product of the states behind the final norm, and nothing else."""


def _plain_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that makes logits of a model's hidden states; None where it is not known to be all."""
    if type(model).__module__.rpartition(".")[2] not in PLAIN_HEADS:
        return None
    return model.lm_head if "lm_head" in model else model.model.embed_tokens
