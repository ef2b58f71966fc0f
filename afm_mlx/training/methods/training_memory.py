"""An estimate of the bytes that a training run needs, from the architecture.

A step has two peaks, and the estimate is the larger one:

    start of the backward pass: all that the forward pass has kept, and the head's logits
    update: all gradients, because clipping needs their common norm, and new values next to old ones

Both include the arrays that stay from step to step: weights, the optimizer's state, the average of weights.

For every token, MLX's automatic differentiation keeps in each block this many numbers of the activations' type
(D: hidden width, F: feed-forward width, H: query heads, K: width of keys, L: tokens of a row):

    residual stream, its norm, and both again after attention                          4 D
    queries after RoPE, after their norm, scaled; attention's output, heads merged     5 D
    feed-forward: gate, up, and their product                                          3 F
    keys and values of a writing block: likewise, and their rounding to int8           11 K
    attention weights                                                                  H L

The constants follow from the operations in `afm_mlx.model.model`, and were checked against `mx.get_peak_memory`
(`bench/training.py`). MLX chooses the order in which it runs operations and frees arrays, so an estimate within
15 % is a good one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx

from afm_mlx.adapters.formats.pair_order import pair_targets
from afm_mlx.config import ModelConfig, block_kinds
from afm_mlx.errors import TrainingError
from afm_mlx.measure.machine import machine_memory
from afm_mlx.training.loop.losses import chunk_of

_WIDTHS_KEPT = 9.5  # D, see above; half of the queries' copies are freed early
_FEED_FORWARD_KEPT = 3
_KEYS_KEPT = 11
_HEAD_COPIES = 3  # arrays like a chunk's logits, in float32
_FROZEN_HEAD_COPIES = 7  # likewise; chunks are small, and MLX allocates some ahead
_UPDATE_COPIES = 0.7  # of the trained weights in float32, while new and old ones exist
_UPDATE_COPIES_AVERAGE = 1.7  # likewise, with an average
_PENDING_ARRAYS = 20  # arrays that MLX computes before it frees any: its MLX_BFS_MAX_WIDTH
_WORKING_BLOCKS = 1.5  # blocks whose activations' gradients exist at a time
_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step, by purpose."""

    weights: int  # of the model, adapters included
    optimizer: int  # the moments, and a float32 copy of 16-bit weights
    average: int  # of weights
    gradients: int  # of all trained weights, float32
    accumulated: int  # sum of gradients over micro-batches
    update: int  # new weights while the old ones exist
    activations: int  # what blocks keep for the backward pass
    expanded: int  # float copies, kept for it, of packed matrices and of matrices on a grid
    head: int  # logits of a chunk of targets, and gradients of the embedding before they are summed

    @property
    def held(self) -> int:
        """Bytes that stay from step to step."""
        return self.weights + self.optimizer + self.average

    @property
    def total(self) -> int:
        """Bytes at the larger of the two peaks."""
        backward = self.activations + self.expanded + self.head
        return self.held + self.accumulated + max(backward, self.gradients + self.update)

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Return the estimate for two models that train in one step."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return MemoryEstimate(*(one + another for one, another in pairs))


