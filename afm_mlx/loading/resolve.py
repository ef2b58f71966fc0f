"""Folders of models, adapters and draft models, from paths, hub ids or names; MLX is not imported."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afm_mlx.errors import AFMError, did_you_mean, reason_of, shown

EMBEDDED_MODEL = "afm-nano"
EMBEDDED_MODELS = (EMBEDDED_MODEL, "afm-nano-vision")
AUTO = "auto"
"""In place of a draft model's path: the one that comes with the model."""

_EMBEDDED_FOLDER = Path(__file__).parent.parent / "embedded"


def resolve_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model.

    A path that exists is used; `EMBEDDED_MODELS` have names; anything else is a hub id, which is downloaded
    (`HF_HUB_OFFLINE=1` forbids that). Progress is shown on stderr; an interrupted download is continued.

    Raises:
        AFMError: if it is none of the three, or can't be downloaded.
    """
    path = Path(os.path.expanduser(path_or_hf_repo))
    if path.is_dir():
        return path
    name = str(path_or_hf_repo)
    if name in EMBEDDED_MODELS:
        return _EMBEDDED_FOLDER / name
    if path.exists():
        raise AFMError(
            f"{path} is a file; a model is a folder with config.json. A checkpoint file is converted "
            "first: afm-mlx convert --model CHECKPOINT --mlx-path OUT."
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise AFMError(
            f"There is no folder {name}. Give a model folder, the name of an embedded model "
            f"({', '.join(EMBEDDED_MODELS)}), or a hub id of the form owner/name."
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


def resolve_adapter(path_or_name: str | Path, model_folder: Path, what: str = "adapter") -> Path:
    """Return the folder of an adapter, from a path that exists or the name of one that comes with the model.

    `what` is the error's word for the adapter, such as "task mask".
    """
    path, own = Path(os.path.expanduser(path_or_name)), model_adapters(model_folder)
    if str(path_or_name) and path.exists():
        return path
    if str(path_or_name) in own:
        return own[str(path_or_name)]
    raise AFMError(
        f"There is no {what} {shown(str(path_or_name))}{did_you_mean(str(path_or_name), own)}: it is no path, "
        f"and the model's own adapters are {', '.join(own) or 'none'}."
    )


def resolve_mask(path_or_name: str | Path, model_folder: Path) -> Path:
    """Return the folder of a task mask, found as `resolve_adapter` finds an adapter's."""
    from afm_mlx.adapters.task_mask import check_has_mask

    folder = resolve_adapter(path_or_name, model_folder, "task mask")
    check_has_mask(folder)
    return folder


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


# -- the hub

_WANTED: dict[str, Any] = {
    "allow_patterns": [
        *("*.json", "*.jsonl", "*.jinja", "*.model", "*.tiktoken", "*.txt", "model*.safetensors"),
        *("adapters/*.safetensors", "draft/*.safetensors"),
    ],
    # Folders in which repositories keep the same model for other programs.
    "ignore_patterns": [
        f"{name}/*" for name in ("original", "metal", "onnx", "openvino", "coreml", "gguf")
    ],
}

_HTTP_LIMIT = 50_000_000_000
"""Bytes from which on the hub serves a file through Xet only, which huggingface_hub speaks."""

_TRIES = 5
"""Requests in succession that bring nothing more of a file before it is given up."""

_WAIT = 1.0
"""Seconds to wait before the second try; every further wait is twice as long."""

_LINE_SECONDS = 15.0
"""Seconds between two lines of progress where stderr is no terminal."""


