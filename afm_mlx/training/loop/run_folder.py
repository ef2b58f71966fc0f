"""The folder of a training run: its settings, metrics, checkpoints and best weights.

    run.json                       the manifest: settings and data that a run must not change
    metrics.jsonl                  a line per report and per evaluation
    checkpoints/step-0000100/      trainable.safetensors, optimizer.safetensors, ema.safetensors, state.json
    best/                          trainable.safetensors, state.json
    NAME.safetensors               what is computed once before the first step, see `RunFolder.keep`
    run.lock                       which process works in the folder, and since when

A checkpoint is written under a temporary name and renamed when all of it is on the disk; older checkpoints are
removed only then. So whenever the process is killed, the newest folder under `checkpoints` is whole. The two
files of `best` are replaced one after the other; resuming reads the copy of the state in the weights' metadata.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.errors import AFMError, CheckpointError, DataError, TrainingError
from afm_mlx.file_lock import FileLock, LockHeldError
from afm_mlx.files import atomic_folder, atomic_write, read_file, remove_folder, remove_leftovers
from afm_mlx.installation import package_problem
from afm_mlx.jsonl import read_jsonl

KEEP = 2  # checkpoints; the older one is for disks that lose data after reporting it written
STATE_NAME = "state.json"
LOCK_NAME = "run.lock"
TRAINABLE = "trainable"

_MAX_BYTES = 256 << 20  # of a JSON file or the metrics
_STEP = re.compile(r"step-(\d+)")


class Checkpoint(NamedTuple):
    """A checkpoint: tensors by file name without suffix and by name, and the loop's state as JSON values."""

    tensors: dict[str, dict[str, mx.array]]
    state: dict[str, Any]


class RunExistsError(TrainingError):
    """A new run was started in the folder `path`, which has a run."""

    def __init__(self, path: Path):
        super().__init__(
            f"{path} holds a training run already. Resume it (--resume) with the arguments that it was started "
            "with, or choose another folder for a new one."
        )
        self.path = path


