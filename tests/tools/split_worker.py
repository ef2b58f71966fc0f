"""Requests to a split model: `split_answers` starts ranks on this machine, and each runs this module."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.follow import follow
from afm_mlx.engine.lockstep import dismiss
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.loading.load import load, load_draft
from afm_mlx.ranks import ALONE, Ranks
from tests.tools.rank_worker import start_ranks


@dataclass
class Job:
    """Requests that one engine answers together; each of `waves` begins when the one before has ended."""

    model: Path
    waves: Sequence[Sequence[Request]]
    adapters: Mapping[str, Path] = field(default_factory=dict)
    draft: Path | None = None
    others: Mapping[str, Path] = field(default_factory=dict)  # adapters of ranks other than 0
    cancelled: int = -1  # index of a request of the first wave that is cancelled after three steps


def answers(job: Job, ranks: Ranks = ALONE) -> list[Any]:
    """The responses to a job's requests, in order; on ranks other than 0, nothing."""
    model, tokenizer = load(job.model, ranks=ranks)
    pool = AdapterPool(model, base_folder=job.model)
    for name, path in (job.adapters if ranks.is_first else {**job.adapters, **job.others}).items():
        pool.register(name, path)
    if not ranks.is_first:
        follow(model, tokenizer, adapters=pool)
        return []
    draft = None if job.draft is None else load_draft(job.draft, model, tokenizer)
    engine = Engine(
        model,
        tokenizer,
        max_batch=4,
        adapters=pool,
        speculation=Speculation(draft, prompt_lookup=True, num_draft_tokens=2) if draft else None,
        prefix_cache=PrefixCache(1 << 20),
    )
    found: dict[int, dict[str, Any]] = {}
    for number, wave in enumerate(job.waves):
        ids = [engine.submit(request) for request in wave]
        found |= {row: {"tokens": []} for row in ids}
        for step in range(1000):
            if not engine.busy:
                break
            if number == 0 and step == 3 and job.cancelled >= 0:
                engine.cancel(ids[job.cancelled])
            for response in engine.step():
                answer = found[response.row]
                answer["tokens"].append(response.token)
                answer["cached"] = response.cached_tokens
                if response.finish_reason is not None:
                    answer["end"] = response.finish_reason, str(response.error or "")
                if response.prompt_logprobs is not None:
                    answer["scores"] = response.prompt_logprobs.logprobs
                if response.embedding is not None:
                    answer["vector"] = response.embedding
    dismiss(ranks)
    return list(found.values())


def split_answers(folder: Path, size: int, *jobs: Job) -> list[list[Any]]:
    """The answers of `size` ranks to each job, in one start of processes."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    running = start_ranks(folder, size, ["-m", "tests.tools.split_worker", str(folder)])
    for each in running:
        try:
            text = each.communicate(timeout=120)[1]
        except subprocess.TimeoutExpired:
            each.kill()
            raise
        assert each.returncode == 0, text
    found: list[list[Any]] = pickle.loads((folder / "answers").read_bytes())
    return found


def main(folder: Path) -> None:
    from afm_mlx.ranks import join_ranks

    ranks = join_ranks()
    found = [answers(job, ranks) for job in pickle.loads((folder / "jobs").read_bytes())]
    if ranks.is_first:
        (folder / "answers").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
