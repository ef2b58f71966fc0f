"""A server as a process of its own: started, waited for, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bench.server_client import Address, get

HOST = "127.0.0.1"


class ServerError(RuntimeError):
    """An error about a server that does not start, or that ended on its own."""


def free_port() -> int:
    """Return a port on which no process listens at this moment."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def with_threads(threads: int) -> dict[str, str]:
    """Return the environment of a program that may use a given number of threads."""
    libraries = ("AFM_MLX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(libraries, str(threads))}


class ServerProcess:
    """A server, from its first answer to its end; an asynchronous context.

    Args:
        command: makes the command line for a port.
        ready_path: URL path that answers with status 200 once requests can be served.
        log: file of everything that the server writes.
        environment: environment of the server; by default this process's.
        patience: maximum seconds until the server is ready.

    Raises:
        ServerError: on entering the context, if the server is not ready in time.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        ready_path: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        patience: float = 300,
    ):
        self._command, self._ready_path = command, ready_path
        self._log, self._environment, self._patience = log, environment, patience
        self.address = Address(HOST, free_port())

    async def __aenter__(self) -> ServerProcess:
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command(self.address.port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                )
            except OSError as error:
                raise ServerError(f"{error.filename} can't be run: {error.strerror}") from None
        try:
            await self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Some servers end only once the second signal has come, some never.
        for send in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            if self.alive:
                self._process.send_signal(send)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, 15)
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that the server has written to its log."""
        return self._log.read_text("utf-8", "replace")

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()

    def resident_bytes(self) -> int:
        """Return the bytes of memory that the server has now."""
        return resident_bytes(self.pid)

    async def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if not self.alive:
                raise ServerError(f"it ended with status {self._process.wait()}: {self._last()}")
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                status, _ = await asyncio.wait_for(get(self.address, self._ready_path), 5)
                if status == 200:
                    return
            await asyncio.sleep(0.2)
        raise ServerError(f"it was not ready after {self._patience:g} seconds: {self._last()}")

    def _last(self) -> str:
        return next((line for line in reversed(self.log.splitlines()) if line.strip()), "no output")


def processor_seconds(pid: int | None = None) -> float:
    """Return the processor's seconds that a process has taken so far, by default this one."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # macOS, whose ps counts hundredths: [hours:]minutes:seconds
        shown = subprocess.run(
            ["ps", "-o", "time=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=True
        )
        parts = reversed(shown.stdout.strip().split(":"))
        return sum(float(part) * 60**i for i, part in enumerate(parts))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the bytes of memory that a process has now, as the system counts them; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], stdout=subprocess.PIPE)
        return int(shown.stdout or 0) * 1024
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
