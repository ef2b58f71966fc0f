"""The test split, measured with what was trained and without, against counting token by token."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, DataError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.methods.train import measure_adapter
from tests.tools.training_runs import random_adapter


@pytest.fixture
def adapter(model, tmp_path, rng):
    return random_adapter(model, tmp_path / "adapter", rng, size=0.3)


def naive(recipe, adapter):
    """Mean loss, and how many tokens, one sample at a time."""
    model, tokenizer = load(recipe.model, adapter_path=adapter and str(adapter))
    total = weight = tokens = 0.0
    for sample in load_split(recipe.data, "test", tokenizer, max_seq_length=96):
        ids = np.asarray(sample.tokens)
        logits = np.array(model(mx.array(ids[None, :-1])).astype(mx.float32), np.float64)[0]
        normal = np.log(np.exp(logits).sum(-1, keepdims=True))
        losses = -(logits - normal)[np.arange(len(ids) - 1), ids[1:]]
        total += (losses * sample.weights[1:]).sum()
        weight += sample.weights[1:].sum()
        tokens += np.count_nonzero(sample.weights[1:])
    return total / weight, tokens


def test_an_adapter_is_measured_with_and_without(recipe, adapter):
    seen, bars = [], []
    scores = measure_adapter(
        recipe, adapter, on_data=seen.append, progress=lambda *done: bars.append(done)
    )
    for score, path in ((scores.untrained, None), (scores.trained, adapter)):
        loss, tokens = naive(recipe, path)
        assert score.loss == pytest.approx(loss, rel=1e-2)  # int8 keys depend on who shares a row
        assert score.tokens == tokens == seen[0].n_targets
        assert score.perplexity == pytest.approx(np.exp(loss), rel=0.1)
        assert score.to_dict() == {
            "loss": score.loss, "perplexity": score.perplexity, "tokens": tokens
        }  # fmt: skip
    assert abs(scores.trained.loss - scores.untrained.loss) > 1e-3
    assert bars[-1] == (seen[0].per_epoch,) * 2
    assert len(bars) == 2 * seen[0].per_epoch


def test_some_batches_of_the_base_alone(recipe):
    recipe = dataclasses.replace(recipe, max_seq_length=64, packing=False)
    some, whole, more = (
        measure_adapter(dataclasses.replace(recipe, test_batches=n), None) for n in (2, -1, 10**6)
    )
    assert some.trained is None
    assert 0 < some.untrained.tokens < whole.untrained.tokens
    assert more.untrained == whole.untrained


def test_what_can_not_be_measured(recipe, adapter, tmp_path):
    with pytest.raises(TrainingError, match=r"no adapter .*nowhere to test.*--train"):
        measure_adapter(recipe, tmp_path / "nowhere")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_fingerprint"] = "0" * 64
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was made for"):
        measure_adapter(recipe, adapter)
    (recipe.data / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"no test\.jsonl"):
        measure_adapter(recipe, None)
