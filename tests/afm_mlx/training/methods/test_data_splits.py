"""Rows of the data: their lengths where nobody gives any."""

import dataclasses

from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import read_data
from tests.tools.cli import lines


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
