"""Trained weights as a model folder that `afm_mlx.load` and mlx-lm read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files, write_config, write_trained_card
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.errors import AFMError
from afm_mlx.files import atomic_folder
from afm_mlx.training.methods.model_source import ModelSource


def save_model_folder(
    path: str | Path,
    model: nn.Module,
    values: Mapping[str, Any],
    source: ModelSource,
    *,
    what: str,
    facts: Mapping[str, str],
) -> Path:
    """Write a model folder; it appears whole or not at all.

    Args:
        path: path of the folder, which must not exist.
        model: a model with float or packed layers.
        values: content of its config.json.
        source: source of the model, whose tokenizer the folder gets.
        what: a sentence for the card on what the weights are.
        facts: rows for the card, by what they are.

    Raises:
        AFMError: when `path` exists or can't be written.
    """
    path = Path(path)
    try:
        with atomic_folder(path) as folder:
            weights = dict(tree_flatten(model.parameters()))
            # Codes of packed layers are fewer than the numbers that they stand for.
            total = model.args.num_parameters if source.is_afm else None
            save_weights(folder, weights, total_parameters=total)
            write_config(folder, values)
            copy_tokenizer_files(source.folder, folder)
            write_trained_card(
                folder,
                name=path.name,
                source=source.name,
                model_type=str(values.get("model_type")),
                what=what,
                facts=facts,
            )
    except OSError as error:
        raise AFMError(f"The model folder {path} can't be written: {error}.") from None
    return path
