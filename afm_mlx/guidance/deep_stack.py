"""Calls llguidance's compiler in a thread with a deep stack, and for a limited time.

The compiler recurses as deep as a grammar's rules name each other, with some 6 KB of stack for each: a chain
of a few thousand would end the process. The stack here is large enough for any accepted grammar
(`constraint.MAX_GRAMMAR`); its memory is reserved, and used only as deep as the recursion goes.

llguidance bounds its work, but one step may be exponential in the size of a pattern and can't be stopped. So
the caller waits up to `SECONDS`. The thread continues; while `_MAX_LEFT` such threads do, nothing is
compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from llguidance import LLParserLimits

from afm_mlx.errors import ConstraintError

Result = TypeVar("Result")

LIMITS = LLParserLimits(step_lexer_fuel=2_000_000, verbose_errors=False)
"""Bounds of llguidance's work: 0.1 s for one mask."""
SECONDS = 10.0  # longest time that a caller waits
_MAX_LEFT = 2
_STACK = 256 << 20
_left: set[Future[Any]] = set()  # calls that exceeded `SECONDS`
_starting = threading.Lock()  # the stack size is a setting of the whole process


def with_deep_stack(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function with a stack of 256 MB, and return what it returns.

    Raises:
        ConstraintError: if that takes longer than `SECONDS`.
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
