"""What the ranks after the first do with a split model: the same as rank 0's engines, see `lockstep.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import AFMError
from afm_mlx.ranks import ranks_of
from afm_mlx.tokenizer.protocol import Tokenizer


def follow(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    adapters: AdapterPool | None = None,
) -> None:
    """On a rank other than 0, do what rank 0's engines do, until `dismiss` is called there.

    Args:
        model, tokenizer: what `load` returns with `ranks`.
        adapters: a pool with rank 0's adapters.

    Raises:
        RankLostError: when another rank has ended.
        OutOfStepError: when the ranks differ.
        AFMError: when rank 0 uses what this rank does not have.
    """
    ranks = ranks_of(model)
    assert ranks is not None
    engines: dict[int, Engine] = {}
    prefixes: dict[int, PrefixCache] = {}

    def begin(number: int, options: dict[str, Any]) -> None:
        options["adapters"] = adapters if options["adapters"] else None
        # Rank 0 alone drafts.
        options["speculation"] = Speculation(prompt_lookup=True) if options["speculation"] else None
        if (kept := options.get("prefix_cache")) is not None:
            prefix_number, budget = kept
            if prefix_number not in prefixes:
                prefixes[prefix_number] = PrefixCache(budget)
            options["prefix_cache"] = prefixes[prefix_number]
        engines[number] = Engine(model, tokenizer, **options)

    def register(number: int, name: str, path: str | None) -> None:
        assert adapters is not None
        problem = ""
        try:
            adapters.unregister(name) if path is None else adapters.register(name, path)
        except AFMError as error:
            problem = str(error)
        assert ranks is not None
        ranks.gather(problem)

    handlers: dict[str, Callable[..., object]] = {
        "engine": begin,
        "adapter": register,
        "submit": lambda number, **facts: engines[number].follow_submit(**facts),
        "cancel": lambda number, row: engines[number].cancel(row),
        "drop_started": lambda number: engines[number].drop_started(),
        "step": lambda number, rows: engines[number].follow_step(rows),
    }
    while True:
        ranks.wait_for_first()
        facts = ranks.first(None)
        event, number = facts.pop("event"), facts.pop("engine")
        for gone in facts.pop("gone"):
            engines.pop(gone, None)
        if event == "end":
            ranks.end_watch()
            return
        handlers[event](number, **facts)
