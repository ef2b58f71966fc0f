"""The training, validation and test data of a recipe, as batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.training.data.batches import ROW_MULTIPLE, Batches
from afm_mlx.training.data.samples import Sample, has_split, load_split
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe

MAX_SEQ_LENGTH = 2048  # mlx-lm's default; less where the model's context is shorter
_SAMPLES_OF_A_ROW = 4  # samples of the mean length in a row, where the recipe gives no length


@dataclass(frozen=True)
class DataSplits:
    """A data set; a split is None where it has no file or is not asked for."""

    train: Batches
    valid: Batches | None
    test: Batches | None


def read_data(recipe: Recipe, source: ModelSource) -> DataSplits:
    """Read and tokenize all splits.

    Raises:
        DataError: names the lines that can't be used; or for a test, when the data is one file.
        ConfigError: for packed rows and a model that can't keep their samples apart.
    """
    if recipe.test and Path(recipe.data).is_file():
        raise DataError(
            f"{recipe.data} is one file, all of which is trained on; there is nothing to test. Put it into a "
            "folder as train.jsonl, with a test.jsonl beside it, or leave the test out."
        )
    return DataSplits(
        read_split(recipe, source, "train"),
        read_split(recipe, source, "valid") if has_split(recipe.data, "valid") else None,
        read_split(recipe, source, "test") if recipe.test else None,
    )


def read_split(recipe: Recipe, source: ModelSource, split: str) -> Batches:
    """Read and tokenize "train", "valid" or "test"; raises as `read_data` does."""
    packed = source.is_afm if recipe.packing is None else recipe.packing
    if packed and not source.is_afm:
        raise ConfigError(
            "Several samples in a row need a mask that models of mlx-lm don't take. Leave packing out "
            "(--no-packing)."
        )
    # Positions start anew with each sample of a row, so only samples are bound by the context.
    limit = _sample_length(recipe, source)
    samples = load_split(
        recipe.data,
        split,
        source.tokenizer,
        max_seq_length=limit,
        prompt_weight=recipe.prompt_weight,
        features=recipe.features,
    )
    return Batches(
        samples,
        batch_size=recipe.batch_size,
        length=_row_length(samples, recipe, limit) if packed else recipe.max_seq_length or limit,
        packed=packed,
        seed=recipe.options.seed,
        shuffle=split == "train",
    )


def _sample_length(recipe: Recipe, source: ModelSource) -> int:
    """The most tokens of a sample."""
    length = MAX_SEQ_LENGTH if recipe.max_seq_length is None else recipe.max_seq_length
    contexts = [source.values.get("context_length")]
    if recipe.max_seq_length is None:  # in the words of models of the zoo, too
        contexts.append(source.values.get("max_position_embeddings"))
    return min([length, *(n for n in contexts if type(n) is int and n > 1)])


def _row_length(samples: Sequence[Sample], recipe: Recipe, limit: int) -> int:
    """Tokens of a packed row: no more than it takes to put all samples into one batch."""
    inputs = [len(sample.tokens) - 1 for sample in samples]
    longest, total = max([*inputs, 1]), sum(inputs)
    wanted = max(longest, math.ceil(total / recipe.batch_size))
    if recipe.max_seq_length is None:
        # Attention's memory grows with the square of a row, and four samples leave little room for padding.
        wanted = min(wanted, max(longest, math.ceil(_SAMPLES_OF_A_ROW * total / len(inputs))))
    return min(-(-wanted // ROW_MULTIPLE) * ROW_MULTIPLE, recipe.max_seq_length or limit)