@functools.cache  # commands ask several times
def _download(name: str, revision: str | None) -> Path:
    """Return the folder of a hub model in huggingface_hub's cache; fetch what is missing of it.

    huggingface_hub (1.31 to 2.4) fetches an interrupted file again from its beginning. So large files are
    fetched here, into its cache, and huggingface_hub fetches the small ones and links all of them.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=timeout)
    except (HTTPError, HFValidationError, OSError) as error:
        try:
            return Path(
                snapshot_download(name, revision=revision, local_files_only=True, **_WANTED)
            )
        except (HFValidationError, OSError):
            raise AFMError(_why(name, revision, error)) from None
    try:
        _fetch_large_files(name, info)
        return Path(snapshot_download(name, revision=revision, tqdm_class=_no_bar(), **_WANTED))
    except (
        HTTPError,
        OSError,
        ValueError,
    ) as error:  # ValueError: a file's name leads out of the folder
        raise AFMError(_why(name, revision, error)) from None


def _fetch_large_files(name: str, info: Any) -> None:
    """Fetch the files of a model that are not in huggingface_hub's cache yet, except small ones."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock, filter_repo_objects

    names = [file.rfilename for file in info.siblings]
    files = filter_repo_objects(info.siblings, key=lambda file: file.rfilename, **_WANTED)
    large = [file for file in files if file.lfs is not None and file.lfs.size < _HTTP_LIMIT]
    weights = [n for n in names if n.startswith("model") and n.endswith(".safetensors")]
    if "config.json" not in names or not weights:
        kinds = sorted({os.path.splitext(n)[1] for n in names} - {"", ".md"})
        raise AFMError(
            f"{name} on the hub is no model that runs here: it needs config.json and model*.safetensors, "
            f"and has files {', '.join(kinds) or 'of no kind'}. Take a repository in that form, such as "
            "one of mlx-community."
        )
    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=name, repo_type="model")
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    missing = {}
    for file in large:
        found = try_to_load_from_cache(name, file.rfilename, revision=info.sha)
        if not isinstance(found, str) and not (blobs / file.lfs.sha256).exists():
            missing[blobs / file.lfs.sha256] = file
    if not missing:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    locks.mkdir(parents=True, exist_ok=True)
    total = sum(file.lfs.size for file in missing.values())
    done = sum(part.stat().st_size for blob in missing if (part := _part(blob)).exists())
    if (free := shutil.disk_usage(blobs).free) < total - done:
        raise AFMError(
            f"{name} needs {(total - done) / 1e9:.1f} GB of disk, and {cache} has {free / 1e9:.1f} GB free. "
            "Free some (`hf cache ls` lists other models), or set HF_HOME to a folder on another disk."
        )
    with _progress(name, total, done) as report:
        for blob, file in missing.items():
            with WeakFileLock(locks / f"{blob.name}.lock"):  # huggingface_hub's own
                if not blob.exists():  # another process fetched it meanwhile
                    url = hf_hub_url(name, file.rfilename, revision=info.sha)
                    _fetch(url, blob, file.lfs.size, report)


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _fetch(url: str, blob: Path, size: int, report: Callable[[int], Any]) -> None:
    """Fetch a file of `size` bytes, whose SHA-256 is its name; continue a part that is there.

    An answer that ends early is followed by another request, unless `_TRIES` in succession bring no byte more
    than there was.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    failures = 0
    with _part(blob).open("ab") as part:
        most = part.tell()
        while (done := part.tell()) < size:
            headers = build_hf_headers() | {
                "Range": f"bytes={done}-",
                "Accept-Encoding": "identity",
            }
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            try:
                with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
                    hf_raise_for_status(response)
                    if response.status_code != 206:  # the whole file
                        part.seek(0)
                        part.truncate()
                        report(-done)
                    for chunk in response.iter_bytes():
                        part.write(chunk)
                        report(len(chunk))
                if part.tell() < size:
                    raise HTTPError("the answer ended early")
            except HTTPError as error:
                permanent = isinstance(error, HfHubHTTPError) and (
                    error.response.status_code < 500 and error.response.status_code != 429
                )
                failures = 1 if part.tell() > most else failures + 1
                most = max(most, part.tell())
                if permanent or failures == _TRIES:
                    raise
                time.sleep(_WAIT * 2 ** (failures - 1))
    with _part(blob).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        _part(blob).unlink()
        raise AFMError(f"What came of {url} was damaged, and is removed: run the command again.")
    _part(blob).rename(blob)


@contextmanager
def _progress(name: str, total: int, done: int) -> Iterator[Callable[[int], Any]]:
    """Yield a function that takes bytes as they come, and shows a bar on stderr, or a line now and then.

    HF_HUB_DISABLE_PROGRESS_BARS=1 switches both off.
    """
    from huggingface_hub import utils

    tqdm: Any = utils.tqdm
    lines: dict[str, Any] = {
        "file": _Lines(),
        "mininterval": _LINE_SECONDS,
        "miniters": 1,
        "bar_format": "{desc}: {n_fmt} of {total_fmt} ({percentage:.0f} %), {rate_fmt}, {remaining} left",
    }
    options = {} if sys.stderr.isatty() else lines
    with tqdm(desc=name, total=total, initial=done, unit="B", unit_scale=True, **options) as bar:
        yield bar.update


class _Lines:
    """A file for tqdm's bar that writes each state as a line on stderr."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _no_bar() -> type:
    """Return a class of bars that show nothing, for the small files."""
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

    return NoBar


def _why(name: str, revision: str | None, error: Exception) -> str:
    """Return one line that says why a hub model could not be fetched, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = next(iter(reason_of(error).strip().splitlines()), type(error).__name__).rstrip(".")
    again = "What has come is kept: the same command continues it."
    match error:
        case errors.GatedRepoError():
            return (
                f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, then log in with "
                "`hf auth login`, or set HF_TOKEN."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"There is no folder {name}, and no public model of this name on the hub. Check the spelling; "
                "for a private model, log in with `hf auth login`, or set HF_TOKEN."
            )
        case errors.RevisionNotFoundError():
            return (
                f"{name} has no revision {shown(revision)} on the hub. "
                f"{constants.ENDPOINT}/{name}/commits/main lists what it has."
            )
        case errors.HFValidationError():
            return f"There is no folder {shown(name)}, and it is no hub id: {reason}."
        case ValueError():
            return f"{name} can't be stored: {reason}."
        case errors.OfflineModeIsEnabled():
            return (
                f"{name} is not on this machine, or not all of it, and HF_HUB_OFFLINE=1 forbids fetching it. "
                "Unset HF_HUB_OFFLINE, or give a model folder."
            )
        case errors.HfHubHTTPError(response=response) if response.status_code == 401:
            return (
                f"The hub refused the token with which {name} was asked for: log in again with "
                "`hf auth login`, or unset HF_TOKEN."
            )
        case errors.HfHubHTTPError(response=response):
            return f"The hub answered {response.status_code} for {name}: try again later. {again}"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"The disk is full: {name} does not fit into {constants.HF_HUB_CACHE}. Free some, or set "
                f"HF_HOME to a folder on another disk. {again}"
            )
        case OSError(errno=int()):
            cache = constants.HF_HUB_CACHE
            return f"{name} can't be stored in {cache}: {reason}. Set HF_HOME to another folder."
    return (
        f"{name} is not on this machine, or not all of it, and the hub ({constants.ENDPOINT}) can't be "
        f"reached: {reason}. Check the connection. {again}"
    )
