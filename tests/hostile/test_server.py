"""Random and malformed bodies: each gets an answer or an error in the API's form, never a 5xx."""

import json

import pytest

from tests.hostile.harness import Case, run_cases
from tests.tools.server import running_server

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"model": "afm-nano", "prompt": "Return", "max_tokens": 3}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"model": "afm-nano", "input": "hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"model": "afm-nano", "input": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "afm-nano", "messages": CHAT["messages"]},
    "/v1/adapters": {"name": "x", "path": "x"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
FIELDS = [
    *"temperature top_p top_k min_p n seed stop logprobs top_logprobs logit_bias stream".split(),
    *"max_tokens tools tool_choice response_format frequency_penalty presence_penalty".split(),
    *"repetition_penalty echo best_of".split(),
    *"structured_outputs guided_json guided_regex guided_choice guided_grammar stream_options user".split(),
    *"messages model prompt name path input tokens metadata store nothing suffix functions".split(),
    *"instructions text include parallel_tool_calls previous_response_id max_output_tokens".split(),
    *"system stop_sequences thinking output_config cache_control".split(),
    *"reasoning client_metadata truncation max_completion_tokens prediction mcp_servers n_predict".split(),
]
TEXTS = [
    "", " ", "a", "\0", "\ud800", "\U0001f600", "<turn_end>", "<executable_start>", "auto", "none", "user",
    "required", "json_object", "x" * 3000, "a\nb", "../../etc/passwd", "{}", "[", "(", "[a-z]{3}", "-1", "NaN",
    "text", "json_schema", "function", "system", "assistant", "tool", "content", "role", "type", "start: /a/",
    'root ::= "a"', "%json {}", "\u202e", "afm-nano:todo", "afm-nano", "\\", "(a|b)*{99999}",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**400, 1e-300]
NUMBERS += [True, False, None]


def draw_value(rng, depth=0):
    kind = rng.integers(6 if depth < 3 else 3)
    if kind == 0:
        return NUMBERS[int(rng.integers(len(NUMBERS)))]
    if kind in (1, 2):
        return TEXTS[int(rng.integers(len(TEXTS)))]
    count = int(rng.integers(4))
    if kind == 3:
        return [draw_value(rng, depth + 1) for _ in range(count)]
    if kind == 4:
        keys = ["type", "role", "content", "function", "name", "json_schema", "schema", "text"]
        keys += ["parameters", "regex", "choice", "1", "5", "properties", "arguments", "id"]
        return {
            keys[int(rng.integers(len(keys)))]: draw_value(rng, depth + 1) for _ in range(count)
        }
    name = TEXTS[int(rng.integers(len(TEXTS)))]
    function = {"name": name, "parameters": draw_value(rng, depth + 1)}
    return {"type": "function", "function": function}


def draw_body(rng, body):
    body = dict(body)
    for _ in range(int(rng.integers(1, 4))):
        body[FIELDS[int(rng.integers(len(FIELDS)))]] = draw_value(rng)
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:  # damaged
        at = int(rng.integers(len(content)))
        extra = [b"", b"[" * 5000, b"\xff", b'"', b"}", b"NaN", b"9" * 5000, b"\\u0000"]
        content = content[:at] + extra[int(rng.integers(len(extra)))] + content[at + 1 :]
    return content


def check(response, path):
    assert response.status_code < 500 or response.status_code == 503, response.text
    if response.status_code >= 400:
        body = response.json()
        if path.startswith("/v1/messages"):
            assert body["type"] == "error"
            assert set(body["error"]) == {"message", "type"}
            assert 0 < len(body["error"]["message"]) < 1400
            return
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert 0 < len(body["error"]["message"]) < 1200
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.rstrip().rpartition("data: ")[2]
        assert '"error":{' not in response.text
    else:
        response.json()


@pytest.fixture(scope="module")
def http():
    with running_server(max_kv_size=200, timeout=30) as server, server.http() as client:
        yield client


def test_random_bodies(http, rng):
    def generate(rng):
        path = list(ROUTES)[int(rng.integers(len(ROUTES)))]
        content = draw_body(rng, ROUTES[path])
        text = f"{path} {content.decode('utf-8', 'backslashreplace')}"
        return Case(text, lambda: check(http.post(path, content=content), path))

    run_cases(generate, rng, share=0.15)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_known_ways_to_break_a_server(http):
    deep = b"[" * 100_000 + b"]" * 100_000
    for content in (
        b"",
        b"\xff\xfe",
        b"null",
        deep,
        b'{"model": "afm-nano", "metadata": ' + deep + b"}",
        b'{"model": "afm-nano", "logit_bias": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
        b'{"model": "afm-nano", "messages": [{"role": "user", "content": "\xc3("}]}',
        b'{"model": "afm-nano", "n": ' + b"9" * 10**5 + b"}",
        b'{"model": "afm-nano", "prompt": "a", "max_tokens": {}}',
        json.dumps({**CHAT, "response_format": nested(200)}).encode(),
        json.dumps({**CHAT, "guided_json": nested(200)}).encode(),
        json.dumps({**CHAT, "guided_regex": "((a*)*)*" * 50}).encode(),
        json.dumps({**CHAT, "stop": ["a"] * 10**5}).encode(),
    ):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            check(http.post(path, content=content), path)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema
