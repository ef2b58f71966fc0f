"""Run MLX in two threads only: the main thread, and one MLX thread that works for all others.

MLX keeps streams, compiled graphs and random state for each thread. Arrays begun in one thread can't be
evaluated in another. A thread that holds such state when Python ends aborts the process, and so may a thread
that ends with it, because MLX's destructors need Python's lock. So no thread that a caller starts runs MLX: the
MLX thread does its work, and ends in good order when Python does.

The main thread runs MLX itself, at no cost, and Ctrl-C interrupts it as usual.

A forked child has neither these threads nor MLX's own, and would wait for them forever. So once MLX has
run in a process, its forked children may import everything but run nothing (`check_process`).
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx

from afm_mlx.errors import RequestError

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Job: TypeAlias = tuple[Future[Any], Callable[[], Any]]

_PAUSE = 1e-4
"""Seconds that a thread leaves the lock to a waiting thread before it takes it again."""


class MLXThread:
    """The thread that runs MLX for all threads except the main one; it starts when first needed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._is_giving_way = False

    def is_current(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def submit(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Future[Result]:
        """Queue a function, and return its future; raise `RequestError` once Python is ending.

        A daemon thread then never returns from here: it ends with the process.
        """
        with self._starting:
            if not self._ended:
                if self._thread is None:
                    # A daemon: Python waits for other threads before it calls `end`.
                    self._thread = threading.Thread(
                        target=self._run, name="afm-mlx MLX", daemon=True
                    )
                    self._thread.start()
                    atexit.register(self.end)
                future: Future[Result] = Future()
                self._jobs.put((future, functools.partial(function, *args, **kwargs)))
                return future
        # `end` waits for the MLX thread.
        if threading.current_thread().daemon and not self.is_current():
            threading.Event().wait()
        raise RequestError("Python is ending, and MLX runs no more: let threads end before.")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(job)
            del job  # else it is kept until the next job
        mx.clear_streams()

    def give_way(self) -> None:
        """In this thread, run the jobs that wait now, except within another call; see `give_way` below."""
        if self._is_giving_way or not self.is_current():
            return
        self._is_giving_way = True
        try:
            for _ in range(self._jobs.qsize()):
                job = self._jobs.get()
                if job is None:  # the thread is to end
                    self._jobs.put(None)
                    return
                _do(job)
                del job
        finally:
            self._is_giving_way = False

    def end(self) -> None:
        """Finish the running job, drop the others, and release MLX's state.

        Threads that wait for dropped jobs are daemons, and wait for the end of the process.
        """
        with self._starting:
            self._ended = True
            thread = self._thread
        if thread is None or not thread.is_alive():
            return
        while not self._jobs.empty():
            self._jobs.get()
        self._jobs.put(None)
        thread.join()


def _do(job: Job) -> None:
    future, function = job
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # the caller waits for it, whatever it is
            future.set_exception(error)


_mlx_thread = MLXThread()
_turn = threading.RLock()  # held by the thread that runs a model: the two may share models
_wanting: set[int] = set()  # threads that wait for a turn


_IMPORTED = 64  # maximum bytes of the scalars that modules make when they are imported
_ran_before_fork = False  # at the last fork
_parent: int | None = None  # id of the process that had run MLX and was forked into this one


def _note_use() -> None:
    """Before a fork, record whether MLX has computed anything in this process."""
    # Frameworks of macOS that `mlx.core` starts on import don't survive a fork either.
    global _ran_before_fork
    used = max(mx.get_peak_memory(), mx.get_active_memory(), mx.get_cache_memory())
    _ran_before_fork = used > _IMPORTED or sys.platform == "darwin"


def _forget_threads() -> None:
    """In a forked child, replace the threads, of which only the forking one is left."""
    global _mlx_thread, _turn, _parent
    if _ran_before_fork:
        _parent = _parent or os.getppid()
    _mlx_thread, _turn = MLXThread(), threading.RLock()
    _wanting.clear()


os.register_at_fork(before=_note_use, after_in_child=_forget_threads)


def check_process() -> None:
    """Raise `RequestError` in a process that was forked from one in which MLX had run."""
    if _parent is not None:
        raise RequestError(
            f"This process was forked from process {_parent}, in which MLX had run, and its threads don't "
            "survive a fork: it would wait for them forever. Use spawn: "
            'multiprocessing.get_context("spawn"), or DataLoader(multiprocessing_context="spawn").'
        )


def runs_mlx() -> bool:
    return in_main_thread() or _mlx_thread.is_current()


def in_main_thread() -> bool:
    """True if the current thread is Python's main one."""
    return threading.get_ident() == threading.main_thread().ident


def call(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function here if this is the main thread, else in the MLX thread.

    Arrays that it returns should be evaluated (`mx.eval`), or used only by functions called this way.

    Raises:
        RequestError: once Python is ending, and in a forked process (`check_process`).
    """
    check_process()
    return function(*args, **kwargs) if runs_mlx() else submit(function, *args, **kwargs).result()


def submit(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Future[Result]:
    """Call a function in the MLX thread without waiting; return its `concurrent.futures` future.

    Raises `RequestError` once Python is ending, and in a forked process. asyncio needs `asyncio.wrap_future`.
    """
    check_process()
    return _mlx_thread.submit(function, *args, **kwargs)


def give_way() -> None:
    """In a long job of the MLX thread, run the jobs that wait; in any other thread, do nothing.

    The job must hold nothing that others need, such as a lock or an unusual default stream.
    """
    _mlx_thread.give_way()


def in_mlx_thread(function: Function) -> Function:
    """Decorate a function so that it runs in a thread of MLX, whichever thread calls it; see `call`."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    return called  # type: ignore[return-value]


class Home:
    """The thread of an object's arrays: the main one if the object is made there, else the MLX thread."""

    def __init__(self) -> None:
        check_process()
        self._is_main = in_main_thread()

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function in the object's thread, while no other thread runs a model.

        Raises:
            RequestError: in another thread if the home is the main one; once Python is ending; and in a forked
                process (`check_process`).
        """
        check_process()
        if self._is_main:
            if not in_main_thread():
                raise RequestError(
                    "This engine was made in the main thread, and is used in the thread "
                    f"{threading.current_thread().name!r}. Use it in the main thread only, or make one in "
                    "another thread: then any may use it."
                )
        elif not _mlx_thread.is_current():
            return submit(self.call, function, *args, **kwargs).result()
        me = threading.get_ident()
        _wanting.add(me)
        with _turn:  # in one instruction, so that Ctrl-C finds it either taken or not
            _wanting.discard(me)
            result = function(*args, **kwargs)
        if _wanting:
            time.sleep(_PAUSE)
        return result

    def hand_out(self, arrays: Any) -> None:
        """Evaluate a tree of arrays for a caller in another thread; in the main thread it stays lazy."""
        if not self._is_main:
            mx.eval(arrays)

    def take_in(self, arrays: Any, what: str) -> None:
        """Evaluate a tree of arrays from a caller, whose thread may be another; `what` names it in errors.

        Raises:
            RequestError: if another thread has begun the arrays and not evaluated them.
        """
        if self._is_main:
            return
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise RequestError(
                f"{what} has arrays that another thread has begun and not evaluated ({error}). Call mx.eval on "
                "them in that thread first; weights are read by load without lazy=True."
            ) from None
