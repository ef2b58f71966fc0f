"""Which rows wait, which ones prefill, and what they may take of a memory budget."""

import gc
import time

import mlx.core as mx
import pytest

from afm_mlx.engine.decoding import DecodeBatch
from afm_mlx.engine.engine import CPU_STEP, CPU_STEP_WHILE_DECODING, Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Embedding, PromptLogprobs, Request
from afm_mlx.engine.scheduler import BACKGROUND_SHARE, EngineGroup, Scheduler
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from afm_mlx.kernels import dispatch
from afm_mlx.model.kv_cache import STEP, TAIL
from tests.tools.engines import (
    SIZES,
    naive_greedy,
    run,
    some_prompt,
    tiny,
    tokens_of,
    wanted_logprobs,
)
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

# -- prefills


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
        """Chunks of a prompt alone; of one next to an answer; and of its rest, once the answer has ended."""
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

    alone, busy, rest = columns_of(None)
    assert alone == [CPU_STEP, CPU_STEP, 300 - 2 * CPU_STEP]
    assert busy == [CPU_STEP_WHILE_DECODING] * 9 + [300 - 9 * CPU_STEP_WHILE_DECODING]
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


# -- rows that generate nothing


BACKGROUND = {
    "vector": {"embedding": Embedding()},
    "mean": {"embedding": Embedding("mean")},
    "scores": {"prompt_logprobs": PromptLogprobs(1)},
    "prefix": {},
}


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a clock that goes on by 1 with each chunk of a prompt, and each step of decoding rows."""
    now, compute, decode = [0.0], Scheduler._compute, DecodeBatch.step
    spent = {True: 0, False: 0}  # by prefills that generate, and others

    def counted(self, prefill, columns):
        now[0] += 1
        spent[prefill.generates] += 1
        compute(self, prefill, columns)

    def counted_step(self):
        now[0] += bool(self.batch.rows)
        return decode(self)

    monkeypatch.setattr(Scheduler, "_compute", counted)
    monkeypatch.setattr(DecodeBatch, "step", counted_step)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now, spent


@pytest.mark.parametrize("kind", BACKGROUND)
def test_rows_that_generate_nothing_take_a_share_of_the_time(rng, model, tokenizer, clock, kind):
    now, spent = clock
    engine = Engine(model, tokenizer, prefill_step_size=4, max_batch=3)
    work = lambda: Request(some_prompt(rng, 90), 0, **BACKGROUND[kind])  # noqa: E731
    for _ in range(12):
        engine.submit(work())
    for _ in range(8):
        engine.step()
    assert spent[False] == now[0] == 8  # nobody else is there
    answers = [engine.submit(Request(some_prompt(rng, 9), 40)) for _ in range(3)]
    begun = now[0]
    while not any(r.row in answers for r in engine.step()):
        pass
    assert now[0] - begun <= 3 * 2 / (1 - BACKGROUND_SHARE) + 2  # two chunks for each answer
    assert engine.rows_running == 6  # they take no places from one another
    for _ in range(30):
        engine.step()
    share = (spent[False] - 8) / (now[0] - begun)
    assert BACKGROUND_SHARE / 2 < share <= BACKGROUND_SHARE + 1 / 40
    found = run(engine)
    assert all(rows[-1].error is None for rows in found.values())
    assert not engine.busy


def test_other_engines_of_a_group_are_not_held_up_either(rng, model, tokenizer, clock):
    _, spent = clock
    group = EngineGroup()
    answering, indexing = (
        Engine(model, tokenizer, prefill_step_size=4, group=group) for _ in range(2)
    )
    answering.submit(Request(some_prompt(rng, 3), 40))
    for _ in range(5):
        indexing.submit(Request(some_prompt(rng, 90), 0, embedding=Embedding()))
    for _ in range(40):
        answering.step()
        indexing.step()
    wanted = 40 * BACKGROUND_SHARE / (1 - BACKGROUND_SHARE)  # next to 40 steps of the other engine
    assert 0.8 * wanted <= spent[False] <= 1.6 * wanted
    while answering.busy:
        answering.step()
    before = spent[False]
    for _ in range(5):
        indexing.step()
    assert spent[False] == before + 5


# -- turns of clients


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


# -- the memory budget

SMALLEST = STEP + TAIL  # columns of a row with few tokens


def bytes_of_rows(model, tokenizer, rows=1, columns=SMALLEST):
    """What rows may take: their columns, a copy of one block's, and of each tail."""
    cache = Engine(model, tokenizer).make_cache()
    engine = Engine(model, tokenizer)
    engine.submit(Request([1, 2, 3], 2, cache=cache))
    run(engine)
    arrays = [list(entry.state)[:2] for entry in cache if entry.state]
    blocks = [sum(a.nbytes // a.shape[2] for a in of_block) for of_block in arrays]
    return rows * (columns * (sum(blocks) + max(blocks)) + TAIL * sum(blocks))


@pytest.mark.parametrize("kind", ["int8", "float", "zoo"])
def test_rows_wait_for_memory_and_never_take_more(rng, tokenizer, kind):
    zoo = zoo_model("llama", SIZES["vocab_size"], 3) if kind == "zoo" else None
    model = zoo or tiny(rng, kv_bits=8 if kind == "int8" else None)
    a_row = bytes_of_rows(model, tokenizer)
    engine = Engine(model, tokenizer, kv_memory=3 * a_row, prefill_step_size=16)
    asked = [(some_prompt(rng, n), count) for n, count in ((3, 9), (150, 4), (7, 30), (250, 12))]
    asked += [(some_prompt(rng, 5), 6) for _ in range(4)]  # the fourth one alone needs more columns
    wanted = {engine.submit(Request(p, n, logprobs=False)): (p, n) for p, n in asked}
    assert (engine.rows_waiting, engine.rows_running, engine.kv_bytes) == (8, 0, 0)
    got, most = {}, 0
    while engine.busy:
        for response in engine.step():
            got.setdefault(response.row, []).append(response.token)
        most = max(most, engine.rows_running)
        assert engine.kv_bytes <= 3 * a_row
        if 3 in got and len(got[3]) < 12:
            assert engine.rows_running == 1  # two rows of 512 columns are too many
    assert most == 3
    for row, (prompt, count) in list(wanted.items())[:3]:
        # Of two almost equal logits, codes of keys and values that are off by one may choose either.
        logprobs = wanted_logprobs(model, prompt, got[row])
        chosen = logprobs[range(count), got[row]]
        assert (logprobs.max(axis=-1) - chosen).max() < 0.01
    assert (engine.rows_waiting, engine.rows_running, engine.kv_tokens) == (0, 0, 0)


def test_what_could_never_fit_is_refused(rng, model, tokenizer):
    a_row = bytes_of_rows(model, tokenizer)
    engine = Engine(model, tokenizer, kv_memory=a_row)
    for request in (
        Request([1], STEP),
        Request(some_prompt(rng, STEP), 1),
        Request([1], -1),  # the context has 512 tokens
    ):
        with pytest.raises(RequestError, match="kv_memory"):
            engine.submit(request)
    assert not engine.busy
    assert len(run(engine)) == 0
    engine.submit(Request([1], STEP - 1))
    bounded = Engine(model, tokenizer, kv_memory=a_row, max_kv_size=100)
    bounded.submit(Request([1], -1))
    window = {"max_kv_size": 32, "sliding_window": True}
    slides = Engine(model, tokenizer, kv_memory=3 * a_row, prefill_step_size=8, **window)
    slides.submit(Request([1] * 300, -1, logprobs=False))
    for _ in range(100):
        slides.step()
        assert slides.kv_bytes <= 3 * a_row
    with pytest.raises(RequestError, match="smallest cache"):
        Engine(model, tokenizer, kv_memory=a_row - 1)
    zoo = zoo_model("llama", SIZES["vocab_size"], 3)
    with pytest.raises(RequestError, match="a row needs a limit"):
        Engine(zoo, tokenizer, kv_memory=1 << 30).submit(Request([1], -1))
    zoo = zoo_model("qwen3", SIZES["vocab_size"], 3)
    with pytest.raises(RequestError, match="RotatingKVCache"):
        Engine(zoo, tokenizer, kv_memory=1 << 30, max_kv_size=64)


@pytest.mark.parametrize("kind", ["ours", "zoo"])
def test_the_longest_rows_columns_go_with_it(rng, tokenizer, kind):
    """A batch of short rows that a long one was part of takes no more than one that it never was part of."""
    model = zoo_model("llama", SIZES["vocab_size"], 3) if kind == "zoo" else tiny(rng)
    engine = Engine(model, tokenizer, kv_memory=bytes_of_rows(model, tokenizer, 3, 512 + TAIL))
    long = engine.submit(Request(some_prompt(rng, 400), 100, logprobs=False))
    for _ in range(2):
        engine.submit(Request(some_prompt(rng, 5), 200, logprobs=False))
    decoding = set()
    while len(decoding) < 3:
        decoding |= {response.row for response in engine.step()}
    with_long = engine.kv_bytes
    engine.cancel(long)
    engine.step()
    assert engine.rows_running == 2
    assert engine.kv_bytes <= with_long * 2 / 3 * SMALLEST / 512


def wide(rng, kv_bits, layers=4):
    """A model whose keys and values outweigh all else that a step computes."""
    sizes = SIZES | {"hidden_dim": 256, "num_heads": 2, "num_kv_heads": 2, "num_layers": layers}
    return random_model(random_config(rng, **sizes, kv_bits=kv_bits), rng).eval()


@pytest.mark.parametrize("kind", ["int8", "float", "draft", "prefix"])
def test_arrays_of_keys_and_values_never_take_more(rng, tokenizer, exact_memory, kind):
    """Over random rows, long and short, that end and are cancelled: all that MLX has allocated at any moment,
    activations included."""
    model = wide(rng, None if kind == "float" else 8)
    speculation = None
    if kind == "draft":
        speculation = Speculation(wide(rng, 8), num_draft_tokens=2)
    prefix = PrefixCache(1 << 30) if kind == "prefix" else None
    options = {"speculation": speculation, "prefix_cache": prefix, "prefill_step_size": 8}
    per_row = 2 if kind == "draft" else 1
    budget = 4 * per_row * bytes_of_rows(model, tokenizer, 1, 512 + TAIL)
    engine = Engine(model, tokenizer, kv_memory=budget, max_batch=6, **options)
    shared = some_prompt(rng, 150)
    running, most_rows, most_bytes = [], 0, 0
    mx.eval(model.parameters())
    gc.collect()
    before = mx.get_active_memory()
    asked = 0
    while asked < 10 or engine.busy:
        if asked < 10 and rng.random() < 0.3:
            length = int(rng.choice([3, 20, 200]))
            prompt = shared[: length // 2] + some_prompt(rng, length)
            request = Request(prompt, int(rng.integers(1, 40)), logprobs=False)
            running.append(engine.submit(request))
            asked += 1
        elif running and rng.random() < 0.02:
            engine.cancel(running.pop(int(rng.integers(len(running)))))
        mx.reset_peak_memory()
        engine.step()
        kept = 0 if prefix is None else prefix.nbytes
        taken = mx.get_peak_memory() - before - kept
        assert taken <= budget
        assert engine.kv_bytes <= budget
        most_rows, most_bytes = max(most_rows, engine.rows_running), max(most_bytes, taken)
    assert most_rows >= 4
    assert most_bytes > budget / 4
    assert engine.kv_bytes == 0


def test_a_budget_without_slack_holds_while_caches_grow_and_rows_leave(
    rng, tokenizer, exact_memory
):
    model = wide(rng, 8, layers=10)
    budget = bytes_of_rows(model, tokenizer, 3, 512 + TAIL)
    engine = Engine(model, tokenizer, kv_memory=budget, prefill_step_size=32)
    for _ in range(3):
        engine.submit(Request(some_prompt(rng, 250), 150, logprobs=False))
    gc.collect()
    before, most = mx.get_active_memory(), 0
    left = 20
    while left:
        if engine.kv_tokens > 3 * 325:  # all rows have grown to 512 columns
            engine.cancel(0)
        left -= engine.kv_tokens < 3 * 250 and engine.rows_running == 2
        mx.reset_peak_memory()
        engine.step()
        most = max(most, mx.get_peak_memory() - before)
    assert budget * 0.8 < most <= budget


# -- engines that share places and memory


def test_engines_of_a_group_share_the_places_of_a_batch(rng, model, tokenizer):
    group = EngineGroup()
    engines = [Engine(model, tokenizer, max_batch=3, group=group) for _ in range(3)]
    prompts = [[some_prompt(rng, 5) for _ in range(4)] for _ in engines]
    answers = [{} for _ in engines]
    for engine, given in zip(engines, prompts, strict=True):
        for prompt in given:
            engine.submit(Request(prompt, 6))
    most, waited = 0, [0] * 3
    while any(engine.busy for engine in engines):
        for i, engine in enumerate(engines):
            for response in engine.step():
                answers[i].setdefault(response.row, []).append(response.token)
            most = max(most, sum(each.rows_running for each in engines))
            waited[i] += not answers[i]
    assert most == 3
    for given, found in zip(prompts, answers, strict=True):
        assert [found[row] for row in range(4)] == [naive_greedy(model, p, 6) for p in given]
    assert max(waited) < 40  # none waits until all rows of another are done


def test_engines_of_a_group_share_a_memory_budget_and_a_large_row_has_its_turn(
    rng, model, tokenizer
):
    probe = Engine(model, tokenizer, kv_memory=1 << 30)
    probe.submit(Request(some_prompt(rng, 5), 6))
    probe.step()
    small = probe._scheduler.reserved
    group = EngineGroup()
    options = {"kv_memory": 5 * small // 2, "group": group}
    one, other = (Engine(model, tokenizer, **options) for _ in range(2))
    for _ in range(6):
        one.submit(Request(some_prompt(rng, 5), 6))
    one.step()
    large = other.submit(Request(some_prompt(rng, 300), 6))
    ended = []
    while one.busy or other.busy:
        for name, engine in (("one", one), ("other", other)):
            ended += [(name, r.row) for r in engine.step() if r.finish_reason]
            assert one._scheduler.reserved + other._scheduler.reserved <= options["kv_memory"]
    assert len(ended) == 7
    assert ended.index(("other", large)) < 5  # before the last of those that came before