def estimate_memory(
    config: ModelConfig,
    kind: str = "full",
    *,
    batch_size: int,
    length: int,
    rank: int = 16,
    base_bits: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    grad_checkpoint: bool = False,
    ema: bool = False,
    accumulates: bool = False,
    muon: bool = False,
    targets: int | None = None,
) -> MemoryEstimate:
    """Estimate the peak of MLX's memory over a training step of an AFM model.

    Args:
        config: architecture.
        kind: "full", "lora" (all linear layers of all blocks), "qat" (all linear layers and the embedding), or
            "ifp" (all weights, and masks of the feed-forwards; for the predictor, see `predictor_memory`).
        batch_size, length: rows and tokens of a micro-batch.
        rank: rank of LoRA pairs.
        base_bits: bits of LoRA's frozen base: 2, 4 or 8 for a packed body with an embedding of 4 bits at least;
            pass None for float, as for the other kinds.
        dtype: type of float weights and activations.
        grad_checkpoint, ema, accumulates: whether blocks are recomputed, an average of weights is kept, and
            a step has several micro-batches.
        muon: whether matrices of blocks, and LoRA pairs, train by Muon, which has one moment in place of two.
        targets: number of scored tokens in a micro-batch; pass None for all.
    """
    hidden, ffn = config.hidden_dim, config.ffn_dim
    embedding = config.vocab_size * hidden
    body = sum(  # weights of all linear layers of all blocks
        kind.num_blocks * matrix.inputs * matrix.outputs
        for kind in block_kinds(config)
        for matrix in kind.matrices
    )
    size, lora = dtype.size, lora_parameters(config, rank) if kind == "lora" else 0
    trained = lora or config.num_parameters
    targets = batch_size * length if targets is None else targets

    weights = config.num_parameters * size
    if base_bits is not None:
        packed = body * base_bits + embedding * max(base_bits, 4)
        weights = packed // 8 + (config.num_parameters - body - embedding) * size
    # LoRA pairs are float32; 16-bit weights have a master copy in addition to both moments.
    copies = 2 if lora or size == _FLOAT32 else 3

    update = int(trained * _FLOAT32 * (_UPDATE_COPIES_AVERAGE if ema else _UPDATE_COPIES))
    if not lora:
        update += _PENDING_ARRAYS * hidden * ffn * _FLOAT32

    # Numbers per token that a block keeps for its backward pass.
    feed_forward = (_FEED_FORWARD_KEPT + (kind == "ifp")) * ffn  # the product again, with its mask
    reuse = _WIDTHS_KEPT * hidden + feed_forward + config.num_heads * length
    writing = reuse + _KEYS_KEPT * config.kv_dim
    if grad_checkpoint:
        per_token = config.num_layers * hidden + config.kv_values_per_token + writing
    else:
        per_token = config.num_kv_layers * writing + config.num_kv_reuse_layers * reuse
        if kind == "qat":
            # Weights' gradients are computed late, and the gradients of the layers' outputs stay until then.
            per_token += config.num_layers * (3 * hidden + 2 * ffn)
    per_token += _WORKING_BLOCKS * writing

    expanded = 0
    if kind == "qat":
        expanded = (1 if grad_checkpoint else config.num_layers) * body * size // config.num_layers
    elif lora and base_bits is not None:
        # One matrix is dequantized to float32 for a product, and the next one already.
        expanded = 2 * hidden * ffn * _FLOAT32

    chunk = chunk_of(targets, config.vocab_size, is_frozen=bool(lora))
    copies_of_logits = _FROZEN_HEAD_COPIES if lora else _HEAD_COPIES
    head = copies_of_logits * chunk * config.vocab_size * _FLOAT32
    if lora:  # a packed embedding is dequantized for the product
        head += 0 if base_bits is None else embedding * _FLOAT32
    else:
        # The embedding has a gradient as input, one as head, and one of a chunk before it is added.
        head += (2 if chunk == targets else 3) * embedding * size
        head += embedding * (size + _FLOAT32) if kind == "qat" else 0

    return MemoryEstimate(
        weights=weights + lora * _FLOAT32,
        optimizer=(trained * copies - muon * (lora or body)) * _FLOAT32,
        average=trained * _FLOAT32 if ema else 0,
        gradients=trained * _FLOAT32,
        accumulated=trained * _FLOAT32 if accumulates else 0,
        update=update,
        activations=int(batch_size * length * size * per_token),
        expanded=expanded,
        head=head,
    )


def predictor_memory(
    config: ModelConfig,
    head: int,
    *,
    prompts: int,
    length: int,
    dtype: mx.Dtype = mx.bfloat16,
    ema: bool = False,
    accumulates: bool = False,
    muon: bool = False,
) -> MemoryEstimate:
    """Estimate what a predictor of masks adds to a training step.

    Args:
        config: architecture of the predictor's body.
        head: number of weights of its head, in float32.
        prompts, length: prompts of a micro-batch, and tokens of each, padding included.
        dtype, ema, accumulates, muon: see `estimate_memory`.
    """
    body = estimate_memory(
        config,
        batch_size=prompts,
        length=length,
        dtype=dtype,
        ema=ema,
        accumulates=accumulates,
        muon=muon,
        targets=1,
    )
    numbers = head * _FLOAT32
    # A body that predicts no tokens has no logits.
    return dataclasses.replace(body, head=0) + MemoryEstimate(
        weights=numbers,
        optimizer=2 * numbers,
        average=numbers if ema else 0,
        gradients=numbers,
        accumulated=numbers if accumulates else 0,
        update=int(numbers * (_UPDATE_COPIES_AVERAGE if ema else _UPDATE_COPIES)),
        activations=0,
        expanded=0,
        head=0,
    )


def lora_parameters(config: ModelConfig, rank: int) -> int:
    """Return the number of parameters of pairs on all linear layers; queries, keys and values have one each."""
    return rank * sum(target.inputs + target.outputs for target in pair_targets(config))


def check_fits(nbytes: int | None) -> None:
    """Raise `TrainingError` if a run of `nbytes` needs more than this machine's memory, without swap space.

    `nbytes` is None if there is no estimate. The error names options that need less.
    """
    available = machine_memory()
    if nbytes is not None and nbytes > available:
        raise TrainingError(
            f"The training needs about {nbytes / 1e9:,.1f} GB, and this machine has {available / 1e9:,.1f}. "
            "--grad-checkpoint, a smaller --batch-size, --max-seq-length or --rank, and a packed model "
            "need less."
        )
