"""Peers in processes of their own, asked over a pipe: a line of JSON each way.

A worker says first what it has loaded, then answers measurements until its input ends. This file is
imported in the peers' own environments, so it needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def serve(hello: Answer, measurements: Mapping[str, Callable[..., Answer]]) -> None:
    """Write `hello`, then answer each request on standard input, with the measurement it names, on standard
    output.
    """
    _send(hello)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("measure")
        try:
            _send(measurements[name](**request))
        except Exception as error:  # the asker reports it and goes on with the other peers
            _send({"error": f"{type(error).__name__}: {error}"})


def _send(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


def peak_resident() -> int:
    """Return the maximum bytes that this process had in memory, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeerError(RuntimeError):
    """A peer that could not start, or could not measure what it was asked."""


class Peer:
    """A worker process that runs one program's measurements.

    Args:
        name: name for tables.
        command: command line that starts the worker.
        threads: number of threads that the worker may compute with.

    Raises:
        PeerError: if the worker can't start; the message has the last line that it wrote.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int):
        self.name = name
        count = str(threads)
        libraries = ("AFM_MLX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **dict.fromkeys(libraries, count)},
            )
        except OSError as error:
            raise PeerError(f"{command[0]} can't be run: {error.strerror}") from None
        self.hello = self._receive()

    def measure(self, name: str, **arguments: Any) -> Answer:
        """Ask the worker for the measurement `name` with `arguments`, and return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"measure": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"it ended with status {self._process.wait()}") from None
        return self._receive()

    def _receive(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"it ended with status {self._process.wait()}; its reason is above")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the worker."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
