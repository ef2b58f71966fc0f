"""Task masks from a model's own predictor, which Instruction-Following Pruning trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from afm_mlx import threads
from afm_mlx.adapters.task_mask import TaskMask
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.errors import ConfigError
from afm_mlx.files import refuse_existing
from afm_mlx.loading.load import check_predictor, load_predictor
from afm_mlx.ranks import refuse_ranks
from afm_mlx.tokenizer.first_prompt import first_prompt
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import MAX_SEQ_LENGTH
from afm_mlx.training.pruning.mask_training import save_mask


def predict_mask(
    model: str | Path,
    path: str | Path,
    *,
    task: str = "",
    data: str | Path | None = None,
    features: Mapping[str, str] | None = None,
) -> TaskMask:
    """Choose a task's mask by the predictor of a model, and write its folder, which runs as an adapter.

    Args:
        model: folder, hub id or name of a model with a predictor.
        path: folder to make.
        task: what the mask is for. Without `data` it is what the predictor reads, as a user's message, such as
            "You are an expert in physics."
        data: a folder with train.jsonl, or one file, in the formats of training: the mask has the channels with
            the highest mean scores over the first prompts of its chats.
        features: see `load_split`.

    Raises:
        AFMError: when there is neither a task nor data, or model, data or `path` can't be used.
    """
    threads.check_process()
    refuse_ranks("A mask")
    path = Path(path)
    refuse_existing(path)
    source = ModelSource.open(model)
    check_predictor(source.folder)
    tokenizer = source.tokenizer
    if data is not None:
        samples = load_split(
            data, "train", tokenizer, max_seq_length=MAX_SEQ_LENGTH, features=features
        )
        ends = [first_prompt(sample.tokens, tokenizer) for sample in samples]
        prompts = [sample.tokens[:end] for sample, end in zip(samples, ends, strict=True)]
    elif task.strip():
        message = {"role": "user", "content": task}
        prompts = [tokenizer.apply_chat_template([message], add_generation_prompt=True)]
    else:
        raise ConfigError("The predictor has nothing to read: describe the task, or give data.")
    config = ModelConfig.from_dict(source.values)
    predictor = load_predictor(source.folder, config)
    mask = predictor.task_mask(prompts, task, folder_fingerprint(config, source.folder))
    save_mask(path, mask)
    return mask
