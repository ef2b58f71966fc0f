"""The model that a student imitates: opened and checked before anything is loaded, then loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.errors import ConfigError
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.training.methods.model_source import ModelSource, open_as_teacher
from afm_mlx.training.methods.recipe import Recipe


class Teacher(NamedTuple):
    """A loaded teacher.

    Args:
        model: the teacher with its adapter.
        name: name of the model and of its adapter, for the card.
        manifest: what a run must keep of the teacher when it resumes.
    """

    model: nn.Module
    name: str
    manifest: dict[str, Any]


def open_teacher(
    recipe: Recipe, student: ModelSource, may_imitate_itself: bool
) -> ModelSource | None:
    """Find the teacher of a recipe; "self" is the student as it is before training.

    Raises:
        ConfigError: when the student has nothing to learn from this teacher.
        AFMError: when there is no such model.
    """
    if recipe.teacher is None:
        return None
    teacher = student if str(recipe.teacher) == "self" else open_as_teacher(recipe.teacher)
    is_same = recipe.teacher_adapter is None and teacher.is_same(student)
    if is_same and not may_imitate_itself:
        raise ConfigError(
            f"The teacher {recipe.teacher} is the very model that is trained: there is nothing to learn from "
            "it. A packed model learns from the float model that it was made of."
        )
    return teacher


def load_teacher(recipe: Recipe, source: ModelSource, student: ModelSource) -> Teacher:
    """Load the teacher of a recipe, and attach its adapter.

    Raises:
        ConfigError: when teacher and student have different vocabularies.
        AFMError: when the model or its adapter can't be loaded.
    """
    if not source.is_same(student):
        _check_vocabulary(source, student)
    model, name = source.load(), source.name
    warn_if_slow(model, "the teacher")
    manifest = {"teacher": name, "teacher_weights": source.fingerprint(model)}
    adapter = recipe.teacher_adapter
    if adapter is not None:
        tensors, config = load_adapter(adapter)
        attach_adapter(model, adapter, base_folder=source.folder, force=recipe.force)
        manifest["teacher_adapter"] = arrays_fingerprint(config.scale, tensors)
        name += f" with the adapter {Path(adapter).resolve().name}"
    return Teacher(model, name, manifest)


def _check_vocabulary(teacher: ModelSource, student: ModelSource) -> None:
    """Raise `ConfigError` if tokens or rows of the embeddings differ."""
    pieces, other_pieces = (source.tokenizer.get_vocab() for source in (teacher, student))
    rows, other_rows = (source.values.get("vocab_size") for source in (teacher, student))
    if pieces != other_pieces:
        fault = f"{len(pieces)} and {len(other_pieces)} pieces"
    elif rows != other_rows:
        fault = f"{rows} and {other_rows} rows of the embedding"
    else:
        return
    raise ConfigError(
        f"The teacher {teacher.name} and {student.name} have different vocabularies ({fault}): its predictions "
        f"can't be imitated. A teacher is the model that {student.name} was made of, or that it drafts for."
    )
