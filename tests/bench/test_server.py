"""The comparison of servers: figures by hand, both dialects against a small server, and who is left out."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import sys

import pytest

from bench import peer_afm, server
from bench.peer_models import EXACT, INT8, MLX_LM
from bench.server_client import Address, get
from bench.server_figures import memory_rows, server_targets, table
from bench.server_load import Answer, Turn, ask, drive, figures
from bench.server_process import ServerError, ServerProcess
from bench.server_programs import (
    Job,
    Jobs,
    Program,
    llama_body,
    openai_body,
    programs,
    read_llama,
    read_openai,
)
from tests.tools.cases import each

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def preset(config, monkeypatch):
    """A small model under the 3B's name, whose vocabulary has words; llama.cpp has one format of it."""
    config = dataclasses.replace(config, vocab_size=2000)
    monkeypatch.setitem(peer_afm.PRESETS, "afm-3b", config)
    monkeypatch.setattr(peer_afm, "FORMATS", peer_afm.FORMATS[:1])
    return config


@contextlib.asynccontextmanager
async def answering(*parts, head=HEAD):
    """An address where each connection gets these parts, whatever it asks; and the bodies that were sent."""
    bodies = []

    async def serve(reader, writer):
        text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(text.split("content-length:")[1].split("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(size) or b"null"))
        writer.write(head)
        for part in parts:
            data = part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode()
            chunked = b"%x\r\n%s\r\n" % (len(data), data) if b"chunked" in head else data
            # An event may come in two pieces.
            for piece in (chunked[:9], chunked[9:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
        if b"chunked" in head and parts[-1:] != (b"cut",):
            writer.write(b"0\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield Address("127.0.0.1", listening.sockets[0].getsockname()[1]), bodies


OPENAI = (
    {"choices": [{"index": 0, "text": "a"}]},
    {"choices": [{"index": 0, "text": " b"}], "usage": None},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    b"data: [DONE]\n\n",
)
LLAMA = (
    {"content": "", "tokens": [5], "stop": False},
    {"content": "b", "tokens": [6], "stop": False},
    {"content": "", "tokens": [], "stop": True, "tokens_evaluated": 3, "tokens_predicted": 2},
)


def program(read, body):
    return Program("x", lambda port: [], "/here", body, read)


@each(
    ("read", "body", "parts"),
    [(read_openai, lambda job: openai_body("m", job), OPENAI), (read_llama, llama_body, LLAMA)],
)
def test_an_answer_is_timed_and_counted(read, body, parts):
    job = Job((7, 8, 9), "p q r", 2)

    async def main():
        async with answering(*parts) as (address, bodies):
            return await ask(program(read, body), address, job), bodies

    answer, (sent,) = asyncio.run(main())
    assert answer.error is None
    assert (answer.prompt, answer.tokens, len(answer.times)) == (3, 2, 2)
    assert 0 < answer.first < answer.times[-1] - answer.sent
    assert answer.per_token == pytest.approx(answer.times[1] - answer.times[0])
    assert sent["prompt"] in ("p q r", [7, 8, 9])
    assert 2 in (sent.get("max_tokens"), sent.get("n_predict"))


@each(
    ("parts", "head", "error"),
    [
        ((b'{"error": "busy"}',), b"HTTP/1.1 503 X\r\nContent-Length: 17\r\n\r\n", "status 503"),
        (({"error": {"message": "no room"}},), HEAD, "no room"),
        ((OPENAI[0], b"cut"), HEAD, "RemoteProtocolError"),
        ((OPENAI[0],), HEAD, "without a count"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(parts, head, error):
    async def main():
        async with answering(*parts, head=head) as (address, _):
            whole = program(read_openai, lambda job: openai_body("m", job))
            return await ask(whole, address, Job((1,), "a", 1))

    assert error in asyncio.run(main()).error


def test_clients_go_on_until_the_time_is_up_and_finish_what_they_began():
    async def main():
        async with answering(*OPENAI) as (address, bodies):
            jobs = iter([Job((1,), str(i), 2) for i in range(1000)])
            whole = program(read_openai, lambda job: openai_body("m", job))
            return await drive(whole, address, jobs, 3, 0.2), bodies

    turn, bodies = asyncio.run(main())
    assert len(turn.answers) == len(bodies) > 3
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    assert all(answer.error is None for answer in turn.answers)
    assert 0 < turn.tokens_per_second <= 2 * len(bodies) / 0.2


def test_figures_and_targets_by_hand():
    good = Answer(10, 3, [11, 12, 14], 5, 3)
    late = Answer(10, 2, [12, 30], 5, 2)
    bad = Answer(10, 9, [11], error="gone")
    found = figures([Turn([good, late, bad], 10, 10)])
    assert found["tokens_per_second"] == pytest.approx((3 + 1) / 10)
    assert (found["first_p50"], found["gap_p50"]) == (1, 2)
    assert found["per_token_p50"] == pytest.approx((1.5 + 18) / 2)
    assert (found["requests"], found["errors"], found["ended_early"]) == (3, 1, 0)
    assert math.isnan(figures([Turn([bad], 1, 10)])["per_token_p99"])

    def of(speed):
        return {16: found | {"tokens_per_second": speed}}

    measured = {EXACT: of(50), "llama.cpp A": of(20), "llama.cpp B": of(24), MLX_LM: {1: of(2)[16]}}
    targets = {t.name: t for t in server_targets(measured)}
    assert targets[f"{EXACT}: tokens/s at 16 clients over llama.cpp's best"].value == 50 / 24
    assert targets[f"{EXACT}: tokens/s at 16 clients over mlx-lm's best"].met
    assert targets[f"{INT8}: tokens/s at 16 clients over mlx-lm's best"].met is None
    spread = targets[f"{EXACT}, 16 clients: gap between tokens, p99 over p50"]
    assert spread.value == found["gap_p99"] / 2
    assert not spread.met
    assert [row[2] for row in table(measured)[1:]] == ["50.0", "20.0", "24.0", "2.0"]
    rows = memory_rows({"x": {"first": 1e6, "after_a_minute": math.nan, "last": 3e6}})
    assert rows[1] == ["x", "1", "nan", "3"]


def test_what_each_program_is_given(preset, tmp_path):
    """Folders and files of one vocabulary; texts and ids of prompts are of one length."""
    gguf = pytest.importorskip("gguf", reason="the extra `bench` is not installed")
    model = peer_afm.afm_model("afm-3b")
    found = programs(model, tmp_path, 2, 4, 50, "llama-server")
    assert list(found) == [EXACT, INT8, "llama.cpp TQ2_0", MLX_LM]
    llama = found["llama.cpp TQ2_0"].command(99)
    file = next(tmp_path.glob("*.gguf"))
    assert [str(file), "99", "200"] == [
        llama[llama.index(o) + 1] for o in ("--model", "--port", "--ctx-size")
    ]
    fields = gguf.GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == preset.vocab_size
    jobs = Jobs(tmp_path / "afm-mlx", (3, 9), (2, 4))
    stream = jobs.stream(1, 2)
    for job, again in zip((next(stream) for _ in range(20)), jobs.stream(1, 2), strict=False):
        assert job == again
        assert 3 <= len(job.prompt) <= 9
        assert 2 <= job.tokens <= 4
        assert "".join(tokens[i] for i in job.prompt) == "▁" + job.text.replace(" ", "▁")


def test_a_server_is_started_watched_and_ended(tmp_path):
    async def main():
        log = tmp_path / "log"
        command = [sys.executable, "-m", "http.server", "--directory", str(tmp_path)]
        async with ServerProcess(lambda port: [*command, str(port)], "/", log) as process:
            assert process.alive
            assert process.resident_bytes() > 1e6
            assert "GET / " in process.log
            assert (await get(process.address, "/nothing"))[0] == 404
            assert os.path.exists(f"/proc/{process.pid}") or sys.platform != "linux"
        assert not process.alive
        for bad, why in (
            ([sys.executable, "-c", "raise SystemExit('no model')"], "status 1: no model"),
            ([str(tmp_path / "nothing")], "can't be run"),
        ):
            with pytest.raises(ServerError, match=why):
                await ServerProcess(lambda port, bad=bad: bad, "/", tmp_path / "other").__aenter__()

    asyncio.run(main())


def test_a_program_that_cannot_start_is_left_out(preset, tmp_path, capsys):
    argv = ["--llama-server", str(tmp_path / "nothing"), "--skip", "afm", MLX_LM, "--seconds", "1"]
    server.main(
        [*argv, "--work", str(tmp_path), "--output", str(tmp_path / "out"), "--rounds", "1"]
    )
    out, err = capsys.readouterr()
    assert "llama.cpp TQ2_0 is left out" in err
    assert out.count("not measured") == 4
    facts = json.loads((tmp_path / "out" / "server.json").read_text())
    assert facts["programs"] == {}
