"""What a method of training is: which weights it trains, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import mlx.nn as nn

from afm_mlx.errors import TrainingError
from afm_mlx.files import refuse_existing
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe


class Method:
    """The parts in which methods differ, in the order in which `train.train_by` calls them.

    `prepare` and `save` are each method's own; the others do nothing unless a method overrides them.

    Attributes:
        kind: name of the method, in the run's manifest.
        untrained_label: what the test split is measured with for comparison, such as "before training".
        may_imitate_itself: the model as it is before `prepare` may be the teacher.
        measures_acceptance: the test also measures the share of the model's proposals that the teacher keeps.
    """

    kind: ClassVar[str]
    untrained_label: ClassVar[str] = "before training"
    may_imitate_itself: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False

    def default_run_path(self, path: Path) -> Path:
        """The folder of the run that saves to `path`."""
        return Path(f"{path}-run")

    def check_path(self, path: Path, run_path: Path, resume: bool) -> None:
        """Raise `AFMError` if something at `path` would be overwritten."""
        if resume and (path / "config.json").is_file() and (run_path / "run.json").is_file():
            raise TrainingError(
                f"The run in {run_path} is finished: {path} is its result, and nothing is left to do. To train "
                "longer, start another run, into another folder."
            )
        refuse_existing(path)

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        """Raise `AFMError` if the model can't be trained by this method; nothing is loaded yet."""

    def with_defaults(self, options: TrainingOptions) -> TrainingOptions:
        """The loop's options, with the method's own defaults."""
        return options

    def prepare(self, model: nn.Module, source: ModelSource, batches: Batches, seed: int) -> None:
        """Change a model in place so that its trainable parameters are those to train.

        Args:
            model: what `source.load` returned.
            source: where the model comes from.
            batches: the training data, for what is calibrated on them.
            seed: seed of new weights.
        """
        raise NotImplementedError

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        """The settings that a run must keep when it resumes; `model` is prepared, and not trained yet."""
        return {}

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which a prepared model computes what `untrained_label` says."""
        return nullcontext()

    def round_as_saved(self, model: nn.Module) -> None:
        """Give the trained model the very numbers that `save` will write."""

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        """Write the folder of the trained model, which has its best weights, after `round_as_saved`.

        Args:
            path: path of the folder.
            model: the model after `round_as_saved`.
            source: where the model came from.
            facts: rows for the model card.
        """
        raise NotImplementedError
