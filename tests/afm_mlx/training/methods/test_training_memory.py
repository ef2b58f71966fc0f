"""The estimate of memory: its parts against models that exist, its total against MLX's peak."""

import dataclasses

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.config import PRESETS
from afm_mlx.errors import ConfigError
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.optimizer import AdamW
from afm_mlx.training.methods.training_memory import estimate_memory, lora_parameters
from bench.training_worker import Case, measure
from tests.tools.models import random_config

# Of the architecture, not of MLX's allocator: what it rounds up is nothing beside these sizes.
WIDTHS = {
    "vocab_size": 256,
    "hidden_dim": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "hidden_dim_scale_factor": 3.25,
}


def bytes_of(tree):
    return sum(array.nbytes for _, array in tree_flatten(tree))


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(None, mx.float32), (None, mx.bfloat16), (2, mx.bfloat16), (4, mx.float32)],
)
def test_what_a_run_holds_is_counted(rng, bits, dtype):
    """Weights and optimizer to the byte, but for scales and static KV scales."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "hidden_dim": 64, "hidden_dim_scale_factor": 3.0}
    config = random_config(rng, **sizes, kv_bits=None)
    rank = int(rng.integers(1, 9))
    model = Model(config)
    model.set_dtype(dtype)
    settings = {"batch_size": 1, "length": 64, "dtype": dtype}
    if bits is None:
        optimizer = AdamW(1e-3)
        optimizer.init(model.trainable_parameters())
        found = estimate_memory(config, "full", **settings)
        assert found.weights == bytes_of(model.parameters())
        assert found.optimizer == bytes_of(optimizer.state) - bytes_of(
            [optimizer.state[name] for name in ("step", "learning_rate")]
        )
    else:
        quantize_model(model, {}, QuantizationRule(bits))
    scales = sum(a.nbytes for name, a in tree_flatten(model.parameters()) if "scales" in name)
    before = bytes_of(model.parameters())
    add_lora(model, rank, 0.5)
    found = estimate_memory(config, "lora", rank=rank, base_bits=bits, **settings)
    lora = bytes_of(model.trainable_parameters())
    assert lora == 4 * lora_parameters(config, rank)
    assert found.weights == before - scales + lora
    assert found.gradients == lora


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


def test_more_of_anything_needs_more(rng):
    config = PRESETS["afm-3b"]
    base = {"kind": "qat", "batch_size": 2, "length": 512}
    total = estimate_memory(config, **base).total
    for more in ({"batch_size": 8}, {"length": 2048}, {"ema": True}, {"accumulates": True}):
        assert estimate_memory(config, **(base | more)).total > total
    assert estimate_memory(config, **base, grad_checkpoint=True).activations < total / 10
    parts = dataclasses.asdict(estimate_memory(config, **base))
    assert all(type(value) is int and value >= 0 for value in parts.values())


def test_an_argument_out_of_range_is_named():
    for argument, value in [
        ("kind", "adapter"),
        ("batch_size", 0),
        ("length", 0),
        ("rank", 0),
        ("base_bits", 3),
    ]:
        arguments = {"kind": "lora", "batch_size": 1, "length": 64, argument: value}
        with pytest.raises(ConfigError, match=f"{argument} is {value!r}"):
            estimate_memory(PRESETS["afm-nano"], **arguments)


def test_only_lora_has_a_packed_base():
    with pytest.raises(ConfigError, match="only LoRA trains on a packed base"):
        estimate_memory(PRESETS["afm-nano"], "qat", batch_size=1, length=64, base_bits=2)
