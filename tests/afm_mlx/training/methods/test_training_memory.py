"""The estimate of memory: its parts against models that exist, its total against MLX's peak."""

import dataclasses

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.adapters.mask_predictor import MaskPredictor, PredictorConfig
from afm_mlx.config import PRESETS
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.optimizers import AdamW, optimizer_of
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.training_memory import (
    estimate_memory,
    lora_parameters,
    predictor_memory,
)
from bench.training_worker import Case, measure
from tests.tools.models import random_config

# MLX's allocator rounds up far less than these sizes.
WIDTHS = {"vocab_size": 256, "hidden_dim": 64, "num_heads": 2, "num_kv_heads": 1}
WIDTHS |= {"hidden_dim_scale_factor": 3.25}


def bytes_of(tree):
    return sum(array.nbytes for _, array in tree_flatten(tree))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_full_training_holds_is_counted(rng, dtype, optimizer):
    config = random_config(rng, kv_bits=None)
    model, is_muon = Model(config), optimizer == "muon"
    model.set_dtype(dtype)
    optimizer = optimizer_of(TrainingOptions(1, 1e-3, optimizer=optimizer), model)
    optimizer.init(model.trainable_parameters())
    found = estimate_memory(config, batch_size=1, length=64, dtype=dtype, muon=is_muon)
    assert found.weights == bytes_of(model.parameters())
    numbers = [optimizer.state[name] for name in ("step", "learning_rate")]
    assert found.optimizer == bytes_of(optimizer.state) - bytes_of(numbers)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(None, mx.bfloat16), (2, mx.bfloat16), (4, mx.float32)]
)
def test_what_lora_holds_is_counted_but_for_scales(rng, bits, dtype):
    config = random_config(rng, **WIDTHS, kv_bits=None)
    rank = int(rng.integers(1, 9))
    model = Model(config)
    model.set_dtype(dtype)
    if bits is not None:
        quantize_model(model, {}, QuantizationRule(bits))
    base = bytes_of([a for name, a in tree_flatten(model.parameters()) if "scales" not in name])
    add_lora(model, rank, 0.5)
    lora = bytes_of(model.trainable_parameters())
    assert lora == 4 * lora_parameters(config, rank)
    found = estimate_memory(
        config, "lora", rank=rank, base_bits=bits, batch_size=1, length=64, dtype=dtype
    )
    assert (found.weights, found.gradients) == (base + lora, lora)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_a_predictor_of_masks_adds_is_counted(rng, dtype):
    body = Model(random_config(rng, kv_bits=None))
    body.set_dtype(dtype)
    predictor, optimizer = MaskPredictor(body, PredictorConfig(3, 64, 16, 4, 5)), AdamW(1e-3)
    optimizer.init(predictor.trainable_parameters())
    head = predictor.w1.size + predictor.w2.size
    found = predictor_memory(body.args, head, prompts=8, length=16, dtype=dtype)
    assert found.weights == bytes_of(predictor.parameters())
    numbers = [optimizer.state[name] for name in ("step", "learning_rate")]
    assert found.optimizer == bytes_of(optimizer.state) - bytes_of(numbers)
    assert found.gradients == 4 * sum(a.size for _, a in tree_flatten(predictor.parameters()))
    assert found.head == 0
    alone = estimate_memory(body.args, "ifp", batch_size=2, length=16, dtype=dtype)
    assert (alone + found).held == alone.held + found.held
    plain = estimate_memory(body.args, batch_size=2, length=16, dtype=dtype)
    assert alone.activations > plain.activations


@pytest.mark.parametrize(("vocab_size", "chunk"), [(256, 4096), (65_536, 128)])
def test_logits_are_those_of_a_chunk_unless_they_are_few(rng, vocab_size, chunk):
    config = random_config(rng, **(WIDTHS | {"vocab_size": vocab_size}))
    sizes = {"batch_size": 4, "length": 1024, "rank": 1, "dtype": mx.float32}
    one, all_of_them = (
        estimate_memory(config, "lora", **sizes, targets=targets).head for targets in (1, None)
    )
    assert all_of_them == chunk * one


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize(
    "case",
    [
        Case("full"),
        Case("full", grad_checkpoint=True, ema=True),
        Case("qat", granularity="row"),
        Case("lora", base_bits=2, grad_checkpoint=True),
    ],
    ids=lambda case: case.name,
)
def test_the_total_is_near_the_peak_of_a_step(rng, case):
    """A wide corridor for small models; bench/training.py has the 3B's widths."""
    config = random_config(rng, **WIDTHS, num_layers=4, num_kv_reuse_layers=1)
    case = dataclasses.replace(case, length=int(rng.choice([192, 256, 320])))
    before = mx.get_active_memory()
    answer = measure(config, case, steps=1, warm_up=1)
    estimate = estimate_memory(
        config,
        case.kind,
        batch_size=1,
        length=case.length,
        base_bits=2 if case.base_bits == 2 else None,
        dtype=mx.float32,
        grad_checkpoint=case.grad_checkpoint,
        ema=case.ema,
    )
    assert (answer["held_bytes"] - before) / estimate.held == pytest.approx(1, abs=0.1)
    assert 0.65 < (answer["peak_bytes"] - before) / estimate.total < 1.5


def test_more_of_anything_needs_more():
    config, base = PRESETS["afm-3b"], {"kind": "qat", "batch_size": 2, "length": 512}
    total = estimate_memory(config, **base).total
    for more in ({"batch_size": 8}, {"length": 2048}, {"ema": True}, {"accumulates": True}):
        assert estimate_memory(config, **(base | more)).total > total
    assert estimate_memory(config, **base, grad_checkpoint=True).activations < total / 10
