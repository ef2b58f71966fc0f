"""Who starts next: clients in turn, each client's requests in their order."""

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from tests.tools.engines import some_prompt


def order_of(engine, requests):
    """Indices of requests by the order in which their answers begin; each is (client, max_tokens)."""
    rows = [
        engine.submit(Request([1 + i], count, client=client, logprobs=False))
        for i, (client, count) in enumerate(requests)
    ]
    begun = dict.fromkeys(response.row for response in engine.run())
    return [rows.index(row) for row in begun]


def test_clients_have_their_turns(model, tokenizer):
    one = Engine(model, tokenizer, max_batch=1)
    assert order_of(one, [("a", 2)] * 4 + [("b", 2)] * 2 + [("c", 2)]) == [0, 4, 6, 1, 5, 2, 3]
    assert order_of(one, [("", 2)] * 4) == [0, 1, 2, 3]  # who says no name is one client
    # Rows that run count: b and c have as many as a.
    three = Engine(model, tokenizer, max_batch=3)
    assert order_of(three, [("a", 9)] * 6 + [("b", 9), ("c", 9)])[:3] == [0, 6, 7]


def test_a_client_with_many_requests_holds_up_no_other_and_is_not_starved(rng, model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2)
    crowd = {engine.submit(Request(some_prompt(rng, 3), 4, client="crowd")) for _ in range(20)}
    ended, waited = [], {}
    for step in range(120):
        if step % 6 == 0:  # always another client, and always the first with a request
            row = engine.submit(Request(some_prompt(rng, 3), 4, client=f"client {step}"))
            waited[row] = step
        for response in engine.step():
            if response.finish_reason:
                ended.append(response.row)
                if response.row in waited:
                    waited[response.row] = step - waited[response.row]
    others = [row for row in waited if row in ended]
    assert len(others) >= 15
    assert max(waited[row] for row in others) <= 12
    assert len(crowd.intersection(ended)) >= 10
