"""Drafters whose quality a test sets."""

from afm_mlx.engine.engine import Engine
from tests.tools.engines import run


class KnownAnswers:
    """Draft tokens from known answers (by prompt), each right with the probability `rate`."""

    def __init__(self, rng, answers, rate, vocab_size):
        self.rng, self.answers, self.rate, self.vocab_size = rng, answers, rate, vocab_size
        self.forgotten = []

    def propose(self, drafts, count):
        for draft in drafts:
            answer = self.answers[tuple(draft.row.request.prompt)]
            for _ in range(count):
                place = len(draft.row.tokens) + len(draft.assumed)
                right = place < len(answer) and self.rng.random() < self.rate
                token = answer[place] if right else int(self.rng.integers(self.vocab_size))
                draft.extend([token])

    def forget(self, rows):
        self.forgotten += rows


class FaultyDrafter:
    def __init__(self, propose=None, forget=None):
        self._propose, self._forget = propose, forget

    def propose(self, drafts, count):
        if self._propose is not None:
            self._propose(drafts)

    def forget(self, rows):
        if self._forget is not None:
            self._forget()


def outcome(model, tokenizer, requests, **options):
    """The tokens, text, finish reason, type of error, log-probabilities and draft counts of each request."""
    engine = Engine(model, tokenizer, **options)
    rows = [engine.submit(request) for request in requests]
    found = run(engine)
    return [described(found[row]) for row in rows]


def described(responses):
    last = responses[-1]
    return (
        [r.token for r in responses if r.token >= 0],
        "".join(r.text for r in responses),
        last.finish_reason,
        type(last.error),
        [None if r.logprobs is None else r.logprobs[max(r.token, 0)].item() for r in responses],
        last.draft_counts,
    )
