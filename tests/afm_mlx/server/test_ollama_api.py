"""Ollama's API on the real server, by the official client."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import ollama
import pytest

from afm_mlx import __version__
from tests.tools import server_stories as stories
from tests.tools.cases import each, until
from tests.tools.scripted_server import scripted_server
from tests.tools.server import fail_after, running_server, several_models
from tests.tools.zoo_chats import write_family_folder

MODEL, KEY = "afm-nano", {"Authorization": "Bearer ann"}
ASKED = [{"role": "user", "content": stories.FORMAL}]
EVENT = "Pull out the event.\nThe Dance Planning takes place at Hall Prom on Sunday."
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "day": {"type": "string"}},
    "required": ["title", "day"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    with running_server(kv="float", api_keys=("ann",), max_body=1 << 18) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(server.url, headers=KEY)


@pytest.fixture(scope="module")
def http(server):
    with server.http(headers=KEY) as plain:
        yield plain


DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


def test_chats_and_prompts_streamed_and_whole(client):
    for ask, text_of in (
        (lambda **f: client.chat(MODEL, ASKED, **f), lambda part: part.message.content),
        (lambda **f: client.generate(MODEL, stories.FORMAL, **f), lambda part: part.response),
    ):
        whole = ask()
        assert text_of(whole) == stories.FORMAL_ANSWER
        *parts, last = ask(stream=True)
        assert "".join(map(text_of, parts)) == stories.FORMAL_ANSWER
        assert text_of(last) == ""
        assert len(parts) > 5
        assert {part.done for part in parts} == {False}
        assert {part.eval_count for part in parts} == {None}
        for end in (whole, last):
            assert (end.done, end.done_reason, end.model) == (True, "stop", MODEL)
            assert (end.prompt_eval_count, end.eval_count) == (43, 17)
            assert all(end[name] > 0 for name in DURATIONS)
            assert end.total_duration == pytest.approx(sum(end[n] for n in DURATIONS), abs=2)
            assert datetime.fromisoformat(end.created_at).tzinfo is not None


def test_a_stream_is_the_default(http):
    body = {"model": MODEL, "messages": ASKED}
    response = http.post("/api/chat", json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert len(lines) > 5
    assert set(lines[0]) == {"model", "created_at", "message", "done"}
    whole = http.post("/api/chat", json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert set(whole.json()) == set(lines[-1])


def test_pings_are_pieces_without_text(client, server):
    state, options = server.app.state, server.app.state.options
    state.options = replace(options, ping_interval=0.001)
    try:
        parts = list(client.chat(MODEL, ASKED, stream=True))
    finally:
        state.options = options
    assert sum(not part.message.content for part in parts) > 1  # the last one, and a ping
    assert "".join(part.message.content for part in parts) == stories.FORMAL_ANSWER
    assert [part.done for part in parts].index(True) == len(parts) - 1


def test_times_are_of_their_steps(client):
    """A long prompt takes longer to read, many tokens take longer to write."""
    long = [{"role": "user", "content": "Read this: " + "a b c d " * 200}]
    options = {"num_predict": 1}
    one = client.chat(MODEL, long, options=options)
    assert (one.eval_count, one.done_reason) == (1, "length")
    assert one.prompt_eval_duration > one.eval_duration
    many = client.chat(MODEL, ASKED)
    again = client.chat(MODEL, ASKED)  # its prompt is cached
    assert again.eval_duration > again.prompt_eval_duration
    assert many.prompt_eval_count == again.prompt_eval_count


def test_names_of_models(client):
    todo = "List the to-dos: Good morning, I am Maria. A stranger from Porto logged in as me."
    for name in (MODEL, f"{MODEL}:latest"):
        assert client.generate(name, stories.FORMAL).response == stories.FORMAL_ANSWER
        assert client.generate(name, stories.FORMAL).model == name
    for name in (f"{MODEL}:todo", f"{MODEL}:todo:latest"):
        assert client.generate(name, todo).response == "- [ ] Lock the account"
    for wrong in ("llama3.2", "llama3.2:latest", f"{MODEL}:1b", "latest"):
        with pytest.raises(ollama.ResponseError, match="There is no model") as refused:
            client.generate(wrong, "Hi")
        assert refused.value.status_code == 404


def test_instructions_and_raw_prompts(client, http):
    def count(**fields):
        fields = {"model": MODEL, "options": {"num_predict": 1}, **fields}
        return client.generate(**fields).prompt_eval_count

    text = "Return"
    plain, instructed = count(prompt=text), count(prompt=text, system="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert client.chat(MODEL, chat, options={"num_predict": 1}).prompt_eval_count == instructed
    tokens = http.post("/tokenize", json={"prompt": text}).json()["count"]
    assert count(prompt=text, raw=True) == tokens < plain != instructed
    raw = client.generate(MODEL, text, raw=True, options={"num_predict": 9})
    body = {"model": MODEL, "prompt": text, "max_tokens": 9}
    assert raw.response == http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_tool_is_called_and_its_result_read(client):
    function = {"name": "track_order", "parameters": stories.parameters("order")}
    defined = [{"type": "function", "function": {**function, "description": "Find an order"}}]
    asked = [{"role": "user", "content": "Track order L5526."}]
    whole = client.chat(MODEL, asked, tools=defined)
    (call,) = whole.message.tool_calls
    assert call.function.model_dump() == {"name": "track_order", "arguments": {"order": "L5526"}}
    assert (whole.done_reason, whole.message.content) == ("stop", "")
    calls = [p.message.tool_calls for p in client.chat(MODEL, asked, tools=defined, stream=True)]
    assert [found for found in calls if found] == [[call]]
    text = '{"city": "Hitton", "arrives": "March 14"}'
    result = {"role": "tool", "content": text, "tool_name": "track_order"}
    answer = client.chat(MODEL, [*asked, whole.message, result], tools=defined)
    assert answer.message.content == "Order L5526 is in Hitton and arrives on March 14."
    cut = client.chat(MODEL, asked, tools=defined, options={"num_predict": 8})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")


READ = {"type": "function", "function": {"name": "read", "parameters": stories.parameters("path")}}
LIST = {"type": "function", "function": {"name": "list", "parameters": stories.parameters("path")}}
CALLS = [("read", {"path": "é.txt"}), ("list", {"path": "b"}), ("read", {"path": "c.txt"})]


@pytest.mark.parametrize("family", [None, "qwen3"], ids=["afm", "qwen3"])
def test_results_find_their_calls(family):
    """Over three turns: results by their tools' names, in order, by ids, and wrong ones."""
    with scripted_server(CALLS, CALLS[:2], "All is read.", family=family) as (server, script):
        client = ollama.Client(server.url)
        http = server.http()
        messages = [{"role": "user", "content": "Go."}]

        def step(**fields):
            whole = client.chat("tiny", messages, tools=[READ, LIST], **fields)
            parts = list(client.chat("tiny", messages, tools=[READ, LIST], stream=True, **fields))
            streamed = [call for part in parts for call in part.message.tool_calls or ()]
            assert streamed == list(whole.message.tool_calls or ())
            text = "".join(part.message.content for part in parts)
            assert text == whole.message.content
            messages.append(whole.message)
            return whole

        first = step()
        called = [(c.function.name, c.function.arguments) for c in first.message.tool_calls]
        assert called == CALLS
        for name, text in (("list", "second"), ("read", "first"), ("read", "third")):
            messages.append({"role": "tool", "tool_name": name, "content": text})
        second = step()
        assert len(second.message.tool_calls) == 2
        messages += [{"role": "tool", "content": text} for text in ("fourth", "fifth")]
        assert step().message.content.strip() == "All is read."
        shown = script.prompts[-1]
        places = [shown.find(word) for word in ("first", "second", "third", "fourth", "fifth")]
        assert places == sorted(places)
        assert places[0] > 0
        # The client drops ids; programs that keep them have results in any order.
        body = {"model": "tiny", "messages": messages[:1], "tools": [READ, LIST], "stream": False}
        message = http.post("/api/chat", json=body).json()["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        texts = dict(zip(ids, ("one", "two", "three"), strict=True))
        results = [{"role": "tool", "tool_call_id": i, "content": texts[i]} for i in reversed(ids)]
        body["messages"] = [messages[0], message, *results]
        assert http.post("/api/chat", json=body).status_code == 200
        shown = script.prompts[-1]
        assert shown.index("one") < shown.index("two") < shown.index("three")
        for wrong, place in (
            ({"tool_call_id": "call_of_others"}, "messages[2].tool_call_id"),
            ({"tool_name": "write"}, "messages[2].tool_name"),
        ):
            body["messages"] = [messages[0], message, {"role": "tool", "content": "", **wrong}]
            refused = http.post("/api/chat", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"].startswith(place)


def test_answers_in_a_format(client):
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    chat = [{"role": "user", "content": EVENT}]
    made = client.chat(MODEL, chat, format=EVENT_SCHEMA).message.content
    assert json.loads(made) == {"title": "Dance Planning", "day": "Sunday"}
    assert client.generate(MODEL, EVENT, format=EVENT_SCHEMA).response == made
    for asked in ({"format": "json"}, {"format": schema, "raw": True}):
        made = client.generate(MODEL, EVENT, options={"num_predict": 400}, **asked)
        if made.done_reason == "stop":
            assert isinstance(json.loads(made.response), dict)
        assert made.response.lstrip().startswith("{")
    assert client.generate(MODEL, stories.FORMAL, format="").response == stories.FORMAL_ANSWER


def test_options_take_effect(client):
    def said(**options):
        return client.chat(MODEL, ASKED, options=options)

    assert said(num_predict=3).done_reason == "length"
    assert said(num_predict=3).eval_count == 3
    for most in (-2, -1, 0):
        assert said(num_predict=most).message.content == stories.FORMAL_ANSWER
    stopped = said(stop=["unable", "Film"])
    assert stopped.message.content == "Dear Hana, I am "
    assert stopped.done_reason == "stop"
    seeded = [said(temperature=2, seed=seed, num_predict=20).message.content for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert said(temperature=2, top_k=1).message.content == stories.FORMAL_ANSWER
    assert said(temperature=2, top_p=0).message.content == stories.FORMAL_ANSWER
    assert said(temperature=2, min_p=1).message.content == stories.FORMAL_ANSWER
    for name in ("presence_penalty", "frequency_penalty"):
        drawn = {"temperature": 2, "seed": 3, "num_predict": 60}
        assert said(**{name: 2}, **drawn).message != said(**drawn).message


def test_a_repetition_penalty_has_a_window(client):
    """The letters that the answer repeats from the prompt are some 20 tokens before it."""

    def said(**options):
        return client.generate(MODEL, stories.FORMAL, options=options).response

    everything = said(repeat_penalty=3, repeat_last_n=-1)
    assert everything != stories.FORMAL_ANSWER
    assert said(repeat_penalty=3, repeat_last_n=0) == stories.FORMAL_ANSWER
    assert said(repeat_penalty=3, repeat_last_n=1) != everything
    assert said(repeat_penalty=1) == stories.FORMAL_ANSWER
    assert said(repeat_penalty=3) == said(repeat_penalty=3, repeat_last_n=64)


def test_log_probabilities(client, http):
    fields = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 5}}
    whole = client.chat(MODEL, ASKED, **fields)
    parts = client.chat(MODEL, ASKED, stream=True, **fields)
    assert [t for part in parts for t in part.logprobs or ()] == list(whole.logprobs)
    assert "".join(token.token for token in whole.logprobs) == whole.message.content
    assert [len(token.top_logprobs) for token in whole.logprobs] == [2] * 5
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 5, "logprobs": True}
    other = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in other] == [t.token for t in whole.logprobs]
    assert [t["logprob"] for t in other] == pytest.approx([t.logprob for t in whole.logprobs])
    assert client.generate(MODEL, stories.FORMAL, top_logprobs=2).logprobs is None


