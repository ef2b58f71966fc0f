"""Commands whose model is split over the processes that `mlx.launch` has started: rank 0 runs the command.

The other ranks load their part of the model, and follow rank 0's engines (`afm_mlx.engine.lockstep`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.arguments import UsageError, flag_of

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.ranks import Ranks

# Arguments that may differ between ranks: rank 0's count, or each rank has its own.
_OF_RANK_0 = frozenset(
    (
        "command_line config model debug prompt text host port "
        "api_key api_key_file admin_key admin_key_file"
    ).split()
)


def joined(args: argparse.Namespace, models: Iterable[str], refused: Iterable[str]) -> Ranks | None:
    """Join the ranks that share a command's model, and compare their models and options; None for one process.

    Args:
        models: folders, hub ids or names of the command's models.
        refused: names of arguments that need the whole model in one process.

    Raises:
        UsageError: if one of these arguments is given.
        AFMError: if the ranks differ, or one has ended.
    """
    from afm_mlx.ranks import join_ranks

    ranks = join_ranks()
    if ranks.size == 1:
        return None
    import mlx.core as mx

    from afm_mlx.checkpoint.fingerprint import weights_fingerprint
    from afm_mlx.loading.resolve import resolve_model

    given = [
        flag_of(name) for name in refused if getattr(args, name, None) not in (None, False, [])
    ]
    if given:
        raise UsageError(
            f"{given[0]} can't be used with a model that is split over {ranks.size} ranks. Leave it out, or "
            "start the command without mlx.launch."
        )
    ranks.watch(_print_error(ranks.rank))
    names = sorted(set(vars(args)) - _OF_RANK_0)
    ranks.check_alike(
        {flag_of(name): str(getattr(args, name)) for name in names}
        | {"device": str(mx.default_device())}
        # Not by name: each machine may have the model elsewhere.
        | {
            "the model's fingerprint": " ".join(
                map(weights_fingerprint, map(resolve_model, models))
            )
        }
    )
    return ranks


def _print_error(rank: int) -> Any:
    def show(message: str) -> None:
        with suppress(OSError):
            print(f"afm-mlx (rank {rank}): error: {message}", file=sys.stderr, flush=True)

    return show


def follows(
    ranks: Ranks | None, model: Any, tokenizer: Any, adapters: AdapterPool | None = None
) -> bool:
    """On a rank other than 0, follow rank 0 to its end, and return True; on rank 0, return False."""
    if ranks is None or ranks.is_first:
        return False
    from afm_mlx.engine.follow import follow

    # A terminal sends Ctrl-C to all ranks, and rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(model, tokenizer, adapters=adapters)
    return True


@contextmanager
def leading(ranks: Ranks | None) -> Iterator[None]:
    """At the end of the context, in good order or with an error, let the other ranks end."""
    try:
        yield
    finally:
        from afm_mlx.engine.lockstep import dismiss
        from afm_mlx.ranks import RankLostError

        with suppress(RankLostError):
            dismiss(ranks)
