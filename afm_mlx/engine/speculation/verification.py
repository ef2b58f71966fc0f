"""One step that checks the drafts of all rows: the tokens at their places, from one run of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from afm_mlx.engine.sampling import Place, draw
from afm_mlx.engine.speculation.draft import Draft
from afm_mlx.model.model import Model
from afm_mlx.model.protocols import Cache


@dataclass
class Drawn:
    """A token that was drawn at one place.

    Args:
        token: its id.
        peak: the largest logit there.
        logprobs: (vocab_size,), None where the row asked for none.
    """

    token: int
    peak: float
    logprobs: mx.array | None = None


def verified(model: Model, cache: Cache, drafts: Sequence[Draft]) -> list[dict[int, Drawn]]:
    """Run the model on B drafts, padded to the longest, and draw a token behind each guess.

    Args:
        model: the model.
        cache: one entry per block, of B rows; it grows by the longest draft in every row.
        drafts: what the rows are fed.

    Returns:
        For each draft the tokens at its places, by their index into `fed`. All is evaluated.
    """
    width = max(len(draft.fed) for draft in drafts)
    inputs = mx.array([[*d.fed] + [0] * (width - len(d.fed)) for d in drafts], mx.int32)
    if not any(draft.row.needs_logits for draft in drafts):
        tokens, peaks = model.verify_greedy(inputs, cache)
        mx.eval(tokens, peaks)
        pairs = zip(tokens.tolist(), peaks.tolist(), strict=True)
        return [
            {i: Drawn(t[i], p[i]) for i in draft.drawn}
            for draft, (t, p) in zip(drafts, pairs, strict=True)
        ]
    places = [(b, i) for b, draft in enumerate(drafts) for i in draft.drawn]
    logits = model.verify(inputs, cache)
    found: list[dict[int, Drawn]] = [{} for _ in drafts]
    if not places:
        mx.eval(logits)
        return found
    rows, columns = (mx.array(indices) for indices in zip(*places, strict=True))
    tokens, peaks, logprobs = draw([_place(drafts[b], i) for b, i in places], logits[rows, columns])
    mx.eval(tokens, peaks)
    values = zip(places, tokens.tolist(), peaks.tolist(), strict=True)
    for n, ((b, i), token, peak) in enumerate(values):
        wanted = drafts[b].row.request.logprobs
        found[b][i] = Drawn(token, peak, logprobs[n] if wanted else None)
    return found


def _place(draft: Draft, index: int) -> Place:
    return Place(draft.row, draft.masks.get(index), draft.fed[1 + draft.known : 1 + index])