def test_without_a_prompt_nothing_is_generated(client):
    for made in (
        client.chat(MODEL),
        client.chat(MODEL, [], keep_alive="10m"),
        client.generate(MODEL),
        client.generate(MODEL, "", keep_alive=0),
        *client.generate(MODEL, stream=True),
    ):
        assert (made.done, made.done_reason) == (True, "load")
        assert made.eval_count is None
        assert made.total_duration == made.load_duration > 0
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat("llama3.2")
    assert refused.value.status_code == 404


WRONG = [
    ("chat", {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "messages[0].images"),
    ("chat", {"messages": [{"role": "tool", "content": "21"}]}, "messages[0].tool_name"),
    ("chat", {"messages": [*ASKED, {"role": "assistant", "tool_calls": [
        {"function": {"name": "look", "arguments": "{}"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ("chat", {"messages": [*ASKED, {"role": "assistant", "tool_calls": [
        {"function": {"name": "look", "arguments": {}}}]}]}, "messages: the call"),
    ("chat", {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools[0].function.name"),
    ("chat", {"messages": ASKED, "format": "xml"}, "format"),
    ("chat", {"messages": ASKED, "format": {"type": "string", "pattern": "("}}, "format"),
    ("chat", {"messages": [*ASKED, {"role": "assistant", "content": "So"}], "format": "json"}, "messages[1]"),
    ("chat", {"messages": ASKED, "options": {"temperature": "warm"}}, "options.temperature"),
    ("chat", {"messages": ASKED, "options": {"stop": "text"}}, "options.stop"),
    ("chat", {"messages": ASKED, "options": {"typical_p": 0.5}}, "options.typical_p"),
    ("chat", {"messages": ASKED, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat", {"messages": ASKED, "temperature": 0.5}, "temperature"),
    ("chat", {"messages": ASKED, "tool_choice": "required"}, "tool_choice"),
    ("chat", {"messages": [{"role": "user", "content": "a b " * 999}]}, "messages"),
    ("generate", {"prompt": "a b " * 999}, "The prompt has"),
    ("generate", {"prompt": "a b " * 999, "raw": True}, "The prompt has"),
    ("generate", {"prompt": "Hi", "raw": True, "system": "Be brief."}, "system"),
    ("generate", {"prompt": "Hi", "suffix": "!"}, "suffix"),
    ("generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
    ("generate", {"prompt": "Hi", "context": [1, 2]}, "context"),
    ("generate", {"prompt": ["Hi"]}, "prompt"),
    ("generate", {"prompt": "Hi", "keep_alive": {}}, "keep_alive"),
    ("generate", {"prompt": "Hi", "images": ["aGk="]}, "images"),
    ("show", {}, "model"),
]  # fmt: skip


@each("route, fields, place", WRONG)
def test_wrong_requests(http, route, fields, place):
    known = {} if route == "show" else {"model": MODEL, "stream": True}
    refused = http.post(f"/api/{route}", json={**known, **fields})
    assert refused.status_code == 400, refused.text
    (error,) = refused.json().values()
    assert error.startswith(place), error


def test_errors_have_ollamas_form(http, server, monkeypatch):
    def error(response):
        assert list(response.json()) == ["error"]
        return response.status_code, response.json()["error"]

    assert error(http.post("/api/chat", json={"messages": ASKED}))[0] == 400
    assert "JSON" in error(http.post("/api/chat", content=b"{"))[1]
    assert error(http.post("/api/chat", content=b" " * (1 << 18) + b"{}"))[0] == 413
    assert error(http.post("/api/chat", json={}, headers={"Authorization": "Bearer bob"}))[0] == 401
    assert error(http.get("/api/chat"))[0] == 405
    assert error(http.get("/api/unheard_of"))[0] == 404
    assert error(http.post("/api/show", json={"model": "llama3.2"}))[0] == 404
    fail_after(monkeypatch, server, 3)
    body = {"model": MODEL, "messages": ASKED}
    assert error(http.post("/api/chat", json={**body, "stream": False}))[0] == 500
    failed = http.post("/api/chat", json=body)  # its status was sent with the first piece
    *parts, last = map(json.loads, failed.text.splitlines())
    assert failed.status_code == 200
    assert "".join(part["message"]["content"] for part in parts) == "Dear H"
    assert list(last) == ["error"]
    client = ollama.Client(server.url, headers=KEY)
    with pytest.raises(ollama.ResponseError, match="has failed"):
        list(client.chat(MODEL, ASKED, stream=True))


def test_a_client_that_leaves_frees_its_row(server, http):
    body = {"model": MODEL, "prompt": "Write", "options": {"temperature": 2, "num_predict": 900}}
    with http.stream("POST", "/api/generate", json=body) as response:
        next(response.iter_lines())
        assert server.served.engine.rows == 1
    until(lambda: server.served.engine.rows == 0)


@each("route, word", [
    ("pull", "--model"), ("create", "convert"), ("copy", "--served-model-name"), ("push", "hub"),
    ("delete", "folder"),
])  # fmt: skip
def test_what_is_not_offered_says_what_to_do(http, route, word):
    method = "DELETE" if route == "delete" else "POST"
    refused = http.request(method, f"/api/{route}", json={"model": MODEL})
    assert refused.status_code == 501
    assert word in refused.json()["error"]


# -- models


def test_models_are_listed_and_described(client, http, server):
    listed = client.list().models
    names = ("latest", "redact", "search", "todo", "triage")
    names = [f"{MODEL}:{name}" for name in names]
    assert [model.model for model in listed] == names
    assert len({model.digest for model in listed}) == 5
    assert {len(model.digest) for model in listed} == {64}
    base, *adapters = (model.details for model in listed)
    assert {details.parent_model for details in adapters} == {f"{MODEL}:latest"}
    assert (base.parent_model, base.family, base.families) == ("", "afm7", ["afm7"])
    assert (base.parameter_size, base.quantization_level) == ("7.5M", "2.4-bit")
    assert base.format == "safetensors"
    shown = client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["general.architecture"] == "afm7"
    assert shown.modelinfo["afm7.context_length"] == 1024
    assert shown.modelinfo["general.parameter_count"] == server.served.model.args.num_parameters
    assert shown.details == base
    assert "num_predict                    512" in shown.parameters
    assert http.post("/api/show", json={"name": f"{MODEL}:todo"}).json()["details"] == (
        adapters[2].model_dump()
    )
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.size, loaded.context_length) == (names[0], listed[0].size, 1024)
    assert http.get("/api/version").json()["version"] != __version__  # Ollama's, not ours
    for path in ("/", "/api/tags", "/api/version"):  # programs look whether the server is there
        assert http.head(path).status_code == 200


def test_a_model_without_a_chat_template_continues_prompts(tmp_path):
    folder = tmp_path / "model"
    write_family_folder(folder, "phi3", max_position_embeddings=128)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_server(source=folder, kv="float") as server:
        client = ollama.Client(server.url)
        assert client.show("model").capabilities == ["completion"]
        options = {"num_predict": 4}
        plain = client.generate("model", "Hi", options=options)
        raw = client.generate("model", "Hi", raw=True, options=options)
        assert (plain.response, plain.prompt_eval_count) == (raw.response, raw.prompt_eval_count)
        for ask in (
            lambda: client.generate("model", "Hi", system="Be brief."),
            lambda: client.chat("model", ASKED),
        ):
            with pytest.raises(ollama.ResponseError, match="no chat template"):
                ask()


def test_models_that_are_not_loaded_are_described(tmp_path):
    write_family_folder(tmp_path / "qwen", "qwen3", max_position_embeddings=512)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "qwen3"}')
    folders = tmp_path / "qwen", tmp_path / "bad"
    with several_models(MODEL, *folders, kv="float", keep_alive=900) as server:
        client = ollama.Client(server.url)
        names = ("qwen:latest", MODEL)

        def described():
            listed = [model.model_dump() for model in client.list().models]
            return listed, [client.show(name).model_dump() for name in names]

        before = described()
        assert {"qwen:latest", f"{MODEL}:todo"} < {model["model"] for model in before[0]}
        (bad,) = (model for model in before[0] if model["model"] == "bad:latest")
        assert (bad["size"], bad["details"]["family"]) == (0, "unknown")
        qwen, nano = before[1]
        assert qwen["capabilities"] == ["completion", "tools", "thinking"]
        assert qwen["modelinfo"]["qwen3.context_length"] == 512
        assert "<|im_start|>" in qwen["template"]
        assert nano["capabilities"] == ["completion", "tools"]
        assert client.ps().models == []
        for nothing in (0, "0s"):
            assert client.chat("qwen", keep_alive=nothing).done_reason == "unload"
        assert set(server.states().values()) == {"unloaded"}
        assert client.generate("qwen:latest").done_reason == "load"
        assert server.states() == {"qwen": "loaded", MODEL: "unloaded", "bad": "unloaded"}
        assert described() == before
        (loaded,) = client.ps().models
        assert loaded.model == "qwen:latest"
        left = loaded.expires_at - datetime.now(UTC)
        assert timedelta(minutes=14) < left < timedelta(minutes=15)
        made = client.chat("qwen", ASKED, options={"num_predict": 2})
        assert made.eval_count == 2
