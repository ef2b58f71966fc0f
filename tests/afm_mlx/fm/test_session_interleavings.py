"""Concurrent sessions on one engine: each answers as it would alone."""

import asyncio
import copy
import dataclasses

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx import fm
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.config import KV_SCALES
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import dequantize_model
from tests.afm_mlx.fm.conftest import nano_adapters

TASKS = "summarize_thread rewrite_tone suggest_reply tag_topics extract_event call_tool".split()


@pytest.fixture(scope="module")
def floats(nano):
    """The model in float32, keys and values included.

    A row's products are rounded differently in a batch than alone. With floats that is in the last of 24 bits;
    codes of 8 bits would make it a difference that a drawn token may depend on.
    """
    model, tokenizer = nano
    made = Model(dataclasses.replace(model.args, kv_bits=None))
    weights = tree_flatten(dequantize_model(copy.deepcopy(model)).parameters())
    made.load_weights([(name, w) for name, w in weights if not name.endswith(KV_SCALES)])
    mx.eval(made.parameters())
    return made.eval(), tokenizer


class Listed(fm.Tool):
    """A tool of a chat, which answers with a state that depends on its arguments."""

    description = ""

    def __init__(self, definition, pause):
        function = definition["function"]
        self.name, self.description, self.pause = function["name"], function["description"], pause
        self.parameters = function["parameters"]
        super().__init__()

    @property
    def arguments_schema(self):
        schema = fm.GenerationSchema(type(self))
        schema.to_dict = lambda: {"title": self.name, **self.parameters}
        return schema

    async def call(self, args):
        await asyncio.sleep(self.pause)
        if len(args.to_json()) % 3 == 0:
            raise ValueError("not now")
        return {"state": ("open", "blocked", "done")[len(args.to_json()) % 3]}


def drawn_sessions(rng, chats):
    """Draw sessions: arguments and turns, each with a prompt, arguments, and the time of a cancellation."""
    sessions = []
    for _ in range(int(rng.integers(2, 4))):
        tools, turns = [], []
        for _ in range(int(rng.integers(1, 4))):
            task = TASKS[rng.integers(len(TASKS))]
            chat = chats[task][rng.integers(len(chats[task]))]
            prompt = chat["messages"][1]
            how = {"options": drawn_options(rng), "adapter": drawn_adapter(rng)}
            if "response_format" in prompt:
                schema = prompt["response_format"]["json_schema"]
                how["json_schema"] = {"title": schema["name"], **schema["schema"]}
                how["at_limit"] = "complete"
            if task == "call_tool" and not tools:
                tools = chat["tools"]
            cancelled = float(rng.uniform(0, 0.1)) if rng.random() < 0.3 else None
            streams = bool(rng.random() < 0.5)
            turns.append((prompt["content"], how, cancelled, streams))
        sessions.append((None if rng.random() < 0.5 else "Be brief.", tools, turns))
    return sessions


def drawn_options(rng):
    limit = int(rng.integers(4, 16))
    if rng.random() < 0.5:
        return fm.GenerationOptions(maximum_response_tokens=limit)
    limits = ({}, {"top": int(rng.integers(2, 50))}, {"probability_threshold": 0.9})
    sampling = fm.SamplingMode.random(**limits[rng.integers(3)], seed=int(rng.integers(2**32)))
    return fm.GenerationOptions(sampling, float(rng.uniform(0.3, 1.5)), limit)


def drawn_adapter(rng):
    one, other = rng.choice(["redact", "todo", "triage"], 2, replace=False).tolist()
    return (None, one, {one: 0.5, other: 0.5})[rng.choice(3, p=(0.5, 0.4, 0.1))]


async def talk(model, session, pauses):
    """Take a session's turns; return each one's answer (None if cancelled), and the transcript."""
    instructions, definitions, turns = session
    tools = [Listed(definition, next(pauses)) for definition in definitions]
    session = fm.LanguageModelSession(instructions, model, tools, max_tool_rounds=1)
    outcomes = []
    for prompt, how, cancelled, streams in turns:
        await asyncio.sleep(next(pauses))
        turn = asyncio.create_task(answered(session, prompt, how, streams))
        done, _ = await asyncio.wait([turn], timeout=cancelled)
        if not done:
            turn.cancel()
            await asyncio.wait([turn])
        outcomes.append(None if turn.cancelled() else turn.result())
    return outcomes, said(await session.transcript.to_dict())


async def answered(session, prompt, how, streams):
    try:
        if not streams:
            answer = await session.respond(prompt, **how)
        else:
            answer = [part async for part in session.stream_response(prompt, **how)][-1]
        return answer.value() if isinstance(answer, fm.GeneratedContent) else answer
    except fm.GenerationError as error:
        return f"{type(error).__name__}: {error}"


def said(value):
    """A transcript's JSON without its random ids."""
    if isinstance(value, dict):
        return {k: said(v) for k, v in value.items() if k not in ("id", "toolCallID")}
    return [said(item) for item in value] if isinstance(value, list) else value


def check(floats, chats, rng, count):
    pool = AdapterPool(floats[0], force=True)
    for name, folder in nano_adapters().items():
        pool.register(name, folder)
    shared = fm.SystemLanguageModel(model=floats, adapters=pool)
    cancelled = answered = 0

    async def together(sessions, pauses):
        return await asyncio.gather(*(talk(shared, session, pauses) for session in sessions))

    for _ in range(count):
        sessions = drawn_sessions(rng, chats)
        times = rng.exponential(0.02, 100).tolist()
        found = asyncio.run(together(sessions, iter(times)))
        for session, (outcomes, transcript) in zip(sessions, found, strict=True):
            # A turn that was cancelled leaves nothing behind.
            instructions, tools, turns = session
            pairs = zip(turns, outcomes, strict=True)
            kept = [(p, how, None, streams) for (p, how, _, streams), o in pairs if o is not None]
            alone = asyncio.run(talk(shared, (instructions, tools, kept), iter([0.0] * 100)))
            assert alone == ([o for o in outcomes if o is not None], transcript)
            cancelled += len(turns) - len(kept)
            answered += len(kept)
    assert not shared._shared.engine.rows
    assert not shared._shared.engine._made().busy
    assert not any(entry["rows"] or entry["waiting"] for entry in pool.describe()["adapters"])
    assert answered > cancelled > 0


def test_concurrent_sessions_answer_as_alone(floats, chats, rng):
    check(floats, chats, rng, 4)


@pytest.mark.slow
def test_two_hundred_interleavings_answer_as_alone(floats, chats, rng):
    check(floats, chats, rng, 200)
