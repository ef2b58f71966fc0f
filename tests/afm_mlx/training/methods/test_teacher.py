"""Teachers that a model can learn from, and those that it can't."""

import dataclasses

import pytest

from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.train import load_teacher, open_teacher
from tests.tools.cli import write_folder
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import random_adapter


def test_a_model_learns_from_itself_on_a_grid_or_with_an_adapter_only(recipe, model):
    student = ModelSource.open(model)
    for teacher in ("self", model):
        alone = dataclasses.replace(recipe, teacher=teacher)
        with pytest.raises(ConfigError, match="nothing to learn"):
            open_teacher(alone, student, may_imitate_itself=False)
        assert open_teacher(alone, student, may_imitate_itself=True).is_same(student)
        adapted = dataclasses.replace(alone, teacher_adapter=model)
        assert open_teacher(adapted, student, may_imitate_itself=False).is_same(student)
    with pytest.raises(ConfigError, match="without a teacher to put it on"):
        dataclasses.replace(recipe, teacher_adapter=model)


def test_a_teacher_has_the_students_vocabulary(recipe, model, tmp_path, spm_bpe, spm_unigram, rng):
    wide = dataclasses.replace(TRAINABLE, vocab_size=TRAINABLE.vocab_size + 8)
    for name, files, message in (
        ("other", (spm_unigram, rng, TRAINABLE), r"different vocabularies \(.* pieces"),
        ("padded", (spm_bpe, rng, wide), r"\(1008 and 1000 rows of the embedding\)"),
    ):
        teacher = ModelSource.open(write_folder(tmp_path / name, *files))
        with pytest.raises(ConfigError, match=message):
            load_teacher(recipe, teacher, ModelSource.open(model))


def test_a_teachers_adapter_is_one_of_its_own(recipe, model, draft, tmp_path, rng):
    stranger = random_adapter(draft, tmp_path / "stranger", rng)
    recipe = dataclasses.replace(recipe, teacher=model, teacher_adapter=stranger)
    with pytest.raises(CheckpointError, match="was made for the model"):
        load_teacher(recipe, ModelSource.open(model), ModelSource.open(draft))
