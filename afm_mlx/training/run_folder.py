"""The folder of a training run: what it was started with, how it went, and where to go on.

    run.json                       the manifest: settings and data that a run must not change
    metrics.jsonl                  a line per report and per evaluation
    checkpoints/step-0000100/      trainable.safetensors, optimizer.safetensors, ema.safetensors, state.json
    best/                          trainable.safetensors, state.json

A checkpoint is written beside its place and renamed when all of it is on the disk; the ones before it go
only after that. So whenever the process is killed, the newest folder under `checkpoints` is whole. The two
files of `best` are replaced one after the other; what counts is the copy of the state in the metadata of
the weights.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from afm_mlx.errors import CheckpointError, TrainingError
from afm_mlx.files import atomic_folder, atomic_write
from afm_mlx.weights import save_file

KEEP = 2  # checkpoints; the second is for disks that lose what they said was written
STATE_NAME = "state.json"
TRAINABLE = "trainable"

_STEP = re.compile(r"step-(\d+)")


class Saved(NamedTuple):
    """What a checkpoint holds.

    Args:
        tensors: by file name without suffix, then by tensor name.
        state: JSON values.
    """

    tensors: dict[str, dict[str, mx.array]]
    state: dict[str, Any]


class RunFolder:
    """Use `create` for a new run and `open` for one to go on with."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self._checkpoints = path / "checkpoints"
        self._best = path / "best"

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, Any]) -> RunFolder:
        """Start a run.

        Args:
            path: a folder; made when missing.
            manifest: JSON values that a run must keep when it resumes.

        Raises:
            TrainingError: when there is a run already, or the folder can't be made.
        """
        run = cls(Path(path))
        if run._manifest_path.exists() or run.steps():
            raise TrainingError(
                f"{path} holds a training run already. Resume it, choose another folder, or remove it."
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(
                f"The run's folder {path} can't be made: {error.strerror}. Choose another path."
            ) from None
        run._write_json(run._manifest_path, dict(manifest))
        return run

    @classmethod
    def open(cls, path: str | Path, manifest: Mapping[str, Any]) -> RunFolder:
        """Go on with a run.

        Raises:
            TrainingError: when there is none, or it was started with another manifest: names the keys.
        """
        run = cls(Path(path))
        if not run._manifest_path.exists():
            raise TrainingError(
                f"{path} holds no training run to resume (no run.json). Check the path, or start a new run."
            )
        before = _read_json(run._manifest_path)
        # Through JSON and back: tuples become lists there.
        now = json.loads(json.dumps(dict(manifest)))
        differing = [
            f"{key} was {json.dumps(before.get(key))} and is now {json.dumps(now.get(key))}"
            for key in [*before, *(key for key in now if key not in before)]
            if (key in before, before.get(key)) != (key in now, now.get(key))
        ]
        if differing:
            raise TrainingError(
                f"{path} was started with other settings: {'; '.join(differing)}. Resume with the old ones, "
                "or start a new run in another folder."
            )
        run._remove_leftovers()
        return run

    @property
    def _manifest_path(self) -> Path:
        return self.path / "run.json"

    # -- checkpoints

    def checkpoint_path(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:07d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order."""
        if not self._checkpoints.is_dir():
            return []
        names = (_STEP.fullmatch(path.name) for path in self._checkpoints.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, mx.array]], state: Mapping[str, Any]
    ) -> Path:
        """Write the checkpoint of a step, and remove all but the newest `KEEP`.

        Args:
            step: that was done last.
            tensors: by file name without suffix; empty groups get no file.
            state: JSON values.

        Raises:
            TrainingError: when the disk is full, say; the checkpoints before are as they were.
        """
        path = self.checkpoint_path(step)
        try:
            with atomic_folder(path) as folder:
                for name, group in tensors.items():
                    if group:
                        save_file(folder / f"{name}.safetensors", group)
                self._write_json(folder / STATE_NAME, dict(state))
        except (OSError, CheckpointError) as error:
            raise TrainingError(
                f"The checkpoint of step {step} could not be written: {error} {self.what_remains()}"
            ) from None
        for old in self.steps()[:-KEEP]:
            _remove(self.checkpoint_path(old))
        return path

    def load(self, step: int) -> Saved:
        """Read a checkpoint.

        Raises:
            CheckpointError: names the file that is missing or damaged.
        """
        path = self.checkpoint_path(step)
        return Saved(
            {file.stem: _read_tensors(file)[0] for file in sorted(path.glob("*.safetensors"))},
            _read_json(path / STATE_NAME),
        )

    def what_remains(self) -> str:
        """A sentence on the newest checkpoint, for errors."""
        steps = self.steps()
        if not steps:
            return "No checkpoint was written yet."
        return (
            f"The last checkpoint is that of step {steps[-1]}, {self.checkpoint_path(steps[-1])}."
        )

    def _remove_leftovers(self) -> None:
        # Of processes that were killed while they wrote or removed a folder or a file.
        for folder in (self.path, self._checkpoints, self._best):
            for path in folder.glob(".*") if folder.is_dir() else ():
                if re.match(r"\.(step|run|metrics|trainable|state)-", path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    # -- best weights

    def save_best(self, tensors: Mapping[str, mx.array], state: Mapping[str, Any]) -> None:
        """Put weights in the place of the best so far.

        Raises:
            TrainingError: when they can't be written; the best so far are as they were.
        """
        try:
            self._best.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._best / f"{TRAINABLE}.safetensors") as path:
                save_file(path, tensors, {"format": "mlx", "state": json.dumps(dict(state))})
            self._write_json(self._best / STATE_NAME, dict(state))
        except (OSError, CheckpointError) as error:
            raise TrainingError(
                f"The best weights could not be written: {error} {self.what_remains()}"
            ) from None

    def load_best(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """The best weights and their state; None before any were saved."""
        path = self._best / f"{TRAINABLE}.safetensors"
        if not path.exists():
            return None
        tensors, metadata = _read_tensors(path)
        return tensors, json.loads(metadata["state"])

    # -- metrics

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; NaN and infinities, which JSON lacks, become null.

        Raises:
            TrainingError: when it can't be written.
        """
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        try:
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self.metrics_path} could not be written: {error}. {self.what_remains()}"
            ) from None

    def truncate_metrics(self, step: int) -> None:
        """Forget the lines of later steps, and a half one at the end."""
        if not self.metrics_path.exists():
            return
        kept = [
            line for line in self.metrics_path.read_text("utf-8").splitlines() if _upto(line, step)
        ]
        with atomic_write(self.metrics_path) as path:
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def _write_json(self, path: Path, values: dict[str, Any]) -> None:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _upto(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _remove(folder: Path) -> None:
    # Under another name first: a removal that is cut short must not leave what looks like a checkpoint.
    hidden = folder.with_name(f".{folder.name}-old")
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _read_tensors(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    try:
        tensors, metadata = mx.load(str(path), return_metadata=True)
        mx.eval(tensors)  # now: the file may be gone by the time that they are used
    except (OSError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from None
    return tensors, metadata


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} can't be read: {error}. Remove its folder to go on from the checkpoint before, or start a "
        "new run."
    )
