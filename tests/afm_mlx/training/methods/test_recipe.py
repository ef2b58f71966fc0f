"""Recipes: epochs and shares as steps."""

import dataclasses

import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import make_plan, read_data
from tests.tools.cli import lines
from tests.tools.training_runs import OPTIONS


def test_epochs_and_shares_become_steps(recipe):
    options = dataclasses.replace(OPTIONS, iters=4, grad_accumulation_steps=2)
    recipe = dataclasses.replace(recipe, options=options, epochs=1.5, warmup_share=0.1)
    settled = recipe.loop_options(100)
    assert (settled.iters, settled.warmup_iters) == (75, 7)
    assert recipe.loop_options(10000).warmup_iters == 100
    whole = dataclasses.replace(recipe, epochs=2, warmup_share=None, warmup_epochs=1)
    settled = whole.loop_options(7)
    assert (settled.iters, settled.warmup_iters) == (7, 4)
    with pytest.raises(ConfigError, match="warm-up of 1 epochs is 50 steps, and the run has 50"):
        dataclasses.replace(whole, epochs=1).loop_options(100)
    with pytest.raises(ConfigError, match="leave one out"):
        dataclasses.replace(recipe, warmup_epochs=1)
    late = dataclasses.replace(options, iters=51, warmup_iters=50)
    recipe = dataclasses.replace(recipe, options=late, warmup_share=None)
    assert recipe.loop_options(100).warmup_iters == 50
    with pytest.raises(
        ConfigError, match=r"warmup_iters is 50, and the run has 8 steps \(1\.6 epochs"
    ):
        recipe.loop_options(10)
    bounded = dataclasses.replace(recipe, epochs=3, steps_between=(60, 80))
    assert [bounded.loop_options(n).iters for n in (4, 50, 400)] == [60, 75, 80]


# -- Rows of the data: their lengths where nobody gives any


def test_rows_are_no_longer_than_the_data(recipe):
    source = ModelSource.open(recipe.model)
    assert read_data(recipe, source).train.length == 96
    batches = read_data(dataclasses.replace(recipe, max_seq_length=4096), source).train
    assert batches.length % 64 == 0
    assert batches.per_epoch <= 2
    assert batches.fill > 0.5


def test_sizes_that_nobody_gives_fit_model_and_data(recipe, tmp_path):
    source = ModelSource.open(recipe.model)
    data = tmp_path / "train.jsonl"
    recipe = dataclasses.replace(recipe, max_seq_length=None, batch_size=1, data=data)
    context = source.values["context_length"]
    short, long = ({"text": "word " * n} for n in (10, 5000))
    for records, most in (([short] * 30, context // 2), ([long], context)):
        lines(data, *records)
        split = read_data(recipe, source).train
        assert split.length <= most
        assert split.fill > 0.7
    assert split.n_tokens / len(split) <= context
    of_zoo = dataclasses.replace(
        source, values={"model_type": "llama", "max_position_embeddings": 48}
    )
    vars(of_zoo)["tokenizer"] = source.tokenizer
    assert read_data(recipe, of_zoo).train.length == 48


def test_a_plan_counts_a_packed_models_codes_and_expects_less_memory(recipe, model, packed):
    plans = []
    for folder in (model, packed):
        source = ModelSource.open(folder)
        data = read_data(recipe, source)
        plans.append(make_plan(source.load(), source, "lora", None, data, recipe.options))
    floats, codes = plans
    assert codes.parameters == floats.parameters
    assert codes.memory < floats.memory
