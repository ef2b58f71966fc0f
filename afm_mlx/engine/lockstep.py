"""The engines of a split model's ranks in step: rank 0's engine decides, and all others do the same.

    rank 0: Engine.submit, cancel, step  ->  an event  ->  other ranks: follow (`follow.py`)

Only rank 0 has callers. Its engine sends what it does (`Lead.say`), and every other rank runs an engine with
the same rows over its own part of the model and of the keys and values. What an engine decides by time, memory
or random numbers, rank 0 decides for all: which rows begin (`Scheduler`), how many tokens are drafted and which
(`Drafting`), and each token that a sampler draws (`agreed`). Everything else follows from equal requests and
tokens, constraints too. A checksum of the rows goes with every step: ranks that differ end with an error.

`Request`s travel as JSON, without samplers and callbacks, which only rank 0 calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Embedding, PromptLogprobs, Request
from afm_mlx.engine.row import Row
from afm_mlx.errors import AFMError, RequestError, shown
from afm_mlx.ranks import Ranks, ranks_of
from afm_mlx.threads import in_main_thread

_NUMBERS = itertools.count()
_ended: list[int] = []
"""Numbers of rank 0's engines that are gone; the next event has the others drop theirs."""
_prefix_numbers: weakref.WeakKeyDictionary[PrefixCache, int] = weakref.WeakKeyDictionary()


class OutOfStepError(AFMError):
    """The ranks of a split model compute different rows: a defect, or a change of memory or files."""


class Lead:
    """What rank 0's engine sends to the engines of the other ranks.

    Args:
        engine: rank 0's engine.
        ranks: the ranks of its model.
        options: the engine's options, as keyword arguments of `Engine`.
    """

    def __init__(self, engine: object, ranks: Ranks, options: dict[str, Any]):
        self._ranks, self._number = ranks, next(_NUMBERS)
        caches: PrefixCache | None = options.pop("prefix_cache")
        if caches is not None:
            if caches.folder is not None:
                raise RequestError("A prefix cache of a split model has no folder; leave it out.")
            number = _prefix_numbers.setdefault(caches, len(_prefix_numbers))
            options["prefix_cache"] = [number, caches.budget]
        for name in ("adapters", "speculation"):
            options[name] = options[name] is not None
        weakref.finalize(engine, _ended.append, self._number)
        self.say("engine", options=options)

    def say(self, event: str, **facts: Any) -> None:
        """Have the other ranks do what this engine does next; `facts` are JSON values."""
        gone = [_ended.pop() for _ in range(len(_ended))]
        self._ranks.first({"event": event, "engine": self._number, "gone": gone, **facts})

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that other ranks can't follow."""
        if request.cache is not None:
            raise RequestError(
                "The request has a prompt cache, and each rank has a part of a split model's keys and values. "
                "Give the engine a prefix cache instead."
            )
        if request.images:
            raise RequestError(
                "The request has images, which split models don't take. Run the model in one process."
            )
        for function in (request.sampler, *request.logits_processors):
            if function is not None and not _is_ours(function):
                raise RequestError(
                    f"The request has the function {shown(function)}, which may fail on this rank alone. With "
                    "a split model, use afm_mlx's make_sampler and make_logits_processors."
                )

    def submit(self, row: int, request: Request, hidden: int, seed: int) -> None:
        """Have the other ranks queue the request of a new row; `hidden` is of `Prepared`."""
        self.say("submit", row=row, values=request_values(request), hidden=hidden, seed=seed)

    @contextmanager
    def step(self, waiting: Sequence[Row], running: Sequence[Row]) -> Iterator[None]:
        """Have the other ranks take a step like the one inside the context.

        Ctrl-C waits for the end of the step. After an exception, nothing more can be said: the others are
        somewhere within the step.
        """
        with _without_interrupts():
            self.say("step", rows=checksum(waiting, running))
            try:
                yield
            except BaseException as error:
                self._ranks.fail(
                    f"A step of the ranks has failed ({type(error).__name__}: {error})."
                )
                raise


def _is_ours(function: Any) -> bool:
    inner = getattr(function, "func", function)  # of a partial
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return str(module).partition(".")[0] == "afm_mlx"


def checksum(waiting: Sequence[Row], running: Sequence[Row]) -> int:
    """Return a number that is equal for equal rows with equally many tokens."""
    rows = [(row.id, row.position, len(row.tokens)) for row in (*waiting, *running)]
    return zlib.crc32(repr((len(waiting), rows)).encode())