class RunFolder:
    """The folder of a run: `create` starts a run, `open` resumes one, `close` releases the folder.

    `create` and `open` lock the folder against other objects and processes until `close` or the process's end.
    As a context manager, the object closes itself. `RunFolder(path)` takes no lock, and is for reading only.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock: FileLock | None = None
        self._manifest_path = path / "run.json"
        self.metrics_path = path / "metrics.jsonl"
        self._checkpoints = path / "checkpoints"
        self._best = path / "best"

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, object]) -> RunFolder:
        """Lock a folder, which is made if missing, and start a run in it.

        `manifest` holds JSON values that the run must keep when it resumes. Raises `RunExistsError` when there
        is a run already, `TrainingError` when another process starts one, or the folder can't be made.
        """
        run = cls(Path(path))
        run.check(resume=False)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(
                f"The run's folder {path} can't be made: {error.strerror}. Choose another path."
            ) from None
        with run._begun():
            run.check(resume=False)  # again: another process may have made one meanwhile
            _write_json(run._manifest_path, manifest)
        return run

    @classmethod
    def open(cls, path: str | Path, manifest: Mapping[str, object]) -> RunFolder:
        """Lock the folder of a run and resume it.

        Raises:
            TrainingError: when there is no run, when a process works in the folder (says which), or when the
                run was started with another manifest (names the keys).
        """
        run = cls(Path(path))
        run.check(resume=True)
        with run._begun():
            before = _read_json(run._manifest_path)
            # Through JSON and back: tuples become lists there.
            now = json.loads(json.dumps(dict(manifest)))
            differing = [
                f"{key} was {json.dumps(before.get(key))} and is now {json.dumps(now.get(key))}"
                for key in before | now
                if (key in before, before.get(key)) != (key in now, now.get(key))
            ]
            if differing:
                raise TrainingError(
                    f"{run.path} was started with other settings: {'; '.join(differing)}. Resume with the "
                    "old ones, or start a new run in another folder."
                )
            for folder in (run.path, run._checkpoints, run._best):
                remove_leftovers(folder)
        return run

    def check(self, *, resume: bool) -> None:
        """Check that a run can be resumed, or else created, apart from its manifest; change nothing.

        Raises `RunExistsError` for a new run, when the folder has one; `TrainingError` when there is no run to
        resume, or when a process works in the folder.
        """
        if self.path.is_dir() and self._lock is None:
            self._take_lock(create=False)
            self.close()
        if not resume and (self._manifest_path.exists() or self.steps()):
            raise RunExistsError(self.path)
        if resume and not self._manifest_path.exists():
            raise TrainingError(
                f"{self.path} holds no training run to resume (no run.json). Check the path, or start a new "
                "run."
            )

    def close(self) -> None:
        """Release the folder's lock; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Lock the folder until `close`; release it if the context raises."""
        self._take_lock()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _take_lock(self, *, create: bool = True) -> None:
        try:
            self._lock = FileLock(self.path / LOCK_NAME, create=create)
        except LockHeldError as error:
            owner = error.owner
            if owner is None:
                who = "a process that its lock does not name. Let it end, or choose another folder."
            elif owner.is_here():
                who = f"{owner}. Close the `RunFolder` that has it first."
            else:
                who = (
                    f"{owner}. Let that run go on, or stop it (kill {owner.pid} lets it save a checkpoint) and "
                    "resume it then (--resume); or choose another folder for a new run."
                )
            raise TrainingError(f"{self.path} is in use by {who}") from None
        except FileNotFoundError:
            if create:
                raise
        except OSError as error:
            raise TrainingError(
                f"The run's folder {self.path} can't be locked: {error.strerror}. Check that it may be written "
                "to."
            ) from None

    # -- checkpoints

    def checkpoint_path(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:07d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        if not self._checkpoints.is_dir():
            return []
        names = (_STEP.fullmatch(path.name) for path in self._checkpoints.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, mx.array]], state: Mapping[str, object]
    ) -> Path:
        """Write the checkpoint of a step, and remove all but the newest `KEEP`.

        `tensors` are by file name without suffix, and empty groups get no file; `state` holds JSON values.

        Raises:
            TrainingError: when it can't be written; the checkpoints before are unchanged.
        """
        path = self.checkpoint_path(step)
        with self._written(f"The checkpoint of step {step}"), atomic_folder(path) as folder:
            for name, group in tensors.items():
                if group:
                    save_file(folder / f"{name}.safetensors", group)
            _write_json(folder / STATE_NAME, state)
        for old in self.steps()[:-KEEP]:
            remove_folder(self.checkpoint_path(old))
        return path

    def load(self, step: int) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            CheckpointError: names the file that is missing or damaged.
        """
        path = self.checkpoint_path(step)
        try:
            return Checkpoint(
                {file.stem: _read_tensors(file)[0] for file in sorted(path.glob("*.safetensors"))},
                _read_json(path / STATE_NAME),
            )
        except CheckpointError as error:
            raise self.damaged(step, str(error)) from None

    def damaged(self, step: int, fault: str) -> CheckpointError:
        """Return the error for a checkpoint that can't be used, from its fault as a sentence, with what to do.

        No error advises to remove a checkpoint: an unreadable one may be whole, on a disk that comes back.
        """
        path, before = self.checkpoint_path(step), [s for s in self.steps() if s < step]
        advice = "There is no checkpoint before it: start a new run in another folder."
        if before:
            advice = (
                f"If the error stays, move {path} out of {self._checkpoints} and keep it; --resume then "
                f"goes on from the checkpoint of step {before[-1]}."
            )
        return CheckpointError(
            f"{fault} Check the disk and permissions, and resume again. {advice}"
        )

    def what_remains(self) -> str:
        """Return a sentence about the newest checkpoint, for errors."""
        steps = self.steps()
        if not steps:
            return "No checkpoint was written yet."
        step = steps[-1]
        return f"The last checkpoint is of step {step}: {self.checkpoint_path(step)}."

    # -- best weights

    def save_best(self, tensors: Mapping[str, mx.array], state: Mapping[str, object]) -> None:
        """Replace the best weights by `tensors`, named by parameter, with `state`: "step" and "valid_loss".

        Raises:
            TrainingError: when they can't be written; the best weights are then the old ones, or these, whole.
        """
        with self._written("The best weights"):
            self._best.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._best / f"{TRAINABLE}.safetensors") as path:
                save_file(path, tensors, {"format": "mlx", "state": json.dumps(dict(state))})
            _write_json(self._best / STATE_NAME, state)

    def load_best(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """Return the best weights, and their "step" and "valid_loss"; return None if none were saved.

        Raises:
            CheckpointError: when the file is damaged, or does not name the step.
        """
        path = self._best / f"{TRAINABLE}.safetensors"
        if not path.exists():
            return None
        tensors, metadata = _read_tensors(path)
        try:
            state = json.loads(metadata["state"])
            return tensors, {"step": state["step"], "valid_loss": state["valid_loss"]}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} does not say which step its weights are of ({type(error).__name__}: {error}). Start a "
                "new run in another folder."
            ) from None

    # -- what is computed once

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest that the run was created with."""
        return _read_json(self._manifest_path)

    def keep(self, name: str, tensors: Mapping[str, mx.array], key: str) -> None:
        """Write tensors that a resumed run doesn't compute again, with a key of what they depend on.

        Raises:
            TrainingError: when they can't be written.
        """
        path = self.path / f"{name}.safetensors"
        with self._written(str(path)), atomic_write(path) as temporary:
            save_file(temporary, tensors, {"format": "mlx", "key": key})

    def kept(self, name: str, key: str) -> dict[str, mx.array] | None:
        """Return what `keep` wrote with this name and key; None if it must be computed (again)."""
        try:
            tensors, metadata = _read_tensors(self.path / f"{name}.safetensors")
        except CheckpointError:
            return None
        return tensors if metadata.get("key") == key else None

    # -- metrics

    def log(self, record: Mapping[str, object]) -> None:
        """Append a line to metrics.jsonl; NaN and infinities become null, as JSON has none.

        Raises:
            TrainingError: when it can't be written.
        """
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        path = self.metrics_path
        with self._written(str(path)), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def truncate_metrics(self, step: int, *, evaluated: bool = True) -> None:
        """Remove from metrics.jsonl the lines of steps after `step`, and an incomplete last line.

        Without `evaluated`, the evaluation after `step` is removed, too: it will be made again.
        """
        if not self.metrics_path.exists():
            return
        kept = ""
        for line in read_file(self.metrics_path, _MAX_BYTES).decode("utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                last = step - (not evaluated and "valid_loss" in record)
                if record["step"] <= last:
                    kept += f"{line}\n"
        with atomic_write(self.metrics_path) as path:
            path.write_text(kept, encoding="utf-8")

    @contextmanager
    def _written(self, what: str) -> Iterator[None]:
        """Turn write errors in the context into a `TrainingError` with `what` and the last checkpoint."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            reason = str(error).rstrip(".")
            raise TrainingError(
                f"{what} could not be written: {reason}. {self.what_remains()}"
            ) from None


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_file(path, _MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(values, dict):
        raise _unreadable(path, f"it holds a JSON {type(values).__name__}, and an object is needed")
    return values


def _read_tensors(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    try:
        if not path.is_file():  # a pipe would never end
            raise FileNotFoundError(errno.ENOENT, "it is missing, or no file", str(path))
        with safe_open(path, framework="np"):
            pass  # sizes in the header are checked against the file's
        tensors, metadata = mx.load(str(path), return_metadata=True)
        mx.eval(tensors)  # now: the file may be removed before the tensors are used
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    return tensors, metadata


def _unreadable(path: Path, error: object) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return CheckpointError(f"{path} can't be read: {reason}.")


_NO_METRICS = set(
    "step loss perplexity learning_rate grad_norm tokens tokens_per_second peak_memory".split()
)  # what every line of metrics.jsonl may have


def plot_metrics(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw losses, metrics and the learning rate of a training run, one above the other.

    Args:
        metrics_path: path of a run's metrics.jsonl.
        png_path: path of the picture; an existing file is replaced.

    Raises:
        AFMError: when matplotlib is not installed.
        DataError: when the file is missing, or no line of it can be drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except (ImportError, OSError) as error:
        raise AFMError(f"Plots need matplotlib. {package_problem(error) or error}") from error

    records = [record for _, record in read_jsonl(Path(metrics_path))]
    if not any("loss" in record or "valid_loss" in record for record in records):
        raise DataError(f"{metrics_path} has no line with a loss yet. Train for some steps first.")
    keys = {key.removeprefix("valid_") for record in records for key in record}
    names = ["loss", *sorted(keys - _NO_METRICS), "learning_rate"]
    heights = [3] + [1.5] * (len(names) - 2) + [1]
    figure = Figure(figsize=(8, 1.25 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(names), 1, sharex=True, height_ratios=heights)
    for axes, name in zip(rows, names, strict=True):
        for key, style in (
            (name, {"linewidth": 1, "label": "training"}),
            (f"valid_{name}", {"marker": "o", "markersize": 3, "label": "validation"}),
        ):
            found = [record for record in records if record.get(key) is not None]
            values = [record[key] for record in found]
            axes.plot([record["step"] for record in found], values, **style)
        axes.grid(alpha=0.3)
        axes.set_ylabel(name.replace("_", " "))
    rows[0].legend()
    rows[-1].set_xlabel("step")
    with atomic_write(png_path) as path:
        figure.savefig(path, dpi=150, format="png")
