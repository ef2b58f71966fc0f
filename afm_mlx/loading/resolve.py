"""Folders of models, adapters and draft models, from paths, hub ids or names; MLX is not imported."""

from __future__ import annotations

import os
from pathlib import Path

from afm_mlx.errors import AFMError, did_you_mean, shown

EMBEDDED_MODEL = "afm-nano"
AUTO = "auto"
"""In place of a draft model's path: the one that comes with the model."""

_EMBEDDED_FOLDER = Path(__file__).parent.parent / "embedded"


def resolve_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model.

    A path that exists is used; the embedded model has a name; anything else is a hub id, which is downloaded
    (`HF_HUB_OFFLINE=1` forbids that).

    Raises:
        AFMError: if it is none of the three.
    """
    path = Path(os.path.expanduser(path_or_hf_repo))
    if path.is_dir():
        return path
    if str(path_or_hf_repo) == EMBEDDED_MODEL:
        return _EMBEDDED_FOLDER / EMBEDDED_MODEL
    name = str(path_or_hf_repo)
    if path.exists():
        raise AFMError(
            f"{path} is a file; a model is a folder with config.json. A checkpoint file is converted "
            "first: afm-mlx convert --model CHECKPOINT --mlx-path OUT."
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise AFMError(
            f"There is no folder {name}. Give a model folder, {EMBEDDED_MODEL!r} for the embedded model, "
            "or a hub id of the form owner/name."
        )
    return _download(name, revision)


def model_folders(folder: str | Path) -> list[Path]:
    """Return the model folders in a folder, or in its folders (`owner/name`), in the order of their paths.

    A model folder has config.json and safetensors files. Adapters and drafts in model folders are not listed.

    Raises:
        AFMError: if there is no such folder, or no model in it.
    """
    root = Path(os.path.expanduser(folder))
    if not root.is_dir():
        raise AFMError(f"There is no folder {root}. Give a folder that has model folders.")

    def is_model(path: Path) -> bool:
        return (path / "config.json").is_file() and any(path.glob("*.safetensors"))

    found = []
    for path in sorted(each for each in root.iterdir() if each.is_dir()):
        inner = (
            [path] if is_model(path) else sorted(each for each in path.iterdir() if is_model(each))
        )
        found += inner
    if not found:
        raise AFMError(
            f"{root} has no model folders: none of its folders has config.json and safetensors files. For one "
            "model, use --model."
        )
    return found


def model_adapters(folder: Path) -> dict[str, Path]:
    """Return a mapping from names to folders of the adapters in a model folder's subfolder `adapters`."""
    return {path.name: path for path in sorted(folder.glob("adapters/*")) if path.is_dir()}


def resolve_adapter(path_or_name: str | Path, model_folder: Path) -> Path:
    """Return the folder of an adapter, from a path that exists or the name of one that comes with the model."""
    path, own = Path(os.path.expanduser(path_or_name)), model_adapters(model_folder)
    if str(path_or_name) and path.exists():
        return path
    if str(path_or_name) in own:
        return own[str(path_or_name)]
    raise AFMError(
        f"There is no adapter {shown(str(path_or_name))}{did_you_mean(str(path_or_name), own)}: it is no path, "
        f"and the model's own adapters are {', '.join(own) or 'none'}."
    )


def model_draft(folder: str | Path) -> Path | None:
    """Return the folder of the draft model that comes with a model: `draft` in its folder; None without one."""
    from afm_mlx.tokenizer.vocabulary import DRAFT_FOLDER

    draft = Path(folder) / DRAFT_FOLDER
    return draft if (draft / "config.json").is_file() else None


def adapter_draft(adapter_path: str | Path) -> Path | None:
    """Return the folder of the draft model that comes with an adapter (its folder, or a file in it), or None.

    Drafts in files of Apple's toolkit are ignored: they are compiled programs, which can't run here.
    """
    path = Path(adapter_path)
    return model_draft(path if path.is_dir() else path.parent)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.tiktoken", "*.txt", "*.jsonl"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AFMError(
            f"{name} is no folder here, and could not be fetched from the hub: {reason}. "
            "Check the name, the connection, and HF_HUB_OFFLINE."
        ) from None