def check_in_step(theirs: int, waiting: Sequence[Row], running: Sequence[Row]) -> None:
    """Raise `OutOfStepError` unless `theirs` is the checksum of these rows."""
    if theirs != checksum(waiting, running):
        held = [(row.id, row.position) for row in (*waiting, *running)]
        raise OutOfStepError(
            f"This rank is out of step with rank 0: it has the rows and tokens {held}. The ranks need equal "
            "versions, model folders and options; if they have them, please report this."
        )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """In the main thread, raise KeyboardInterrupt at the end of the context and not inside it."""
    before = signal.getsignal(signal.SIGINT) if in_main_thread() else None
    if not callable(before):
        yield
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: caught.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        before(*caught[0])


def agreed(
    ranks: Ranks | None, tokens: mx.array, max_logits: mx.array
) -> tuple[mx.array, mx.array]:
    """Return rank 0's drawn tokens (...) int32 and their logits (...) float32, not evaluated.

    Ranks on machines of different kinds may compute other last bits of equal logits.
    """
    if ranks is None:
        return tokens, max_logits
    own = mx.stack([tokens.astype(mx.int32), max_logits.astype(mx.float32).view(mx.int32)])
    # Zeros that depend on the tokens, so that exchanges inside of the model come first on all ranks.
    found = mx.distributed.all_sum(own * int(ranks.is_first), group=ranks.group)
    return found[0], found[1].view(mx.float32)


# -- requests as JSON

_OF_RANK_0 = ("sampler", "seed", "logits_processors", "cache", "on_prefill", "heal")
"""Fields of a request that only rank 0 uses; all others travel."""


def request_values(request: Request) -> dict[str, Any]:
    """Return what other ranks need of a checked request, as JSON values."""
    names = [each.name for each in dataclasses.fields(request) if each.name not in _OF_RANK_0]
    values: dict[str, Any] = {name: getattr(request, name) for name in names}
    for name in ("prompt_logprobs", "embedding", "constraint"):
        value = getattr(request, name)
        values[name] = None if value is None else dataclasses.asdict(value)
    values["draws"] = bool(request.sampler or request.logits_processors)
    return values


def request_of(values: dict[str, Any]) -> Request:
    """Return the request of `request_values`, with a sampler whose tokens are not used in place of rank 0's."""
    values = dict(values)
    if values.pop("draws"):
        values["sampler"] = _most_likely
    if (asked := values["prompt_logprobs"]) is not None:
        values["prompt_logprobs"] = PromptLogprobs(**asked | {"others": tuple(asked["others"])})
    if (asked := values["embedding"]) is not None:
        values["embedding"] = Embedding(**asked)
    if (asked := values["constraint"]) is not None:
        from afm_mlx.guidance.constraint import Constraint

        values["constraint"] = Constraint(**asked)
    return Request(**values)


def _most_likely(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


# -- events without an engine


def register_adapter(model: nn.Module, pool: AdapterPool, name: str, path: Path) -> None:
    """Register an adapter in the pools of all ranks that hold the model, or in none.

    Call it in the thread of the model's engines: a request can't name the adapter before all ranks know it.

    Raises:
        AFMError: the error of a rank that can't.
    """
    pool.register(name, path)
    ranks = ranks_of(model)
    try:
        problems = _change_adapter(ranks, name, str(path))
    except AFMError:
        pool.unregister(name)
        raise
    if problems:
        unregister_adapter(model, pool, name)
        raise RequestError(problems[0])


def unregister_adapter(model: nn.Module, pool: AdapterPool, name: str) -> None:
    """Remove an adapter from the pools of all ranks that hold the model; other ranks may lack it.

    Raises:
        RequestError: as `AdapterPool.unregister` does on this rank.
    """
    pool.unregister(name)
    _change_adapter(ranks_of(model), name, None)


def _change_adapter(ranks: Ranks | None, name: str, path: str | None) -> list[str]:
    """On rank 0, have the other ranks do the same; return the errors of those that can't."""
    if ranks is None:
        return []
    ranks.first({"event": "adapter", "engine": -1, "gone": [], "name": name, "path": path})
    return [f"{text} (rank {rank})" for rank, text in enumerate(ranks.gather("")) if text]


def dismiss(ranks: Ranks | None) -> None:
    """On rank 0, end `follow` on the other ranks."""
    if ranks is not None and ranks.is_first:
        try:
            ranks.first({"event": "end", "engine": -1, "gone": []})
        finally:
            ranks.end_watch()  # not before: the exchange never returns if another rank ends now
