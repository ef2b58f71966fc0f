"""Calls of llguidance's compiler: it goes as deep as a grammar's rules name each other, and may take for ever.

Some 6 KB of stack for each rule: a chain of a few thousand would end the process. So it runs in a thread whose
stack is large enough for any grammar that is taken (`constraint.MAX_GRAMMAR`). The memory is reserved, and used
only as deep as it goes.

llguidance bounds its work, but one step of it may be exponential in the size of a pattern, and can't be
stopped. So the caller waits `SECONDS` at most. The thread goes on; while `_MAX_LEFT` such threads do, nothing
is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from afm_mlx.errors import ConstraintError

Result = TypeVar("Result")

SECONDS = 10.0
"""Seconds that a call may take."""
_MAX_LEFT = 2
_STACK = 256 << 20
_left: set[Future[Any]] = set()  # calls that nobody waits for any more
_starting = threading.Lock()  # the size of stacks is a setting of the whole process


def with_deep_stack(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function with a stack of 256 MB, and return what it returns.

    Raises:
        ConstraintError: when that takes longer than `SECONDS`.
    """
    future: Future[Result] = Future()
    _left.difference_update([one for one in _left if one.done()])
    if len(_left) >= _MAX_LEFT:
        raise ConstraintError(
            f"{len(_left)} constraints are still compiled after more than {SECONDS:g} s. Try again later."
        )

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
    try:
        return future.result(SECONDS)
    except TimeoutError:
        if future.done():
            raise
        _left.add(future)
        raise ConstraintError(
            f"The constraint takes longer than {SECONDS:g} s to compile. Use simpler patterns, or fewer."
        ) from None
