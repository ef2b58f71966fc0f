"""Calibrated int8 scales against tamm's observer."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.kernels import dispatch
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.data.batches import Batch, Batches
from afm_mlx.training.data.samples import Sample
from afm_mlx.training.qat.kv_scales import calibrate_kv_scales
from afm_mlx.training.qat.qat_layers import pack_qat, prepare_qat
from tests.tools.models import random_config, random_model, tamm_model, twin_of_tamm
from tests.tools.zoo import zoo_model


def batch_of(tokens, segments=None):
    segments = None if segments is None else mx.array(segments)
    positions = mx.arange(tokens.size, dtype=mx.int32)
    return Batch(mx.array(tokens), segments, positions, positions, mx.ones(tokens.size))


def calibrated(model, *batches):
    """The scales of a model's blocks, (blocks, 2), after calibration."""
    calibrate_kv_scales(model, batches)
    return scales_of(model)


def scales_of(model):
    blocks = model.model.layers
    return np.array([[b.self_attn.quant_key_scale, b.self_attn.quant_value_scale] for b in blocks])


@pytest.mark.parametrize("per_row", [True, False])
def test_scales_equal_those_of_tamms_observer(rng, per_row):
    import torch

    config = random_config(rng, num_layers=4, num_kv_reuse_layers=1)
    reference = tamm_model(config, rng)
    model = twin_of_tamm(reference, config)
    for module in reference.modules():
        if type(module).__name__ == "SimpleEMAMinMaxObserver":
            module.reset_parameters()
    reference.train()
    batches = rng.integers(1, config.vocab_size, (4, 2, 12))
    with torch.no_grad():
        for tokens in batches:
            reference(torch.from_numpy(tokens))
    wanted = scales_of(twin_of_tamm(reference, config))
    segments = None if per_row else np.ones((2, 12), np.int32)
    with dispatch.force("reference"):
        got = calibrated(model, *(batch_of(tokens, segments) for tokens in batches))
    # A key on a rounding boundary may fall to either side and move what later blocks see.
    assert np.allclose(got[0], wanted[0], rtol=1e-5)
    assert np.allclose(got, wanted, rtol=3e-2)
    assert not np.allclose(wanted, 1, rtol=0.1)


def test_packed_rows_have_their_samples_ranges_without_padding(rng):
    """One batch of a packed row, and of its samples alone: the extremes of both are the same."""
    config = random_config(rng, num_layers=2, num_kv_reuse_layers=0)
    model = random_model(config, rng)
    row = rng.integers(0, config.vocab_size, 14)
    segments = np.repeat([1, 2, 0], [6, 5, 3]).astype(np.int32)
    alone = [calibrated(model, batch_of(row[segments == number][None]))[0] for number in (1, 2)]
    together = calibrated(model, batch_of(row[None], segments[None]))[0]
    assert np.allclose(together, np.max(alone, axis=0), rtol=1e-4)


def test_padding_of_rows_of_one_sample_counts_for_nothing(rng):
    config = random_config(rng, num_layers=2, num_kv_reuse_layers=0)
    model = random_model(config, rng)
    # Its keys and values have a large outlier.
    model.model.embedding.weight[0] *= 1e3
    for block in model.model.layers:
        block.input_layernorm.eps = 1e6  # so that the norm does not take the outlier away
    tokens = rng.integers(1, config.vocab_size, 9).tolist()
    wanted = calibrated(model, batch_of(np.array([tokens[:-1]])))[0]
    samples = [Sample(tokens, [0, 0, 0, 1, 1, 1, 1, 1, 1], "memory:1")]
    padded = Batches(samples, batch_size=2, length=24, packed=False)(0)
    np.testing.assert_allclose(calibrated(model, padded)[0], wanted, rtol=1e-4)


def test_a_model_without_scales_gets_them(rng):
    """Those that it would get if it had some already, and computes the same with them."""
    config = random_config(rng, kv_bits=None)
    model = random_model(config, rng)
    with_scales = random_model(dataclasses.replace(config, kv_bits=8), rng)
    with_scales.load_weights(tree_flatten(model.parameters()), strict=False)
    tokens = rng.integers(0, config.vocab_size, (2, 12))
    with dispatch.force("reference"):
        as_float = np.array(model(mx.array(tokens)))
        scales = [calibrated(each, batch_of(tokens)) for each in (model, with_scales)]
        got, wanted = (np.array(each(mx.array(tokens))) for each in (model, with_scales))
    np.testing.assert_array_equal(*scales)
    np.testing.assert_array_equal(got, wanted)
    assert (got != as_float).any()
    assert model.args.kv_bits == 8
    assert model.make_cache()[0].int8


def test_models_on_grids_are_calibrated_too(rng):
    sizes = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
    config = random_config(rng, **sizes)
    model = random_model(config, rng).train()
    batch = batch_of(rng.integers(0, config.vocab_size, (2, 12)))
    prepare_qat(model, QuantizationRule(4))
    trained = calibrated(model, batch)
    assert model.training
    pack_qat(model, config.to_dict())
    assert np.allclose(calibrated(model, batch), trained, rtol=0.05)
    assert not model.training


def test_what_cannot_be_calibrated(rng):
    model = random_model(random_config(rng), rng)
    with pytest.raises(DataError, match="No batch"):
        calibrate_kv_scales(model, [])
    with pytest.raises(ConfigError, match="momentum is 1"):
        calibrate_kv_scales(model, [], momentum=1)
    with pytest.raises(ConfigError, match="AFM architecture"):
        calibrate_kv_scales(zoo_model("llama", 32, 0), [])
