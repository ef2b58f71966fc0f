"""The embedded model with its draft model, on the chats that it is evaluated with, under every feature."""

import json
from importlib.resources import files

import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_logits_processors, make_sampler
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.loading.load import load, load_draft
from afm_mlx.loading.resolve import model_draft
from tests.tools.drafts import outcome

NANO = files("afm_mlx") / "embedded/afm-nano"
GREEDY = (
    {},
    {"logprobs": False},
    {"logits_processors": make_logits_processors({7: 1.0}, repetition_penalty=1.1)},
    {"stop": [".", "e "]},
    {"constraint": Constraint.json_schema({}), "at_limit": "complete"},
    {"constraint": Constraint.regex("[A-Z][a-z ,.]{5,60}")},
)


def chats():
    """500 chats, with the names of the adapters that answer: the model's own, the adapters', and both."""

    def read(folder):
        return [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]

    names = ("redact", "todo", "triage")
    own = read(NANO)
    found = [(None, chat) for chat in own]
    found += [(name, chat) for name in names for chat in read(NANO / "adapters" / name)]
    return found + [(names[i % 3], own[i]) for i in range(500 - len(found))]


def is_tie(mine, theirs):
    """True if two answers differ first at tokens that are equally likely, except for rounding."""
    at = next(i for i, (a, b) in enumerate(zip(mine[0], theirs[0], strict=False)) if a != b)
    return abs(mine[4][at] - theirs[4][at]) < 0.02


@pytest.mark.slow
def test_500_answers_are_the_same_as_without_drafts(rng):
    model, tokenizer = load(NANO)
    pool = AdapterPool(model, base_folder=NANO)
    for name in ("redact", "todo", "triage"):
        pool.register(name, NANO / "adapters" / name)
    requests = []
    for i, (adapter, chat) in enumerate(chats()):
        messages = chat["messages"]
        tools = chat.get("tools") or next((m["tools"] for m in messages if m.get("tools")), None)
        more = {} if tools is None or "tools" in messages[0] else {"tools": tools}
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more)
        options = dict(GREEDY[i % len(GREEDY)])
        if tools and i % 2:
            options = {"constraint": tool_call_constraint(tools), "at_limit": "complete"}
        elif i % 5 == 4:
            options = {"sampler": make_sampler(1.0, top_p=0.95), "seed": i}
        requests.append(Request(prompt, 60, adapter=adapter, **options))
    assert len(requests) == 500
    draft = load_draft(model_draft(NANO), model, tokenizer)
    for max_batch in (1, 8):
        wanted = outcome(model, tokenizer, requests, max_batch=max_batch, adapters=pool)
        for options in ({"num_draft_tokens": 4}, {"prompt_lookup": True}):
            speculation = Speculation(draft, **options)
            found = outcome(
                model,
                tokenizer,
                requests,
                max_batch=max_batch,
                adapters=pool,
                speculation=speculation,
            )
            pairs = list(zip(requests, found, wanted, strict=True))
            other = [pair for pair in pairs if pair[1][:4] != pair[2][:4]]
            # Alone, all are the same. In a batch products round differently with other rows, drafts
            # or not: a token that is as likely as another may give way to it, and a draw to its neighbour.
            assert len(other) <= (0 if max_batch == 1 else 5)
            assert all(request.sampler or is_tie(*answers) for request, *answers in other)
            counts = [f[5] for f in found]
            assert 0 < sum(c.accepted for c in counts) < sum(c.proposed for c in counts)
