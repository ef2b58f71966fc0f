"""A worker that measures one kind of training step: seconds, and MLX's peak memory.

`ours` are the steps of this package, `peer_mlx_lm` steps of mlx-lm's own trainer on its `afm7`. Both run with
the BLAS that this package installs, so that only the steps differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from afm_mlx.config import ModelConfig  # before mlx.core: it installs a BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx.optimizers as optim

from afm_mlx.adapters.lora import add_lora
from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.data.preferences import PreferenceBatch
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.step import TrainingStep
from afm_mlx.training.qat.qat_layers import prepare_qat
from bench.peer_protocol import Answer, peak_resident, serve

RANK = 16


@dataclass(frozen=True)
class Case:
    """One kind of training.

    Args:
        kind: "full", "lora", "qat", or "dpo", LoRA by preferences, whose rows are chosen and rejected answers;
            "mlx-lm full" and "mlx-lm lora" are the peer's.
        base_bits: bits of a LoRA's base; 32 for float.
        granularity: granularity of QAT's scales.
        grad_checkpoint: recompute activations.
        ema: keep an average of weights.
        batch_size, length: rows and tokens of a batch.
    """

    kind: str
    base_bits: int = 32
    granularity: str = "tensor"
    grad_checkpoint: bool = False
    ema: bool = False
    batch_size: int = 1
    length: int = 256

    @property
    def name(self) -> str:
        base = f", {self.base_bits}-bit base" if self.base_bits < 32 else ", float base"
        details = {
            "qat": f" per {self.granularity}",
            "lora": base,
            "dpo": base,
        }.get(self.kind, "")
        average = ", average" if self.ema else ""
        return self.kind + details + average + (", recomputed" if self.grad_checkpoint else "")


def build(config: ModelConfig, case: Case, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Make a random model of ours, trainable as the case says."""
    mx.random.seed(0)
    model = Model(config)
    model.set_dtype(dtype)
    if config.kv_bits:
        for block in model.model.layers:
            block.self_attn.quant_key_scale = block.self_attn.quant_value_scale = mx.array(4 / 127)
            block.self_attn.freeze(keys=["quant_key_scale", "quant_value_scale"], recurse=False)
    if case.kind in ("lora", "dpo"):
        if case.base_bits < 32:
            quantize_model(model, {}, QuantizationRule(case.base_bits))
        add_lora(model, RANK, 0.5)
    elif case.kind == "qat":
        prepare_qat(model, QuantizationRule(granularity=case.granularity))
    mx.eval(model.parameters())
    return model.train()


def random_batch(config: ModelConfig, case: Case) -> Batch:
    """Make a batch of rows that are filled by one sample each, all of whose tokens are scored."""
    shape = (case.batch_size, case.length)
    tokens = case.batch_size * case.length
    inputs = mx.random.randint(0, config.vocab_size, shape).astype(mx.int32)
    labels = mx.random.randint(0, config.vocab_size, (tokens,)).astype(mx.int32)
    positions = mx.arange(tokens, dtype=mx.int32)
    return Batch(inputs, None, positions, labels, mx.ones((tokens,)))


def random_preferences(config: ModelConfig, case: Case) -> PreferenceBatch:
    """Make pairs of the same tokens: a row is an answer, and the last half of the rows are rejected."""
    batch, rows = random_batch(config, case), case.batch_size
    return PreferenceBatch(
        *batch[:4],
        answers=mx.repeat(mx.arange(rows, dtype=mx.int32), case.length),
        numbers=batch.positions,
        lengths=mx.full((rows,), float(case.length)),
        weights=mx.ones(rows // 2),
        strengths=mx.ones(rows // 2),
        reference=mx.full(batch.labels.shape, -9.0),
    )


def our_step(config: ModelConfig, case: Case, stack: ExitStack) -> Callable[[], None]:
    """Return a function that takes one whole step of our training loop, compiled as there."""
    model = build(config, case)
    if case.grad_checkpoint:
        stack.enter_context(recomputed_blocks(model))
    decay = 0.999 if case.ema else None
    is_dpo = case.kind == "dpo"
    loss = PreferenceLoss("dpo") if is_dpo else CrossEntropy()
    step = TrainingStep(model, loss, AdamW(1e-5), max_norm=1.0, ema_decay=decay)
    batch = random_preferences(config, case) if is_dpo else random_batch(config, case)
    mx.eval(batch, step.optimizer.state)

    def run() -> None:
        step.evaluate(step([batch]))

    return run


def mlx_lm_step(config: ModelConfig, case: Case, stack: ExitStack) -> Callable[[], None]:
    """Return a function that takes the step inside `mlx_lm.tuner.trainer.train`, copied from there."""
    from mlx_lm.models import afm7
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers

    sizes = {k: v for k, v in config.to_dict().items() if k not in ("kv_bits", "context_length")}
    mx.random.seed(0)
    model = afm7.Model(afm7.ModelArgs(**sizes))
    if case.kind == "mlx-lm lora":
        model.freeze()
        keys = {"rank": RANK, "scale": 0.5, "dropout": 0.0}
        linear_to_lora_layers(model, config.num_layers, keys)
    mx.eval(model.parameters())
    if case.grad_checkpoint:
        # Changes the class of the first block: of the blocks that write keys and values only.
        kind = type(model.layers[0])
        stack.callback(setattr, kind, "__call__", kind.__call__)
        grad_checkpoint(model.layers[0])
    optimizer = optim.AdamW(1e-5, weight_decay=0.0)
    gradients = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state, mx.random.state]

    mx.enable_compile()  # as mlx-lm's users have it
    stack.callback(keep_compiler_out)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> Any:
        (loss, tokens), found = gradients(model, batch, lengths)
        optimizer.update(model, found)
        return loss, tokens

    model.train()
    shape = (case.batch_size, case.length + 1)
    batch = mx.random.randint(0, config.vocab_size, shape).astype(mx.int32)
    lengths = mx.array([[0, case.length]] * case.batch_size)
    mx.eval(batch, lengths)

    def run() -> None:
        loss, tokens = step(batch, lengths)
        mx.eval(state, loss, tokens)

    return run


def measure(config: ModelConfig, case: Case, steps: int, warm_up: int = 1) -> Answer:
    """Measure the seconds of each step, and MLX's peak bytes.

    Processor seconds, of all threads, mean something on a machine that others use too.
    """
    with ExitStack() as stack:
        make = mlx_lm_step if case.kind.startswith("mlx-lm") else our_step
        run = make(config, case, stack)
        for _ in range(warm_up):  # the first traces and compiles
            run()
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        seconds, processor_seconds = [], []
        for _ in range(steps):
            start, busy = time.perf_counter(), time.process_time()
            run()
            seconds.append(time.perf_counter() - start)
            processor_seconds.append(time.process_time() - busy)
        return {
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "peak_bytes": mx.get_peak_memory(),
            "held_bytes": held,
            "resident_bytes": peak_resident(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="ModelConfig as JSON")
    parser.add_argument("--case", type=json.loads, required=True, help="Case as JSON")
    options = parser.parse_args()
    config, case = ModelConfig.from_dict(options.config), Case(**options.case)
    serve({}, {"steps": lambda steps: measure(config, case, steps)})


if __name__ == "__main__":
    main()
