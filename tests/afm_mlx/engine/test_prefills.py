"""Prompts that come in while others run: what a step computes of them, and in which order they are done."""

import pytest

from afm_mlx.engine.engine import CPU_STEP, CPU_STEP_WHILE_DECODING, Engine
from afm_mlx.engine.request import Request
from afm_mlx.kernels import dispatch
from tests.tools.engines import naive_greedy, some_prompt, tokens_of


@pytest.fixture
def chunks(model, monkeypatch):
    """The (rows, columns) that were prefilled so far."""
    chunks = []
    prefill = type(model).prefill

    def counted(self, tokens, cache):
        chunks.append(tokens.shape)
        return prefill(self, tokens, cache)

    monkeypatch.setattr(type(model), "prefill", counted)
    return chunks


def test_a_step_prefills_no_more_than_a_chunk_and_every_row_has_its_token(
    rng, model, tokenizer, chunks
):
    engine = Engine(model, tokenizer, prefill_step_size=8)
    lengths = [30, 3, 1, 4, 40, 2, 9]
    prompts = {engine.submit(Request(p, 60)): p for p in [some_prompt(rng, 2)]}
    answers = {0: []}
    for _ in range(3):
        engine.step()
    for length in lengths:
        prompt = some_prompt(rng, length)
        prompts[engine.submit(Request(prompt, 6, logprobs=False))] = prompt
    while engine.busy:
        done = len(chunks)
        responses = engine.step()
        assert len(chunks) <= done + 1
        if not all(len(answers.get(row, ())) == 6 for row in range(1, 8)):
            assert sum(response.row == 0 for response in responses) == 1
        for row, tokens in tokens_of({r.row: [r] for r in responses}).items():
            answers.setdefault(row, []).extend(tokens)
    assert max(rows * columns for rows, columns in chunks) == 8
    assert any(rows > 1 for rows, _ in chunks)  # short prompts share a chunk
    for row in range(1, 8):
        assert answers[row] == naive_greedy(model, prompts[row], 6)


@pytest.mark.skipif(dispatch.device() != "cpu", reason="a GPU has chunks of one size")
def test_chunks_are_small_on_a_cpu_while_rows_decode(rng, model, tokenizer, chunks):
    def columns_of(size):
        """Chunks of a prompt alone; of one beside an answer; and of its rest, once that has ended."""
        engine = Engine(model, tokenizer, prefill_step_size=size)
        found = []
        for answer in (0, 40, 4):
            if answer:
                engine.submit(Request([5], answer, logprobs=False))
                engine.step()
            chunks.clear()
            engine.submit(Request(some_prompt(rng, 301), 1, logprobs=False))
            list(engine.run())
            found.append([columns for _, columns in chunks])
        return found

    alone, beside, rest = columns_of(None)
    assert alone == [CPU_STEP, CPU_STEP, 300 - 2 * CPU_STEP]
    assert beside == [CPU_STEP_WHILE_DECODING] * 9 + [300 - 9 * CPU_STEP_WHILE_DECODING]
    assert rest[0] == CPU_STEP_WHILE_DECODING
    assert CPU_STEP in rest
    assert sum(rest) == 300
    for asked in (50, 1000):
        given = min(asked, CPU_STEP)
        for columns in columns_of(asked):
            assert columns == [given] * (300 // given) + [300 % given] * (300 % given > 0)


def test_short_prompts_pass_long_ones_which_go_on_all_the_same(rng, model, tokenizer, chunks):
    engine = Engine(model, tokenizer, max_batch=64, prefill_step_size=4)
    long = engine.submit(Request(some_prompt(rng, 33), 1, logprobs=False))
    engine.step()
    first = {}
    for step in range(40):
        if step < 30:  # one after another, and each would be first
            engine.submit(Request(some_prompt(rng, 5), 1, logprobs=False))
        for response in engine.step():
            first[response.row] = step
    assert all(first[row] - (row - 1) <= 2 * row + 1 for row in range(1, 31))
    assert first[1] <= 2
    assert first[long] <= 2 * 8 + 1


def test_a_row_that_is_cancelled_in_its_prompt_is_gone_at_once(rng, model, tokenizer, chunks):
    engine = Engine(model, tokenizer, prefill_step_size=4)
    prompts = [some_prompt(rng, n) for n in (30, 3, 3, 50)]
    rows = [engine.submit(Request(p, 3, logprobs=False)) for p in prompts]
    engine.step()
    for row in (rows[0], rows[3], rows[3], 99):
        engine.cancel(row)
    engine.cancel(rows[1])  # it has company
    answers = [response.token for response in engine.run()]
    assert answers == naive_greedy(model, prompts[2], 3)
    assert sum(rows * columns for rows, columns in chunks) <= 8
