"""Draft models, which propose tokens to a target (speculative decoding): where they lie, and loading one.

A draft has its target's vocabulary, token for token, and no tokenizer of its own is needed: ids go from one
to the other as they are. It is a model folder like any other, and lies in `draft` of its target's folder, or of
the folder of the adapter that it was trained for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.config import is_afm_config, read_config_json
from afm_mlx.errors import AFMError, ConfigError
from afm_mlx.loading.load import load_model
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.threads import in_mlx_thread
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import DRAFT_FOLDER, has_tokenizer


def model_draft(folder: str | Path) -> Path | None:
    """The folder of the draft model that comes with a model; None where there is none."""
    draft = Path(folder) / DRAFT_FOLDER
    return draft if (draft / "config.json").is_file() else None


def adapter_draft(adapter_path: str | Path) -> Path | None:
    """The folder of the draft model that was trained for a model with this adapter; None where there is none.

    Args:
        adapter_path: an adapter's folder, or a file in it. A draft in a file of Apple's toolkit is a compiled
            program, and none that runs here.
    """
    path = Path(adapter_path)
    return model_draft(path if path.is_dir() else path.parent)


AUTO = "auto"
"""In place of a draft model's path: the one that comes with the model."""


def load_drafts(
    path: str | Path | None,
    model: nn.Module,
    tokenizer: Any,
    folder: str | Path,
    adapters: Mapping[str, Path] | None = None,
) -> tuple[nn.Module | None, dict[str, nn.Module]]:
    """Load the draft model that a user names, and those that come with adapters.

    Args:
        path: folder or hub id of the draft model; "auto" takes the one that comes with the model, None none.
        model, tokenizer: the target and its tokenizer.
        folder: the target's folder.
        adapters: paths of adapters by their names.

    Returns:
        The draft model, and those of the adapters that have one, by the adapters' names; nothing for None.

    Raises:
        AFMError: see `load_draft`; and where no draft comes with the model or an adapter.
    """
    if path is None:
        return None, {}
    given = {name: adapter_draft(path) for name, path in (adapters or {}).items()}
    own = {name: load_draft(path, model, tokenizer) for name, path in given.items() if path}
    found = model_draft(folder) if path == AUTO else path
    if found is None and not own:
        raise ConfigError(
            f"{folder} has no draft model of its own: there is no {DRAFT_FOLDER}/config.json. Give the draft "
            "model's folder or hub id."
        )
    return (None if found is None else load_draft(found, model, tokenizer)), own


@in_mlx_thread
def load_draft(path: str | Path, model: nn.Module, tokenizer: Any) -> nn.Module:
    """Load a draft model for a target.

    Args:
        path: folder or hub id of the draft model, such as `model_draft` returns.
        model: the target.
        tokenizer: the target's tokenizer, with which that of the draft's folder is compared, if there is one;
            None compares no pieces.

    Returns:
        The draft model in eval mode, an AFM `Model` where its folder says so.

    Raises:
        ConfigError: when the draft's vocabulary is not the target's.
        AFMError: what is wrong with its folder, and where.
    """
    try:
        folder = resolve_model(path)
        values = read_config_json(folder / "config.json")
        draft, own = _load(folder, values)
    except AFMError as error:
        raise type(error)(f"The draft model: {error}") from None
    _check_rows(folder, draft, model)
    if own is not None and tokenizer is not None:
        _check_pieces(folder, own, tokenizer)
    return draft


def _load(folder: Path, values: dict[str, Any]) -> tuple[nn.Module, Any | None]:
    """The model, and the tokenizer that its own folder holds."""
    if not is_afm_config(values):
        model, tokenizer, _ = load_mlx_lm_folder(folder)
        return model, tokenizer
    return load_model(folder, values), load_tokenizer(folder) if has_tokenizer(folder) else None


def _check_rows(folder: Path, draft: nn.Module, model: nn.Module) -> None:
    rows, wanted = (getattr(each.args, "vocab_size", None) for each in (draft, model))
    if rows != wanted:
        raise _other_vocabulary(
            folder, f"its embedding has {_count(rows)} rows, and the model's {_count(wanted)}"
        )


def _count(rows: int | None) -> str:
    return "an unknown number of" if rows is None else f"{rows:,}"


def _check_pieces(folder: Path, own: Any, tokenizer: Any) -> None:
    pieces, wanted = own.get_vocab(), tokenizer.get_vocab()
    if pieces == wanted:
        return
    if len(pieces) != len(wanted):
        fault = f"its tokenizer has {len(pieces):,} pieces, and the model's {len(wanted):,}"
    else:
        other = sum(wanted.get(piece) != token for piece, token in pieces.items())
        fault = f"{other:,} of its tokenizer's {len(pieces):,} pieces are others, or have other ids"
    raise _other_vocabulary(folder, fault)


def _other_vocabulary(folder: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"The draft model {folder} has another vocabulary than the model that it would propose tokens to: "
        f"{fault}. Choose a draft with the model's tokenizer, or train one: afm-mlx lora --fine-tune-type "
        "draft --teacher MODEL."
    )
