"""The test split, measured with what was trained and without, against counting token by token."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.errors import CheckpointError, DataError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.scores import measure_adapter
from tests.tools.cli import write_folder
from tests.tools.training_data import TRAINABLE, write_data


@pytest.fixture
def model(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE)


@pytest.fixture
def recipe(model, tmp_path, rng):
    options = TrainingOptions(iters=1, learning_rate=1e-3)
    data = write_data(tmp_path / "data", rng, splits="test")
    return Recipe(data, options, model, batch_size=2, max_seq_length=96, test=True)


@pytest.fixture
def adapter(model, tmp_path, rng):
    """A folder whose adapter changes predictions."""
    adapted = add_lora(load(model)[0], 3, 2.0)
    drawn = [
        (name, mx.array(rng.normal(0, 0.3, array.shape).astype(np.float32)))
        for name, array in lora_tensors(adapted).items()
    ]
    adapted.load_weights(drawn, strict=False)
    save_lora(adapted, tmp_path / "adapter", model)
    return tmp_path / "adapter"


def naive(folder, recipe, adapter=None):
    """Mean loss, and how many tokens, one sample at a time."""
    model, tokenizer = load(folder, adapter_path=None if adapter is None else str(adapter))
    total = weight = tokens = 0.0
    for sample in load_split(recipe.data, "test", tokenizer, max_seq_length=96):
        ids = np.asarray(sample.tokens)
        logits = np.array(model(mx.array(ids[None, :-1])).astype(mx.float32), np.float64)[0]
        largest = logits.max(-1, keepdims=True)
        normal = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
        losses = -(logits - normal)[np.arange(len(ids) - 1), ids[1:]]
        total += (losses * sample.weights[1:]).sum()
        weight += sample.weights[1:].sum()
        tokens += np.count_nonzero(sample.weights[1:])
    return total / weight, tokens


def test_an_adapter_is_measured_with_and_without(recipe, model, adapter):
    seen, bars = [], []
    scores = measure_adapter(
        recipe, adapter, on_data=seen.append, progress=lambda *done: bars.append(done)
    )
    for score, folder in ((scores.untrained, None), (scores.trained, adapter)):
        loss, tokens = naive(model, recipe, folder)
        assert score.loss == pytest.approx(loss, rel=1e-2)  # int8 keys depend on who shares a row
        assert score.tokens == tokens == seen[0].n_targets
        assert score.perplexity == pytest.approx(np.exp(loss), rel=0.1)
        assert score.acceptance is None
        assert score.to_dict() == {
            "loss": score.loss, "perplexity": score.perplexity, "tokens": tokens
        }  # fmt: skip
    assert abs(scores.trained.loss - scores.untrained.loss) > 1e-3
    assert bars[-1] == (seen[0].per_epoch,) * 2
    assert len(bars) == 2 * seen[0].per_epoch


def test_some_batches_of_the_base_alone(recipe, adapter):
    recipe = dataclasses.replace(recipe, max_seq_length=64, packing=False, test_batches=2)
    scores = measure_adapter(recipe, None)
    assert scores.trained is None
    whole = measure_adapter(dataclasses.replace(recipe, test_batches=-1), None)
    assert 0 < scores.untrained.tokens < whole.untrained.tokens
    more = measure_adapter(dataclasses.replace(recipe, test_batches=10**6), None)
    assert more.untrained == whole.untrained


def test_what_can_not_be_measured(recipe, model, adapter, tmp_path):
    with pytest.raises(TrainingError, match=r"no adapter .*nowhere to test.*--train"):
        measure_adapter(recipe, tmp_path / "nowhere")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_fingerprint"] = "0" * 64
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was made for"):
        measure_adapter(recipe, adapter)
    (recipe.data / "test.jsonl").rename(recipe.data / "valid.jsonl")
    with pytest.raises(DataError, match=r"no test\.jsonl"):
        measure_adapter(recipe, None)
