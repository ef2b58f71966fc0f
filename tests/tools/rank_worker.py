"""Training runs on several ranks of this machine: `run_ranks` starts them, and each runs this module."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tools.cli import ROOT


@dataclass
class Job:
    """A call of `train_by` by all ranks.

    `changes` are fields of the recipe, by rank; the rank `killed[0]` ends before it exchanges anything of step
    `killed[1]`; the rank `stopped` has a stop signal before its first step.
    """

    method: Any
    recipe: Any
    path: Path
    resume: bool = False
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    killed: tuple[int, int] | None = None
    stopped: int | None = None


@dataclass
class Ended:
    """How a rank ended: its exit status, what it printed to stderr, and what `train_by` raised, by job."""

    status: int
    stderr: str
    errors: list[str]


def start_ranks(
    folder: Path, size: int, command: Sequence[str], **environment: str
) -> list[subprocess.Popen]:
    """Start the ranks of a ring as `mlx.launch` does; it would end them all when one fails."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(addresses))
    values = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_HOSTFILE": str(hosts), **environment}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=values | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def run_ranks(folder: Path, size: int, *jobs: Job) -> list[Ended]:
    """Run jobs one after the other on `size` ranks; return how each rank ended."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    for old in folder.glob("errors-*"):
        old.unlink()
    running = start_ranks(folder, size, ["-m", "tests.tools.rank_worker", str(folder)])
    texts = [each.communicate(timeout=120)[1] for each in running]
    files = [folder / f"errors-{rank}" for rank in range(size)]
    errors = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    return [
        Ended(each.returncode, text, errors[rank])
        for rank, (each, text) in enumerate(zip(running, texts, strict=True))
    ]


def main(folder: Path) -> None:
    from afm_mlx.errors import AFMError
    from afm_mlx.ranks import Ranks, join_ranks
    from afm_mlx.training.methods.train import train_by

    rank, errors = join_ranks().rank, []
    numbers, calls = Ranks.numbers, [0]
    for job in pickle.loads((folder / "jobs").read_bytes()):
        if job.killed is not None and job.killed[0] == rank:
            calls[0] = 0

            def counted(self: Ranks, *values: float, last: int = job.killed[1]) -> Any:
                calls[0] += len(values) == 2  # weights and targets of a step
                if calls[0] == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return numbers(self, *values)

            Ranks.numbers = counted  # type: ignore[method-assign]

        @contextmanager
        def stopping(is_set: bool = job.stopped == rank) -> Any:
            flag = threading.Event()
            if is_set:
                flag.set()
            yield flag

        recipe = dataclasses.replace(job.recipe, **job.changes.get(rank, {}))
        try:
            train_by(job.method, recipe, job.path, resume=job.resume, stopping=stopping)
            # Rank 0 saves; all others wait for it.
            is_saved = any(job.path.glob("*.safetensors"))
            errors.append("" if is_saved else f"{job.path} is not saved yet")
        except (AFMError, KeyboardInterrupt) as error:
            errors.append(f"{type(error).__name__}: {error}")
        (folder / f"errors-{rank}").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
