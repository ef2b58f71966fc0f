"""The soak test of the server: its verdict by hand, and a short run of every kind of client."""

import json

import pytest

from bench import server_soak
from bench.server_soak import Report, memory_growth
from bench.server_traffic import EVENT, Query, Reading, Traffic
from bench.server_visitors import ANSWERED, LOST, REFUSED, WRONG, Outcome, refusal
from tests.tools.cases import each

EVENT_TEXT = '{"title": "a", "day": "Sunday", "people": 3, "outside": true}'
DONE = "[DONE]"


def chunk(text="", reason=None, index=0):
    return json.dumps(
        {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}
    )


@each(
    ("events", "choices", "complaint"),
    [
        ([chunk("a"), chunk(reason="stop"), DONE], 1, None),
        ([chunk("a", "stop"), chunk("b", "length", 1), DONE], 2, None),
        (['{"error": {"message": "late"}}'], 1, None),
        (['{"type": "response.completed"}'], 1, None),
        (['{"type": "message_stop"}'], 1, None),
        ([chunk("a", "stop")], 1, "no last event"),
        ([chunk("a"), DONE], 1, "1 choices asked for, ended have []"),
        ([chunk("a", "stop"), DONE], 2, "2 choices asked for"),
    ],
)
def test_a_stream_is_whole_or_told_to_be_broken(events, choices, complaint):
    reading = Reading(Query("chat", "/v1/chat/completions", {"stream": True}, choices))
    for data in events:
        reading.event(data)
    found = reading.complaint()
    assert found is None if complaint is None else complaint in found


def test_answers_keep_to_their_schema():
    for text, fine in ((EVENT_TEXT, True), (EVENT_TEXT[:-1], False), ('{"title": "a"}', False)):
        reading = Reading(Query("schema", "/v1/chat/completions", {}, 1, True))
        choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
        reading.body(json.dumps({"choices": [choice]}).encode())
        assert (reading.complaint() is None) == fine, text


def test_refusals_have_the_form_of_their_api():
    openai = {"error": {"message": "no", "type": "t", "param": None, "code": None}}
    anthropic = {"type": "error", "error": {"message": "no", "type": "t"}}
    for status, body, path, verdict in (
        (400, openai, "/v1/completions", REFUSED),
        (429, anthropic, "/v1/messages", REFUSED),
        (400, anthropic, "/v1/completions", WRONG),
        (200, openai, "/v1/completions", WRONG),
        (500, "Internal Server Error", "/v1/completions", WRONG),
    ):
        assert refusal("x", status, json.dumps(body).encode(), path).verdict == verdict


def test_the_verdict():
    flat = [(second, 100 + second % 2) for second in range(300)]
    assert memory_growth(flat[:100]) is None
    assert memory_growth(flat) == pytest.approx(0, abs=0.02)
    assert memory_growth([(second, 100 + second) for second in range(300)]) > 0.5
    well = Report([Outcome("chat", ANSWERED)], 300, flat, True)
    assert well.faults == []
    ill = Report(
        [Outcome("chat", LOST, "nothing"), Outcome("x", WRONG)],
        300,
        [(s, 100 + s) for s in range(300)],
        False,
        {"num_requests_running": 1},
    )
    assert [fault.split()[0] for fault in ill.faults] == ["chat:", "x:", "the", "left", "resident"]


def test_requests_are_of_every_kind(rng):
    traffic = Traffic(rng, ["m", "m:a"], apis=["/v1/responses", "/v1/messages"])
    queries = [traffic.query() for _ in range(300)]
    assert {q.kind for q in queries} == {
        *("chat", "schema", "tools", "completion", "response", "message")
    }
    assert {q.body["model"] for q in queries} == {"m", "m:a"}
    assert {q.choices for q in queries} >= {1, 2, 3}
    assert {q.streamed for q in queries} == {True, False}
    assert set(json.loads(EVENT_TEXT)) == set(EVENT["properties"])


def test_a_short_run_of_all_clients(tmp_path, capsys):
    output = tmp_path / "soak.json"
    argv = ["--minutes", "0.03", "--clients", "8", "--output", str(output)]
    status = server_soak.main([*argv, "--", "--served-model-name", "mine"])
    assert "All is well." in capsys.readouterr().out
    assert status == 0
    found = json.loads(output.read_text())
    assert found["faults"] == []
    assert len(found["outcomes"]) > 8
    assert found["resident"][0][1] > 1e6
    assert server_soak.main([*argv, "--model", str(tmp_path / "nothing")]) == 1
    assert "The server does not start: it ended with status 2" in capsys.readouterr().err
