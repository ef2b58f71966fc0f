"""Calls of llguidance's compiler, which goes as deep as a grammar's rules name each other.

Some 6 KB of stack for each rule: a chain of a few thousand would end the process. So it runs in a thread whose
stack is large enough for any grammar that is taken (`constraint.MAX_GRAMMAR`). The memory is reserved, and used
only as deep as it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_STACK = 256 << 20
_starting = threading.Lock()  # the size of stacks is a setting of the whole process


def with_deep_stack(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function with a stack of 256 MB, and return what it returns."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    with _starting:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="afm-mlx grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()
